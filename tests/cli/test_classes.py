"""Tables by class fit a terminal of 80 columns, whatever the labels are."""

import random

from rich.cells import cell_len

from bertsmith.cli.classification_report import format_class_report, format_confusion_matrix


def scores(f1: float, support: int = 1) -> dict[str, float]:
    """Return the scores of a class."""
    return {"precision": f1, "recall": f1, "f1": f1, "support": support}


def test_few_classes() -> None:
    """All labels in their order, and the whole matrix."""
    assert format_class_report({"neg": scores(0.5, 1200), "pos": scores(1.0)}) == [
        "",
        "by label:",
        "label  precision  recall      f1  support",
        "neg       0.5000  0.5000  0.5000    1,200",
        "pos       1.0000  1.0000  1.0000        1",
        "",
    ]
    assert format_confusion_matrix({"neg": {"neg": 3, "pos": 1}, "pos": {"pos": 12}}) == [
        "rows: right labels, columns: predicted labels",
        "     neg  pos",
        "neg    3    1",
        "pos    0   12",
        "",
    ]


def test_long_labels_are_numbered() -> None:
    """Columns have numbers where the names would not fit."""
    names = [f"{name} of the weather and the sea in spring" for name in "abcd"]
    lines = format_confusion_matrix({name: {name: 1, names[0]: 2} for name in names})
    assert lines[1].split() == ["1", "2", "3", "4"]
    assert lines[3].startswith("2 b of the weather")
    assert lines[3].split()[-4:] == ["2", "1", "0", "0"]


def test_many_classes() -> None:
    """The labels with the lowest F1 and the most confused pairs are shown."""
    names = [f"label {number}" for number in range(60)]
    lines = format_class_report({name: scores(number / 60) for number, name in enumerate(names)})
    assert lines[1] == "the 20 of 60 labels with the lowest F1 (all: --json):"
    assert [line.split()[1] for line in lines[3:-1]] == [str(number) for number in range(20)]
    confusion = {name: {name: 90, "label 0": 10 + number} for number, name in enumerate(names)}
    shown = format_confusion_matrix(confusion)
    assert shown[0] == "the 10 most confused of 59 pairs (all: --json):"
    assert shown[2].split() == ["label", "59", "label", "0", "69", "43.4%"]
    assert format_confusion_matrix({name: {name: 1} for name in names})[0] == (
        "no label was confused with another"
    )


def test_any_labels_fit_the_terminal() -> None:
    """Long, wide and broken names never make a line longer than 80 cells."""
    chance = random.Random(0)
    for size in (2, 3, 8, 12, 40):
        names = [
            f"{number}" + "".join(chance.choices("ab 가나\n\t", k=chance.choice((1, 9, 60))))
            for number in range(size)
        ]
        confusion = {name: {other: chance.randrange(10**6) for other in names} for name in names}
        lines = format_class_report({name: scores(0.5, 10**6) for name in names})
        lines += format_confusion_matrix(confusion)
        assert max(map(cell_len, lines)) <= 80
        assert not any(sign in line for line in lines for sign in "\n\t")


def test_nothing_to_show() -> None:
    """Families without classes print no table."""
    assert format_class_report({}) == format_confusion_matrix({}) == []
