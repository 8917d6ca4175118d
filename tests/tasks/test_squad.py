"""SQuAD metrics, compared with an independent implementation of the official definition."""

import re
import string
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.tasks import squad

#: Words that differ only in case, articles, punctuation, accents or spaces, and some others.
SIMILAR_WORDS = (
    "the", "The", "A", "an", "a-n", "theatre", "Mary", "mary's", "Mary.", "'", ".", "--", "1,000",
    "1000", "é", "e\u0301", "“Mary”", "–", "\u00a0", "  ", "\t", "İ", "ẞ", "나는", "나", "THE.",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(SIMILAR_WORDS), max_size=5).flatmap(
    lambda words: st.sampled_from(["", " "]).map(lambda separator: separator.join(words))
)
ANSWERS = st.lists(TEXTS.filter(bool), max_size=4)
#: Small integers, so that margins are often equal.
NULL_MARGINS = st.integers(-3, 3).map(float)
#: Predicted text, correct answers, and the score of no answer minus the score of the prediction.
Question = tuple[str, list[str], float]
QUESTIONS = st.lists(st.tuples(TEXTS, ANSWERS, NULL_MARGINS), min_size=1, max_size=12)
ANSWERABLE_QUESTIONS = st.lists(
    st.tuples(TEXTS, ANSWERS.filter(bool), NULL_MARGINS), min_size=1, max_size=12
)


def normalize(text: str) -> str:
    """Normalize step by step: lower case, then punctuation, articles and whitespace."""
    characters = [character for character in text.lower() if character not in string.punctuation]
    words = re.split(r"\b(?:a|an|the)\b", "".join(characters))
    return " ".join(" ".join(words).split())


def count_shared_words(first: list[str], second: list[str]) -> int:
    """Return the size of the multiset intersection of two lists."""
    remaining = list(second)
    num_shared = 0
    for word in first:
        if word in remaining:
            remaining.remove(word)
            num_shared += 1
    return num_shared


def score_answer(predicted: str, answer: str, metric: str, *, is_v2: bool) -> float:
    """Score a prediction against one answer."""
    predicted_words, answer_words = normalize(predicted).split(), normalize(answer).split()
    if metric == "exact":
        return float(normalize(predicted) == normalize(answer))
    if is_v2 and not (predicted_words and answer_words):
        return float(predicted_words == answer_words)
    num_shared = count_shared_words(predicted_words, answer_words)
    if not num_shared:
        return 0.0
    precision, recall = num_shared / len(predicted_words), num_shared / len(answer_words)
    return 2 * precision * recall / (precision + recall)


def compute_mean_score(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], metric: str, *, is_v2: bool
) -> float:
    """Return the mean score of predictions, as in evaluate-v1.1 or evaluate-v2.0."""
    total = 0.0
    for predicted, question_answers in zip(predictions, answers, strict=True):
        valid_answers = question_answers
        if is_v2:
            valid_answers = [text for text in question_answers if normalize(text)] or [""]
        total += max(score_answer(predicted, text, metric, is_v2=is_v2) for text in valid_answers)
    return total / len(predictions)


def split_questions(
    questions: Sequence[Question],
) -> tuple[list[str], list[list[str]], list[float]]:
    """Return the predictions, the answers and the margins of all questions."""
    predictions, answers, margins = zip(*questions, strict=True)
    return list(predictions), list(map(list, answers)), list(margins)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Theatre of\tan Apple", "theatre of apple"),
        ("a-n", ""),
        ("A.", ""),
        ("U.S.", "us"),
        ("The “Mary”", "“mary”"),
        ("an–a", "–"),
        ("Ä the\u00a0b", "ä b"),
        ("나는 a 학생", "나는 학생"),
    ],
)
def test_normalization_removes_punctuation_before_articles(text: str, expected: str) -> None:
    """ASCII punctuation is removed before articles, and only whole words are articles."""
    assert squad.normalize_answer(text) == expected


@given(TEXTS)
def test_normalization_equals_reference(text: str) -> None:
    """Normalization equals the independent implementation on random texts."""
    assert squad.normalize_answer(text) == normalize(text)


@given(ANSWERABLE_QUESTIONS)
def test_v1_metrics_equal_reference(questions: list[Question]) -> None:
    """If all questions have answers, only exact match and F1 are returned, and both agree."""
    predictions, answers, margins = split_questions(questions)
    metrics = squad.compute_squad_metrics(predictions, np.array(margins), answers)
    assert metrics == pytest.approx(
        {
            name: compute_mean_score(predictions, answers, name, is_v2=False)
            for name in ("exact", "f1")
        }
    )


@given(QUESTIONS, NULL_MARGINS)
def test_v2_metrics_equal_reference(questions: list[Question], threshold: float) -> None:
    """The metrics of all, of answerable and of unanswerable questions agree."""
    predictions, answers, margins = split_questions([*questions, ("b", [], 0.5)])
    metrics = squad.compute_squad_metrics(predictions, np.array(margins), answers, threshold)
    final_predictions = [
        "" if margin > threshold else text
        for text, margin in zip(predictions, margins, strict=True)
    ]
    for name in ("exact", "f1"):
        expected = compute_mean_score(final_predictions, answers, name, is_v2=True)
        assert metrics[name] == pytest.approx(expected)
        for prefix, is_answerable in (("HasAns", True), ("NoAns", False)):
            subset = [
                (text, question_answers)
                for text, question_answers in zip(final_predictions, answers, strict=True)
                if bool(question_answers) == is_answerable
            ]
            key = f"{prefix}_{name}"
            assert (key in metrics) == bool(subset)
            if subset:
                texts, subset_answers = zip(*subset, strict=True)
                expected = compute_mean_score(texts, subset_answers, name, is_v2=True)
                assert metrics[key] == pytest.approx(expected)
    assert metrics["null_threshold"] == threshold


