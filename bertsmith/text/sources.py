"""Finds the text sources given on the command line: files, folders, globs, standard input."""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bertsmith.errors import CorpusError
from bertsmith.files import compute_file_sha256, describe_missing_path
from bertsmith.text.alphabet import has_surrogates
from bertsmith.text.archives import COMPRESSION_SUFFIXES, get_format_suffix

#: Kind of file for each suffix. The kind of files with other suffixes is detected from the content.
KIND_BY_SUFFIX: Final = {
    ".txt": "plain",
    ".text": "plain",
    ".md": "markdown",
    ".markdown": "markdown",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}
#: Formats that would be read as prose, with all their markup, by file name suffix.
_UNSUPPORTED_FORMATS: Final = {
    ".json": "JSON",
    ".csv": "a table",
    ".tsv": "a table",
    ".html": "HTML",
    ".htm": "HTML",
    ".xml": "XML",
}
#: Files by which an output of bertsmith is recognized: a folder that has all files of a group.
_OUTPUT_FILES: Final = (
    # A tokenizer or a model.
    ("tokenizer.json",),
    ("bertsmith.json",),
    # A token store, and an unfinished one.
    ("manifest.json", "train.ids"),
    ("parts/plan.json",),
    # A run.
    ("settings.toml", "metrics.jsonl"),
    # An index of embedded lines, and an unfinished one.
    ("index.json", "lines.txt"),
    ("state.json", "data/lines.txt"),
)
#: Name of standard input.
STDIN: Final = "-"


@dataclass(frozen=True)
class Source:
    """A file or stream to read text from. Sources can be pickled for worker processes.

    Attributes:
        name: Path, or "-" for standard input.
        size: Size of the file in bytes; None for standard input and pipes.
        kind: Kind of file according to the name: "plain", "markdown", "jsonl", "wikiextractor",
            "parquet" or "unknown".
    """

    name: str
    size: int | None
    kind: str

    @property
    def is_stream(self) -> bool:
        """Whether this is standard input or a pipe, which can be read only once."""
        return self.size is None

    def fingerprint(self) -> str:
        """Return the SHA-256 of the file in hexadecimal; "" for a stream."""
        return "" if self.is_stream else compute_file_sha256(Path(self.name))


def detect_kind_from_name(path: Path) -> str:
    """Return the kind of a file according to its name, ignoring a compression suffix."""
    if kind := KIND_BY_SUFFIX.get(get_format_suffix(path)):
        return kind
    # WikiExtractor writes AA/wiki_00, AA/wiki_01, ...
    return "wikiextractor" if re.match(r"wiki_\d+($|\.)", path.name) else "unknown"


def detect_unsupported_format(path: Path) -> str | None:
    """Return the format of a file whose name indicates that it is not plain text, or None."""
    return _UNSUPPORTED_FORMATS.get(get_format_suffix(path))


def find_sources(arguments: Sequence[str], ignored: list[str] | None = None) -> list[Source]:
    """Return the sources that the arguments name, in the order of the arguments.

    A folder stands for the files below it whose names indicate a text format (see
    ``detect_kind_from_name``), in sorted order. Hidden files and folders are skipped, and so are
    outputs of bertsmith, such as token stores, in subfolders.

    Args:
        arguments: Files, folders, globs, or "-" for standard input.
        ignored: List to which the other files in folders are appended, except hidden ones, and
            the outputs of bertsmith.

    Raises:
        CorpusError: A path does not exist, cannot be read, or holds no text file.
    """
    if not arguments:
        raise CorpusError("no source of text: give files, folders, globs, or - for standard input")
    ignored = [] if ignored is None else ignored
    sources: list[Source] = []
    for argument in arguments:
        sources.extend(_expand(argument, ignored))
    if sum(source.name == STDIN for source in sources) > 1:
        raise CorpusError(
            "standard input (-) is given more than once, but can be read only once; give it once"
        )
    return sources


