"""Official metrics of SQuAD and KorQuAD: exact match, F1, and the no-answer threshold.

The metrics follow the official scripts evaluate-v1.1 and evaluate-v2.0. Version 2.0 ignores answers
that are empty after normalization, and counts an empty prediction as correct only for unanswerable
questions. Character F1 and the exact match without English articles are the metrics of KorQuAD 1.0
(Lim et al. 2019, arXiv:1909.07005).
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
#: Quotation marks and brackets that KorQuAD's evaluation script replaces with spaces.
_KOREAN_MARKS = dict.fromkeys(map(ord, "'\"《》<>〈〉()‘’"), " ")  # noqa: RUF001
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lowercase a text and remove ASCII punctuation, articles and redundant whitespace."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def normalize_characters(text: str) -> str:
    """Lowercase a text and remove quotation marks, punctuation and whitespace, as in KorQuAD."""
    return "".join(text.translate(_KOREAN_MARKS).lower().translate(_PUNCTUATION).split())


def normalize_korean(text: str) -> str:
    """Lowercase a text and remove quotation marks, punctuation and redundant whitespace.

    This is the normalization of KorQuAD's evaluation script for exact matches.
    """
    return " ".join(text.translate(_KOREAN_MARKS).lower().translate(_PUNCTUATION).split())


def compute_exact_match(predicted: str, answer: str) -> float:
    """Return 1 if two normalized texts are equal, else 0."""
    return float(predicted == answer)


def compute_word_f1(predicted: str, answer: str) -> float:
    """Return the F1 of the words of two normalized texts."""
    return _compute_overlap_f1(predicted.split(), answer.split())


def compute_char_f1(predicted: str, answer: str) -> float:
    """Return the F1 of the characters of two texts that ``normalize_characters`` normalized."""
    return _compute_overlap_f1(predicted, answer)


def _compute_overlap_f1(predicted: Sequence[str], answer: Sequence[str]) -> float:
    """Return the F1 of two multisets of words or characters; 0 if they share no element."""
    num_shared = (Counter(predicted) & Counter(answer)).total()
    return 2 * num_shared / (len(predicted) + len(answer)) if num_shared else 0.0


#: Name of each metric -> the function that compares two normalized texts, and the function that
#: normalizes each of them.
METRICS: dict[str, tuple[Callable[[str, str], float], Callable[[str], str]]] = {
    "f1": (compute_word_f1, normalize_answer), "exact": (compute_exact_match, normalize_answer),
    "char_f1": (compute_char_f1, normalize_characters),
    "korean_exact": (compute_exact_match, normalize_korean),
}  # fmt: skip


def _max_over_answers(
    metric: Callable[[str, str], float],
    predicted: Sequence[str],
    answers: Sequence[Sequence[str]],
    *,
    is_v2: bool,
) -> Floats:
    """Return the highest score of each of n predictions over the correct answers, float64 [n].

    Args:
        metric: The function that compares a prediction with an answer.
        predicted: Normalized predictions.
        answers: Normalized answers of each question.
        is_v2: Whether to use the rules of version 2.0: empty answers are ignored, and an empty
            prediction is correct only for unanswerable questions.
    """

    def compare(text: str, answer: str) -> float:
        if is_v2 and (not text or not answer):
            return float(text == answer)
        return metric(text, answer)

    scores = []
    for text, question_answers in zip(predicted, answers, strict=True):
        valid_answers: Sequence[str] = question_answers
        if is_v2:
            valid_answers = [answer for answer in question_answers if answer] or [""]
        scores.append(max(compare(text, answer) for answer in valid_answers))
    return np.array(scores, np.float64)


def compute_squad_metrics(
    predictions: Sequence[str],
    null_margins: Floats,
    answers: Sequence[Sequence[str]],
    threshold: float | None = None,
    names: Sequence[str] = ("f1", "exact"),
) -> dict[str, float]:
    """Return the means of exact match, F1 and other metrics over n questions, from 0 to 1.

    If any question is unanswerable, the rules of version 2.0 apply, otherwise those of 1.1.

    Args:
        predictions: The best span of each question.
        null_margins: Score of no answer minus the score of the span, float64 [n].
        answers: The correct answers of each question, empty for unanswerable questions.
        threshold: No answer is predicted if the margin is above the threshold. ``math.inf``:
            always predict the span. None: as ``math.inf`` in version 1.1; in 2.0 use the threshold
            with the best F1 (section 4.3 of the paper).
        names: The metrics to compute, including "f1" and "exact".

    Returns:
        The metrics. In version 2.0 also the metrics over answerable ("HasAns_f1") and unanswerable
        ("NoAns_f1") questions, the best values over all thresholds ("best_f1") with the thresholds
        that give them ("best_f1_thresh"), and the threshold that is used ("null_threshold"), unless
        it is infinite.
    """
    has_answer = np.array([bool(question_answers) for question_answers in answers])
    is_v2 = not has_answer.all()
    span_scores, null_scores = {}, {}
    for name in names:
        metric, normalize = METRICS[name]
        texts = [normalize(text) for text in predictions]
        normalized_answers = [
            [normalize(text) for text in question_answers] for question_answers in answers
        ]
        empty_texts = [""] * len(predictions)
        span_scores[name] = _max_over_answers(metric, texts, normalized_answers, is_v2=is_v2)
        null_scores[name] = _max_over_answers(metric, empty_texts, normalized_answers, is_v2=is_v2)
    if threshold in (None, math.inf) and not is_v2:
        return {name: float(scores.mean()) for name, scores in span_scores.items()}
    best = {
        name: find_best_threshold(span_scores[name], null_scores[name], null_margins)
        for name in names
    }
    if threshold is None:
        threshold = best["f1"][1]
    scores_by_name = {
        name: np.where(null_margins > threshold, null_scores[name], span_scores[name])
        for name in names
    }
    values = {name: float(scores.mean()) for name, scores in scores_by_name.items()}
    for prefix, mask in (("HasAns", has_answer), ("NoAns", ~has_answer)):
        if mask.any():
            values |= {
                f"{prefix}_{name}": float(scores[mask].mean())
                for name, scores in scores_by_name.items()
            }
    best_values = {f"best_{name}": score for name, (score, _) in best.items()}
    best_values |= {f"best_{name}_thresh": margin for name, (_, margin) in best.items()}
    null_threshold = {"null_threshold": threshold} if math.isfinite(threshold) else {}
    return {**values, **best_values, **null_threshold}


def find_best_threshold(
    span_scores: Floats,
    null_scores: Floats,
    null_margins: Floats,
) -> tuple[float, float]:
    """Return the best mean score over all no-answer thresholds, and the threshold that gives it.

    The threshold lies halfway between two margins, so rounding errors do not affect predictions.

    Args:
        span_scores: Score of each question if its span is predicted, float64 [n].
        null_scores: Score of each question if no answer is predicted, float64 [n].
        null_margins: Score of no answer minus the score of the span, float64 [n]. No answer is
            predicted for margins above the threshold.
    """
    order = np.argsort(null_margins, kind="stable")
    margins = null_margins[order]
    # gains[k] is the change of the total score if the spans of the k questions with the smallest
    # margins are predicted instead of no answer.
    gains = np.concatenate([[0.0], np.cumsum((span_scores - null_scores)[order])])
    # No threshold lies between two questions with equal margins.
    gains[1:-1][margins[1:] == margins[:-1]] = -np.inf
    thresholds = [margins[:1] - 1, (margins[1:] + margins[:-1]) / 2, margins[-1:] + 1]
    best = int(gains.argmax())
    best_score = (null_scores.sum() + gains[best]) / len(null_margins)
    return float(best_score), float(np.concatenate(thresholds)[best])
