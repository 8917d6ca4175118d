"""Checks of a request that do not need a model."""

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

from bertsmith.errors import InputError
from bertsmith.serve.deadline import RequestTooLargeError
from bertsmith.text.alphabet import has_surrogates

#: Maximum number of predicted tokens per mask.
MAX_TOP: Final = 1000
#: Maximum number of masks times predictions per mask in a request; they become Python objects.
MAX_PREDICTIONS: Final = 100_000


def check_limit(name: str, count: int, limit: int) -> None:
    """Raise RequestTooLargeError if a request has more than ``limit`` items called ``name``."""
    if count > limit:
        raise RequestTooLargeError(
            f"the limit is {limit:,} {name} per request, got {count:,}; split the request"
        )


class _Result(Protocol):
    """The result of a model for a text."""

    @property
    def is_truncated(self) -> bool: ...


def check_not_truncated(results: Iterable[_Result], description: str = "a text") -> None:
    """Raise RequestTooLargeError if an input was truncated; the message has ``description``."""
    if any(result.is_truncated for result in results):
        raise RequestTooLargeError(
            f"{description} is longer than the model's maximum; shorten it, or send truncate: true"
        )


def check_num_truncated(num_truncated: int, max_seqlen: int) -> None:
    """Raise RequestTooLargeError if texts were truncated to ``max_seqlen`` tokens."""
    if num_truncated:
        raise RequestTooLargeError(
            f"{num_truncated:,} of the texts are longer than the model's maximum of {max_seqlen} "
            "tokens; shorten them, or send truncate: true"
        )


def check_no_surrogates(texts: Sequence[Any]) -> None:
    r"""Raise InputError for a text with a lone surrogate.

    JSON can express one ("\ud800"), but it has no UTF-8 encoding and tokenizers reject it.

    Args:
        texts: texts, or nested sequences of texts such as pairs.
    """
    has_surrogates_cached = functools.cache(has_surrogates)
    for number, text in enumerate(texts, 1):
        if any(map(has_surrogates_cached, iter_strings(text))):
            raise InputError(
                f"text {number} has a lone surrogate (half of a character); send valid Unicode"
            )


def iter_strings(text: Any) -> Iterator[str]:
    """Yield the strings of a string or of nested sequences of strings."""
    if isinstance(text, str):
        yield text
    else:
        for part in text:
            yield from iter_strings(part)
