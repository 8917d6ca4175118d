"""Detects how plain text is divided into lines, and joins hard-wrapped lines into paragraphs."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Final

from bertsmith.text.sentences import split_sentences

#: Characters that end a sentence, and closing characters that may follow them. Apart from colons,
#: semicolons and the ellipsis, sentencex ends a sentence at these characters, too.
_SENTENCE_ENDINGS: Final = frozenset(
    ".!?:;\u2026\u203c\u203d\u2047\u2048\u2049"
    "\u0589\u061f\u06d4\u0964\u0965\u104a\u104b\u1362\u1367"
    "\u3002\ufe52\ufe56\ufe57\uff01\uff0e\uff1a\uff1b\uff1f\uff61"
)
_CLOSING_CHARACTERS: Final = (
    "\"'\u201d\u2019\u00bb)]*_ \t\r\u3009\u300b\u300d\u300f\u3011\u3015\uff09\uff3d\uff63"
)
#: Chinese and Japanese characters, which are written without spaces between words.
_UNSPACED: Final = re.compile(
    "[\u2e80-\u303f\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\uff00-\uff9f\U00020000-\U0003ffff]"
)
#: Maximum width of a line in hard-wrapped text, and minimum width of most lines, in columns of a
#: monospaced font.
_MAX_WRAPPED_WIDTH: Final = 120
_MIN_WRAPPED_WIDTH: Final = 45
#: Number of columns that may stay free at the end of a line without spaces, because punctuation
#: must not start or end a line.
_UNSPACED_MARGIN: Final = 6
#: Number of lines examined to detect the layout.
_NUM_EXAMINED_LINES: Final = 400


def ends_sentence(line: str) -> bool:
    """Return whether a line ends like a sentence, apart from closing quotes and brackets."""
    return line.rstrip(_CLOSING_CHARACTERS)[-1:] in _SENTENCE_ENDINGS


def is_wrapped(lines: Sequence[str]) -> bool:
    """Return whether sentences continue across lines, as in text wrapped at a fixed width.

    In wrapped text, most lines inside a paragraph are long, no line is very long, and most lines
    end in the middle of a sentence.
    """
    examined_lines = [line.strip() for line in islice(lines, _NUM_EXAMINED_LINES)]
    if any(_measure_width(line) > _MAX_WRAPPED_WIDTH for line in examined_lines):
        return False
    inner_pairs = [pair for pair in pairwise(examined_lines) if pair[0] and pair[1]]
    long_lines = [line for line, _ in inner_pairs if _measure_width(line) >= _MIN_WRAPPED_WIDTH]
    if len(inner_pairs) < 2 or 2 * len(long_lines) < len(inner_pairs):
        return False
    if sum(not ends_sentence(line) for line in long_lines) <= len(long_lines) / 2:
        return False
    is_wide = sum(_measure_width(line) > len(line) for line in long_lines) > len(long_lines) / 2
    return not is_wide or _has_full_lines(inner_pairs)


def _measure_width(line: str) -> int:
    """Return the width of a line: two columns for a Hangul, Chinese or Japanese character."""
    if line.isascii():
        return len(line)
    return len(line) + sum(unicodedata.east_asian_width(character) in "WF" for character in line)


def _has_full_lines(pairs: Sequence[tuple[str, str]]) -> bool:
    """Return whether most lines end where the next word would not have fit.

    Korean, Chinese and Japanese titles and comments, one per line, often have no final
    punctuation, but are of different widths.

    Args:
        pairs: Each line, and the line after it.
    """
    widths = [_measure_width(line) for line, _ in pairs]
    # Single lines may exceed the width of the others.
    wrapped_width = sorted(widths)[-1 - len(widths) // 10]
    num_filled = 0
    for width, (line, next_line) in zip(widths, pairs, strict=True):
        if _UNSPACED.match(line[-1]) and _UNSPACED.match(next_line):
            required = _UNSPACED_MARGIN
        else:
            required = 1 + _measure_width(next_line.split(maxsplit=1)[0])
        num_filled += width + required > wrapped_width
    return 2 * num_filled > len(pairs)


def is_presplit(lines: Sequence[str]) -> bool:
    """Return whether the text has one sentence per line and blank lines between documents.

    This is the input format of the original BERT. It is recognized if nearly every line is one
    sentence and most lines are next to another line.
    """
    examined_lines = [line.strip() for line in islice(lines, _NUM_EXAMINED_LINES)]
    nonempty = [line for line in examined_lines if line]
    if len(nonempty) < 2 or is_wrapped(examined_lines):
        return False
    num_blocks = sum(
        1 for previous, line in pairwise(["", *examined_lines]) if line and not previous
    )
    num_single_sentences = sum(len(split_sentences(line)) == 1 for line in nonempty)
    num_sentence_ends = sum(ends_sentence(line) for line in nonempty)
    return (
        num_single_sentences >= 0.8 * len(nonempty)
        and num_sentence_ends >= 0.6 * len(nonempty)
        and len(nonempty) >= 1.5 * num_blocks
    )


def join_lines(lines: Iterable[str]) -> str:
    """Join wrapped lines by spaces, but without a space between Chinese or Japanese characters."""
    parts: list[str] = []
    for line in lines:
        if parts and not (_UNSPACED.match(parts[-1][-1:]) and _UNSPACED.match(line)):
            parts.append(" ")
        parts.append(line)
    return "".join(parts)


def unwrap_lines(lines: Sequence[str]) -> str:
    """Join the lines of each paragraph into one line; blank lines separate paragraphs."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        text = line.strip()
        if text:
            paragraphs[-1].append(text)
        elif paragraphs[-1]:
            paragraphs.append([])
    return "\n".join(join_lines(paragraph) for paragraph in paragraphs if paragraph)


def unwrap_paragraphs(text: str) -> str:
    """Return prose with one paragraph per line, whether or not it is hard-wrapped."""
    # A long first line shows at once that a text is not wrapped, as most texts are.
    if "\n" not in text or len(text.split("\n", 1)[0]) > _MAX_WRAPPED_WIDTH:
        return text
    head = text.split("\n", _NUM_EXAMINED_LINES)[:_NUM_EXAMINED_LINES]
    return unwrap_lines(text.split("\n")) if is_wrapped(head) else text
