"""Tables of per-class scores and of confusions, for terminals of 80 columns."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size

WIDTH = 80
#: Labels and confused pairs that are shown where there are many, and the cells of a label.
_MOST_LABELS, _MOST_PAIRS, _LABEL_WIDTH = 20, 10, 28


def format_class_report(classes: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return precision, recall, F1 and support of each label; of many, the lowest in F1."""
    if not classes:
        return []
    names = list(classes)
    title = "by label:"
    if len(names) > _MOST_LABELS:
        names = sorted(names, key=lambda name: classes[name]["f1"])[:_MOST_LABELS]
        title = f"the {_MOST_LABELS} of {len(classes):,} labels with the lowest F1 (all: --json):"
    rows = [
        [name, *(f"{classes[name][key]:.4f}" for key in ("precision", "recall", "f1")),
         f"{classes[name]['support']:,.0f}"]
        for name in names
    ]  # fmt: skip
    return ["", title, *_aligned(["label", "precision", "recall", "f1", "support"], rows), ""]


def format_confusion_matrix(confusion: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the matrix of right labels by predicted ones, or the most confused pairs."""
    if not confusion:
        return []
    labels = list(confusion)
    counts = [[confusion[right].get(name, 0) for name in labels] for right in labels]
    rows = [[f"{count:,}" for count in row] for row in counts]
    labels = [" ".join(name.split()) for name in labels]
    numbers = [str(number) for number in range(1, len(labels) + 1)]
    numbered = [f"{number} {name}" for number, name in zip(numbers, labels, strict=True)]
    for first, columns in ((labels, labels), (numbered, numbers)):
        table = [[name, *row] for name, row in zip(first, rows, strict=True)]
        lines = _aligned(["", *columns], table)
        if max(map(cell_len, lines)) <= WIDTH and max(map(cell_len, columns)) <= _LABEL_WIDTH:
            return ["rows: right labels, columns: predicted labels", *lines, ""]
    return _most_confused(confusion)


def _most_confused(confusion: Mapping[str, Mapping[str, int]]) -> list[str]:
    pairs = sorted(
        ((count, right, predicted)
         for right, own in confusion.items() for predicted, count in own.items()
         if right != predicted),
        key=lambda pair: -pair[0],
    )  # fmt: skip
    rows = [
        [right, predicted, f"{count:,}", f"{count / sum(confusion[right].values()):.1%}"]
        for count, right, predicted in pairs[:_MOST_PAIRS]
    ]
    if not rows:
        return ["no label was confused with another", ""]
    shown = f"the {len(rows)} most confused of {len(pairs):,} pairs (all: --json):"
    return [shown, *_aligned(["right", "predicted", "count", "of right"], rows, texts=2), ""]


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return rows with columns of equal width, the first ``texts`` ones to the left and cut."""
    table = [header, *rows]
    cells = [
        [_shorten(cell) if place < texts else cell for place, cell in enumerate(row)]
        for row in table
    ]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            set_cell_size(cell, width) if place < texts else " " * (width - cell_len(cell)) + cell
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _shorten(text: str) -> str:
    """Return a label on one line, at most ``_LABEL_WIDTH`` cells of it."""
    line = " ".join(text.split())
    if cell_len(line) <= _LABEL_WIDTH:
        return line
    return set_cell_size(line, _LABEL_WIDTH - 1).rstrip() + "…"
