"""Weight files: writing of safetensors files, and listing of stored tensors without loading them.

Safetensors files, pickled checkpoints and sharded weights of both types can be listed.
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

#: dtypes that can be converted to float32 without loss.
FLOAT_DTYPES: Final = frozenset({"float32", "float16", "bfloat16"})
#: Maximum size of a safetensors header. With about 100 bytes per tensor, it is enough for thousands
#: of layers.
_MAX_HEADER_BYTES: Final = 8 * 2**20
_DTYPE_NAMES: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: The error number in a safetensors message about a failed write, such as "... (os error 28)".
_OS_ERROR_CODE: Final = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor on disk.

    Attributes:
        file: The file that contains the tensor.
        shape: The shape of the tensor.
        dtype: PyTorch's name for 16-bit and 32-bit floats, otherwise the name in the file.
        load: Function that loads the tensor, memory-mapped if the file format allows it.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    load: Callable[[], Tensor]


def save_tensors(
    tensors: Mapping[str, Tensor],
    path: Path,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a safetensors file with the permissions given by the umask.

    Raises:
        OSError: The file cannot be written. The error contains the file name.
    """
    # safetensors replaces the file with a temporary one that only its owner can read.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        code = _OS_ERROR_CODE.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None
    path.chmod(mode)


def list_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return all tensors of a model directory by their names in the files.

    Raises:
        ModelError: The weights are missing or damaged.
    """
    name = find_weights_file(directory)
    if name is None:
        raise ModelError(
            f"{directory}: this folder has no weights; it needs {' or '.join(WEIGHT_FILES)}"
        )
    if name in (INDEX_FILE, PICKLE_INDEX_FILE):
        return _list_sharded(directory / name)
    return list_file_tensors(directory / name)


def list_file_tensors(path: Path) -> dict[str, StoredTensor]:
    """Return all tensors of one file by their names.

    Raises:
        ModelError: The file is damaged.
    """
    return _list_pickled(path) if path.suffix == ".bin" else _list_safetensors(path)


def _list_sharded(index: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all shards in an index, after checking that each tensor exists."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(
            f"{index}: weight_map, which lists the file of each tensor, is missing or empty; "
            "download the file again"
        )
    suffix = ".bin" if index.name == PICKLE_INDEX_FILE else ".safetensors"
    for shard in weight_map.values():
        # Names with a folder are rejected, so that no file outside the model directory is read.
        is_file_name = isinstance(shard, str) and Path(shard).name == shard and "\0" not in shard
        if not is_file_name or not shard.endswith(suffix):
            raise ModelError(
                f"{index}: {shard!r} is not the name of a {suffix} file in the same folder",
            )
    tensors_by_shard = {}
    for shard in sorted(set(weight_map.values())):
        path = index.with_name(shard)
        if not path.is_file():
            raise ModelError(f"{index}: the shard {shard} is missing; download it again")
        tensors_by_shard[shard] = list_file_tensors(path)
    tensors = {
        name: tensor for shard in tensors_by_shard.values() for name, tensor in shard.items()
    }
    for name, shard in weight_map.items():
        if name not in tensors_by_shard[shard]:
            raise ModelError(
                f"{index}: the tensor {name!r} is missing from {shard}; download both again"
            )
        tensors[name] = tensors_by_shard[shard][name]
    return tensors


def _list_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file.

    The safetensors library compares the header with the file size before it allocates memory. It
    allows headers of 100 MB, but these would take seconds to parse.
    """
    try:
        _check_header_size(path)
        file: Any = safe_open(path, framework="pt")
        tensors = {}
        for name in file.keys():  # noqa: SIM118 - ``file`` is not a dictionary
            tensor_slice = file.get_slice(name)
            shape = tuple(tensor_slice.get_shape())
            dtype = str(tensor_slice.get_dtype())
            load = partial(_load_tensor, file, name, path)
            tensors[name] = StoredTensor(path, shape, _DTYPE_NAMES.get(dtype, dtype), load)
    except (SafetensorError, OSError, ValueError, OverflowError) as error:
        raise ModelError(f"{path}: not a readable safetensors file: {error}") from None
    return tensors


def _check_header_size(path: Path) -> None:
    """Raise ModelError if the header of a safetensors file is too large."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if size > _MAX_HEADER_BYTES:
        raise ModelError(
            f"{path}: not a readable safetensors file: its header has {size:,} bytes; the maximum "
            f"is {_MAX_HEADER_BYTES:,} bytes",
        )


def _load_tensor(file: Any, name: str, path: Path) -> Tensor:
    """Load a tensor from an open safetensors file."""
    try:
        tensor: Tensor = file.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ModelError(f"{path}: {name} cannot be read: {error}") from None
    return tensor


def _list_pickled(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a pickled checkpoint, memory-mapped if it is a zip file."""
    is_zip = pickles.check_pickled_checkpoint(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # noqa: BLE001 - the error is reported
        # Damaged files cause many types of errors, such as RuntimeError and UnpicklingError.
        first_line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{path}: not a readable checkpoint: {first_line}") from None
    if not isinstance(state, dict):
        raise ModelError(
            f"{path}: the file contains a {type(state).__name__}; expected a dictionary of tensors"
        )
    tensors = {
        name: value
        for name, value in state.items()
        if isinstance(name, str) and isinstance(value, Tensor)
    }
    _check_storage_sizes(path, tensors)
    return {
        name: StoredTensor(
            path,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
            partial(_return_tensor, tensor),
        )
        for name, tensor in tensors.items()
    }


def _return_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor that ``torch.load`` has already memory-mapped or read."""
    return tensor


def _check_storage_sizes(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise ModelError if a tensor is not dense or larger than its data in the file.

    With a stride of 0, one number in a file can represent a tensor of any size.
    """
    sizes = {}
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        is_dense = (
            tensor.layout is torch.strided
            and tensor.device.type == "cpu"
            and not tensor.is_quantized
        )
        if not is_dense:
            raise ModelError(
                f"{path}: the tensor {name} is sparse, quantized or without data; use another model"
            )
        if size > tensor.untyped_storage().nbytes():
            raise ModelError(
                f"{path}: the tensor {name} is larger than its data in the file; use another model"
            )
        # Tied tensors, such as the decoder weight and the word embeddings, are counted once.
        sizes[tensor.data_ptr(), tuple(tensor.shape)] = size
    if sum(sizes.values()) > path.stat().st_size:
        raise ModelError(f"{path}: the tensors are larger than the file; use another model")
