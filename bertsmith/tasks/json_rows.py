"""Streaming objects from JSON lines and JSON arrays, with line numbers."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from bertsmith.errors import TaskError
from bertsmith.tasks.text_files import split_lines

NOT_JSON, NOT_OBJECT = "a line that is not JSON", "a line that is not a JSON object"
DUPLICATE_KEY = "a duplicate key in an object"
_WHITESPACE = " \t\r\n"
_WHITESPACE_PATTERN = re.compile(f"[{_WHITESPACE}]*")

#: Line number, object, and error message ("" if the object is valid).
JsonRow = tuple[int, dict[str, Any], str]


class _ObjectDecoder:
    """A JSON decoder that reports duplicate keys; Python's decoder keeps only the last value."""

    def __init__(self) -> None:
        self._has_duplicate_key = False
        self._decoder = json.JSONDecoder(object_pairs_hook=self._build_object)

    def _build_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Build an object from its keys and values, and record whether a key is repeated."""
        value = dict(pairs)
        self._has_duplicate_key |= len(value) < len(pairs)
        return value

    def decode(self, text: str, start: int) -> tuple[Any, int, str]:
        """Return the value at ``start``, the index of its end, and an error message or "".

        Raises:
            ValueError: The text is not valid JSON.
        """
        self._has_duplicate_key = False
        try:
            value, end = self._decoder.raw_decode(text, start)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(value, dict):
            return {}, end, NOT_OBJECT
        return value, end, DUPLICATE_KEY if self._has_duplicate_key else ""


def read_json_lines(lines: Iterable[str]) -> Iterator[JsonRow]:
    """Yield one object per line; blank lines are skipped."""
    decoder = _ObjectDecoder()
    for line_number, line in enumerate(lines, 1):
        text = line.strip(_WHITESPACE)
        if not text:
            continue
        try:
            value, end, error = decoder.decode(text, 0)
        except ValueError:
            value, end, error = {}, len(text), NOT_JSON
        if end < len(text):
            error = NOT_JSON
        yield line_number, {} if error else value, error


def read_json(chunks: Iterator[str], path: Path) -> Iterator[JsonRow]:
    """Yield the objects of a JSON array, or of JSON lines, which some .json files contain.

    Only one object at a time is in memory.

    Args:
        chunks: Consecutive parts of the text.
        path: The file, for error messages.

    Raises:
        TaskError: The text is neither a JSON array nor JSON lines.
    """
    prefix = ""
    for chunk in chunks:
        prefix += chunk
        if prefix.strip(_WHITESPACE):
            break
    if prefix.lstrip(_WHITESPACE).startswith("["):
        yield from _read_array(prefix, chunks, path)
        return
    is_first = True
    for line_number, value, error in read_json_lines(split_lines(chain([prefix], chunks))):
        if is_first and error == NOT_JSON:
            raise TaskError(
                f"{path}, line {line_number:,}: expected an array of objects, or an object on each "
                "line",
            )
        is_first = False
        yield line_number, value, error


class _Buffer:
    """A text that is read in chunks.

    Attributes:
        text: A part of the text. The unread text starts at index ``start``.
        start: Index of the next character.
        line_number: Line number of the next character, from 1.
    """

    def __init__(self, prefix: str, chunks: Iterator[str]) -> None:
        self.text = prefix
        self.start = 0
        self.line_number = 1
        self._chunks = chunks

    def advance(self, end: int) -> None:
        """Advance to index ``end`` of the text."""
        self.line_number += self.text.count("\n", self.start, end)
        self.start = end

    def read_chunks(self) -> bool:
        """Discard the text before ``start``, and read until the unread text has doubled.

        A long value is decoded again after each read; doubling keeps the total work linear.

        Returns:
            Whether any text was read.
        """
        unread_text = self.text[self.start :]
        parts = [unread_text]
        size = len(unread_text)
        for chunk in self._chunks:
            parts.append(chunk)
            size += len(chunk)
            if size >= 2 * len(unread_text):
                break
        self.text = "".join(parts)
        self.start = 0
        return size > len(unread_text)

    def skip_whitespace(self) -> str:
        """Advance to the next character that is not whitespace and return it, "" at the end."""
        while True:
            match = _WHITESPACE_PATTERN.match(self.text, self.start)
            assert match is not None
            self.advance(match.end())
            if self.start < len(self.text) or not self.read_chunks():
                return self.text[self.start : self.start + 1]


def _read_array(prefix: str, chunks: Iterator[str], path: Path) -> Iterator[JsonRow]:
    """Yield the objects of an array that starts in ``prefix``."""
    buffer = _Buffer(prefix, chunks)
    decoder = _ObjectDecoder()

    def build_error(problem: str) -> TaskError:
        return TaskError(
            f"{path}, line {buffer.line_number:,}: not JSON: {problem}; repair the array"
        )

    buffer.skip_whitespace()
    buffer.advance(buffer.start + 1)  # the opening bracket
    has_next_value = buffer.skip_whitespace() != "]"
    while has_next_value:
        value, end, error = _decode_value(buffer, decoder, build_error)
        # The values of an array need not be on separate lines.
        yield buffer.line_number, {} if error else value, error.replace("a line", "a value")
        buffer.advance(end)
        separator = buffer.skip_whitespace()
        if separator not in (",", "]"):
            problem = f"{separator!r} instead of a comma" if separator else "the array has no end"
            raise build_error(problem)
        has_next_value = separator == ","
        if has_next_value:
            buffer.advance(buffer.start + 1)
            buffer.skip_whitespace()
    buffer.advance(buffer.start + 1)  # the closing bracket
    if buffer.skip_whitespace():
        raise build_error("text after the end of the array")


def _decode_value(
    buffer: _Buffer,
    decoder: _ObjectDecoder,
    build_error: Callable[[str], TaskError],
) -> tuple[Any, int, str]:
    """Return the next value, the index of its end in the buffer, and an error message or ""."""
    while True:
        try:
            value, end, error = decoder.decode(buffer.text, buffer.start)
        except ValueError as json_error:
            if not buffer.read_chunks():
                raise build_error(getattr(json_error, "msg", str(json_error))) from None
            continue
        if end < len(buffer.text):
            return value, end, error
        # The value may be a number that continues in the next chunk.
        size = end - buffer.start
        if not buffer.read_chunks():
            # ``read_chunks`` has discarded the text before the value, which is now at index 0.
            return value, size, error
