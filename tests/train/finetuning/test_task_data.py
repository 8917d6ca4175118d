"""Data and settings of fine-tuning: counts, warnings and errors."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith import bundle
from bertsmith.errors import RunError, SettingsError, TaskError
from bertsmith.tasks.families import reject_unused_fields
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.finetuning.settings import FinetuneSettings
from bertsmith.train.finetuning.sweep import run_sweep
from bertsmith.train.finetuning.task_data import read_task_data, resolve_model_settings
from bertsmith.train.pretraining.pretrain import write_initial_model
from tests.train.conftest import WORDS, RecordingProgress, make_assignments
from tests.train.finetuning.conftest import write_rows
from tests.train.finetuning.test_finetune import (
    FAST_SETTINGS,
    finetune_table,
    write_table,
)


def test_unknown_label_in_a_held_out_file_is_rejected(start_model: Path, tmp_path: Path) -> None:
    """An unknown label is an error with file and line number, and no run is created."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    dev = write_rows(tmp_path / "dev.jsonl", [{"text": "w", "label": "perhaps"}])
    with pytest.raises(TaskError, match=r"dev\.jsonl, line 1: an unknown label: 'perhaps'"):
        finetune_table(
            start_model,
            tmp_path / "run",
            data,
            "single",
            task={"validation_files": {"dev": str(dev)}},
        )
    assert not (tmp_path / "run").exists()


def test_scores_of_the_training_file_are_not_needed_to_read_it(tmp_path: Path) -> None:
    """A teacher with scores replaces those of the training file, which may have none."""
    train = write_rows(tmp_path / "train.jsonl", [{"text": "ba"}, {"text": "de"}])
    dev = write_rows(tmp_path / "dev.jsonl", [{"text": "ba", "label": 0.5}])
    task = TaskSettings(
        kind="regression", train_file=str(train), validation_files={"dev": str(dev)},
        text_column="text", label_column="label",
    )  # fmt: skip
    data = read_task_data(task, labeled=False)
    assert len(data.train) == 2
    assert [example.label for example in data.heldout["dev"]] == [0.5]


@pytest.mark.parametrize(
    ("attention", "value", "expected"),
    [("bidirectional", None, "first"), ("causal", None, "last"), ("causal", "first", "first")],
)
def test_last_token_is_tagged_if_attention_is_causal(
    start_model: Path, attention: str, value: str | None, expected: str
) -> None:
    """By default, a left-to-right model tags a word at its last token, which sees all of it."""
    start: Any = bundle.load(start_model)
    config = start.config.model_copy(update={"attention": attention})
    values = {"model": config.model_dump(), "task": {"kind": "entities", "tagged_token": value}}
    settings = FinetuneSettings.parse(values, "the test")
    resolved = resolve_model_settings(settings, replace(start, config=config))
    assert resolved.task.tagged_token == expected


@pytest.mark.parametrize("task", ["classify", "choose"])
def test_pairs_of_texts_need_a_model_with_two_segments(
    store: Path, tmp_path: Path, task: str
) -> None:
    """A model with a single segment is rejected before the run is created."""
    write_initial_model(
        store, tmp_path / "m", assignments=make_assignments(model__segments=1, data__nsp="false")
    )
    rows = [{"text": "ba", "other": "de", "label": number % 2} for number in range(8)]
    data = write_rows(tmp_path / "train.jsonl", rows)
    columns: dict[str, Any] = {"text_column": "text", "label_column": "label"}
    columns |= (
        {"pair_column": "other"} if task == "classify" else {"ending_columns": ["other", "text"]}
    )
    with pytest.raises(SettingsError, match="the model has a single segment"):
        finetune(task, tmp_path / "m", tmp_path / "run", data=data, values={"task": columns})
    assert not (tmp_path / "run").exists()


