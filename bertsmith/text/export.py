"""Writes documents as JSON Lines, or as text with one sentence per line."""

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from bertsmith.errors import CorpusError
from bertsmith.files import add_error_filename, atomic_file
from bertsmith.text.archives import COMPRESSION_SUFFIXES, compress, get_format_suffix
from bertsmith.text.docstrings import ModuleProse
from bertsmith.text.sources import KIND_BY_SUFFIX

#: Output format by the kind of file, which the suffix of its name implies.
_OUTPUT_FORMATS: Final = {"jsonl": "jsonl", "plain": "sentences"}


def choose_output_format(path: Path) -> str:
    """Return the output format for a file name: "jsonl" or "sentences".

    Raises:
        CorpusError: The suffix of the name is unknown.
    """
    output_format = _OUTPUT_FORMATS.get(KIND_BY_SUFFIX.get(get_format_suffix(path), ""))
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
    with (
        add_error_filename(path),
        atomic_file(path) as temporary,
        temporary.open("wb") as file,
        compress(file, path) as compressed,
    ):
        text = io.TextIOWrapper(compressed, encoding="utf-8", newline="\n")
        yield text
        text.flush()


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
