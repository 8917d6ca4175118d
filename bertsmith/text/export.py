"""Writes documents: as JSON lines, or a sentence a line as the original wants them.

It never knows how they were read.
"""

import bz2
import gzip
import io
import json
import lzma
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, Final

import zstandard

from bertsmith.errors import CorpusError
from bertsmith.files import add_error_filename, sync
from bertsmith.text.archives import COMPRESSION_SUFFIXES
from bertsmith.text.docstrings import ModuleProse
from bertsmith.text.sources import KIND_BY_SUFFIX

#: The forms that can be written, by what the file's name tells.
FORMS: Final = {"jsonl": "jsonl", "plain": "sentences"}

_PACKERS: Final[dict[str, Callable[[Any], Any]]] = {
    # Without the time of day in it, equal text gives equal bytes.
    "gzip": lambda file: gzip.GzipFile(fileobj=file, mode="wb", mtime=0),
    "xz": partial(lzma.LZMAFile, mode="wb"),
    "bzip2": partial(bz2.BZ2File, mode="wb"),
    "zstd": lambda file: zstandard.ZstdCompressor().stream_writer(file, closefd=False),
}


def choose_output_format(path: Path) -> str:
    """Tell from a name in what form text shall be written: "jsonl" or "sentences".

    Raises CorpusError for a name that ends in neither.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    form = FORMS.get(KIND_BY_SUFFIX.get(suffixes[-1] if suffixes else "", ""))
    if form is None:
        raise CorpusError(
            f"{path}: cannot tell the form to write from this name; expected one that ends in "
            f".jsonl (JSON lines) or .txt (a sentence a line), also with {' '.join(COMPRESSION_SUFFIXES)}"
        )
    return form


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[str]]:
    """Open a text file, packed as its name says, that takes its place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    packer = _PACKERS.get(COMPRESSION_SUFFIXES.get(path.suffix.lower(), ""))
    try:
        with add_error_filename(path), temporary.open("wb") as file:
            packed = packer(file) if packer else None
            text = io.TextIOWrapper(packed or file, encoding="utf-8", newline="\n")
            yield text
            text.flush()
            if packed is not None:
                text.close()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_sentences(file: IO[str], documents: Iterable[Iterable[str]]) -> None:
    """Write a sentence a line and a blank line between documents."""
    for number, sentences in enumerate(documents):
        file.write("\n" * (number > 0) + "".join(f"{sentence}\n" for sentence in sentences))


def write_json_lines(file: IO[str], documents: Iterable[dict[str, Any]]) -> None:
    """Write an object a line."""
    for document in documents:
        file.write(json.dumps(document, ensure_ascii=False) + "\n")


def module_to_document(module: ModuleProse) -> dict[str, str]:
    """Return a module's documentation as an object with the fields ``id`` and ``text``."""
    paragraphs = [" ".join(paragraph) for paragraph in module.paragraphs]
    return {"id": module.module, "text": "\n".join(paragraphs)}