def test_unknown_tokens_are_warned_about(start_model: Path, tmp_path: Path) -> None:
    """A warning names the file with the most [UNK]; the counts have the fraction of each file."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    rows = [{"text": "겨울에는 날씨가 춥습니다", "label": label} for label in ("yes", "no")]
    dev = write_rows(tmp_path / "dev.jsonl", rows)
    progress = RecordingProgress()
    task = {**FAST_SETTINGS["task"], "validation_files": {"dev": str(dev)}}
    values = {**FAST_SETTINGS, "task": task, "schedule": {"steps": 1}}
    result = finetune(
        "classify", start_model, tmp_path / "run", data=data, values=values, progress=progress
    )
    (message,) = [message for message in progress.messages if "[UNK]" in message]
    assert message.startswith("warning: 100.0% of the tokens of dev are [UNK]")
    assert result.counts["train"]["unknown_share"] == 0
    assert result.counts["dev"]["unknown_share"] == 1


def test_label_without_training_examples_is_logged(start_model: Path, tmp_path: Path) -> None:
    """A label that only held-out examples have is logged, and listed in the counts."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    dev = write_rows(tmp_path / "dev.jsonl", [{"text": "w", "label": "perhaps"}])
    progress = RecordingProgress()
    task = {"validation_files": {"dev": str(dev)}, "labels": ["no", "perhaps", "yes"]}
    values = {
        **FAST_SETTINGS,
        "task": {**FAST_SETTINGS["task"], **task},
        "schedule": {"steps": 1},
    }
    result = finetune(
        "classify", start_model, tmp_path / "run", data=data, values=values, progress=progress
    )
    assert result.counts["train"]["unseen_labels"] == ["perhaps"]
    assert "unseen_labels" not in result.counts["dev"]
    (message,) = [message for message in progress.messages if "no example has" in message]
    assert message == "train: no example has the label 'perhaps', so the model cannot learn it"
    repeated = finetune("classify", start_model, tmp_path / "run", data=data, values=values)
    assert repeated.counts == result.counts


def test_labels_are_counted_and_compared_with_the_majority(
    start_model: Path, tmp_path: Path
) -> None:
    """A run logs the label counts, and warns if it is no better than the majority class.

    The warning does not depend on the metrics that the user has chosen.
    """
    rows = [{"text": WORDS[0], "label": "yes" if n % 10 else "no"} for n in range(40)]
    data = write_rows(tmp_path / "t.jsonl", rows)
    progress = RecordingProgress()
    task = {
        **FAST_SETTINGS["task"],
        "metrics": ["macro_f1"],
        "validation_files": {"dev": str(data)},
    }
    values = {**FAST_SETTINGS, "task": task, "schedule": {"steps": 1}}
    finetune("classify", start_model, tmp_path / "run", data=data, values=values, progress=progress)
    assert "train: 2 labels: yes 36 (90.0%), no 4 (10.0%)" in progress.messages
    assert "dev: 2 labels: yes 36 (90.0%), no 4 (10.0%)" in progress.messages
    warnings = [message for message in progress.messages if message.startswith("warning: ")]
    assert warnings[0].startswith("warning: train: 90.0% of the examples have the label 'yes'")
    assert "is not better than always predicting the majority class 'yes' (0.9000)" in warnings[1]
    assert len(warnings) == 2


