"""What one request may ask at the most, and what no model can read.

It never answers.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from bertsmith.errors import InputError
from bertsmith.serve.deadline import RequestTooLargeError
from bertsmith.text.alphabet import has_surrogates

#: Words told for a mask, at the most.
MAX_TOP: Final = 1000


def check_limit(what: str, count: int, most: int) -> None:
    """Raise LargeError where a request has more of something than the server takes."""
    if count > most:
        raise RequestTooLargeError(
            f"the request has {count:,} {what}; this server takes {most:,} of one request: part it"
        )


def check_top(top: int) -> None:
    """Raise QuestionError for a number of words that nobody is told."""
    if not 1 <= top <= MAX_TOP:
        raise InputError(f"top is {top}; expected 1 to {MAX_TOP:,}")


def check_surrogates(texts: Sequence[Any]) -> None:
    """Raise QuestionError for a text with half of a character: JSON can write it, no model reads.

    texts: each a text, a pair, or a prompt and its endings.
    """
    for number, text in enumerate(texts, 1):
        if any(map(has_surrogates, _parts(text))):
            raise InputError(
                f"text {number} has half a character (a lone surrogate); send it whole"
            )


def _parts(text: Any) -> Iterator[str]:
    """Yield the texts of a text, of a pair, or of a prompt and its endings."""
    if isinstance(text, str):
        yield text
    else:
        for part in text:
            yield from _parts(part)
