"""Labels parsed from the cells of a table."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertsmith.bundle import TaskKind
from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks.classification import read_examples
from bertsmith.tasks.families import reject_unused_fields
from bertsmith.tasks.settings import TaskSettings

COLUMNS = ["mild", "hot"]
TASK = TaskSettings(kind="multi", label_columns=COLUMNS)


def read_labels(file: Path, task: TaskSettings = TASK) -> list[Any]:
    """Return the sorted labels of each example of a file."""
    examples, _ = read_examples(file, task, labels=task.labels or task.label_columns)
    labels = [example.label for example in examples]
    assert all(isinstance(label, frozenset) for label in labels)
    return [sorted(label) for label in labels if isinstance(label, frozenset)]


def test_each_column_of_0_and_1_is_a_label(tmp_path: Path) -> None:
    """Numbers and truth values of CSV and JSON are read; a text may have no label."""
    table = tmp_path / "a.csv"
    table.write_text("text,hot,mild\nred,1,0\ngreen,0,0\nblue,1.0,1.0\nred,True,FALSE\n")
    assert read_labels(table) == [["hot"], [], ["hot", "mild"], ["hot"]]
    rows = [{"text": "red", "mild": 1, "hot": 0.0}, {"text": "red", "mild": True, "hot": False}]
    lines = tmp_path / "a.jsonl"
    lines.write_text("\n".join(map(json.dumps, rows)))
    assert read_labels(lines) == [["mild"], ["mild"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("red,-1,0", "line 3: a label that is neither 0 nor 1 in column 'hot': '-1'"),
        ("red,1,yes", "line 3: a label that is neither 0 nor 1 in column 'mild': 'yes'"),
        ("red,1,", "line 3: a missing label in column 'mild'"),
        ("red,NaN,1", "line 3: a missing label: 'NaN'"),
    ],
)
def test_row_with_another_value_is_an_error_or_skipped(
    tmp_path: Path, row: str, message: str
) -> None:
    """The comments of Jigsaw that are not scored have -1 in each column."""
    table = tmp_path / "a.csv"
    table.write_text(f"text,hot,mild\nred,1,0\n{row}\n")
    with pytest.raises(TaskError, match=message):
        read_labels(table)
    assert read_labels(table, TASK.model_copy(update={"skip_invalid": True})) == [["hot"]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["mild", "cold"], "there is no column for the label 'hot'; .*: 'mild', 'hot'"),
        (["mild", "hot", "cold"], "the column 'cold' is not a label of the model"),
    ],
)
def test_columns_must_be_the_labels_of_the_model(
    tmp_path: Path, columns: list[str], message: str
) -> None:
    """Otherwise a label would count as absent in each text."""
    table = tmp_path / "a.csv"
    table.write_text("text,mild,hot,cold\nred,1,0,0\n")
    task = TaskSettings(kind="multi", label_columns=columns)
    with pytest.raises(TaskError, match=message):
        read_examples(table, task, labels=COLUMNS)


def test_missing_column_is_an_error(tmp_path: Path) -> None:
    """The message has the existing columns and the option."""
    table = tmp_path / "a.csv"
    table.write_text("text,mild\nred,1\n")
    with pytest.raises(TaskError, match=r"no column 'hot'; the columns are .* --label-columns"):
        read_labels(table)


def test_separator_of_labels(tmp_path: Path) -> None:
    """The labels of GoEmotions are numbers separated by commas."""
    table = tmp_path / "a.tsv"
    table.write_text("text\tlabel\nred\t27\ngreen\t2,5\n")
    task = TaskSettings(kind="multi", label_separator=",", labels=["2", "5", "27"])
    assert read_labels(table, task) == [["27"], ["2", "5"]]


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (
            "single",
            {"label_columns": COLUMNS},
            r"\(--label-columns\): .* is 'single'; remove",
        ),
        ("single", {"label_threshold": 0.3}, r"label_threshold \(--threshold\): .* is 'single'"),
        ("entities", {"label_separator": ","}, "label_separator: only for several labels per text"),
        (
            "multi",
            {"label_columns": COLUMNS, "label_column": "tags"},
            r"--label\) and .*--label-columns\) both name the labels",
        ),
    ],
)
def test_settings_without_effect_are_rejected(
    kind: Any, fields: dict[str, Any], message: str
) -> None:
    """Only tasks with several labels per text have these settings."""
    with pytest.raises(SettingsError, match=message):
        reject_unused_fields(kind, fields, [])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"label_columns": ["a", "a"]}, "label_columns has 'a' twice"),
        ({"label_columns": ["a"]}, "label_columns has one column; give at least two"),
        ({"label_columns": ["a", "text"]}, "'text' is both text and the label 'text'"),
        ({"label_threshold": 1.0}, "label_threshold"),
        ({"label_separator": ""}, "label_separator"),
    ],
)
def test_invalid_settings(fields: dict[str, Any], message: str) -> None:
    """Equal columns, an empty separator and a threshold outside (0, 1) are errors."""
    with pytest.raises(SettingsError, match=message):
        TaskSettings.parse({"kind": "multi", **fields}, "the test")


def test_nan_is_a_class_only_if_listed(tmp_path: Path) -> None:
    """The label "NaN", in upper or lower case, is missing unless task.labels contains it."""
    file = tmp_path / "a.csv"
    file.write_text("text,label\nred,NaN\ngreen,nan\nblue,na\nred,None\n")
    examples, counts = read_examples(file, TaskSettings(skip_invalid=True))
    assert [example.label for example in examples] == ["na", "None"]
    assert counts.skipped == {"a missing label": 2}
    with pytest.raises(TaskError, match=r"must be listed in task\.labels"):
        read_examples(file, TaskSettings())
    labels = ["NaN", "na", "None"]
    examples, counts = read_examples(file, TaskSettings(skip_invalid=True), labels=labels)
    assert [example.label for example in examples] == labels
    assert counts.skipped == {"a missing label": 1}


def test_empty_cell_of_a_multi_label_table_means_that_no_label_applies(tmp_path: Path) -> None:
    """A text table cannot distinguish an empty list from a missing one; JSON's null is missing."""
    task = TaskSettings(kind="multi")
    (tmp_path / "a.csv").write_text('text,label\nred,1|2\ngreen,\nblue," "\n')
    examples, _ = read_examples(tmp_path / "a.csv", task)
    assert [example.label for example in examples] == [frozenset("12"), frozenset(), frozenset()]
    (tmp_path / "a.jsonl").write_text(
        '{"text": "green", "label": []}\n{"text": "blue", "label": null}\n'
    )
    examples, counts = read_examples(
        tmp_path / "a.jsonl", task.model_copy(update={"skip_invalid": True})
    )
    assert [example.label for example in examples] == [frozenset()]
    assert counts.skipped == {"a missing value": 1}


