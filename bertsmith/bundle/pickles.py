"""Safety checks of pickled checkpoints (pytorch_model.bin) before they are loaded.

These checks do not execute the pickle. They parse its instructions and compare the sizes in the
instructions with the file size.
"""

import io
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Final

from bertsmith.errors import ModelError

#: Pickle opcodes that occur in state dicts. Of the opcodes that import a name, only GLOBAL is
#: allowed. The others take the name from the stack, where it cannot be checked without executing
#: the pickle.
_ALLOWED_OPCODES: Final = frozenset(
    {
        "PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
        "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "BINSTRING", "EMPTY_TUPLE", "TUPLE",
        "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM",
        "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "REDUCE", "BUILD",
        "BINPERSID",
    },
)  # fmt: skip
_INTEGER_OPCODES: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})
_PUT_OPCODES: Final = frozenset({"BINPUT", "LONG_BINPUT"})
#: Classes and functions that the pickle of a state dict may import.
_ALLOWED_GLOBALS: Final = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch Size|"
    r"torch (Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)Storage|"
    r"torch\.storage (UntypedStorage|TypedStorage)",
)
#: Maximum size of a pickle without the tensor data. With about 150 bytes per tensor, it is enough
#: for a thousand layers.
_MAX_PICKLE_BYTES: Final = 4 * 2**20
#: Exceptions that the zipfile module raises for damaged files.
_ZIP_ERRORS: Final = (
    OSError, EOFError, ValueError, OverflowError, RuntimeError, NotImplementedError, struct.error,
    zipfile.BadZipFile,
)  # fmt: skip
#: The first bytes of a checkpoint from before PyTorch 1.6: a pickled number, followed by four
#: pickles.
_LEGACY_MAGIC: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def check_pickled_checkpoint(path: Path) -> bool:
    """Check a pickled checkpoint and return whether it is a zip file, which can be memory-mapped.

    Raises:
        ModelError: The file is not a checkpoint, its pickle imports names that tensors do not need,
            or its tensors are larger than the file.
    """
    file_size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(len(_LEGACY_MAGIC))
            if start.startswith(b"PK"):
                _check_pickles(path, _read_zip_pickle(path, file_size), file_size, num_pickles=1)
                return True
            if start == _LEGACY_MAGIC:
                _check_pickles(path, file.read(_MAX_PICKLE_BYTES), file_size, num_pickles=4)
                return False
    except _ZIP_ERRORS as error:
        raise ModelError(f"{path}: not a readable checkpoint: {error}") from None
    raise ModelError(f"{path}: not a PyTorch checkpoint; expected a zip file or the legacy format")


def _read_zip_pickle(path: Path, file_size: int) -> bytes:
    """Return the content of data.pkl in a zip checkpoint with uncompressed members."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        if is_compressed or sum(member.file_size for member in members) > file_size:
            raise ModelError(
                f"{path}: this checkpoint is compressed and may unpack to any size; save it again "
                "with PyTorch, which writes uncompressed checkpoints",
            )
        pickles = [member for member in members if member.filename.rpartition("/")[2] == "data.pkl"]
        has_duplicates = len({member.filename for member in members}) != len(members)
        if len(pickles) != 1 or has_duplicates:
            raise ModelError(f"{path}: not a PyTorch checkpoint: expected exactly one data.pkl")
        if pickles[0].file_size > _MAX_PICKLE_BYTES:
            raise ModelError(
                f"{path}: the pickle in this file has {pickles[0].file_size:,} bytes; the maximum "
                f"is {_MAX_PICKLE_BYTES:,} bytes",
            )
        return archive.read(pickles[0])


def _check_pickles(path: Path, data: bytes, file_size: int, *, num_pickles: int) -> None:
    """Check consecutive pickles.

    Pickles that declare more data than the file can hold are rejected: the sum of all integers in
    the pickles must not exceed twice the file size. In a valid file, the numbers of elements of all
    tensors add up to at most the file size, because each element takes at least one byte. The limit
    is twice as high, because shapes and offsets are integers too. Memoized integers are rejected,
    because they could be used many times but would be counted only once.

    Args:
        path: The file, for error messages.
        data: The pickles, one after the other.
        file_size: Size of the file in bytes.
        num_pickles: Number of pickles.

    Raises:
        ModelError: A pickle contains an instruction that state dicts do not need.
    """
    stream = io.BytesIO(data)
    integer_sum = 0
    previous_opcode = ""
    try:
        for _ in range(num_pickles):
            for instruction, argument, _ in pickletools.genops(stream):
                opcode = instruction.name
                is_memoized_integer = opcode in _PUT_OPCODES and previous_opcode in _INTEGER_OPCODES
                if is_memoized_integer:
                    raise ModelError(_rejection_message(path, f"contains {opcode}"))
                _check_instruction(path, opcode, argument)
                if opcode in _INTEGER_OPCODES:
                    integer_sum += abs(argument or 0)
                previous_opcode = opcode
    except (ValueError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path}: not a readable pickle: {error}") from None
    if integer_sum > 2 * file_size:
        raise ModelError(
            f"{path}: the tensors in this file need more than its {file_size:,} bytes; use another "
            "model",
        )


def _check_instruction(path: Path, opcode: str, argument: object) -> None:
    """Raise ModelError if a pickle instruction does not occur in state dicts."""
    if opcode == "PROTO" and argument != 2:
        raise ModelError(
            f"{path}: the pickle in this file has protocol {argument}, but PyTorch writes protocol "
            "2; save the file again with PyTorch"
        )
    if opcode not in _ALLOWED_OPCODES:
        raise ModelError(_rejection_message(path, f"contains {opcode}"))
    if opcode == "GLOBAL" and not _ALLOWED_GLOBALS.fullmatch(str(argument)):
        # The argument is the module and the name, separated by a space.
        imported_name = str(argument).replace(" ", ".")
        raise ModelError(_rejection_message(path, f"imports {imported_name}"))


def _rejection_message(path: Path, finding: str) -> str:
    """Return the error message for a pickle that may execute code."""
    return (
        f"{path}: the pickle in this file {finding}, which no weights need; it was not executed; "
        "use another model"
    )
