"""Reading text files and streams in chunks, with decompression and any encoding."""

import codecs
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from bertsmith.errors import SettingsError, TaskError
from bertsmith.files import describe_missing_path
from bertsmith.text.archives import (
    BUFFER_BYTES,
    DECOMPRESSION_ERRORS,
    decompress,
    get_format_suffix,
)

UTF8 = "utf-8"
#: Common encodings other than UTF-8, which error messages suggest. Excel writes cp1252. Read as
#: Latin-1, its quotation marks, dashes and euro signs would become control characters, which the
#: tokenizer removes.
OTHER_ENCODINGS = "such as cp949 (Korean) or cp1252 (Western European)"
#: File suffix -> table format. A suffix of a compressed file may follow.
TABLE_FORMATS = {".csv": "csv", ".tsv": "tsv", ".jsonl": "jsonl", ".ndjson": "jsonl",
                 ".json": "json", ".parquet": "parquet"}  # fmt: skip
#: Setting of how tables are read -> its default, and the table formats on which it has no effect.
_FORMATS_IGNORING_SETTING: dict[str, tuple[Any, frozenset[str | None]]] = {
    "header": (True, frozenset({"jsonl", "json", "parquet"})),
    "delimiter": ("", frozenset({"jsonl", "json", "parquet"})),
    "encoding": (UTF8, frozenset({"parquet"})),
}
#: The end of a line, as ``csv`` and ``open(newline="")`` split text.
_LINE_END = re.compile(r"\r\n?|\n")


def detect_table_format(path: Path) -> str | None:
    """Return the table format that a file's suffix indicates, None if unknown."""
    return TABLE_FORMATS.get(get_format_suffix(path))


def reject_ignored_settings(
    table: str | None, settings: Mapping[str, Any], files: Collection[Path]
) -> None:
    """Raise SettingsError if a setting of how tables are read has no effect on any data file.

    For example, JSON lines have no delimiter, and Parquet has no text encoding.

    Args:
        table: The name of the settings table for the message, such as "task"; None if the settings
            are in no table.
        settings: Settings by name. Only ``header``, ``delimiter`` and ``encoding`` are checked, and
            only if they differ from their defaults.
        files: The data files.
    """
    formats = {detect_table_format(file) for file in files}
    for name, (default, ignoring_formats) in _FORMATS_IGNORING_SETTING.items():
        is_set = settings.get(name, default) not in (default, "")
        if is_set and formats and formats <= ignoring_formats:
            key = f"{table}.{name}" if table else name
            raise SettingsError(f"{key}: has no effect on {', '.join(map(str, files))}; remove it")


def is_txt_table(path: Path, text_column: str | None) -> bool:
    """Return whether a file is a .txt file and is read as TSV.

    It is read as TSV if the user gave a text column; otherwise each line is a text.
    """
    return get_format_suffix(path) == ".txt" and text_column is not None


def check_encoding(encoding: str) -> None:
    """Raise SettingsError for an encoding that Python does not support as a text encoding."""
    try:
        is_supported = codecs.lookup(encoding)._is_text_encoding  # noqa: SLF001 - used by open()
    except (LookupError, ValueError):
        is_supported = False
    if not is_supported:
        raise SettingsError(
            f"encoding: {encoding!r} is unknown; give an encoding such as utf-8, cp949, cp1252 or "
            "utf-16",
        )


@contextmanager
def open_text(
    path: Path,
    *,
    encoding: str = UTF8,
    stream: IO[bytes] | None = None,
) -> Iterator[Iterator[str]]:
    """Open a text and yield it in decompressed and decoded chunks, without a byte order mark.

    Args:
        path: The file. If there is a stream, ``path`` is only its name in messages.
        encoding: The text encoding.
        stream: The stream to read, None to read the file.

    Raises:
        TaskError: The file is missing, damaged, or not in this encoding.
    """
    check_encoding(encoding)
    with ExitStack() as files:
        with _explain_read_errors(path):
            file = files.enter_context(path.open("rb")) if stream is None else stream
            _, decompressed = decompress(file)
        # The caller's block is outside: its errors, such as those of writing, are not read errors.
        yield _read_chunks(decompressed, encoding, path)


