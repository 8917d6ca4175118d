"""Looks into an old checkpoint, pytorch_model.bin, before anything in it is run or allocated.

It never runs a pickle: it reads the instructions as text and compares what they ask for with the
file's own size.
"""

import io
import pickletools
import re
import struct
import zipfile
from pathlib import Path
from typing import Final

from bertsmith.errors import ModelError

#: The instructions of a state dict. Names come by GLOBAL alone: those built on the stack cannot be
#: checked without running them.
_INSTRUCTIONS: Final = frozenset(
    {
        "PROTO", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2",
        "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING", "BINSTRING", "EMPTY_TUPLE", "TUPLE",
        "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "APPEND", "APPENDS", "EMPTY_DICT", "SETITEM",
        "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "REDUCE", "BUILD",
        "BINPERSID",
    }
)  # fmt: skip
_INTEGERS: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1"})
_PUTS: Final = frozenset({"BINPUT", "LONG_BINPUT"})
#: What a state dict is made of.
_NAMES: Final = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch Size|"
    r"torch (Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)Storage|"
    r"torch\.storage (UntypedStorage|TypedStorage)"
)
#: Bytes of the instructions: about 150 a tensor, so a model of a thousand layers has as many.
_MOST: Final = 4 * 2**20
#: What reading a damaged zip file may raise.
_DAMAGE: Final = (
    OSError, EOFError, ValueError, OverflowError, RuntimeError, NotImplementedError, struct.error,
    zipfile.BadZipFile,
)  # fmt: skip
#: How a checkpoint from before PyTorch 1.6 begins: a pickled number, then four pickles more.
_OLD_MAGIC: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."


def check_checkpoint(path: Path) -> bool:
    """Look into a checkpoint; return whether it is in the zip form, whose tensors can be mapped.

    Raises ModelError for a pickle that asks for anything but tensors, for sizes beyond the file's
    own, and for what is no checkpoint at all.
    """
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            start = file.read(len(_OLD_MAGIC))
            if start.startswith(b"PK"):
                _check_pickles(path, _instructions_in_zip(path, size), 1, size)
                return True
            if start == _OLD_MAGIC:
                _check_pickles(path, file.read(_MOST), 4, size)
                return False
    except _DAMAGE as error:
        raise ModelError(f"{path}: not a readable checkpoint: {error}") from None
    raise ModelError(f"{path}: not a checkpoint of PyTorch's; expected a zip file or its old form")


def _instructions_in_zip(path: Path, size: int) -> bytes:
    """Return data.pkl, after checking that the archive holds what it promises, uncompressed."""
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        packed = [one for one in members if one.compress_type != zipfile.ZIP_STORED]
        if packed or sum(one.file_size for one in members) > size:
            raise ModelError(
                f"{path}: a packed checkpoint, which may unpack to any size; PyTorch writes them "
                "unpacked, so this one is refused"
            )
        found = [one for one in members if one.filename.rpartition("/")[2] == "data.pkl"]
        if len(found) != 1 or len({one.filename for one in members}) != len(members):
            raise ModelError(f"{path}: not a checkpoint of PyTorch's: no single data.pkl in it")
        if found[0].file_size > _MOST:
            raise ModelError(f"{path}: its pickle has {found[0].file_size:,} bytes; too many")
        return archive.read(found[0])


def _check_pickles(path: Path, data: bytes, count: int, size: int) -> None:
    """Check ``count`` pickles, one after another.

    All numbers in them together are at most twice the file's size: an element of a storage has at
    least a byte there, and shapes and offsets come on top. A number that is put aside could be
    taken out again, uncounted.
    """
    stream, total, before = io.BytesIO(data), 0, ""
    try:
        for _ in range(count):
            for instruction, argument, _ in pickletools.genops(stream):
                name = instruction.name
                if name == "PROTO" and argument != 2:
                    raise ModelError(f"{path}: its pickle has protocol {argument}; PyTorch writes "
                                     "2, so this one is refused unread")  # fmt: skip
                if name not in _INSTRUCTIONS or (name in _PUTS and before in _INTEGERS):
                    raise ModelError(f"{path}: its pickle has {name}, which no weights need; "
                                     "refused, nothing in it was run")  # fmt: skip
                if name == "GLOBAL" and not _NAMES.fullmatch(str(argument)):
                    asked = str(argument).replace(" ", ".")
                    raise ModelError(f"{path}: its pickle asks for {asked}, which no weights "
                                     "need; refused, nothing in it was run")  # fmt: skip
                if name in _INTEGERS:
                    total += abs(argument or 0)
                before = name
    except (ValueError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ModelError(f"{path}: not a readable pickle: {error}") from None
    if total > 2 * size:
        raise ModelError(
            f"{path}: its tensors would need more than the file's {size:,} bytes; refused"
        )