@given(QUESTIONS)
def test_best_threshold_maximizes_the_metric(questions: list[Question]) -> None:
    """No other threshold is better; the metrics are those of the best threshold for F1."""
    predictions, answers, margins = split_questions([*questions, ("b", [], 0.5)])
    null_margins = np.array(margins)
    metrics = squad.compute_squad_metrics(predictions, null_margins, answers)
    metrics_by_threshold = [
        squad.compute_squad_metrics(predictions, null_margins, answers, float(threshold))
        for threshold in {*null_margins, -9.0, 9.0}
    ]
    for name in ("exact", "f1"):
        best = max(values[name] for values in metrics_by_threshold)
        assert metrics[f"best_{name}"] == pytest.approx(best)
        threshold = metrics[f"best_{name}_thresh"]
        best_metrics = squad.compute_squad_metrics(predictions, null_margins, answers, threshold)
        assert best_metrics[name] == pytest.approx(metrics[f"best_{name}"])
    assert metrics["f1"] == pytest.approx(metrics["best_f1"])
    threshold = metrics["null_threshold"]
    assert squad.compute_squad_metrics(predictions, null_margins, answers, threshold) == metrics


def test_best_f1_equals_official_sweep() -> None:
    """evaluate-v2.0 tries the questions in the order of their margins and finds the same F1."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        num_questions = int(rng.integers(2, 30))
        answers: list[list[str]] = [
            ["x y"] if is_answerable else [] for is_answerable in rng.random(num_questions) < 0.6
        ]
        answers[0] = []
        predictions = [str(text) for text in rng.choice(["x y", "x", "z"], num_questions)]
        null_margins = rng.normal(size=num_questions)
        # Without any prediction, only unanswerable questions are correct.
        total = best = float(sum(not question_answers for question_answers in answers))
        for index in np.argsort(null_margins):
            if answers[index]:
                total += compute_mean_score(
                    [predictions[index]], [answers[index]], "f1", is_v2=True
                )
            else:
                total -= 1
            best = max(best, total)
        metrics = squad.compute_squad_metrics(predictions, null_margins, answers)
        assert metrics["best_f1"] == pytest.approx(best / num_questions)


@pytest.mark.parametrize(
    ("predicted", "answer", "expected"),
    [
        ("서울특별시", "서울", 2 * 2 / (5 + 2)),
        ("《무궁화》 꽃", "무궁화꽃", 1.0),
        ("‘Apple’ (the)", "apple THE.", 1.0),
        ("가나", "다라", 0.0),
        ("가가나", "가나나", 2 / 3),
    ],
)
def test_character_f1_ignores_punctuation_and_spaces(
    predicted: str, answer: str, expected: float
) -> None:
    """Quotation marks, punctuation and spaces are ignored; articles are not removed."""
    metrics = squad.compute_squad_metrics(
        [predicted], np.zeros(1), [["밖", answer]], names=("f1", "exact", "char_f1")
    )
    assert metrics["char_f1"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("predicted", "expected"), [("《죄와 벌》", 1.0), ("죄와벌", 0.0), ("the 죄와 벌", 0.0)]
)
def test_korean_exact_match_keeps_articles_and_word_spaces(predicted: str, expected: float) -> None:
    """Only quotation marks and punctuation are ignored, as in KorQuAD's evaluation script."""
    names = ("f1", "exact", "korean_exact")
    metrics = squad.compute_squad_metrics([predicted], np.zeros(1), [["죄와 벌"]], names=names)
    assert metrics["korean_exact"] == expected


def test_character_f1_follows_the_rules_of_version_2() -> None:
    """By the rules of v2.0 only an empty prediction is correct for an unanswerable question."""
    names = ("f1", "exact", "char_f1")
    metrics = squad.compute_squad_metrics(
        ["가나", "다"], np.array([-1.0, 1.0]), [["가"], []], 0.0, names
    )
    assert metrics["HasAns_char_f1"] == pytest.approx(2 / 3)
    assert metrics["NoAns_char_f1"] == 1.0
    assert metrics["best_char_f1"] == pytest.approx(5 / 6)


def test_prediction_is_compared_with_the_best_answer() -> None:
    """The score of a prediction is the highest score over the correct answers."""
    metrics = squad.compute_squad_metrics(["the red fox"], np.zeros(1), [["fox", "a red fox"]])
    assert metrics == {"f1": 1.0, "exact": 1.0}
    metrics = squad.compute_squad_metrics(["red fox ran"], np.zeros(1), [["a dog", "fox"]])
    assert metrics == {"f1": pytest.approx(0.5), "exact": 0.0}


def test_only_version_2_ignores_empty_normalized_answers() -> None:
    """In version 1.1 the answer "." is an exact match without a common word; 2.0 ignores it."""
    metrics = squad.compute_squad_metrics(["."], np.zeros(1), [["."]])
    assert metrics == {"f1": 0.0, "exact": 1.0}
    metrics = squad.compute_squad_metrics([".", "x"], np.zeros(2), [[".", "y"], []], 9.0)
    assert (metrics["f1"], metrics["NoAns_exact"]) == (0.0, 0.0)
    metrics = squad.compute_squad_metrics(["q", "x"], np.ones(2), [["q"], []], 0.0)
    assert metrics["NoAns_f1"] == 1.0