def _expand(argument: str, ignored: list[str]) -> Iterator[Source]:
    """Yield the sources that one argument names; see ``find_sources``."""
    if argument == STDIN:
        yield Source(STDIN, None, "unknown")
        return
    if not argument.strip():
        raise CorpusError(
            "an argument is empty: give files, folders, globs, or - for standard input"
        )
    path = Path(argument)
    if path.is_dir():
        yield from _expand_folder(path, ignored)
    elif path.exists():
        yield _make_source(path)
    elif glob.has_magic(argument):
        yield from _expand_glob(argument, ignored)
    elif "://" in argument:
        raise CorpusError(f"{argument}: addresses are not read; download the file first")
    else:
        raise CorpusError(describe_missing_path(path, "file or folder"))


def _make_source(path: Path) -> Source:
    """Return the source for a file; raise CorpusError if it cannot be read."""
    if has_surrogates(str(path)):
        raise CorpusError(f"{str(path)!r}: the name of this file is not valid UTF-8; rename it")
    if not os.access(path, os.R_OK):
        raise CorpusError(f"{path}: no permission to read this file; change its permissions")
    # A pipe or device (process substitution, /dev/stdin) has no size.
    size = path.stat().st_size if path.is_file() else None
    return Source(str(path), size, detect_kind_from_name(path))


def _expand_folder(path: Path, ignored: list[str]) -> Iterator[Source]:
    """Yield the text files below a folder; raise CorpusError if there are none."""
    count = 0
    for count, source in enumerate(_walk_folder(path, ignored), 1):  # noqa: B007
        yield source
    if not count:
        suffixes = " ".join(KIND_BY_SUFFIX)
        raise CorpusError(
            f"{path}: no text file in this folder; expected names ending in {suffixes} (each also "
            f"with {' '.join(COMPRESSION_SUFFIXES)}) or wiki_00; give other files one by one"
        )


def _walk_folder(path: Path, ignored: list[str]) -> Iterator[Source]:
    """Yield the text files below a folder; append other files and outputs to ``ignored``."""
    visited: set[str] = set()
    for folder, subfolders, names in os.walk(path, onerror=_raise_unreadable, followlinks=True):
        # Links can form cycles, or lead to a file or folder that is also reached without them.
        real_path = os.path.realpath(folder)
        if real_path in visited:
            subfolders.clear()
            continue
        visited.add(real_path)
        visible = sorted(name for name in subfolders if not name.startswith("."))
        outputs = [name for name in visible if _is_output(Path(folder, name))]
        ignored += [str(Path(folder, name)) for name in outputs]
        subfolders[:] = [name for name in visible if name not in outputs]
        for name in sorted(names):
            file = Path(folder, name)
            if name.startswith("."):
                continue
            if detect_kind_from_name(file) == "unknown" or not file.is_file():
                ignored.append(str(file))
                continue
            real_path = os.path.realpath(file)
            if real_path not in visited:
                visited.add(real_path)
                yield _make_source(file)


def _is_output(folder: Path) -> bool:
    """Return whether a folder is an output of bertsmith, such as a token store or a model."""
    return any(all((folder / name).exists() for name in names) for names in _OUTPUT_FILES)


def _raise_unreadable(error: OSError) -> None:
    """Raise CorpusError for a folder that cannot be read."""
    raise CorpusError(
        f"{error.filename}: this folder cannot be read: {error.strerror}; check its permissions"
    ) from None


def _expand_glob(pattern: str, ignored: list[str]) -> Iterator[Source]:
    """Yield the files that a glob matches, and the text files below the folders that it matches.

    A folder that is an output of bertsmith or has no text file is left out.
    """
    # Unlike Path.glob, glob.glob accepts absolute patterns.
    matches = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    if not matches:
        raise CorpusError(
            f"{pattern}: no file matches this pattern (the current folder is {Path.cwd()})"
        )
    if "**" in pattern:
        # The pattern matches folders and the files in them. The folders are then left out, so
        # that no file is read twice.
        matches = [match for match in matches if not Path(match).is_dir()] or matches
    count = 0
    for match in matches:
        path = Path(match)
        if not path.is_dir():
            sources = _expand(match, ignored)
        elif _is_output(path):
            ignored.append(match)
            continue
        else:
            sources = _walk_folder(path, ignored)
        for source in sources:
            count += 1
            yield source
    if not count:
        raise CorpusError(f"{pattern}: no text file in the folders that match this pattern")
