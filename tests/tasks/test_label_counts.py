"""Summaries of labels and the warnings about them."""

import pytest

from bertsmith.errors import TaskError
from bertsmith.tasks.classification import TextExample
from bertsmith.tasks.conll import TaggedSentence
from bertsmith.tasks.label_counts import (
    reject_numeric_labels,
    summarize_labels,
    warn_about_accuracy,
    warn_about_labels,
)
from bertsmith.tasks.multiple_choice import ChoiceExample
from bertsmith.tasks.questions import QuestionExample as SpanExample
from bertsmith.tasks.settings import TaskSettings


def labelled(*labels: str | float | frozenset[str]) -> list[TextExample]:
    """Return one text for each label."""
    return [TextExample(("text",), label, "f") for label in labels]


def sentence(*tags: str) -> TaggedSentence:
    """Return a sentence with these tags."""
    return TaggedSentence("", tuple((n, n) for n in range(len(tags))), tags, 0, "f")


def test_summary_of_classes() -> None:
    """Labels come with counts and shares, the commonest first; ten are named, in one line."""
    assert summarize_labels(labelled("b", "a", "b", "b"), "single") == (
        "2 labels: b 3 (75.0%), a 1 (25.0%)"
    )
    many = labelled(*(f"c{n:02}" for n in range(12)))
    assert summarize_labels(many, "single").endswith("c09 1 (8.3%), and 2 more")
    long = summarize_labels(labelled("a\n" + "b" * 99, "c"), "single")
    assert "\n" not in long
    assert len(long) < 100


def test_summary_of_other_kinds() -> None:
    """Several labels a text, numbers, endings, tags, entities and spans each have a summary."""
    several = labelled(frozenset(("a", "b")), frozenset("a"), frozenset())
    assert summarize_labels(several, "multi") == "2 labels: a 2 (66.7%), b 1 (33.3%)"
    assert summarize_labels(labelled(1.0, 4.0), "regression") == "scores from 1 to 4, mean 2.5"
    prompts = [ChoiceExample("p", ("a", "b"), right, "f") for right in (1, 1, 0)]
    assert summarize_labels(prompts, "choice").startswith("2 labels: ending 1 2 (66.7%)")
    tagged = [sentence("B-PER", "I-PER", "O", "B-LOC"), sentence("B-PER")]
    assert summarize_labels(tagged, "entities") == "2 entity types: PER 2 (66.7%), LOC 1 (33.3%)"
    assert summarize_labels([sentence("N", "V", "N", "N")], "tags").startswith("2 tags: N 3 (75")
    spans = [SpanExample("q", "c", answers, "1", "f") for answers in ((("c", 0),), ())]
    assert summarize_labels(spans, "span") == "questions with an answer 1, without 1"


@pytest.mark.parametrize(
    ("labels", "settings", "message"),
    [
        ([str(n) for n in range(6)] * 2, {}, ""),
        ([str(n) for n in range(7)] + ["0"] * 6, {}, "7 different labels in 13 examples"),
        (["a"] * 8 + ["b"] * 2, {}, ""),
        (["a"] * 9 + ["b"] * 2, {}, "81.8% of the examples have the label 'a'"),
        (["a"] * 9 + ["b"] * 2, {"class_weights": "balanced"}, ""),
    ],
)
def test_warnings_about_classes(labels: list[str], settings: dict[str, str], message: str) -> None:
    """More classes than half the rows, or one with more than 80% of them, is reported."""
    task = TaskSettings.parse(settings, "the test")
    warnings = warn_about_labels(labelled(*labels), task)
    assert len(warnings) == bool(message)
    assert message in "".join(warnings)


def test_numbers_are_no_classes() -> None:
    """A column of different numbers is what regression needs."""
    task = TaskSettings(kind="regression")
    assert warn_about_labels(labelled(1.0, 2.0, 3.0), task) == []


@pytest.mark.parametrize(
    ("labels", "accuracy", "warned"),
    [("aab", 2 / 3, True), ("aab", 0.5, True), ("aab", 1.0, False), ("aa", 1.0, False),
     ("aa", 0.5, True), ("abb", 0.7, False)],
)  # fmt: skip
def test_no_better_than_the_majority(labels: str, accuracy: float, warned: bool) -> None:
    """An accuracy up to the share of the commonest held-out label is reported; 1 never is."""
    assert (warn_about_accuracy(labelled(*labels), accuracy) is not None) == warned


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            ["0", "2.75", "5"],
            r"f\.csv: the column 'label' holds 3 different numbers \(such as 2\.75",
        ),
        ([str(3 * n) for n in range(25)], r"25 different numbers \(0 to 72\).*--kind regression"),
        (["1.0", "2.0", "3.0"], None),
        ([str(n) for n in range(1, 90)], None),
        ([*map(str, range(40, 80)), "other"], None),
        (["nan", "inf", "1.5"], None),
    ],
)
def test_a_scale_of_numbers_is_no_set_of_classes(labels: list[str], message: str | None) -> None:
    """Fractions, or many numbers with gaps; classes that are counted from 0 or 1 may be many."""
    task = TaskSettings(train="f.csv")
    if message is None:
        reject_numeric_labels(labelled(*labels), task)
        return
    with pytest.raises(TaskError, match=message):
        reject_numeric_labels(labelled(*labels), task)
    reject_numeric_labels(labelled(*labels), task.model_copy(update={"labels": labels}))
    reject_numeric_labels(labelled(0.5, 1.5), task.model_copy(update={"kind": "regression"}))


def test_many_counted_classes_are_warned_about() -> None:
    """They may be a score all the same."""
    found = labelled(*(str(n % 30) for n in range(90)))
    (warning,) = warn_about_labels(found, TaskSettings())
    assert "30 different numbers are labels" in warning
