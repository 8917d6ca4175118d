"""Tables of per-class metrics and confusion matrices for terminals of 80 columns."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size

MAX_WIDTH = 80
_MAX_CLASSES, _MAX_CONFUSED_PAIRS, _MAX_LABEL_WIDTH = 20, 10, 28


def format_class_report(classes: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table with precision, recall, F1 and support of each class.

    Of more than 20 classes, only those with the lowest F1 are included.
    """
    if not classes:
        return []
    labels = list(classes)
    title = "by label:"
    if len(labels) > _MAX_CLASSES:
        labels = sorted(labels, key=lambda label: classes[label]["f1"])[:_MAX_CLASSES]
        title = f"the {_MAX_CLASSES} of {len(classes):,} labels with the lowest F1 (all: --json):"
    metrics = ("precision", "recall", "f1")
    rows = []
    for label in labels:
        values = [f"{classes[label][metric]:.4f}" for metric in metrics]
        rows.append([label, *values, f"{classes[label]['support']:,.0f}"])
    lines = _align_columns(["label", *metrics, "support"], rows)
    return ["", title, *lines, ""]


def format_confusion_matrix(confusion: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return the confusion matrix, or the most confused pairs if it is too wide.

    confusion: counts by true label, then by predicted label; absent counts are 0.
    """
    if not confusion:
        return []
    labels = list(confusion)
    counts = [[confusion[true].get(predicted, 0) for predicted in labels] for true in labels]
    rows = [[f"{count:,}" for count in row] for row in counts]
    labels = [" ".join(label.split()) for label in labels]
    numbers = [str(number) for number in range(1, len(labels) + 1)]
    numbered_labels = [f"{number} {label}" for number, label in zip(numbers, labels, strict=True)]
    # Columns are headed by their labels, or by numbers if the labels are too wide.
    for row_headers, column_headers in ((labels, labels), (numbered_labels, numbers)):
        table = [[header, *row] for header, row in zip(row_headers, rows, strict=True)]
        lines = _align_columns(["", *column_headers], table)
        fits_terminal = max(map(cell_len, lines)) <= MAX_WIDTH
        if fits_terminal and max(map(cell_len, column_headers)) <= _MAX_LABEL_WIDTH:
            return ["rows: true labels, columns: predicted labels", *lines, ""]
    return _format_confused_pairs(confusion)


def _format_confused_pairs(confusion: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a table of the most frequent errors, by true and predicted label."""
    pairs = sorted(
        (
            (count, true, predicted)
            for true, predictions in confusion.items()
            for predicted, count in predictions.items()
            if true != predicted
        ),
        key=lambda pair: -pair[0],
    )
    rows = [
        [true, predicted, f"{count:,}", f"{count / sum(confusion[true].values()):.1%}"]
        for count, true, predicted in pairs[:_MAX_CONFUSED_PAIRS]
    ]
    if not rows:
        return ["no label was confused with another", ""]
    title = f"the {len(rows)} most confused of {len(pairs):,} pairs (all: --json):"
    header = ["true", "predicted", "count", "% of true"]
    return [title, *_align_columns(header, rows, num_text_columns=2), ""]


def _align_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int = 1
) -> list[str]:
    """Return lines with columns of equal width.

    The first ``num_text_columns`` columns are truncated and left-aligned, the others
    right-aligned.
    """
    table = [
        [
            _truncate_label(cell) if column < num_text_columns else cell
            for column, cell in enumerate(row)
        ]
        for row in [header, *rows]
    ]
    widths = [max(map(cell_len, cells)) for cells in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [
            set_cell_size(cell, width)
            if column < num_text_columns
            else " " * (width - cell_len(cell)) + cell
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _truncate_label(text: str) -> str:
    """Return a label on one line, truncated to ``_MAX_LABEL_WIDTH`` terminal cells."""
    line = " ".join(text.split())
    if cell_len(line) <= _MAX_LABEL_WIDTH:
        return line
    return set_cell_size(line, _MAX_LABEL_WIDTH - 1).rstrip() + "…"