def test_training_on_the_held_out_file_is_logged(start_model: Path, tmp_path: Path) -> None:
    """Evaluating on the training file is possible, but a message is logged."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    (tmp_path / "link.jsonl").symlink_to(data)
    progress = RecordingProgress()
    task = {**FAST_SETTINGS["task"], "validation_files": {"dev": str(tmp_path / "link.jsonl")}}
    values = {**FAST_SETTINGS, "task": task, "schedule": {"steps": 1}}
    finetune("classify", start_model, tmp_path / "run", data=data, values=values, progress=progress)
    expected = "dev: the held-out file is the training file"
    assert any(message.startswith(expected) for message in progress.messages)


@pytest.mark.parametrize(
    ("family", "task_settings"),
    [
        ("classify", {}),
        ("answer", {}),
        ("choose", {"ending_columns": ["a", "b"]}),
        ("tag", {"kind": "tags"}),
    ],
)
def test_held_out_duplicates_are_logged(
    start_model: Path, tmp_path: Path, family: str, task_settings: dict[str, Any]
) -> None:
    """Held-out examples with the input of a training example are counted, whatever their label."""

    def make_row(number: int, label: int) -> dict[str, Any]:
        """Return a row with the columns of all families."""
        answers = {"text": ["w"] * label, "answer_start": [0] * label}
        return {
            "text": f"w {number}", "a": "a", "b": "b", "label": label,
            "question": "q", "context": f"w {number}", "answers": answers,
            "tokens": ["w", str(number)], "tags": ["N", "V"] if label else ["V", "N"],
        }  # fmt: skip

    train = write_rows(tmp_path / "train.jsonl", [make_row(n, n % 2) for n in range(10)])
    # 8 and 9 occur in the training file, 9 with another label.
    dev_rows = [make_row(n, 0) for n in (8, 9, 10)]
    dev = write_rows(tmp_path / "dev.jsonl", dev_rows)
    progress = RecordingProgress()
    task = {**task_settings, "validation_files": {"dev": str(dev)}, "max_seqlen": 24}
    values = {"task": task, "schedule": {"steps": 1}, "run": {"threads": 1}}
    finetune(family, start_model, tmp_path / "a", data=train, values=values, progress=progress)
    expected = "dev: inputs that also occur in the training data: 2 of 3; the scores"
    assert any(message.startswith(expected) for message in progress.messages)
    write_rows(dev, dev_rows[2:])
    progress = RecordingProgress()
    finetune(family, start_model, tmp_path / "b", data=train, values=values, progress=progress)
    assert not any("also occur in" in message for message in progress.messages)


def test_f1_needs_two_labels(start_model: Path, tmp_path: Path) -> None:
    """With three labels, the metric f1 is an error that suggests macro_f1."""
    rows = [{"text": f"w {n}", "label": f"l{n % 3}"} for n in range(20)]
    data = write_rows(tmp_path / "t.jsonl", rows)
    with pytest.raises(SettingsError, match=r"'f1' .* with 3 labels; .* macro_f1"):
        finetune_table(start_model, tmp_path / "run", data, "single", task={"metrics": ["f1"]})
    assert not (tmp_path / "run").exists()


def test_training_examples_of_one_class_are_rejected(start_model: Path, tmp_path: Path) -> None:
    """Training examples that all have the same label are an error.

    They are also an error if the held-out examples or the settings have another label.
    """
    rows = [{"text": f"w {n}", "label": "no"} for n in range(19)]
    other_row = {"text": "w", "label": "yes"}
    data = write_rows(tmp_path / "train.jsonl", rows)
    dev = write_rows(tmp_path / "dev.jsonl", [*rows, other_row])
    task = {"validation_files": {"dev": str(dev)}, "labels": ["no", "yes"]}
    with pytest.raises(
        TaskError, match=r"train\.jsonl: every label is 'no'; expected at least two"
    ):
        finetune_table(start_model, tmp_path / "run", data, "single", task=task)
    # With a held-out fraction of 1/20, the row at this index is held out.
    index = int(np.random.default_rng(0).permutation(20)[0])
    data = write_rows(tmp_path / "all.jsonl", [*rows[:index], other_row, *rows[index:]])
    with pytest.raises(TaskError, match="without the held-out examples: every label is 'no'"):
        finetune_table(
            start_model, tmp_path / "run", data, "single", task={"validation_fraction": 0.05}
        )
    assert not (tmp_path / "run").exists()


def reject_constant(name: str) -> None:
    """Reject NaN and Infinity, which are not standard JSON."""
    raise ValueError(name)


def test_nan_metric_is_null_on_disk(start_model: Path, tmp_path: Path) -> None:
    """A correlation that is NaN is written as null to all files, and is NaN in the result."""
    data = write_table(tmp_path / "train.jsonl", "regression", 20)
    rows = [{"text": f"w {word}", "label": 2} for word in WORDS[:3]]
    dev = write_rows(tmp_path / "dev.jsonl", rows)
    task = {"validation_files": {"dev": str(dev)}}
    run = tmp_path / "run"
    changes: dict[str, Any] = {"schedule": {"steps": 2}, "task": task}
    result = finetune_table(start_model, run, data, "regression", **changes)
    repeated = finetune_table(start_model, run, data, "regression", **changes)
    assert result.model is not None
    for metrics in (result.metrics, repeated.metrics):
        assert math.isnan(metrics["pearson"])
        assert math.isfinite(metrics["loss"])
    for file in (run / "result.json", result.model / bundle.INFO_FILE):
        json.loads(file.read_text(), parse_constant=reject_constant)
    assert json.loads((run / "result.json").read_text())["metrics"]["pearson"] is None
    for line in (run / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=reject_constant)
    sweep_task = {**FAST_SETTINGS["task"], **task, "kind": "regression"}
    values = {**FAST_SETTINGS, **changes, "task": sweep_task}
    out = tmp_path / "sweep"
    run_sweep("classify", start_model, out, seeds=2, data=data, values=values)
    json.loads((out / "results.json").read_text(), parse_constant=reject_constant)


def test_truncated_held_out_examples_are_counted(start_model: Path, tmp_path: Path) -> None:
    """Truncated examples are counted, including those that are held out from the training file."""
    rows = [{"text": "w " * 20, "label": str(n % 2)} for n in range(20)]
    data = write_rows(tmp_path / "train.jsonl", rows)
    result = finetune_table(
        start_model,
        tmp_path / "run",
        data,
        "single",
        schedule={"steps": 1},
        task={"max_seqlen": 12},
    )
    assert result.counts["train"]["num_truncated"] == 20


def test_invalid_settings_are_rejected(start_model: Path, tmp_path: Path) -> None:
    """Unknown tasks and metrics, another model width and too long inputs are errors."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    run = tmp_path / "run"
    with pytest.raises(SettingsError, match="unknown task 'cole'"):
        finetune("cole", start_model, run, data=data)
    with pytest.raises(SettingsError, match="'matthew'"):
        finetune_table(start_model, run, data, "single", task={"metrics": ["matthew"]})
    with pytest.raises(SettingsError, match=r"run\.num_frozen_layers is 99"):
        finetune_table(start_model, run, data, "single", run={"num_frozen_layers": 99})
    assert not (run / "settings.toml").exists()
    with pytest.raises(SettingsError, match=r"model\.width"):
        finetune_table(start_model, run, data, "single", model={"width": 64})
    with pytest.raises(SettingsError, match=r"reduce task\.max_seqlen"):
        finetune_table(start_model, run, data, "single", task={"max_seqlen": 5000})
    schedule = {"steps": 1}
    finetune_table(start_model, run, data, "single", schedule=schedule)
    with pytest.raises(RunError, match=r"task\.batch_size: 8 in the run, 4 now"):
        finetune_table(start_model, run, data, "single", schedule=schedule, task={"batch_size": 4})


