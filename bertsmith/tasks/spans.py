"""From contexts to windows, and from the scores of their tokens back to spans of text.

It never knows a tokenizer, nor what is right.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ContextWindow:
    """A stretch of m tokens of a question's context, as it stands in one input.

    example_index: the number of the question. first: the place of its first token in the input.
    offsets: int64 [m, 2], the characters [start, end) of the context that each token stands for.
    can_start_span: bool [m], whether a span may start with the token. By the rule of ``assign_tokens_to_windows`` each token
    is owned by one window; without that rule, by all that hold it.
    """

    example_index: int
    first_position: int
    offsets: NDArray[np.int64]
    can_start_span: NDArray[np.bool_]


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a context. score: that of its first token plus its last one's."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class SpanPredictions:
    """What a question's windows say: spans of unlike texts, the best first, and of no answer."""

    spans: list[Span]
    null_score: float


def split_into_windows(size: int, room: int, stride: int) -> list[tuple[int, int]]:
    """Return the tokens [start, stop) of each window of a context of ``size`` tokens.

    A window has ``room`` tokens at most, and the next one starts ``stride`` tokens later.
    """
    found = [(0, min(size, room))]
    while found[-1][1] < size:
        start = found[-1][0] + min(stride, room)
        found.append((start, min(size, start + room)))
    return found


def assign_tokens_to_windows(parts: Sequence[tuple[int, int]]) -> list[NDArray[np.bool_]]:
    """Return for each window which of its tokens have most context there: bool [m] each.

    A token's context is the lesser of what is on its left and on its right; the window's length
    counts a hundredth, and the first of equal ones wins, as in the original's run_squad.py.
    """
    best = np.full(parts[-1][1], -np.inf)
    owner = np.zeros(len(best), np.int64)
    for number, (start, stop) in enumerate(parts):
        places = np.arange(stop - start)
        context = np.minimum(places, places[::-1]) + 0.01 * len(places)
        better = context > best[start:stop]
        best[start:stop][better] = context[better]
        owner[start:stop][better] = number
    return [owner[start:stop] == number for number, (start, stop) in enumerate(parts)]


def find_covering_tokens(
    offsets: NDArray[np.int64], start: int, end: int
) -> tuple[int, int] | None:
    """Return the first and the last token of those that stand for the characters [start, end).

    A token that the span begins or ends in is among them. None where no token does.
    """
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


def find_best_spans(
    outputs: Sequence[NDArray[np.float32]],
    windows: Sequence[ContextWindow],
    contexts: Sequence[str],
    *,
    max_answer_tokens: int,
    num_spans: int,
) -> list[SpanPredictions]:
    """Return the ``num_spans`` best spans of each question.

    outputs: float32 [s, 2] of each window, start and end of its s tokens, [CLS] the first one;
    windows: in the order of their questions. A span lies in one window, has ``max_answer_tokens`` tokens at
    most and begins with a token that the window owns. No answer scores what its least window says.
    """
    found = []
    pairs = zip(outputs, windows, strict=True)
    for number, own in groupby(pairs, key=lambda pair: pair[1].example_index):
        null, scores, places = np.inf, [], []
        for rows, window in own:
            exactly = rows.astype(np.float64)
            null = min(null, float(exactly[0].sum()))
            more = _scores(
                exactly[window.first_position :], window.can_start_span, max_answer_tokens
            )
            first, size = np.nonzero(np.isfinite(more))
            scores.append(more[first, size])
            offsets = window.offsets
            places.append(np.stack([offsets[first, 0], offsets[first + size, 1]], 1))
        spans = _distinct(
            np.concatenate(scores), np.concatenate(places), contexts[number], num_spans
        )
        # A context of no token at all has nothing to say; that is as good as no answer.
        found.append(SpanPredictions(spans or [Span("", 0, 0, null)], null))
    return found


def _scores(rows: Floats, owned: NDArray[np.bool_], longest: int) -> Floats:
    """Return float64 [m, n], the score of a span from each of m tokens on of 1 to n tokens.

    rows: float64 [>= m, 2]. What is no span has the score -inf.
    """
    size = len(owned)
    if not size:
        return np.empty((0, 0))
    width = min(longest, size)
    ends = np.concatenate([rows[:size, 1], np.full(width - 1, -np.inf)])
    table: Floats = rows[:size, :1] + sliding_window_view(ends, width)
    table[~owned] = -np.inf
    return table


def _distinct(scores: Floats, places: NDArray[np.int64], context: str, count: int) -> list[Span]:
    """Return the best spans; of those with one text the best alone."""
    found: dict[str, Span] = {}
    for place in _in_order(scores, 8 * count):
        start, end = places[place].tolist()
        # A tokenizer that strips accents leaves those out that stand alone after a letter.
        while end < len(context) and unicodedata.combining(context[end]):
            end += 1
        text = context[start:end]
        if text not in found:
            found[text] = Span(text, start, end, float(scores[place]))
            if len(found) == count:
                break
    return list(found.values())


def _in_order(scores: Floats, few: int) -> Iterator[int]:
    """Yield the places of scores, the best first; after the best few the whole order anew.

    Few of thousands are wanted, and to sort them all takes much longer.
    """
    if few < len(scores):
        best = np.sort(np.argpartition(-scores, few)[:few])
        yield from best[np.argsort(-scores[best], kind="stable")].tolist()
    yield from np.argsort(-scores, kind="stable").tolist()
