"""Splitting contexts into windows, and finding the best spans from the scores of their tokens."""

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
    """The m context tokens of one input.

    Attributes:
        example_index: Index of the example (a question with its context).
        first_position: Position of the first context token in the input.
        offsets: Character offsets [start, end) of each token in the context, int64 [m, 2].
        can_start_span: Whether a span may start with each token, bool [m].
    """

    example_index: int
    first_position: int
    offsets: NDArray[np.int64]
    can_start_span: NDArray[np.bool_]


@dataclass(frozen=True)
class Span:
    """The characters [start, end) of a context. ``score`` is the start logit plus the end logit."""

    text: str
    start: int
    end: int
    score: float


@dataclass(frozen=True)
class SpanPredictions:
    """The best spans of a question, which have different texts, in descending order of score.

    ``null_score`` is the score of no answer.
    """

    spans: list[Span]
    null_score: float


def split_into_windows(num_tokens: int, window_size: int, stride: int) -> list[tuple[int, int]]:
    """Split the tokens of a context into windows; return the tokens [start, stop) of each window.

    Args:
        num_tokens: Number of tokens of the context.
        window_size: Maximum tokens per window.
        stride: Tokens between the starts of consecutive windows.
    """
    windows = [(0, min(num_tokens, window_size))]
    while windows[-1][1] < num_tokens:
        start = windows[-1][0] + min(stride, window_size)
        windows.append((start, min(num_tokens, start + window_size)))
    return windows


def assign_tokens_to_windows(windows: Sequence[tuple[int, int]]) -> list[NDArray[np.bool_]]:
    """Assign each token to the window in which it has the most context.

    The context of a token is the number of tokens to its left or right, whichever is smaller, plus
    0.01 times the length of the window. In case of a tie, the first window is selected. This is the
    rule of the original run_squad.py.

    Returns:
        For each window, whether each of its m tokens is assigned to the window: bool [m].
    """
    best_context = np.full(windows[-1][1], -np.inf)
    assigned_window = np.zeros(len(best_context), np.int64)
    for index, (start, stop) in enumerate(windows):
        positions = np.arange(stop - start)
        context = np.minimum(positions, positions[::-1]) + 0.01 * len(positions)
        is_better = context > best_context[start:stop]
        best_context[start:stop][is_better] = context[is_better]
        assigned_window[start:stop][is_better] = index
    return [assigned_window[start:stop] == index for index, (start, stop) in enumerate(windows)]


