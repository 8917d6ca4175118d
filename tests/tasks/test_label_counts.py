"""Label summaries and warnings."""

import pytest

from bertsmith.bundle import TaskKind
from bertsmith.errors import TaskError
from bertsmith.tasks.classification import TextExample
from bertsmith.tasks.conll import TaggedSentence
from bertsmith.tasks.label_counts import (
    get_accuracy_warning,
    get_label_warnings,
    reject_numeric_labels,
    summarize_labels,
)
from bertsmith.tasks.multiple_choice import ChoiceExample
from bertsmith.tasks.questions import QuestionExample
from bertsmith.tasks.settings import TaskSettings


def make_examples(*labels: str | float | frozenset[str]) -> list[TextExample]:
    """Return one text for each label."""
    return [TextExample(("text",), label, "f") for label in labels]


def make_sentence(*tags: str) -> TaggedSentence:
    """Return a sentence with these tags."""
    return TaggedSentence("", tuple((n, n) for n in range(len(tags))), tags, 0, "f")


def test_class_summary_lists_most_frequent_labels() -> None:
    """Up to ten labels are listed with counts and shares; long names are shortened to one line."""
    assert summarize_labels(make_examples("b", "a", "b", "b"), "single") == (
        "2 labels: b 3 (75.0%), a 1 (25.0%)"
    )
    examples = make_examples(*(f"c{n:02}" for n in range(12)))
    assert summarize_labels(examples, "single").endswith("c09 1 (8.3%), and 2 more")
    summary = summarize_labels(make_examples("a\n" + "b" * 99, "c"), "single")
    assert "\n" not in summary
    assert len(summary) < 100


def test_every_task_kind_has_a_summary() -> None:
    """Multi-label, regression, multiple choice, tagging and span examples are summarized."""
    multi = make_examples(frozenset(("a", "b")), frozenset("a"), frozenset())
    expected = "2 labels: a 2 (66.7%), b 1 (33.3%), no label 1 (33.3%)"
    assert summarize_labels(multi, "multi") == expected
    assert "no label" not in summarize_labels(multi[:2], "multi")
    scores = make_examples(1.0, 4.0)
    assert summarize_labels(scores, "regression") == "scores from 1 to 4, mean 2.5"
    choices = [ChoiceExample("p", ("a", "b"), index, "f") for index in (1, 1, 0)]
    assert summarize_labels(choices, "choice").startswith("2 labels: ending 1 2 (66.7%)")
    tagged = [make_sentence("B-PER", "I-PER", "O", "B-LOC"), make_sentence("B-PER")]
    assert summarize_labels(tagged, "entities") == "2 entity types: PER 2 (66.7%), LOC 1 (33.3%)"
    summary = summarize_labels([make_sentence("N", "V", "N", "N")], "tags")
    assert summary.startswith("2 tags: N 3 (75")
    questions = [QuestionExample("q", "c", answers, "1", "f") for answers in ((("c", 0),), ())]
    assert summarize_labels(questions, "span") == "1 answerable and 1 unanswerable questions"


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
def test_unusual_class_counts_cause_a_warning(
    labels: list[str], settings: dict[str, str], message: str
) -> None:
    """Over 80% of examples in one class, or more classes than half the examples, is unusual."""
    task = TaskSettings.parse(settings, "the test")
    warnings = get_label_warnings(make_examples(*labels), task)
    assert bool(warnings) == bool(message)
    assert message in "".join(warnings)


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_labels_that_differ_only_in_case_cause_a_warning(kind: TaskKind) -> None:
    """Data that people typed can have the same class in two spellings."""
    task = TaskSettings(kind=kind)
    labels = ["Good", "bad", "good", "bad", "bad", "good"]
    examples = make_examples(*(frozenset([x]) if kind == "multi" else x for x in labels))
    (warning,) = get_label_warnings(examples, task)
    assert "'Good' and 'good' differ only in case" in warning
    assert get_label_warnings(examples[1:], task) == []


@pytest.mark.parametrize("label", ["a, b", "b;c", "a,x"])
def test_another_separator_of_labels_causes_a_warning(label: str) -> None:
    """A multi-label cell such as "a,b" is one label, unless its parts are not labels."""
    task = TaskSettings(kind="multi")
    examples = make_examples(frozenset("a"), frozenset("b"), frozenset([label]))
    (warning,) = get_label_warnings(examples, task)
    assert f"{label!r} is a single label; several labels in one cell are separated by |" in warning
    # The columns of 0 and 1 are the labels; there is no separator.
    in_columns = TaskSettings(kind="multi", label_columns=["red", "blue", label])
    assert not get_label_warnings(examples, in_columns)
    assert get_label_warnings(examples[2:], task) == []


def test_regression_has_no_label_warnings() -> None:
    """Scores of a regression task may all be different."""
    task = TaskSettings(kind="regression")
    assert get_label_warnings(make_examples(1.0, 2.0, 3.0), task) == []


@pytest.mark.parametrize(
    ("labels", "accuracy", "has_warning"),
    [("aab", 2 / 3, True), ("aab", 0.5, True), ("aab", 1.0, False), ("aa", 1.0, False),
     ("aa", 0.5, True), ("abb", 0.7, False)],
)  # fmt: skip
def test_accuracy_of_majority_class_causes_a_warning(
    labels: str, accuracy: float, has_warning: bool
) -> None:
    """Accuracy up to the share of the majority class causes a warning, unless it is 1."""
    warning = get_accuracy_warning(make_examples(*labels), accuracy)
    assert (warning is not None) == has_warning


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (
            ["0", "2.75", "5"],
            r"f\.csv: the column 'label' has 3 different numbers \(such as 2\.75",
        ),
        ([str(3 * n) for n in range(25)], r"25 different numbers \(0 to 72\).*--kind regression"),
        (["1.0", "2.0", "3.0"], None),
        ([str(n) for n in range(1, 90)], None),
        ([*map(str, range(40, 80)), "other"], None),
        (["nan", "inf", "1.5"], None),
    ],
)
def test_scores_as_class_labels_are_rejected(labels: list[str], message: str | None) -> None:
    """Fractions, or many integers with gaps, are rejected; consecutive class indices are not."""
    task = TaskSettings(train_file="f.csv")
    if message is None:
        reject_numeric_labels(make_examples(*labels), task)
        return
    with pytest.raises(TaskError, match=message):
        reject_numeric_labels(make_examples(*labels), task)
    reject_numeric_labels(make_examples(*labels), task.model_copy(update={"labels": labels}))
    regression_task = task.model_copy(update={"kind": "regression"})
    reject_numeric_labels(make_examples(0.5, 1.5), regression_task)


def test_many_class_indices_cause_a_warning() -> None:
    """Many consecutive integers are accepted as classes, but may be scores."""
    examples = make_examples(*(str(n % 30) for n in range(90)))
    (warning,) = get_label_warnings(examples, TaskSettings())
    assert "30 different numbers are used as class labels" in warning
