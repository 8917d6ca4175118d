"""Per-class metrics and confusion matrices fit a terminal of 80 columns for all labels."""

import random
import tracemalloc

from rich.cells import cell_len

from bertsmith.cli.classification_report import format_class_report, format_confusion_matrix


def make_metrics(f1: float, support: int = 1) -> dict[str, float]:
    """Return the metrics of a class."""
    return {"precision": f1, "recall": f1, "f1": f1, "support": support}


def test_few_classes_are_shown_completely() -> None:
    """A few labels are shown in order, with the complete confusion matrix."""
    assert format_class_report({"neg": make_metrics(0.5, 1200), "pos": make_metrics(1.0)}) == [
        "",
        "by label:",
        "label  precision  recall      f1  support",
        "neg       0.5000  0.5000  0.5000    1,200",
        "pos       1.0000  1.0000  1.0000        1",
        "",
    ]
    assert format_confusion_matrix({"neg": {"neg": 3, "pos": 1}, "pos": {"pos": 12}}) == [
        "rows: true labels, columns: predicted labels",
        "     neg  pos",
        "neg    3    1",
        "pos    0   12",
        "",
    ]


def test_columns_of_long_labels_are_numbered() -> None:
    """Columns are headed by numbers if the labels do not fit."""
    labels = [f"{letter} of the weather and the sea in spring" for letter in "abcd"]
    lines = format_confusion_matrix({label: {label: 1, labels[0]: 2} for label in labels})
    assert lines[1].split() == ["1", "2", "3", "4"]
    assert lines[3].startswith("2 b of the weather")
    assert lines[3].split()[-4:] == ["2", "1", "0", "0"]


def test_of_many_classes_only_the_worst_are_shown() -> None:
    """Of many labels, only those with the lowest F1 and the most confused pairs are shown."""
    labels = [f"label {number}" for number in range(60)]
    classes = {label: make_metrics(number / 60) for number, label in enumerate(labels)}
    lines = format_class_report(classes)
    assert lines[1] == "the 20 of 60 labels with the lowest F1 (all: --json):"
    assert [line.split()[1] for line in lines[3:-1]] == [str(number) for number in range(20)]
    confusion = {label: {label: 90, "label 0": 10 + number} for number, label in enumerate(labels)}
    lines = format_confusion_matrix(confusion)
    assert lines[0] == "the 10 most confused of 59 pairs (all: --json):"
    # Of the 159 examples of label 59, 69 are predicted as label 0.
    assert lines[2].split() == ["label", "59", "label", "0", "69", "43.4%"]
    assert format_confusion_matrix({label: {label: 1} for label in labels})[0] == (
        "no label was confused with another"
    )


def test_no_matrix_is_made_for_many_labels() -> None:
    """A matrix of 1,000 labels would need more than 50 MB."""
    labels = [f"label {number}" for number in range(1000)]
    confusion = {label: {"label 0": 1} for label in labels}
    tracemalloc.start()
    lines = format_confusion_matrix(confusion)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert lines[0] == "the 10 most confused of 999 pairs (all: --json):"
    assert peak_bytes < 5_000_000


def test_lines_are_at_most_80_cells_wide() -> None:
    """Long labels, wide characters and line breaks never produce a line above 80 cells."""
    rng = random.Random(0)
    for num_labels in (2, 3, 8, 12, 40):
        labels = [
            f"{number}" + "".join(rng.choices("ab 가나\n\t", k=rng.choice((1, 9, 60))))
            for number in range(num_labels)
        ]
        confusion = {
            true: {predicted: rng.randrange(10**6) for predicted in labels} for true in labels
        }
        lines = format_class_report({label: make_metrics(0.5, 10**6) for label in labels})
        lines += format_confusion_matrix(confusion)
        assert max(map(cell_len, lines)) <= 80
        assert not any(character in line for line in lines for character in "\n\t")


def test_no_classes_give_no_lines() -> None:
    """Tasks without classes have no tables."""
    assert format_class_report({}) == format_confusion_matrix({}) == []
