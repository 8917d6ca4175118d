"""Tables of per-class metrics and confusion matrices for terminals of 80 columns."""

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size

MAX_WIDTH = 80
_MAX_CLASSES = 20
_MAX_CONFUSED_PAIRS = 10
_MAX_LABEL_WIDTH = 28


def format_class_report(classes: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a table with precision, recall, F1 and support of each class.

    If there are more than 20 classes, only the 20 with the lowest F1 are included.
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
    """Return the confusion matrix as a table, or the most confused pairs if it is too wide.

    Args:
        confusion: Counts by true label, then by predicted label; absent counts are 0.
    """
    if not confusion:
        return []
    # A column has at least one character, and two spaces before it.
    if 3 * len(confusion) > MAX_WIDTH:
        return _format_confused_pairs(confusion)
    cells = [
        [f"{confusion[true].get(predicted, 0):,}" for predicted in confusion] for true in confusion
    ]
    labels = [" ".join(label.split()) for label in confusion]
    numbers = [str(number) for number in range(1, len(labels) + 1)]
    numbered_labels = [f"{number} {label}" for number, label in zip(numbers, labels, strict=True)]
    # Columns are headed by their labels, or by numbers if the labels are too wide.
    for row_headers, column_headers in ((labels, labels), (numbered_labels, numbers)):
        rows = [[header, *row] for header, row in zip(row_headers, cells, strict=True)]
        lines = _align_columns(["", *column_headers], rows)
        fits_terminal = max(map(cell_len, lines)) <= MAX_WIDTH
        if fits_terminal and max(map(cell_len, column_headers)) <= _MAX_LABEL_WIDTH:
            return ["rows: true labels, columns: predicted labels", *lines, ""]
    return _format_confused_pairs(confusion)


def _format_confused_pairs(confusion: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return a table of the most frequent pairs of a true label and a wrong predicted label."""
    pairs = [
        (count, true, predicted)
        for true, predictions in confusion.items()
        for predicted, count in predictions.items()
        if true != predicted
    ]
    if not pairs:
        return ["no label was confused with another", ""]
    pairs.sort(key=lambda pair: pair[0], reverse=True)
    rows = []
    for count, true, predicted in pairs[:_MAX_CONFUSED_PAIRS]:
        num_true = sum(confusion[true].values())
        rows.append([true, predicted, f"{count:,}", f"{count / num_true:.1%}"])
    title = f"the {len(rows)} most confused of {len(pairs):,} pairs (all: --json):"
    header = ["true", "predicted", "count", "% of true"]
    return [title, *_align_columns(header, rows, num_text_columns=2), ""]


def _align_columns(
    header: Sequence[str], rows: Sequence[Sequence[str]], num_text_columns: int = 1
) -> list[str]:
    """Return the lines of a table in which each column has a fixed width.

    The first ``num_text_columns`` columns are truncated and left-aligned, the others
    right-aligned.
    """
    table = []
    for row in [header, *rows]:
        labels = [_truncate_label(cell) for cell in row[:num_text_columns]]
        table.append([*labels, *row[num_text_columns:]])
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        padded_cells = []
        for column_index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            if column_index < num_text_columns:
                padded_cells.append(set_cell_size(cell, width))
            else:
                padded_cells.append(" " * (width - cell_len(cell)) + cell)
        lines.append("  ".join(padded_cells).rstrip())
    return lines


def _truncate_label(text: str) -> str:
    """Return a label on one line, truncated to ``_MAX_LABEL_WIDTH`` terminal cells."""
    line = " ".join(text.split())
    if cell_len(line) <= _MAX_LABEL_WIDTH:
        return line
    return set_cell_size(line, _MAX_LABEL_WIDTH - 1).rstrip() + "…"
