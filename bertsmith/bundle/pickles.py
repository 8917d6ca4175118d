"""Safety checks of pickled checkpoints (pytorch_model.bin) before they are loaded.

The pickle is never executed. Its instructions are parsed, and the sizes that they ask for are
compared with the file size.
"""

import io
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Final

from bertsmith.errors import ModelError

#: Opcodes that occur in state dicts. GLOBAL is the only one that imports names, because names that
#: are built on the stack cannot be checked without executing the pickle.
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
#: Classes and functions that a state dict may import.
_ALLOWED_GLOBALS: Final = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch Size|"
    r"torch (Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)Storage|"
    r"torch\.storage (UntypedStorage|TypedStorage)",
)
#: Maximum size of a pickle without the tensor data: about 150 bytes per tensor, enough for a
#: thousand layers.
_MAX_PICKLE_BYTES: Final = 4 * 2**20
#: Exceptions raised for damaged zip files.
_ZIP_ERRORS: Final = (
    OSError, EOFError, ValueError, OverflowError, RuntimeError, NotImplementedError, struct.error,
    zipfile.BadZipFile,
)  # fmt: skip
#: The first bytes of a checkpoint from before PyTorch 1.6: a pickled number, followed by four
#: pickles.
_LEGACY_MAGIC: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def check_pickled_checkpoint(path: Path) -> bool:
    """Check a checkpoint and return whether it is a zip file, which can be memory-mapped.

    Raises:
        ModelError: The file is not a checkpoint, its pickle imports anything but tensors, or its
            tensors are larger than the file.
    """
    file_size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(len(_LEGACY_MAGIC))
            if start.startswith(b"PK"):
                _check_pickles(path, _read_zip_pickle(path, file_size), 1, file_size)
                return True
            if start == _LEGACY_MAGIC:
                _check_pickles(path, file.read(_MAX_PICKLE_BYTES), 4, file_size)
                return False
    except _ZIP_ERRORS as error:
        raise ModelError(f"{path}: not a readable checkpoint: {error}") from None
    raise ModelError(f"{path}: not a PyTorch checkpoint; expected a zip file or the legacy format")


def _read_zip_pickle(path: Path, file_size: int) -> bytes:
    """Return data.pkl of a zip checkpoint whose members are stored uncompressed."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        is_compressed = any(member.compress_type != zipfile.ZIP_STORED for member in members)
        if is_compressed or sum(member.file_size for member in members) > file_size:
            raise ModelError(
                f"{path}: a compressed checkpoint, which may unpack to any size; PyTorch writes "
                "uncompressed ones, so this one is rejected",
            )
        pickles = [member for member in members
                   if member.filename.rpartition("/")[2] == "data.pkl"]  # fmt: skip
        has_duplicates = len({member.filename for member in members}) != len(members)
        if len(pickles) != 1 or has_duplicates:
            raise ModelError(f"{path}: not a PyTorch checkpoint: expected exactly one data.pkl")
        if pickles[0].file_size > _MAX_PICKLE_BYTES:
            raise ModelError(
                f"{path}: its pickle has {pickles[0].file_size:,} bytes; the maximum is "
                f"{_MAX_PICKLE_BYTES:,}",
            )
        return archive.read(pickles[0])


def _check_pickles(path: Path, data: bytes, count: int, file_size: int) -> None:
    """Check ``count`` consecutive pickles.

    The sum of all integers is limited to twice the file size: each storage element takes at least
    one byte, and shapes and offsets add to that. Memoizing an integer is rejected, because it could
    be reused without being counted.
    """
    stream, total, previous = io.BytesIO(data), 0, ""
    try:
        for _ in range(count):
            for instruction, argument, _ in pickletools.genops(stream):
                opcode = instruction.name
                if opcode == "PROTO" and argument != 2:
                    raise ModelError(f"{path}: its pickle has protocol {argument}; PyTorch writes "
                                     "protocol 2, so this one is rejected unread")  # fmt: skip
                is_memoized_integer = opcode in _PUT_OPCODES and previous in _INTEGER_OPCODES
                if opcode not in _ALLOWED_OPCODES or is_memoized_integer:
                    raise ModelError(f"{path}: its pickle contains {opcode}, which no weights "
                                     "need; rejected without executing it")  # fmt: skip
                if opcode == "GLOBAL" and not _ALLOWED_GLOBALS.fullmatch(str(argument)):
                    imported = str(argument).replace(" ", ".")
                    raise ModelError(f"{path}: its pickle imports {imported}, which no weights "
                                     "need; rejected without executing it")  # fmt: skip
                if opcode in _INTEGER_OPCODES:
                    total += abs(argument or 0)
                previous = opcode
    except (ValueError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path}: not a readable pickle: {error}") from None
    if total > 2 * file_size:
        raise ModelError(
            f"{path}: its tensors would need more than the file's {file_size:,} bytes; rejected",
        )
