"""The tensors of a model directory, whatever files they are in, told before any of them is read.

It never knows what a tensor is for.
"""

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from bertsmith.bundle import pickles
from bertsmith.bundle.config import read_json
from bertsmith.bundle.directory import (
    INDEX_FILE,
    PICKLE_INDEX_FILE,
    WEIGHT_FILES,
    find_weights_file,
)
from bertsmith.errors import ModelError

#: Kinds of numbers that become float32 with nothing lost.
FLOAT_DTYPES: Final = frozenset({"float32", "float16", "bfloat16"})
#: Bytes of a header: about 100 a tensor, so a model of some thousand layers has as many.
_HEADER: Final = 8 * 2**20
_DTYPES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: How the library ends the message of a failed write: "... (os error 28)".
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor on disk; ``read`` maps it into memory, or returns it if it is there already.

    ``dtype``: PyTorch's name of it for the floats of 16 and 32 bits, else as the file says it.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Tensor]


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file with the permissions that any new file gets here (the umask).

    Raises OSError, with the file's name, where it cannot be written.
    """
    # The library writes a temporary file that only its owner may read, and renames it.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
    path.chmod(mode)


def list_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a model directory by its name in the files. Raises ModelError."""
    form = find_weights_file(directory)
    if form is None:
        raise ModelError(f"{directory}: no weights; expected {' or '.join(WEIGHT_FILES)}")
    if form in (INDEX_FILE, PICKLE_INDEX_FILE):
        return _sharded(directory / form)
    return list_file_tensors(directory / form)


def list_file_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of one file. Raises ModelError."""
    return _pickled(path) if path.suffix == ".bin" else _mapped(path)


def _sharded(index: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files that an index names; each must be where the index says."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ModelError(f"{index}: no weight_map in it; expected the file of each tensor")
    suffix = ".bin" if index.name == PICKLE_INDEX_FILE else ".safetensors"
    for name in places.values():
        # A name only: no folder, above all none outside.
        plain = isinstance(name, str) and Path(name).name == name and "\0" not in name
        if not plain or not name.endswith(suffix):
            raise ModelError(f"{index}: {name!r} is not the name of a {suffix} file beside it")
    found = {}
    for name in sorted(set(places.values())):
        path = index.with_name(name)
        if not path.is_file():
            raise ModelError(f"{index}: it names {name}, which is missing; fetch it again")
        found[name] = list_file_tensors(path)
    result = {tensor: own for shard in found.values() for tensor, own in shard.items()}
    for tensor, name in places.items():
        if tensor not in found[name]:
            raise ModelError(f"{index}: the tensor {tensor!r} is missing from {name}")
        result[tensor] = found[name][tensor]
    return result


def _mapped(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file.

    The library compares the header with the file's own size before it allocates anything; its own
    bound of 100 MB for the header would take seconds.
    """
    try:
        _check_header(path)
        file: Any = safe_open(path, framework="pt")
        result = {}
        for name in file.keys():  # noqa: SIM118 - the handle is no dictionary
            part = file.get_slice(name)
            shape, dtype = tuple(part.get_shape()), str(part.get_dtype())
            read = partial(_read, file, name, path)
            result[name] = StoredTensor(path, shape, _DTYPES.get(dtype, dtype), read)
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
    return result


def _check_header(path: Path) -> None:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > _HEADER:
        raise ModelError(
            f"{path}: not a readable safetensors file: it promises a header of {size:,} bytes"
        )


def _read(file: Any, name: str, path: Path) -> Tensor:
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"{path}: {name} cannot be read: {error}") from None
    return tensor


def _pickled(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of an old checkpoint, mapped from its zip form."""
    mapped = pickles.check_checkpoint(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except Exception as error:  # noqa: BLE001 - said below
        # Whatever a broken file makes of the reader: RuntimeError, KeyError, UnpicklingError …
        first = str(error).strip().partition("\n")[0]
        raise ModelError(f"{path}: not a readable checkpoint: {first}") from None
    if not isinstance(state, dict):
        raise ModelError(f"{path}: found a {type(state).__name__}; expected tensors by name")
    found = {name: own for name, own in state.items()
             if isinstance(name, str) and isinstance(own, Tensor)}  # fmt: skip
    _check_backed(path, found)
    return {
        name: StoredTensor(
            path, tuple(own.shape), str(own.dtype).removeprefix("torch."), partial(_same, own)
        )
        for name, own in found.items()
    }


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _check_backed(path: Path, tensors: dict[str, Tensor]) -> None:
    """Check that the tensors are no larger than what the file holds for them.

    A stride of 0 makes a tensor of any size out of one number.
    """
    sizes = {}
    for name, one in tensors.items():
        size = one.numel() * one.element_size()
        dense = one.layout is torch.strided and one.device.type == "cpu" and not one.is_quantized
        if not dense or size > one.untyped_storage().nbytes():
            raise ModelError(f"{path}: {name} is larger than what is stored of it; refused")
        # The decoder's weight is the word embeddings again.
        sizes[one.data_ptr(), tuple(one.shape)] = size
    if sum(sizes.values()) > path.stat().st_size:
        raise ModelError(f"{path}: the tensors are larger than the file; refused")
