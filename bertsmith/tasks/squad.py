"""The official scores of SQuAD and KorQuAD: exact match, F1, and the threshold of no answer.

By the published definitions of evaluate-v1.1 and evaluate-v2.0. The second leaves out answers of
which normalization leaves nothing, and counts nothing said as right where there is no answer. The
F1 of characters is that of KorQuAD 1.0 (Lim et al. 2019, arXiv:1909.07005).
"""

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_ARTICLES = re.compile(r"\b(a|an|the)\b")
#: The quotation marks and brackets that KorQuAD's program takes for spaces.
_KOREAN_MARKS = dict.fromkeys(map(ord, "'\"《》<>〈〉()‘’"), " ")  # noqa: RUF001
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Return a text in lower case without (ASCII) punctuation, articles and needless spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def normalize_characters(text: str) -> str:
    """Return a text without spaces in lower case, and without quotation marks and punctuation.

    As KorQuAD 1.0 normalizes it before its characters are compared.
    """
    return "".join(text.translate(_KOREAN_MARKS).lower().translate(_PUNCTUATION).split())


def exact_match(said: str, answer: str) -> float:
    """Return 1 if two normalized texts are equal, else 0."""
    return float(said == answer)


def f1(said: str, answer: str) -> float:
    """Return the F1 of the words of two normalized texts; 0 where none is shared."""
    return _overlap(said.split(), answer.split())


def char_f1(predicted: str, answer: str) -> float:
    """Return the F1 of the characters of two texts from ``normalize_characters``."""
    return _overlap(predicted, answer)


def _overlap(predicted: Sequence[str], answer: Sequence[str]) -> float:
    shared = (Counter(predicted) & Counter(answer)).total()
    return 2 * shared / (len(predicted) + len(answer)) if shared else 0.0


#: Each metric, and the normalization of the texts that it compares.
METRICS: dict[str, tuple[Callable[[str, str], float], Callable[[str], str]]] = {
    "f1": (f1, normalize_answer), "exact": (exact_match, normalize_answer),
    "char_f1": (char_f1, normalize_characters),
}  # fmt: skip


def _best(
    metric: Callable[[str, str], float],
    predicted: Sequence[str],
    answers: Sequence[Sequence[str]],
    *,
    second: bool,
) -> Floats:
    """Return the metric of each of n normalized texts, the maximum over its answers: float64 [n].

    second: by the rules of v2.0. An answer that normalization leaves nothing of is left out, and
    an empty text is right only where there is no answer.
    """

    def compare(text: str, answer: str) -> float:
        return float(text == answer) if second and not (text and answer) else metric(text, answer)

    scores = []
    for text, own in zip(predicted, answers, strict=True):
        usable = ([answer for answer in own if answer] or [""]) if second else own
        scores.append(max(compare(text, answer) for answer in usable))
    return np.array(scores, np.float64)


def compute_squad_metrics(
    said: Sequence[str],
    nulls: Floats,
    answers: Sequence[Sequence[str]],
    threshold: float | None = None,
    names: Sequence[str] = ("f1", "exact"),
) -> dict[str, float]:
    """Return exact match and F1, from 0 to 1, of what was said to n questions.

    said: the best span of each. answers: all that are right; an empty list where there is none,
    and if there is such a one anywhere, the rules are those of v2.0. nulls: float64 [n], by how
    much the score of no answer is above that of the span; beyond ``threshold`` none is given.

    names: the metrics, those of v1.1 among them; ``char_f1`` is KorQuAD's.

    Without a threshold each span is given under v1.1, and under v2.0 the threshold is tuned here,
    for the best F1 (section 4.3 of the paper); with ``math.inf`` each span is given under both.
    Under v2.0 there are also the best scores that any threshold gives, the thresholds that give
    them (``best_f1_thresh``), the scores of each kind of question, and of a threshold that is
    finite, ``null_threshold``.
    """
    has = np.array([bool(own) for own in answers])
    second = not has.all()
    given, silent = {}, {}
    for name in names:
        metric, normalize = METRICS[name]
        texts = [normalize(text) for text in said]
        right = [[normalize(text) for text in own] for own in answers]
        given[name] = _best(metric, texts, right, second=second)
        silent[name] = _best(metric, [""] * len(said), right, second=second)
    if threshold in (None, math.inf) and not second:
        return {name: float(each.mean()) for name, each in given.items()}
    tuned = {name: find_best_threshold(given[name], silent[name], nulls) for name in names}
    if threshold is None:
        threshold = tuned["f1"][1]
    each = {name: np.where(nulls > threshold, silent[name], given[name]) for name in names}
    found = {name: float(own.mean()) for name, own in each.items()}
    for kind, chosen in (("HasAns", has), ("NoAns", ~has)):
        if chosen.any():
            found |= {f"{kind}_{name}": float(own[chosen].mean()) for name, own in each.items()}
    best = {f"best_{name}": value for name, (value, _) in tuned.items()}
    best |= {f"best_{name}_thresh": place for name, (_, place) in tuned.items()}
    told = {"null_threshold": threshold} if math.isfinite(threshold) else {}
    return {**found, **best, **told}


def find_best_threshold(given: Floats, silent: Floats, nulls: Floats) -> tuple[float, float]:
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