def _read_chunks(stream: IO[bytes], encoding: str, path: Path) -> Iterator[str]:
    """Yield a stream in decoded chunks; raise TaskError if it cannot be read or decoded."""
    with _explain_read_errors(path):
        yield from _decode_stream(stream, encoding, path)


@contextmanager
def _explain_read_errors(path: Path) -> Iterator[None]:
    """Raise TaskError for an error of opening, reading or decompressing a file."""
    try:
        yield
    except FileNotFoundError:
        raise TaskError(describe_missing_path(path)) from None
    except DECOMPRESSION_ERRORS as error:
        raise TaskError(f"{path}: a damaged or truncated archive: {error}") from None
    except OSError as error:
        raise TaskError(f"{path}: cannot be read: {error.strerror or error}") from None


def choose_output_encoding(path: Path, encoding: str) -> str:
    """Return the encoding for an output file, which is that of the input file.

    If the input file has a UTF-8 byte order mark, the returned encoding also writes one.

    Args:
        path: The input file.
        encoding: The encoding of the input file.
    """
    if codecs.lookup(encoding).name != UTF8 or not path.is_file():
        return encoding
    try:
        with path.open("rb") as file:
            return "utf-8-sig" if decompress(file)[0].startswith(codecs.BOM_UTF8) else encoding
    except (OSError, *DECOMPRESSION_ERRORS):
        # The error is reported when the file is read.
        return encoding


@contextmanager
def open_lines(
    path: Path,
    *,
    encoding: str = UTF8,
    stream: IO[bytes] | None = None,
) -> Iterator[Iterator[str]]:
    """Open a text and yield its lines with their ends; see ``open_text``."""
    with open_text(path, encoding=encoding, stream=stream) as chunks:
        yield split_lines(chunks)


def split_lines(chunks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text, with their ends.

    Args:
        chunks: Consecutive parts of the text.
    """
    # The parts of a line that has not ended yet. They are joined once, because a line can be long.
    parts: list[str] = []
    for chunk in filter(None, chunks):
        start = 0
        if parts and parts[-1].endswith("\r"):
            # The previous chunk ended with a line, or within "\r\n".
            start = int(chunk.startswith("\n"))
            yield "".join([*parts, chunk[:start]])
            parts = []
        for match in _LINE_END.finditer(chunk, start):
            if match[0] == "\r" and match.end() == len(chunk):
                break
            yield "".join([*parts, chunk[start : match.end()]])
            parts, start = [], match.end()
        if start < len(chunk):
            parts.append(chunk[start:])
    if parts:
        yield "".join(parts)


def _decode_stream(stream: IO[bytes], encoding: str, path: Path) -> Iterator[str]:
    """Yield a stream in decoded chunks; raise TaskError with the line of an invalid byte."""
    is_utf8 = codecs.lookup(encoding).name == UTF8
    decoder = codecs.getincrementaldecoder("utf-8-sig" if is_utf8 else encoding)()
    line_number = 1
    is_first = has_no_text = True
    while True:
        block = stream.read(BUFFER_BYTES)
        if is_first and is_utf8 and block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise TaskError(f"{path}: not UTF-8 but UTF-16; give --encoding utf-16")
        is_first = False
        try:
            text = decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            valid_text = error.object[: error.start].decode(encoding, "replace")
            if valid_text:
                yield valid_text
            error_line = line_number + valid_text.count("\n")
            invalid_byte = error.object[error.start]
            advice = f"give its encoding with --encoding, {OTHER_ENCODINGS}"
            if not is_utf8:
                advice = f"{encoding} is not its encoding"
            name = "UTF-8" if is_utf8 else encoding
            raise TaskError(
                f"{path}, line {error_line:,}: not {name}: byte 0x{invalid_byte:02x}; {advice}",
            ) from None
        except UnicodeError as error:
            # For example, UTF-16 without a byte order mark.
            raise TaskError(
                f"{path}: not {encoding}: {error}; give its encoding with --encoding"
            ) from None
        if has_no_text:
            # utf-16-le and utf-16-be keep the byte order mark.
            text = text.removeprefix("\ufeff")
        has_no_text = has_no_text and not text
        line_number += text.count("\n")
        if text:
            yield text
        if not block:
            return