def test_equal_numbers_are_the_same_label(tmp_path: Path) -> None:
    """1, 1.0 and "1" are one label: integer columns with missing values are stored as floats."""
    file = tmp_path / "a.jsonl"
    labels = (1, 1.0, "1", -0.0, 0.5)
    file.write_text("".join(json.dumps({"text": "red", "label": label}) + "\n" for label in labels))
    examples, _ = read_examples(file, TaskSettings())
    assert [example.label for example in examples] == ["1", "1", "1", "0", "0.5"]


@pytest.mark.parametrize(
    ("kind", "cells", "expected"),
    [
        ("single", "1.0 0 -0.0 1.00", ["1", "0", "0", "1"]),
        ("multi", "1.0|0 1", [{"0", "1"}, {"1"}]),
        ("single", "1.0 0.5 1", ["1.0", "0.5", "1"]),
        ("single", "1.0 a", ["1.0", "a"]),
    ],
)
def test_integers_with_decimals_in_text_are_integers(
    tmp_path: Path, kind: TaskKind, cells: str, expected: list[Any]
) -> None:
    """If all classes of CSV are integers, 1.0 is the class 1, as in Parquet."""
    file = tmp_path / "a.csv"
    file.write_text("text,label\n" + "".join(f"red,{cell}\n" for cell in cells.split()))
    examples, _ = read_examples(file, TaskSettings(kind=kind))
    assert [example.label for example in examples] == expected


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_number_matches_the_default_label_of_transformers(tmp_path: Path, kind: TaskKind) -> None:
    """Without names, class 1 of transformers is called LABEL_1; other numbers are unknown."""
    file = tmp_path / "a.csv"
    file.write_text("text,label\nred,1\ngreen,0.0\nblue,LABEL_1\n")
    examples, _ = read_examples(file, TaskSettings(kind=kind), labels=["LABEL_0", "LABEL_1"])
    expected: list[Any] = ["LABEL_1", "LABEL_0", "LABEL_1"]
    if kind == "multi":
        expected = [{label} for label in expected]
    assert [example.label for example in examples] == expected
    file.write_text("text,label\nred,2\n")
    with pytest.raises(TaskError, match="an unknown label: '2'; known labels are 'LABEL_0'"):
        read_examples(file, TaskSettings(kind=kind), labels=["LABEL_0", "LABEL_1"])


def test_integer_with_decimals_matches_a_known_label(tmp_path: Path) -> None:
    """1.0 is the known label 1, unless 1.0 is a label itself."""
    file = tmp_path / "a.csv"
    file.write_text("text,label\nred,1.0\ngreen,1\n")
    examples, _ = read_examples(file, TaskSettings(), labels=["0", "1"])
    assert [example.label for example in examples] == ["1", "1"]
    examples, _ = read_examples(file, TaskSettings(), labels=["1", "1.0"])
    assert [example.label for example in examples] == ["1.0", "1"]
    with pytest.raises(TaskError, match=r"an unknown label: '1\.0'"):
        read_examples(file, TaskSettings(), labels=["0", "2"])
