"""The official scores of SQuAD: exact match, F1, and the threshold of no answer.

It never knows models; it scores texts.

By the published definitions of evaluate-v1.1 and evaluate-v2.0. The second leaves out answers of
which normalization leaves nothing, and counts nothing said as right where there is no answer.
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Return a text in lower case without (ASCII) punctuation, articles and needless spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(said: str, answer: str) -> float:
    """Return 1 if two normalized texts are equal, else 0."""
    return float(said == answer)


def f1(said: str, answer: str) -> float:
    """Return the F1 of the words of two normalized texts; 0 where none is shared."""
    ours, theirs = said.split(), answer.split()
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0


def f1_or_none(said: str, answer: str) -> float:
    """Return the F1, or, where either text is empty, whether both are (v2.0)."""
    return f1(said, answer) if said and answer else float(said == answer)


def _best(
    metric: Callable[[str, str], float], said: Sequence[str], answers: Sequence[Sequence[str]]
) -> Floats:
    """Return the metric of each of n texts, the maximum over its answers: float64 [n]."""
    pairs = zip(said, answers, strict=True)
    return np.array([max(metric(one, each) for each in own) for one, own in pairs], np.float64)


def figures(
    said: Sequence[str],
    nulls: Floats,
    answers: Sequence[Sequence[str]],
    threshold: float | None = None,
) -> dict[str, float]:
    """Return exact match and F1, from 0 to 1, of what was said to n questions.

    said: the best span of each. answers: all that are right; an empty list where there is none,
    and if there is such a one anywhere, the rules are those of v2.0. nulls: float64 [n], by how
    much the score of no answer is above that of the span; beyond ``threshold`` none is given.

    Without a threshold each span is given under v1.1, and under v2.0 the threshold is tuned here,
    for the best F1 (section 4.3 of the paper); with ``math.inf`` each span is given under both.
    Under v2.0 there are also the best scores that any threshold gives, the thresholds that give
    them (``best_f1_thresh``), the scores of each kind of question, and of a threshold that is
    finite, ``null_threshold``.
    """
    has = np.array([bool(own) for own in answers])
    second = not has.all()
    texts = [normalized(text) for text in said]
    right = [[normalized(text) for text in own] for own in answers]
    if second:
        right = [[text for text in own if text] or [""] for own in right]
    nothing = [""] * len(texts)
    metrics: dict[str, Any] = {"f1": f1_or_none if second else f1, "exact": exact}
    given = {name: _best(metric, texts, right) for name, metric in metrics.items()}
    silent = {name: _best(metric, nothing, right) for name, metric in metrics.items()}
    if threshold in (None, math.inf) and not second:
        return {name: float(each.mean()) for name, each in given.items()}
    tuned = {name: best_threshold(given[name], silent[name], nulls) for name in metrics}
    if threshold is None:
        threshold = tuned["f1"][1]
    each = {name: np.where(nulls > threshold, silent[name], given[name]) for name in metrics}
    found = {name: float(own.mean()) for name, own in each.items()}
    for kind, chosen in (("HasAns", has), ("NoAns", ~has)):
        if chosen.any():
            found |= {f"{kind}_{name}": float(own[chosen].mean()) for name, own in each.items()}
    best = {f"best_{name}": value for name, (value, _) in tuned.items()}
    best |= {f"best_{name}_thresh": place for name, (_, place) in tuned.items()}
    told = {"null_threshold": threshold} if math.isfinite(threshold) else {}
    return {**found, **best, **told}


def best_threshold(given: Floats, silent: Floats, nulls: Floats) -> tuple[float, float]:
    """Return the best mean score over all thresholds of no answer, and the threshold that gives it.

    given, silent, nulls: float64 [n], the score of each question with its span and with no answer,
    and what the threshold is compared with. The threshold stands between two of the ``nulls``, so
    that rounding cannot move a question across it.
    """
    order = np.argsort(nulls, kind="stable")
    ordered = nulls[order]
    gains = np.concatenate([[0.0], np.cumsum((given - silent)[order])])
    # Questions of equal nulls are answered together or not at all.
    gains[1:-1][ordered[1:] == ordered[:-1]] = -np.inf
    edges = [ordered[:1] - 1, (ordered[1:] + ordered[:-1]) / 2, ordered[-1:] + 1]
    place = int(gains.argmax())
    best = (silent.sum() + gains[place]) / len(nulls)
    return float(best), float(np.concatenate(edges)[place])
