"""Writes documents as JSON Lines, or as text with one sentence per line."""

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

#: Output format by the kind of file, which the suffix of its name implies.
_OUTPUT_FORMATS: Final = {"jsonl": "jsonl", "plain": "sentences"}

_COMPRESSORS: Final[dict[str, Callable[[Any], Any]]] = {
    # mtime=0 leaves the timestamp out, so that the same text gives the same bytes.
    "gzip": lambda file: gzip.GzipFile(fileobj=file, mode="wb", mtime=0),
    "xz": partial(lzma.LZMAFile, mode="wb"),
    "bzip2": partial(bz2.BZ2File, mode="wb"),
    "zstd": lambda file: zstandard.ZstdCompressor().stream_writer(file, closefd=False),
}


def choose_output_format(path: Path) -> str:
    """Return the output format for a file name: "jsonl" or "sentences".

    Raises:
        CorpusError: The suffix of the name is unknown.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSION_SUFFIXES:
        suffixes.pop()
    output_format = _OUTPUT_FORMATS.get(KIND_BY_SUFFIX.get(suffixes[-1] if suffixes else "", ""))
    if output_format is None:
        raise CorpusError(
            f"{path}: the suffix of this name is no known output format; choose a name that ends "
            "in .jsonl (JSON Lines) or .txt (one sentence per line), optionally followed by "
            f"{' '.join(COMPRESSION_SUFFIXES)}"
        )
    return output_format


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[str]]:
    """Open a text file for writing, compressed according to its suffix.

    The file has a temporary name until the ``with`` block ends without an error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    compressor = _COMPRESSORS.get(COMPRESSION_SUFFIXES.get(path.suffix.lower(), ""))
    try:
        with add_error_filename(path), temporary.open("wb") as file:
            compressed = compressor(file) if compressor else None
            text = io.TextIOWrapper(compressed or file, encoding="utf-8", newline="\n")
            yield text
            text.flush()
            if compressed is not None:
                text.close()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_sentences(file: IO[str], documents: Iterable[Iterable[str]]) -> None:
    """Write one sentence per line, and a blank line between documents."""
    for number, sentences in enumerate(documents):
        if number > 0:
            file.write("\n")
        file.writelines(f"{sentence}\n" for sentence in sentences)


def write_json_lines(file: IO[str], documents: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    for document in documents:
        file.write(json.dumps(document, ensure_ascii=False) + "\n")


def module_to_document(module: ModuleProse) -> dict[str, str]:
    """Return a module's documentation as an object with the fields ``id`` and ``text``."""
    paragraphs = [" ".join(paragraph) for paragraph in module.paragraphs]
    return {"id": module.module, "text": "\n".join(paragraphs)}
