"""Detects how plain text is divided into lines, and joins hard-wrapped lines into paragraphs."""

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Final

from bertsmith.text.sentences import split_sentences

#: Characters that end a sentence, and closing characters that may follow them.
_SENTENCE_ENDINGS: Final = frozenset(".!?\u3002\uff01\uff1f\u2026\u061f\u0964:;")
_CLOSING_CHARACTERS: Final = "\"'\u201d\u2019\u00bb)]*_ \t\r"
#: Maximum length of a line in hard-wrapped text, and minimum length of most lines, in characters.
_MAX_WRAPPED_LENGTH: Final = 120
_MIN_WRAPPED_LENGTH: Final = 45
#: Number of lines examined to detect the layout.
_NUM_EXAMINED_LINES: Final = 400


def ends_sentence(line: str) -> bool:
    """Return whether a line ends like a sentence, apart from closing quotes and brackets."""
    return line.rstrip(_CLOSING_CHARACTERS)[-1:] in _SENTENCE_ENDINGS


def is_wrapped(lines: Sequence[str]) -> bool:
    """Return whether sentences continue across lines, as in text wrapped at a fixed width.

    In wrapped text, the lines inside a paragraph have about the same length, no line is very long,
    and most lines end in the middle of a sentence.
    """
    examined_lines = [line.strip() for line in islice(lines, _NUM_EXAMINED_LINES)]
    if any(len(line) > _MAX_WRAPPED_LENGTH for line in examined_lines):
        return False
    inner_lines = [line for line, next_line in pairwise(examined_lines) if line and next_line]
    long_lines = [line for line in inner_lines if len(line) >= _MIN_WRAPPED_LENGTH]
    if len(inner_lines) < 2 or 2 * len(long_lines) < len(inner_lines):
        return False
    return sum(not ends_sentence(line) for line in long_lines) > len(long_lines) / 2


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


def unwrap_lines(lines: Sequence[str]) -> str:
    """Join the lines of each paragraph into one line; blank lines separate paragraphs."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        text = line.strip()
        if text:
            paragraphs[-1].append(text)
        elif paragraphs[-1]:
            paragraphs.append([])
    return "\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph)


def unwrap_paragraphs(text: str) -> str:
    """Return prose with one paragraph per line, whether or not it is hard-wrapped."""
    # A long first line shows at once that a text is not wrapped, as most texts are.
    if "\n" not in text or len(text.split("\n", 1)[0]) > _MAX_WRAPPED_LENGTH:
        return text
    head = text.split("\n", _NUM_EXAMINED_LINES)[:_NUM_EXAMINED_LINES]
    return unwrap_lines(text.split("\n")) if is_wrapped(head) else text
