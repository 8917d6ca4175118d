"""SQuAD's scores beside the published definition, written anew, on awkward texts."""

import re
import string
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.tasks import squad

#: Words that differ by case, articles, punctuation, accents and spaces only, and some others.
AWKWARD = (
    "the", "The", "A", "an", "a-n", "theatre", "Mary", "mary's", "Mary.", "'", ".", "--", "1,000",
    "1000", "é", "e\u0301", "“Mary”", "–", "\u00a0", "  ", "\t", "İ", "ẞ", "나는", "나", "THE.",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(AWKWARD), max_size=5).flatmap(
    lambda words: st.sampled_from(["", " "]).map(lambda between: between.join(words))
)
ANSWERS = st.lists(TEXTS.filter(bool), max_size=4)
#: Scores of no answer that are often equal.
NULLS = st.integers(-3, 3).map(float)
QUESTIONS = st.lists(st.tuples(TEXTS, ANSWERS, NULLS), min_size=1, max_size=12)


def plain(text: str) -> str:
    """Normalize by the definition: lower case, then punctuation, articles, white space."""
    letters = [sign for sign in text.lower() if sign not in string.punctuation]
    words = re.split(r"\b(?:a|an|the)\b", "".join(letters))
    return " ".join(" ".join(words).split())


def shared_words(one: list[str], two: list[str]) -> int:
    """Count the words that both lists have, each as often as both have it."""
    rest, found = list(two), 0
    for word in one:
        if word in rest:
            rest.remove(word)
            found += 1
    return found


def one_score(said: str, answer: str, name: str, *, second: bool) -> float:
    """Score a prediction against one answer."""
    ours, theirs = plain(said).split(), plain(answer).split()
    if name == "exact":
        return float(plain(said) == plain(answer))
    if second and not (ours and theirs):
        return float(ours == theirs)
    found = shared_words(ours, theirs)
    if not found:
        return 0.0
    precision, recall = found / len(ours), found / len(theirs)
    return 2 * precision * recall / (precision + recall)


def mean_score(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], name: str, *, second: bool
) -> float:
    """Score predictions as evaluate-v1.1 or evaluate-v2.0 do."""
    total = 0.0
    for said, own in zip(predictions, answers, strict=True):
        usable = [text for text in own if plain(text)] or [""] if second else own
        total += max(one_score(said, text, name, second=second) for text in usable)
    return total / len(predictions)


def asked(rows: Sequence[tuple[str, Sequence[str], float]]) -> tuple[list[str], list[list[str]]]:
    """Return what was said, and the answers."""
    return [said for said, _, _ in rows], [list(own) for _, own, _ in rows]


