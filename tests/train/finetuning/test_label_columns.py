"""Fine-tuning on several labels per text, with a column of 0 and 1 for each label."""

from pathlib import Path

import numpy as np
import pytest

from bertsmith.bundle import load_fine_tuned
from bertsmith.errors import SettingsError
from bertsmith.train.distillation.distill import distill
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.use.evaluate import evaluate
from tests.train.conftest import WORDS

#: The label of a text with one of the first two words.
LABELS = ("hot", "cold")
TASK = {"label_columns": list(LABELS), "batch_size": 8, "metrics": ["f1", "macro_f1"]}


def write_table(path: Path, count: int) -> Path:
    """Write texts with two columns of 0 and 1, in the order of ``LABELS``, and the same labels.

    The column "names" has the labels separated by semicolons.
    """
    rng = np.random.default_rng(0)
    lines = ["text,hot,cold,names"]
    for _ in range(count):
        words = [str(word) for word in rng.choice(WORDS[4:], 4)]
        flags = rng.integers(0, 2, 2).tolist()
        words += [word for word, flag in zip(WORDS, flags, strict=False) if flag]
        names = ";".join(label for label, flag in zip(LABELS, flags, strict=True) if flag)
        lines.append(f"{' '.join(words)},{flags[0]},{flags[1]},{names}")
    path.write_text("\n".join(lines) + "\n")
    return path


def test_columns_of_0_and_1_train_the_same_model_as_names(
    start_model: Path, tmp_path: Path
) -> None:
    """``label_columns`` implies the kind; the model is the same as with names in one column."""
    data = write_table(tmp_path / "train.csv", 160)
    values = {"optim": {"lr": 3e-3}, "schedule": {"epochs": 8.0}}
    from_columns = finetune(
        "classify", start_model, tmp_path / "a", data=data, values={**values, "task": TASK}
    )
    names = {
        "kind": "multi", "label_column": "names", "label_separator": ";", "labels": list(LABELS),
    }  # fmt: skip
    task = {**TASK, **names, "label_columns": []}
    from_names = finetune(
        "classify", start_model, tmp_path / "b", data=data, values={**values, "task": task}
    )
    assert from_columns.metrics == from_names.metrics
    assert from_columns.metrics["f1"] > 0.9
    assert from_columns.model is not None
    scores = evaluate(from_columns.model, data)
    assert list(scores["classes"]) == list(LABELS)
    # The labels of another table may be in one column.
    changes = {"label_column": "names", "label_separator": ";"}
    assert evaluate(from_columns.model, data, changes=changes) == scores
    # With a threshold near 0, all labels are predicted.
    low = evaluate(from_columns.model, data, changes={"label_threshold": 1e-6})
    assert [low["classes"][label]["recall"] for label in LABELS] == [1.0, 1.0]
    assert low["f1"] < scores["f1"]


def test_recorded_settings_with_other_labels(start_model: Path, tmp_path: Path) -> None:
    """With ``config``, other columns of labels replace the recorded ones and their labels."""
    data = write_table(tmp_path / "train.csv", 24)
    values = {"schedule": {"steps": 2}}
    finetune("classify", start_model, tmp_path / "a", data=data, values={**values, "task": TASK})
    config = tmp_path / "a" / "settings.toml"
    table = tmp_path / "other.csv"
    table.write_text(data.read_text().replace("text,hot,cold", "text,warm,cool"))
    other_columns = finetune(
        "classify", start_model, tmp_path / "b", data=table, config=config,
        values={"task": {"label_columns": ["warm", "cool"]}},
    )  # fmt: skip
    other_column = finetune(
        "classify", start_model, tmp_path / "c", data=data, config=config,
        values={"task": {"label_column": "names", "label_separator": ";"}},
    )  # fmt: skip
    for result, labels in ((other_columns, ("warm", "cool")), (other_column, ("cold", "hot"))):
        assert result.model is not None
        assert load_fine_tuned(result.model).head.labels == labels


def test_teacher_with_names_is_distilled_on_columns(start_model: Path, tmp_path: Path) -> None:
    """The columns of 0 and 1 of the validation table give the same scores as names."""
    data = write_table(tmp_path / "train.csv", 24)
    names = {"kind": "multi", "label_column": "names", "label_separator": ";"}
    values = {"schedule": {"steps": 2}, "task": names}
    teacher = finetune("classify", start_model, tmp_path / "teacher", data=data, values=values)
    assert teacher.model is not None
    metrics: list[dict[str, float]] = []
    for columns in ({}, {"label_columns": list(LABELS)}):
        student = distill(
            teacher.model, tmp_path / f"student-{len(metrics)}", data=data,
            values={"distill": {"layers": 1, **columns}, "schedule": {"steps": 2}},
        )  # fmt: skip
        metrics.append(student.metrics)
    assert metrics[0] == metrics[1]


def test_taggers_have_no_label_columns(start_model: Path, tmp_path: Path) -> None:
    """The error names the setting."""
    data = write_table(tmp_path / "train.csv", 8)
    task = {"label_columns": list(LABELS)}
    with pytest.raises(SettingsError, match=r"task\.label_columns .*: only for several labels"):
        finetune("tag", start_model, tmp_path / "run", data=data, values={"task": task})
