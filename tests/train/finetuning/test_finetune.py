"""Fine-tuning: learning, resuming, early stopping, settings, and losses."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from safetensors.torch import load_file
from torch.nn import functional

from bertsmith import bundle
from bertsmith.bundle import HeadConfig
from bertsmith.errors import RunError, SettingsError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.packed import pack_sequences
from bertsmith.runtime import device
from bertsmith.settings import read_toml
from bertsmith.tasks.classification import compute_losses
from bertsmith.tasks.inputs import TaskMicroBatch
from bertsmith.train.engine import loop
from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.engine.finetuning_run import RESULT_FILE, FinetuneResult
from bertsmith.train.engine.step import take_step
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.finetuning.settings import read_overrides, update_task_settings
from bertsmith.train.finetuning.task_data import resolve_task_settings
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict import predict
from tests.train.conftest import WORDS

#: Model settings without dropout, with which a model of width 32 learns more reliably.
NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
#: Settings with a high learning rate, which small models need.
FAST_SETTINGS: dict[str, dict[str, Any]] = {
    "optim": {"lr": 3e-3},
    "run": {"threads": 1},
    "task": {"batch_size": 8},
}


def write_table(path: Path, kind: str, count: int = 160, seed: int = 0) -> Path:
    """Write texts whose label says which of the first two WORDS they contain.

    Args:
        path: File to write, as JSON lines.
        kind: Kind of the task, which determines the kind of the label.
        count: Number of texts.
        seed: Seed of the random generator.
    """
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        text = [str(word) for word in rng.choice(WORDS[4:], rng.integers(2, 9))]
        has_a, has_b = rng.integers(0, 2, 2)
        text += [WORDS[0]] * int(has_a) + [WORDS[1]] * int(has_b)
        labels = [name for name, is_present in (("a", has_a), ("b", has_b)) if is_present]
        label = {
            "single": "yes" if has_a else "no",
            "multi": labels,
            "regression": float(has_a + 2 * has_b),
        }[kind]
        lines.append(json.dumps({"text": " ".join(rng.permutation(text)), "label": label}))
    path.write_text("\n".join(lines) + "\n")
    return path


def finetune_table(
    start_model: Path, out: Path, data: Path, kind: str, **changes: Any
) -> FinetuneResult:
    """Fine-tune a classifier on ``data`` with fast settings; keywords are tables of settings."""
    values = {**FAST_SETTINGS, "schedule": {"epochs": 6.0}, **changes}
    values["task"] = {**FAST_SETTINGS["task"], "kind": kind, **changes.get("task", {})}
    return finetune("classify", start_model, out, data=data, values=values)


@pytest.mark.parametrize(
    ("kind", "min_score"), [("single", 0.95), ("multi", 0.9), ("regression", 0.9)]
)
def test_each_kind_is_learned(
    start_model: Path, tmp_path: Path, kind: str, min_score: float
) -> None:
    """Held-out scores are high, and ``evaluate`` and ``predict`` agree on a new file."""
    data = write_table(tmp_path / "train.jsonl", kind, 320)
    result = finetune_table(
        start_model, tmp_path / "run", data, kind, model=NO_DROPOUT, schedule={"epochs": 10.0}
    )
    assert result.metrics[result.metric_names[0]] >= min_score
    assert result.metrics["examples"] == 320 // 10, "a tenth of the texts is held out"
    new_file = write_table(tmp_path / "new.jsonl", kind, 60, seed=9)
    assert result.model is not None
    assert evaluate(result.model, new_file)[result.metric_names[0]] >= min_score - 0.1
    with pytest.raises(SettingsError, match=r"reduce task\.max_seqlen"):
        evaluate(result.model, new_file, changes={"max_seqlen": 5000})
    rows = [json.loads(line) for line in new_file.read_text().splitlines()]
    predictions = predict(tmp_path / "run", [row["text"] for row in rows])
    if kind == "single":
        is_correct = [
            prediction.labels[0][0] == row["label"]
            for prediction, row in zip(predictions, rows, strict=True)
        ]
        accuracy = evaluate(result.model, new_file)["accuracy"]
        assert np.mean(is_correct) == pytest.approx(accuracy)
        for prediction in predictions:
            assert sum(probability for _, probability in prediction.labels) == pytest.approx(1)


def test_interrupted_run_ends_with_the_same_weights(
    start_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run interrupted in the middle of an epoch ends with the same weights and metrics."""
    data = write_table(tmp_path / "train.jsonl", "single", 60)
    changes: dict[str, Any] = {"schedule": {"epochs": 3.0}, "checkpoint": {"steps": 4}}
    expected = finetune_table(start_model, tmp_path / "uninterrupted", data, "single", **changes)
    num_steps = 0

    def interrupt_step_11(*arguments: Any, **keywords: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 11:
            raise KeyboardInterrupt
        return take_step(*arguments, **keywords)

    monkeypatch.setattr(loop, "take_step", interrupt_step_11)
    with pytest.raises(KeyboardInterrupt):
        finetune_table(start_model, tmp_path / "interrupted", data, "single", **changes)
    assert num_steps == 11
    assert not (tmp_path / "interrupted" / "model").exists()
    monkeypatch.undo()
    resumed = finetune_table(start_model, tmp_path / "interrupted", data, "single", **changes)
    assert expected.model is not None
    assert resumed.model is not None
    weights = load_file(resumed.model / bundle.WEIGHTS_FILE)
    for name, tensor in load_file(expected.model / bundle.WEIGHTS_FILE).items():
        assert torch.equal(tensor, weights[name]), name
    assert resumed.metrics == expected.metrics


def test_run_without_its_device_moves(start_model: Path, tmp_path: Path) -> None:
    """Without the device of a run, an unfinished run moves; a finished one needs none."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    changes: dict[str, Any] = {"schedule": {"steps": 3}}
    run = tmp_path / "run"
    result = finetune_table(start_model, run, data, "single", **changes)
    path = run / "settings.toml"
    gpu_settings = re.sub('device = ".*"', 'device = "cuda:7"', path.read_text())
    path.write_text(gpu_settings)
    assert finetune_table(start_model, run, data, "single", **changes) == result
    assert path.read_text() == gpu_settings
    (run / RESULT_FILE).unlink()
    assert finetune_table(start_model, run, data, "single", **changes).step == 3
    assert read_toml(path)["run"]["device"] in ("cpu", "cuda")


def test_finished_run_is_not_repeated(start_model: Path, tmp_path: Path) -> None:
    """Repeating the call returns the same result; with changed data files it is an error."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    schedule = {"steps": 3}
    result = finetune_table(start_model, tmp_path / "run", data, "single", schedule=schedule)
    log = tmp_path / "run" / "metrics.jsonl"
    modification_time = log.stat().st_mtime_ns
    assert (
        finetune_table(start_model, tmp_path / "run", data, "single", schedule=schedule) == result
    )
    assert log.stat().st_mtime_ns == modification_time
    write_table(tmp_path / "train.jsonl", "single", 40, seed=5)
    with pytest.raises(RunError, match=r"the data files have changed .*train\.jsonl"):
        finetune_table(start_model, tmp_path / "run", data, "single", schedule=schedule)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", '{"step": 3}', '{"metrics": 3}', "\xff"])
def test_damaged_result_is_an_error(start_model: Path, tmp_path: Path, content: str) -> None:
    """A damaged result.json is an error; if it is removed, the same call writes it again."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    schedule = {"steps": 1}
    result = finetune_table(start_model, tmp_path / "run", data, "single", schedule=schedule)
    path = tmp_path / "run" / "result.json"
    original = path.read_bytes()
    path.write_text(content, encoding="latin-1")
    with pytest.raises(RunError, match=rf"{path}: damaged; remove this file"):
        finetune_table(start_model, tmp_path / "run", data, "single", schedule=schedule)
    path.unlink()
    assert (
        finetune_table(start_model, tmp_path / "run", data, "single", schedule=schedule) == result
    )
    assert path.read_bytes() == original


def test_early_stopping_keeps_the_best_weights(start_model: Path, tmp_path: Path) -> None:
    """If no epoch improves on the first one, the run stops early with the weights of that epoch."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    run = tmp_path / "run"
    # With such a small learning rate, no epoch improves on the first one.
    changes: dict[str, Any] = {
        "optim": {"lr": 1e-12},
        "schedule": {"epochs": 9.0},
        "run": {"threads": 1, "patience": 2},
    }
    result = finetune_table(start_model, run, data, "single", **changes)
    steps_per_epoch = result.steps // 9
    assert result.step == (1 + 2) * steps_per_epoch, "the first epoch and two without improvement"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    first_line = json.loads(next(line for line in lines if '"heldout"' in line))
    first_metrics = {
        name: value for name, value in first_line.items() if name not in ("step", "kind")
    }
    assert result.metrics == first_metrics
    # The finished run needs no optimizer state to write its model again.
    assert not list(run.rglob("moments.safetensors"))
    weights = (run / "model" / bundle.WEIGHTS_FILE).read_bytes()
    shutil.rmtree(run / "model")
    repeated = finetune_table(start_model, run, data, "single", **changes)
    assert repeated.metrics == result.metrics
    assert (run / "model" / bundle.WEIGHTS_FILE).read_bytes() == weights


def test_best_weights_are_evaluated_again_without_their_metrics(
    start_model: Path, tmp_path: Path
) -> None:
    """A run whose metrics log was removed finishes with the same metrics and weights."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    run = tmp_path / "run"
    changes: dict[str, Any] = {
        "optim": {"lr": 1e-12},
        "schedule": {"epochs": 2.0},
        "run": {"threads": 1, "model_selection": "best"},
    }
    result = finetune_table(start_model, run, data, "single", **changes)
    weights = (run / "model" / bundle.WEIGHTS_FILE).read_bytes()
    shutil.rmtree(run / "model")
    for name in (RESULT_FILE, "metrics.jsonl"):
        (run / name).unlink()
    repeated = finetune_table(start_model, run, data, "single", **changes)
    assert repeated.metrics == pytest.approx(result.metrics)
    assert (run / "model" / bundle.WEIGHTS_FILE).read_bytes() == weights


def test_evaluation_only_at_the_end(start_model: Path, tmp_path: Path) -> None:
    """With eval_strategy "end", the run evaluates once, with the same final metrics.

    The settings model_selection "best" and patience are errors then.
    """
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    results = [
        finetune_table(
            start_model,
            tmp_path / setting,
            data,
            "single",
            schedule={"epochs": 3.0},
            run={"threads": 1, "eval_strategy": setting},
        )
        for setting in ("epoch", "end")
    ]
    assert results[0].metrics == results[1].metrics
    logs = [(result.run / "metrics.jsonl").read_text() for result in results]
    assert [log.count('"heldout"') for log in logs] == [3, 1]
    for name, value in (("model_selection", "best"), ("patience", 1)):
        with pytest.raises(SettingsError, match=f"{name}.* needs an evaluation after each epoch"):
            finetune_table(
                start_model,
                tmp_path / name,
                data,
                "single",
                run={"eval_strategy": "end", name: value},
            )
        assert not (tmp_path / name).exists()


def test_defaults_suit_the_width_and_small_files(start_model: Path, tmp_path: Path) -> None:
    """The defaults are 3e-4 for a narrow model, 3 epochs, at least 100 steps and batch size 32.

    A short epoch does not end with a checkpoint.
    """
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    values = {"optim": {"weight_decay": 0.0}, "schedule": {}, "run": {"threads": 1}}
    result = finetune("classify", start_model, tmp_path / "run", data=data, values=values)
    settings = read_toml(tmp_path / "run" / "settings.toml")
    assert (settings["optim"]["lr"], settings["optim"]["weight_decay"]) == (3e-4, 0.0)
    assert (settings["schedule"]["epochs"], settings["task"]["batch_size"]) == (3.0, 32)
    # The 36 texts that are not held out make two batches per epoch, so three epochs are six steps.
    assert result.steps == 100
    # A checkpoint every 10 steps instead of every 2, in addition to the best one.
    steps = [step for step, _ in list_checkpoints(result.run)]
    assert steps[-2:] == [90, 100]


def test_resuming_needs_the_same_columns(start_model: Path, tmp_path: Path) -> None:
    """Resuming a run without task.pair_column is an error if the run was started with it."""
    rows = [{"text": f"w {n}", "b": "w", "label": n % 2} for n in range(20)]
    data = tmp_path / "t.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    schedule = {"steps": 1}
    finetune_table(
        start_model, tmp_path / "run", data, "single", task={"pair_column": "b"}, schedule=schedule
    )
    with pytest.raises(RunError, match=r"task\.pair_column: 'b' in the run, None now"):
        finetune_table(start_model, tmp_path / "run", data, "single", schedule=schedule)


def test_memory_is_estimated_for_the_lengths_of_the_texts(
    start_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate for a batch has the mean length of the texts instead of the maximum length."""
    batch_tokens: list[int] = []
    monkeypatch.setattr(device, "check_memory", lambda *values: batch_tokens.append(values[2]))
    # Each text has 2 to 10 words, [CLS] and [SEP].
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    finetune_table(start_model, tmp_path / "run", data, "single", schedule={"steps": 1})
    assert 8 * 4 < batch_tokens[0] < 8 * 12


def test_subset_settings_need_a_size(start_model: Path, tmp_path: Path) -> None:
    """The seed or the kind of a subset of the training data is an error without its size."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    settings: list[dict[str, Any]] = [{"train_subset_seed": 3}, {"train_subset": "first"}]
    for task in settings:
        with pytest.raises(SettingsError, match=f"task.{next(iter(task))} has no effect"):
            finetune_table(start_model, tmp_path / "run", data, "single", task=task)
    assert not (tmp_path / "run").exists()


def test_steps_and_epochs_exclude_each_other(start_model: Path, tmp_path: Path) -> None:
    """Steps on the command line and epochs in the settings file are an error."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    (tmp_path / "s.toml").write_text("[schedule]\nepochs = 5.0\n")
    with pytest.raises(SettingsError, match=r"schedule\.steps is 2 and schedule\.epochs is 5\.0"):
        finetune(
            "classify",
            start_model,
            tmp_path / "run",
            data=data,
            config=tmp_path / "s.toml",
            assignments=["schedule.steps=2"],
        )
    assert not (tmp_path / "run").exists()


def test_settings_of_a_run_are_a_settings_file(start_model: Path, tmp_path: Path) -> None:
    """``config=RUN/settings.toml`` repeats a run, and can also be used with other data."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    first = finetune_table(
        start_model,
        tmp_path / "first",
        data,
        "single",
        schedule={"epochs": 1.0},
        task={"class_weights": "balanced"},
    )
    config = tmp_path / "first" / "settings.toml"
    second = finetune("classify", start_model, tmp_path / "second", data=data, config=config)
    assert read_toml(config) == read_toml(tmp_path / "second" / "settings.toml")
    assert second.metrics == first.metrics
    other = write_table(tmp_path / "other.jsonl", "single", 80)
    other.write_text(other.read_text().replace("yes", "true").replace('"no"', '"false"'))
    for number, assignments in enumerate(([], ["schedule.steps=3"])):
        run = tmp_path / f"other-{number}"
        result = finetune(
            "classify", start_model, run, data=other, config=config, assignments=assignments
        )
        # One epoch has 72 texts in batches of 8.
        assert result.steps == (3 if assignments else 72 // 8)
        # The interval of checkpoints is an epoch of these data.
        assert "steps" not in read_toml(run / "settings.toml")["checkpoint"]
        task = read_toml(run / "settings.toml")["task"]
        assert (task["labels"], task["train_file"]) == (["false", "true"], str(other))
    with pytest.raises(SettingsError, match="settings of a run on the task 'classify', not on"):
        finetune("tag", start_model, tmp_path / "third", data=data, config=config)
    config.write_text('[run]\nstore_id = "1a2b"\n')
    with pytest.raises(SettingsError, match="settings of a pre-training run"):
        finetune("classify", start_model, tmp_path / "third", data=data, config=config)


@pytest.mark.parametrize("task", ["classify", "sst-2"])
def test_validation_file_belongs_to_the_training_data(tmp_path: Path, task: str) -> None:
    """With other training data, the validation files of the run in ``config`` are not used."""
    is_public = task == "sst-2"
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        for name in ("train.tsv", "dev.tsv", "own.tsv"):
            (folder / name).touch()
    first, second = (folder if is_public else folder / "train.tsv" for folder in folders)
    validation_files = {"dev": str(folders[0] / "own.tsv")}
    stored_task = {
        "name": task, "fingerprint": "0", "train_file": str(folders[0] / "train.tsv"),
        "validation_files": validation_files, "batch_size": 7,
    }  # fmt: skip
    config = tmp_path / "settings.toml"
    config.write_text(tomli_w.dumps({"task": stored_task}))

    def read_task_overrides(data: Path, values: dict[str, Any] | None = None) -> dict[str, Any]:
        overrides: dict[str, Any] = read_overrides(task, data, config, values, [])["task"]
        return overrides

    assert read_task_overrides(first)["validation_files"] == validation_files
    overrides = read_task_overrides(second)
    assert "validation_files" not in overrides
    assert overrides["batch_size"] == 7
    new_file = {"new": str(folders[1] / "own.tsv")}
    overrides = read_task_overrides(second, {"task": {"validation_files": new_file}})
    assert overrides["validation_files"] == new_file


@pytest.mark.parametrize(
    "task", ["classify", "tag", "answer", "choose", "rte", "squad", "conll2003"]
)
def test_stored_task_settings_are_read_back(start_model: Path, tmp_path: Path, task: str) -> None:
    """A new run with the stored settings of another run resolves to the same settings."""
    settings = resolve_task_settings(task, start_model, tmp_path, {"task": {"skip_invalid": True}})
    config = tmp_path / "settings.toml"
    config.write_text(update_task_settings(settings, {"fingerprint": "1a2b"}).to_toml())
    overrides = read_overrides(task, tmp_path, config, None, ())
    assert resolve_task_settings(task, start_model, tmp_path, overrides) == settings


def test_micro_batches_with_class_weights_equal_one_batch(
    start_model: Path, tmp_path: Path
) -> None:
    """With class weights, batches split into micro-batches give the same loss as unsplit ones."""
    data = write_table(tmp_path / "train.jsonl", "single", 60)
    task = {"class_weights": "balanced", "batch_size": 16}
    losses = []
    for micro_batch_tokens in (64, 4096):
        run = {"threads": 1, "micro_batch_tokens": micro_batch_tokens, "precision": "fp32"}
        result = finetune_table(
            start_model,
            tmp_path / str(micro_batch_tokens),
            data,
            "single",
            task=task,
            model=NO_DROPOUT,
            schedule={"steps": 3},
            run=run,
        )
        losses.append(result.metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_frozen_layers_do_not_change(start_model: Path, tmp_path: Path) -> None:
    """With run.num_frozen_layers=1, the embeddings and the first layer do not change."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    result = finetune_table(
        start_model, tmp_path / "run", data, "single", run={"threads": 1, "num_frozen_layers": 1}
    )
    assert result.model is not None
    old_weights = load_file(start_model / bundle.WEIGHTS_FILE)
    for name, tensor in load_file(result.model / bundle.WEIGHTS_FILE).items():
        if name.startswith(("bert.embeddings", "bert.encoder.layer.0.")):
            assert torch.equal(old_weights[name], tensor), name
        elif name.startswith("bert.encoder.layer.1.") and name.endswith("weight"):
            assert not torch.equal(old_weights[name], tensor), name