def find_covering_tokens(
    offsets: NDArray[np.int64],
    start: int,
    end: int,
) -> tuple[int, int] | None:
    """Return the first and last token that overlap the characters [start, end), None if none does.

    Args:
        offsets: Character offsets [start, end) of each token, int64 [n, 2].
        start: Index of the first character.
        end: Index after the last character.
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
    """Return the best spans of each question.

    A span lies within one window and starts with a token for which ``can_start_span`` is set. The
    score of no answer is the sum of the two logits of [CLS], minimized over the windows.

    Args:
        outputs: Start and end logits of the s tokens of each window, float32 [s, 2]; the first
            token is [CLS].
        windows: The windows, in the order of their questions.
        contexts: The context of each question.
        max_answer_tokens: Maximum tokens of a span.
        num_spans: Maximum number of spans per question.
    """
    predictions = []
    pairs = zip(outputs, windows, strict=True)
    for example_index, window_pairs in groupby(pairs, key=lambda pair: pair[1].example_index):
        null_score = np.inf
        scores, offsets = [], []
        for window_outputs, window in window_pairs:
            logits = window_outputs.astype(np.float64)
            null_score = min(null_score, float(logits[0].sum()))
            window_scores, window_offsets = _list_spans(logits, window, max_answer_tokens)
            scores.append(window_scores)
            offsets.append(window_offsets)
        best_spans = _select_distinct_spans(
            np.concatenate(scores),
            np.concatenate(offsets),
            contexts[example_index],
            num_spans,
        )
        # A context without tokens has no spans. An empty span represents no answer.
        best_spans = best_spans or [Span("", 0, 0, null_score)]
        predictions.append(SpanPredictions(best_spans, null_score))
    return predictions


def _list_spans(
    logits: Floats,
    window: ContextWindow,
    max_answer_tokens: int,
) -> tuple[Floats, NDArray[np.int64]]:
    """Return all n possible spans of a window.

    Args:
        logits: Start and end logits of the s tokens of the input, float64 [s, 2].
        window: The window.
        max_answer_tokens: Maximum tokens of a span.

    Returns:
        The scores, float64 [n], and the character offsets [start, end), int64 [n, 2].
    """
    context_logits = logits[window.first_position :]
    scores = _score_spans(context_logits, window.can_start_span, max_answer_tokens)
    first_tokens, extra_tokens = np.nonzero(np.isfinite(scores))
    last_tokens = first_tokens + extra_tokens
    starts, ends = window.offsets[first_tokens, 0], window.offsets[last_tokens, 1]
    return scores[first_tokens, extra_tokens], np.stack([starts, ends], 1)


def _score_spans(
    logits: Floats,
    can_start_span: NDArray[np.bool_],
    max_answer_tokens: int,
) -> Floats:
    """Return the scores of all spans, float64 [m, n].

    Entry [i, j] is the score of the span that starts with token i and has j + 1 tokens. It is -inf
    if no span may start with token i, or if the span would end after the last token.

    Args:
        logits: Start and end logits, float64 [>= m, 2].
        can_start_span: Whether a span may start with each of the m context tokens, bool [m].
        max_answer_tokens: Maximum tokens of a span.
    """
    num_tokens = len(can_start_span)
    if not num_tokens:
        return np.empty((0, 0))
    max_length = min(max_answer_tokens, num_tokens)
    end_logits = np.concatenate([logits[:num_tokens, 1], np.full(max_length - 1, -np.inf)])
    scores: Floats = logits[:num_tokens, :1] + sliding_window_view(end_logits, max_length)
    scores[~can_start_span] = -np.inf
    return scores


def _select_distinct_spans(
    scores: Floats,
    offsets: NDArray[np.int64],
    context: str,
    num_spans: int,
) -> list[Span]:
    """Return the best spans; of several spans with the same text, only the best one is returned.

    Args:
        scores: Score of each span, float64 [n].
        offsets: Character offsets [start, end) of each span, int64 [n, 2].
        context: The context.
        num_spans: Maximum number of spans.
    """
    spans: dict[str, Span] = {}
    # Several of the best spans may have the same text, so more than ``num_spans`` are needed.
    for index in _iterate_by_score(scores, num_best=8 * num_spans):
        start, end = offsets[index].tolist()
        # If a tokenizer strips accents, tokens do not include combining characters at their end.
        while end < len(context) and _continues_character(context[end]):
            end += 1
        text = context[start:end]
        if text not in spans:
            spans[text] = Span(text, start, end, float(scores[index]))
            if len(spans) == num_spans:
                break
    return list(spans.values())


def _continues_character(character: str) -> bool:
    """Return whether a character belongs to the one before it: an accent, a vowel sign, or a jamo.

    Jamo are the vowels and final consonants of Korean syllables in decomposed text.
    """
    return unicodedata.category(character) == "Mn" or "\u1160" <= character <= "\u11ff"


def _iterate_by_score(scores: Floats, num_best: int) -> Iterator[int]:
    """Yield the indices of the ``num_best`` best scores, then those of all scores.

    Both parts are in descending order of score. Usually the caller needs only the first part, and
    sorting thousands of scores takes much longer.
    """
    if num_best < len(scores):
        best = np.sort(np.argpartition(-scores, num_best)[:num_best])
        yield from best[np.argsort(-scores[best], kind="stable")].tolist()
    yield from np.argsort(-scores, kind="stable").tolist()
