"""Labels of classification and regression, parsed from the cells of a table."""

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bertsmith.errors import TaskError
from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tables import Row, drop_zero_decimals, get_cell, reject_lone_surrogates

_MAX_LISTED_LABELS = 20
#: A number as spreadsheets write it in many languages.
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,[0-9]+")
#: The largest score: targets are 32-bit numbers.
_MAX_SCORE = float(np.finfo(np.float32).max)
#: The options that name the columns, for errors.
_COLUMNS_OPTION = "--label-columns, or the column of all labels with --label"
#: Text of a cell in lower case -> whether the label of the column applies.
_INDICATORS = {"0": False, "1": True, "false": False, "true": True}

#: A class name, a score, or a set of class names.
Label = str | float | frozenset[str]


def parse_label(row: Row, task: TaskSettings, labels: Sequence[str] | None) -> Label:
    """Return the label of a row.

    Args:
        row: The row.
        task: The task settings, with the columns and the kind of the labels.
        labels: The known labels, None if they are collected from the file.

    Raises:
        BadExampleError: The row has no valid label, or a label that is not in ``labels``.
        TaskError: The table has no such column.
    """
    if task.label_columns:
        return _parse_indicators(row, task.label_columns)
    label = _parse_cell(get_cell(row, task.label_column, "--label"), task, labels)
    return label if labels is None else _match_labels(label, labels)


def _parse_indicators(row: Row, columns: Sequence[str]) -> frozenset[str]:
    """Return the names of the columns with the value 1, among columns of 0 and 1."""
    return frozenset(
        column
        for column in columns
        if _parse_indicator(get_cell(row, column, _COLUMNS_OPTION), column)
    )


def _parse_indicator(value: Any, column: str) -> bool:
    """Convert 0, 1, false or true, as a number, truth value or text, to a bool."""
    _reject_missing_label(value, None)
    text = to_label_name(value)
    if not text:
        raise BadExampleError("a missing label", f" in column {column!r}")
    try:
        return _INDICATORS[drop_zero_decimals(text).lower()]
    except KeyError:
        raise BadExampleError(
            "a label that is neither 0 nor 1", f" in column {column!r}: {value!r}"
        ) from None


def check_label_columns(columns: Sequence[str], labels: Sequence[str], source: str) -> None:
    """Raise TaskError unless the columns of 0 and 1 are the labels of the model, in any order.

    Args:
        columns: Names of the columns.
        labels: Labels of the model.
        source: Name of the table, for the error message.
    """
    missing = [label for label in labels if label not in columns]
    unknown = [column for column in columns if column not in labels]
    if missing:
        problem = f"there is no column for the label {missing[0]!r}"
    elif unknown:
        problem = f"the column {unknown[0]!r} is not a label of the model"
    else:
        return
    raise TaskError(f"{source}: {problem}; give one column for each label: {_list_labels(labels)}")


def _list_labels(labels: Sequence[str]) -> str:
    """Return the first labels as text."""
    return ", ".join(map(repr, labels[:_MAX_LISTED_LABELS]))


def _parse_cell(value: Any, task: TaskSettings, labels: Sequence[str] | None) -> Label:
    """Convert the value of a cell to a label of the task's kind; see ``parse_label``."""
    if task.kind == "multi":
        return _parse_label_set(value, task.label_separator, labels)
    _reject_missing_label(value, labels)
    if task.kind == "single":
        if isinstance(value, list):
            raise BadExampleError("several labels where one is expected", "; see --kind multi")
        name = to_label_name(value)
        if not name:
            raise BadExampleError("an empty label")
        return name
    return parse_score(value)


def _parse_label_set(value: Any, separator: str, labels: Sequence[str] | None) -> frozenset[str]:
    """Convert a list of labels, or a text with ``separator`` between labels, to a set."""
    if isinstance(value, str):
        items = value.split(separator)
    elif isinstance(value, list):
        items = value
    else:
        items = [value]
    for item in items:
        _reject_missing_label(item, labels)
    names = [name for name in map(to_label_name, items) if name]
    if len(names) > len(set(names)):
        raise BadExampleError(
            "a label that occurs twice",
            "; give names of labels instead of a 0 or 1 for each, or a column of 0 and 1 for each "
            "label with --label-columns",
        )
    return frozenset(names)


def parse_score(value: Any) -> float:
    """Convert the value of a cell to a number that is finite as a 32-bit number.

    Raises:
        BadExampleError: The value is not such a number.
    """
    if isinstance(value, str) and not value.strip():
        raise BadExampleError("an empty label")
    if isinstance(value, bool):
        raise BadExampleError("a score that is not a number", f": {value!r}")
    try:
        score = float(value)
    except (TypeError, ValueError, OverflowError):
        detail = f": {value!r}"
        if isinstance(value, str) and _DECIMAL_COMMA.fullmatch(value.strip()):
            detail += "; write a decimal point instead of the comma"
        raise BadExampleError("a score that is not a number", detail) from None
    if not math.isfinite(score):
        raise BadExampleError("a score that is not finite", f": {value!r}")
    if abs(score) > _MAX_SCORE:
        raise BadExampleError("a score that exceeds the 32-bit range", f": {value!r}")
    return score


def _reject_missing_label(value: Any, labels: Sequence[str] | None) -> None:
    """Raise BadExampleError for NaN, which pandas writes for missing values.

    The text "nan", in upper or lower case, is also rejected, unless ``labels`` contains it.
    """
    if isinstance(value, float) and math.isnan(value):
        raise BadExampleError("a missing label", ": NaN")
    if (
        isinstance(value, str)
        and value.strip().lower() == "nan"
        and value.strip() not in (labels or ())
    ):
        raise BadExampleError(
            "a missing label",
            f": {value!r} (if it is a class, it must be listed in task.labels)",
        )


def to_label_name(value: Any) -> str:
    """Convert a cell to the name of a label: true to "true"; 1 and 1.0 to "1"."""
    if isinstance(value, bool):
        return json.dumps(value)
    if not isinstance(value, str | int | float):
        raise BadExampleError("a label that is neither text nor a number", f": {value!r}")
    if isinstance(value, float):
        # Integer columns with missing values are stored as floats.
        if not math.isfinite(value):
            raise BadExampleError("a label that is not finite", f": {value!r}")
        value = int(value) if value.is_integer() else value
    name = str(value).strip()
    reject_lone_surrogates(name, "label")
    return name


def rename_label(label: Label, rename: Callable[[str], str]) -> Label:
    """Return a label with renamed class names; a score is returned unchanged."""
    if isinstance(label, str):
        return rename(label)
    return frozenset(map(rename, label)) if isinstance(label, frozenset) else label


def _match_labels(label: Label, labels: Sequence[str]) -> Label:
    """Return a label whose class names are in ``labels``.

    "1.0" matches the class "1", and both match "LABEL_1", the default name in transformers.

    Raises:
        BadExampleError: There is another class name.
    """

    def match(name: str) -> str:
        integer = drop_zero_decimals(name)
        names = (name, integer, f"LABEL_{integer}")
        return next((candidate for candidate in names if candidate in labels), name)

    matched = rename_label(label, match)
    if isinstance(matched, float):
        return matched
    names = matched if isinstance(matched, frozenset) else {matched}
    unknown_names = sorted(names - set(labels))
    if unknown_names:
        raise BadExampleError(
            "an unknown label", f": {unknown_names[0]!r}; known labels are {_list_labels(labels)}"
        )
    return matched