@pytest.mark.parametrize(
    ("text", "wanted"),
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
def test_normalization(text: str, wanted: str) -> None:
    """Punctuation goes before articles, only ASCII's, and a word that holds an article stays."""
    assert squad.normalize_answer(text) == wanted


@given(TEXTS)
def test_normalization_is_the_definitions(text: str) -> None:
    """The same as the definition written anew."""
    assert squad.normalize_answer(text) == plain(text)


@given(QUESTIONS.map(lambda rows: [row for row in rows if row[1]]).filter(bool))
def test_v1_is_the_definition(rows: list[tuple[str, list[str], float]]) -> None:
    """With an answer to each question: exact match and F1, and no figure of no answer."""
    said, answers = asked(rows)
    found = squad.compute_squad_metrics(said, np.array([null for *_, null in rows]), answers)
    assert found == pytest.approx(
        {name: mean_score(said, answers, name, second=False) for name in ("exact", "f1")}
    )


@given(QUESTIONS, NULLS)
def test_v2_is_the_definition(rows: list[tuple[str, list[str], float]], threshold: float) -> None:
    """At a given threshold: what is above it is no answer; HasAns and NoAns by themselves."""
    rows = [*rows, ("b", [], 0.5)]
    said, answers = asked(rows)
    nulls = [null for *_, null in rows]
    found = squad.compute_squad_metrics(said, np.array(nulls), answers, threshold)
    given_ = ["" if null > threshold else text for text, null in zip(said, nulls, strict=True)]
    for name in ("exact", "f1"):
        assert found[name] == pytest.approx(mean_score(given_, answers, name, second=True))
        for kind, wanted in (("HasAns", True), ("NoAns", False)):
            chosen = [number for number, own in enumerate(answers) if bool(own) == wanted]
            key = f"{kind}_{name}"
            assert (key in found) == bool(chosen)
            if chosen:
                some = [given_[number] for number in chosen], [answers[number] for number in chosen]
                assert found[key] == pytest.approx(mean_score(*some, name, second=True))
    assert found["null_threshold"] == threshold


@given(QUESTIONS)
def test_no_threshold_is_better_than_the_best(rows: list[tuple[str, list[str], float]]) -> None:
    """Best F1 and exact match are the maximum over all thresholds; the one for F1 is taken."""
    rows = [*rows, ("b", [], 0.5)]
    said, answers = asked(rows)
    nulls = np.array([null for *_, null in rows])
    found = squad.compute_squad_metrics(said, nulls, answers)
    every = [
        squad.compute_squad_metrics(said, nulls, answers, float(one)) for one in {*nulls, -9.0, 9.0}
    ]
    for name in ("exact", "f1"):
        assert found[f"best_{name}"] == pytest.approx(max(one[name] for one in every))
        threshold = found[f"best_{name}_thresh"]
        best = squad.compute_squad_metrics(said, nulls, answers, threshold)
        assert best[name] == pytest.approx(found[f"best_{name}"])
    assert found["f1"] == pytest.approx(found["best_f1"])
    assert squad.compute_squad_metrics(said, nulls, answers, found["null_threshold"]) == found


def test_the_best_threshold_is_the_official_one() -> None:
    """The official sweep, question after question by its score, finds the same best F1."""
    chance = np.random.default_rng(0)
    for _ in range(50):
        count = int(chance.integers(2, 30))
        answers: list[list[str]] = [["x y"] if one else [] for one in chance.random(count) < 0.6]
        answers[0] = []
        said = [str(one) for one in chance.choice(["x y", "x", "z"], count)]
        nulls = chance.normal(size=count)
        now = best = float(sum(not own for own in answers))
        for number in np.argsort(nulls):
            own = answers[number]
            now += mean_score([said[number]], [own], "f1", second=True) if own else -1
            best = max(best, now)
        found = squad.compute_squad_metrics(said, nulls, answers)
        assert found["best_f1"] == pytest.approx(best / count)


@pytest.mark.parametrize(
    ("said", "answer", "score"),
    [
        ("서울특별시", "서울", 2 * 2 / 7),
        ("《무궁화》 꽃", "무궁화꽃", 1.0),
        ("‘Apple’ (the)", "apple THE.", 1.0),
        ("가나", "다라", 0.0),
        ("가가나", "가나나", 2 / 3),
    ],
)
def test_character_f1_of_korquad(said: str, answer: str, score: float) -> None:
    """Marks, punctuation and spaces do not count, articles do; the best answer does."""
    found = squad.compute_squad_metrics(
        [said], np.zeros(1), [["밖", answer]], names=("f1", "exact", "char_f1")
    )
    assert found["char_f1"] == pytest.approx(score)


def test_character_f1_of_no_answer() -> None:
    """By the rules of v2.0: nothing said is right only where nothing is."""
    found = squad.compute_squad_metrics(
        ["가나", "다"], np.array([-1.0, 1.0]), [["가"], []], 0.0, ("f1", "exact", "char_f1")
    )
    assert found["HasAns_char_f1"] == pytest.approx(2 / 3)
    assert found["NoAns_char_f1"] == 1.0
    assert found["best_char_f1"] == pytest.approx(5 / 6)


def test_scores_by_hand() -> None:
    """Several answers: the best one counts; v1.1 and v2.0 differ where normalization leaves nil."""
    one = squad.compute_squad_metrics(["the red fox"], np.zeros(1), [["fox", "a red fox"]])
    assert one == {"f1": 1.0, "exact": 1.0}
    one = squad.compute_squad_metrics(["red fox ran"], np.zeros(1), [["a dog", "fox"]])
    assert one == {"f1": pytest.approx(0.5), "exact": 0.0}
    # "." against ".": equal in v1.1, without a shared word; not looked at in v2.0.
    assert squad.compute_squad_metrics(["."], np.zeros(1), [["."]]) == {"f1": 0.0, "exact": 1.0}
    two = squad.compute_squad_metrics([".", "x"], np.zeros(2), [[".", "y"], []], 9.0)
    assert (two["f1"], two["NoAns_exact"]) == (0.0, 0.0)
    assert squad.compute_squad_metrics(["q", "x"], np.ones(2), [["q"], []], 0.0)["NoAns_f1"] == 1.0
