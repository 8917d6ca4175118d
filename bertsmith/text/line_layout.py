"""Tells how plain text is laid out on its lines, and brings it into paragraphs on lines.

It never knows what file the text stood in.
"""

from collections.abc import Sequence
from itertools import islice, pairwise
from typing import Final

from bertsmith.text.sentences import split_sentences

#: What a sentence ends with, and what may still follow it.
TERMINAL: Final = frozenset(".!?\u3002\uff01\uff1f\u2026\u061f\u0964:;")
CLOSING: Final = "\"'\u201d\u2019\u00bb)]*_ \t\r"
#: No hard-wrapped text has longer lines, and its full lines are seldom shorter.
WIDEST: Final = 120
NARROWEST: Final = 45
#: Lines looked at to tell the layout.
LOOK: Final = 400


def ends_sentence(line: str) -> bool:
    """Tell whether a line ends as a sentence does, closing quotes and brackets aside."""
    return line.rstrip(CLOSING)[-1:] in TERMINAL


def is_wrapped(lines: Sequence[str]) -> bool:
    """Tell whether sentences run over the line ends, as in text wrapped at a fixed width.

    So it is when lines with a line right below them are about as long as each other, none is
    very long, and most end in the middle of a sentence.
    """
    looked = [line.strip() for line in islice(lines, LOOK)]
    if any(len(line) > WIDEST for line in looked):
        return False
    inner = [line for line, below in pairwise(looked) if line and below]
    full = [line for line in inner if len(line) >= NARROWEST]
    if len(inner) < 2 or 2 * len(full) < len(inner):
        return False
    return sum(not ends_sentence(line) for line in full) > len(full) / 2


def is_presplit(lines: Sequence[str]) -> bool:
    """Tell whether the text has the original's form: a sentence a line, documents between blanks.

    So it is when nearly every line holds one sentence and few are documents of their own.
    """
    looked = [line.strip() for line in islice(lines, LOOK)]
    full = [line for line in looked if line]
    if len(full) < 2 or is_wrapped(looked):
        return False
    blocks = sum(1 for above, line in pairwise(["", *looked]) if line and not above)
    single = sum(len(split_sentences(line)) == 1 for line in full)
    ended = sum(ends_sentence(line) for line in full)
    return single >= 0.8 * len(full) and ended >= 0.6 * len(full) and len(full) >= 1.5 * blocks


def unwrap_lines(lines: Sequence[str]) -> str:
    """Return hard-wrapped lines as one line a paragraph; blank lines part paragraphs."""
    paragraphs: list[list[str]] = [[]]
    for line in lines:
        if text := line.strip():
            paragraphs[-1].append(text)
        elif paragraphs[-1]:
            paragraphs.append([])
    return "\n".join(" ".join(paragraph) for paragraph in paragraphs if paragraph)


def unwrap_paragraphs(text: str) -> str:
    """Return prose with one paragraph a line, whether or not it was hard-wrapped."""
    # Most text is not wrapped, and its first lines show it at once.
    if "\n" not in text or len(text.split("\n", 1)[0]) > WIDEST:
        return text
    head = text.split("\n", LOOK)[:LOOK]
    return unwrap_lines(text.split("\n")) if is_wrapped(head) else text
