"""Finds the text sources that a user's arguments name: files, folders, globs, standard input.

It never knows how the text in them is laid out.
"""

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bertsmith.errors import CorpusError
from bertsmith.files import sha256_of_file
from bertsmith.text.alphabet import has_surrogates
from bertsmith.text.archives import COMPRESSION_SUFFIXES

#: What a file's name tells of what it holds; text in any other file is told by its content.
KIND_BY_SUFFIX: Final = {
    ".txt": "plain",
    ".text": "plain",
    ".md": "markdown",
    ".markdown": "markdown",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
STDIN: Final = "-"


@dataclass(frozen=True)
class Source:
    """One place that text comes from, small enough to hand to a worker process.

    ``name`` is as the user wrote or found it; ``size`` is in bytes as stored, None for standard
    input and pipes; ``kind`` is what the name tells ("plain", "markdown", "jsonl", "wikiextractor",
    "parquet" or "unknown").
    """

    name: str
    size: int | None
    kind: str

    @property
    def is_stream(self) -> bool:
        """Whether this is standard input or a pipe, which can be read once only."""
        return self.size is None

    def fingerprint(self) -> str:
        """Return the SHA-256 of the stored bytes, in hexadecimal; "" for a stream."""
        return "" if self.is_stream else sha256_of_file(Path(self.name))


def kind_from_name(path: Path) -> str:
    """Tell from a file's name what it holds; a packer's ending is looked through."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    if suffixes and suffixes[-1] in KIND_BY_SUFFIX:
        return KIND_BY_SUFFIX[suffixes[-1]]
    # WikiExtractor writes AA/wiki_00, AA/wiki_01, ...
    return "wikiextractor" if path.name.startswith("wiki_") else "unknown"


def find_sources(arguments: Sequence[str], ignored: list[str] | None = None) -> list[Source]:
    """Return the sources that files, folders, globs and "-" name, in a fixed order.

    A folder gives the files in and below it whose names tell a text format, sorted; the others
    are appended to ``ignored``. Hidden files are passed over. Raises CorpusError for a path that
    is not there, cannot be read, or gives nothing.
    """
    if not arguments:
        raise CorpusError("no text was named: give files, folders, globs, or - for standard input")
    passed: list[str] = [] if ignored is None else ignored
    found: list[Source] = []
    for argument in arguments:
        found.extend(_expand(argument, passed))
    if sum(source.name == STDIN for source in found) > 1:
        raise CorpusError("standard input (-) was named twice, but can be read once only")
    return found


def _expand(argument: str, ignored: list[str]) -> Iterator[Source]:
    if argument == STDIN:
        yield Source(STDIN, None, "unknown")
        return
    if not argument.strip():
        raise CorpusError("an empty name: give files, folders, globs, or - for standard input")
    path = Path(argument)
    if path.is_dir():
        yield from _folder(path, ignored)
    elif path.exists():
        yield _file(path)
    elif glob.has_magic(argument):
        yield from _glob(argument, ignored)
    else:
        raise CorpusError(f"{argument}: no such file or folder (here: {Path.cwd()})")


def _file(path: Path) -> Source:
    if has_surrogates(str(path)):
        raise CorpusError(f"{str(path)!r}: the name of this file is not valid UTF-8; rename it")
    if not os.access(path, os.R_OK):
        raise CorpusError(f"{path}: this file may not be read; its permissions forbid it")
    # A pipe or device (process substitution, /dev/stdin) has no size to speak of.
    size = path.stat().st_size if path.is_file() else None
    return Source(str(path), size, kind_from_name(path))


def _folder(path: Path, ignored: list[str]) -> Iterator[Source]:
    count = 0
    for folder, folders, names in os.walk(path, onerror=_unreadable):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            if name.startswith("."):
                continue
            if kind_from_name(file) == "unknown" or not file.is_file():
                ignored.append(str(file))
                continue
            count += 1
            yield _file(file)
    if not count:
        endings = " ".join(KIND_BY_SUFFIX)
        raise CorpusError(
            f"{path}: no text file in this folder; expected names ending in {endings} "
            f"(each also with {' '.join(COMPRESSION_SUFFIXES)}) or wiki_00; name other files one by one"
        )


def _unreadable(error: OSError) -> None:
    raise CorpusError(f"{error.filename}: this folder may not be read: {error.strerror}") from None


def _glob(pattern: str, ignored: list[str]) -> Iterator[Source]:
    # The user's pattern may stand anywhere in the file system, which Path.glob cannot do.
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if not matches:
        raise CorpusError(f"{pattern}: no file matches this pattern (here: {Path.cwd()})")
    # "data/**" matches folders and the files in them: the files are enough.
    files = [match for match in matches if not Path(match).is_dir()]
    for match in files or matches:
        yield from _expand(match, ignored)
