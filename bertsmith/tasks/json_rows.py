"""JSON lines and JSON arrays as a stream of values, each with its line."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from bertsmith.errors import TaskError
from bertsmith.tasks.text_files import split_lines

NOT_JSON, NOT_OBJECT = "a line that is not JSON", "a line that is no JSON object"
DUPLICATE_KEY = "a key that stands twice in its object"
_BLANKS = " \t\r\n"
_BLANK = re.compile(f"[{_BLANKS}]*")

#: A line number, an object, and why there is none.
JsonRow = tuple[int, dict[str, Any], str]


class _Objects:
    """A decoder of JSON that notes whether a key stands twice in an object: one would be lost."""

    def __init__(self) -> None:
        self._has_twice = False
        self._decoder = json.JSONDecoder(object_pairs_hook=self._pairs)

    def _pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        cells = dict(pairs)
        self._has_twice |= len(cells) < len(pairs)
        return cells

    def decode(self, text: str, start: int) -> tuple[Any, int, str]:
        """Return the value at ``start``, where it ends, and its fault. Raises ValueError."""
        self._has_twice = False
        try:
            value, end = self._decoder.raw_decode(text, start)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        if not isinstance(value, dict):
            return {}, end, NOT_OBJECT
        return value, end, DUPLICATE_KEY if self._has_twice else ""


def read_json_lines(lines: Iterable[str]) -> Iterator[JsonRow]:
    """Yield an object a line; lines without anything are passed over."""
    objects = _Objects()
    for number, line in enumerate(lines, 1):
        text = line.strip(_BLANKS)
        if not text:
            continue
        try:
            value, end, fault = objects.decode(text, 0)
        except ValueError:
            value, end, fault = {}, len(text), NOT_JSON
        if end < len(text):
            fault = NOT_JSON
        yield number, {} if fault else value, fault


def read_json(pieces: Iterator[str], path: Path) -> Iterator[JsonRow]:
    """Yield the objects of an array; or of JSON lines, as some .json files hold. Raises TaskError.

    Memory holds one object, not the array.
    """
    head = ""
    for piece in pieces:
        head += piece
        if head.strip(_BLANKS):
            break
    if head.lstrip(_BLANKS).startswith("["):
        yield from _array(head, pieces, path)
        return
    is_first = True
    for number, value, fault in read_json_lines(split_lines(chain([head], pieces))):
        if is_first and fault == NOT_JSON:
            raise TaskError(
                f"{path}, line {number:,}: expected an array of objects, or an object on each line"
            )
        is_first = False
        yield number, value, fault


class _Buffer:
    """The part of a text that is not read yet: ``text`` from ``start``, which is on ``line``."""

    def __init__(self, head: str, pieces: Iterator[str]) -> None:
        self.text, self.start, self.line = head, 0, 1
        self._pieces = pieces

    def move(self, end: int) -> None:
        """Go on to the character ``end`` of the text."""
        self.line += self.text.count("\n", self.start, end)
        self.start = end

    def extend(self) -> bool:
        """Forget what was read, and read on until the rest is twice as long; False at the end."""
        parts = [self.text[self.start :]]
        before = size = len(parts[0])
        for piece in self._pieces:
            parts.append(piece)
            size += len(piece)
            if size >= 2 * before:
                break
        self.text, self.start = "".join(parts), 0
        return size > before

    def next_character(self) -> str:
        """Skip blanks and return the character after them; "" at the end."""
        while True:
            match = _BLANK.match(self.text, self.start)
            assert match is not None
            self.move(match.end())
            if self.start < len(self.text) or not self.extend():
                return self.text[self.start : self.start + 1]


def _array(head: str, pieces: Iterator[str], path: Path) -> Iterator[JsonRow]:
    buffer, objects = _Buffer(head, pieces), _Objects()

    def broken(fault: str) -> TaskError:
        return TaskError(f"{path}, line {buffer.line:,}: not JSON: {fault}; repair the array")

    buffer.next_character()
    buffer.move(buffer.start + 1)
    mark = "" if buffer.next_character() == "]" else ","
    while mark == ",":
        value, end, fault = _decode(buffer, objects, broken)
        yield buffer.line, {} if fault else value, fault.replace("a line", "a value")
        buffer.move(end)
        mark = buffer.next_character()
        if mark not in (",", "]"):
            raise broken(f"{mark!r} instead of a comma" if mark else "the array has no end")
        if mark == ",":
            buffer.move(buffer.start + 1)
            buffer.next_character()
    buffer.move(buffer.start + 1)
    if buffer.next_character():
        raise broken("text after the end of the array")


def _decode(
    buffer: _Buffer, objects: _Objects, broken: Callable[[str], TaskError]
) -> tuple[Any, int, str]:
    """Return the next value, where it ends in the buffer's text, and its fault."""
    while True:
        try:
            value, end, fault = objects.decode(buffer.text, buffer.start)
        except ValueError as error:
            if not buffer.extend():
                raise broken(getattr(error, "msg", str(error))) from None
            continue
        if end < len(buffer.text):
            return value, end, fault
        # A number may go on in the next piece.
        size = end - buffer.start
        if not buffer.extend():
            return value, size, fault