@pytest.mark.parametrize(
    "changes",
    [{"run": {"threads": 1, "num_frozen_layers": 2}}, {"features": {"layers": "last", "width": 8}}],
    ids=["num_frozen_layers", "features"],
)
def test_statistics_of_a_frozen_batch_norm_do_not_change(
    start_model: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The running statistics of frozen layers do not change either."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    start = bundle.load(start_model)
    config = start.config.model_copy(update={"norm": "batch"})
    batch_norm_model = tmp_path / "start"
    bundle.save(batch_norm_model, BertForPreTraining(config), start.tokenizer, {})
    result = finetune_table(batch_norm_model, tmp_path / "run", data, "single", **changes)
    assert result.model is not None
    old_weights = load_file(batch_norm_model / bundle.WEIGHTS_FILE)
    new_weights = load_file(result.model / bundle.WEIGHTS_FILE)
    names = [name for name in old_weights if name.endswith(("running_mean", "running_var"))]
    assert names
    for name in names:
        assert torch.equal(old_weights[name], new_weights[name]), name


def test_losses_equal_those_of_transformers() -> None:
    """The mean losses of the three kinds equal the loss functions that transformers uses."""
    torch.manual_seed(0)
    logits = torch.randn(7, 3)
    class_ids = torch.randint(3, (7,))
    label_vectors = torch.randint(2, (7, 3)).float()
    scores = torch.randn(7)
    bce = functional.binary_cross_entropy_with_logits
    labels = ("a", "b", "c")
    for head, targets, expected in (
        (HeadConfig("single", labels), class_ids, functional.cross_entropy(logits, class_ids)),
        (HeadConfig("multi", labels), label_vectors, bce(logits, label_vectors)),
        (HeadConfig("regression"), scores, functional.mse_loss(logits[:, 0], scores)),
    ):
        # The losses do not depend on the model inputs.
        packed = pack_sequences([([1], [0])])
        micro_batch = TaskMicroBatch(packed, None, targets, torch.ones(7), [1] * 7)
        torch.testing.assert_close(compute_losses(logits, micro_batch, head).mean(), expected)