@pytest.mark.parametrize(
    ("task", "task_settings", "message"),
    [
        ("answer", {"ending_columns": ["x", "y"]}, "ending_columns: .*choose"),
        ("tag", {"pair_column": "other"}, "pair_column: .*classify, answer, choose"),
        ("classify", {"context": "document"}, "context: .*tag"),
        ("answer", {"text_column": "nosuch"}, r"text_column: .*own\.json"),
    ],
)
def test_unused_settings_are_rejected(
    start_model: Path, tmp_path: Path, task: str, task_settings: dict[str, Any], message: str
) -> None:
    """A setting that the task does not use is an error, even before the data file is read."""
    values = {"task": task_settings}
    with pytest.raises(SettingsError, match=rf"task\.{message}"):
        finetune(task, start_model, tmp_path / "run", data=tmp_path / "own.json", values=values)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("t.jsonl", {"delimiter": ";"}),
        ("t.parquet", {"delimiter": ";"}),
        ("t.json.gz", {"header": False}),
        ("t.parquet", {"encoding": "cp949"}),
    ],
)
def test_settings_of_other_formats_are_rejected(name: str, settings: dict[str, Any]) -> None:
    """A setting that applies to none of the files is an error; one CSV file suffices."""
    files = [Path(name), Path("dev.jsonl" if "delimiter" in settings else name)]
    with pytest.raises(SettingsError, match=rf"task\.{next(iter(settings))}: has no effect on"):
        reject_unused_fields("single", settings, files)
    reject_unused_fields("single", settings, [*files, Path("t.csv")])
    reject_unused_fields("single", settings, [])


def test_numeric_labels_are_classes_only_on_request(start_model: Path, tmp_path: Path) -> None:
    """Many different numbers as labels are an error, unless the user sets the kind "single"."""
    data = tmp_path / "scores.csv"
    rows = [f"{WORDS[n % 9]},{n % 7 / 2}" for n in range(28)]
    data.write_text("\n".join(["text,label", *rows]) + "\n")
    with pytest.raises(TaskError, match=r"7 different numbers .*--kind regression"):
        finetune("classify", start_model, tmp_path / "run", data=data, values={"task": {}})
    assert not (tmp_path / "run").exists()
    result = finetune(
        "classify",
        start_model,
        tmp_path / "run",
        data=data,
        values={**FAST_SETTINGS, "task": {"kind": "single"}, "schedule": {"steps": 1}},
    )
    assert result.metrics["examples"] == 3, "a tenth of the 28 rows is held out"


@pytest.mark.parametrize(
    ("values", "message"),
    [({"task": {"max_train_examples": 30}}, r"task\.max_train_examples: 30 in the run, None now"),
     ({"features": {"layers": "last", "width": 8}}, "features: "),
     ({"run": {"num_frozen_layers": 1}}, r"run\.num_frozen_layers: 1 in the run, None now")],
)  # fmt: skip
def test_resuming_without_a_setting_is_rejected(
    start_model: Path, tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    """Resuming a run without one of the settings it was started with is an error."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    changes = {**values, "run": {"threads": 1, **values.get("run", {})}}
    schedule = {"steps": 1}
    finetune_table(start_model, tmp_path / "run", data, "single", schedule=schedule, **changes)
    with pytest.raises(RunError, match=message):
        finetune_table(start_model, tmp_path / "run", data, "single", schedule=schedule)
