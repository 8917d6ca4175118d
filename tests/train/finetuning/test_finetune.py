"""Fine-tuning learns, repeats itself, stops and goes on, once or over seeds and a grid.

These tests never look at what is wrong with data: tests/train/finetuning/test_task_data.py does.
"""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bertsmith import bundle
from bertsmith.bundle import HeadConfig
from bertsmith.errors import RunError, SettingsError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.packed import pack_sequences
from bertsmith.settings import read_toml
from bertsmith.tasks.classification import compute_losses
from bertsmith.tasks.inputs import MicroBatch
from bertsmith.train.engine import loop
from bertsmith.train.engine.step import take_step
from bertsmith.train.finetuning import sweep as several
from bertsmith.train.finetuning.finetune import FinetuneResult, finetune
from bertsmith.train.finetuning.sweep import run_sweep
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict import predict
from tests.model.examples import prime_config
from tests.train.conftest import WORDS, make_tokenizer

#: Without dropout, which a width of 32 can hardly bear, learning hangs less on the draw.
NO_DROPOUT: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
#: Large steps for small models; all else as it stands.
FAST_SETTINGS: dict[str, dict[str, Any]] = {
    "optim": {"lr": 3e-3},
    "run": {"threads": 1},
    "task": {"batch": 8},
}


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the vocabulary of sixty words."""
    words = make_tokenizer()
    torch.manual_seed(0)
    config = prime_config(
        vocab_size=words.vocab_size, width=32, heads=2, feed_forward=61, init_range=0.1
    )
    directory = tmp_path_factory.mktemp("start") / "model"
    bundle.save(directory, BertForPreTraining(config), words, {})
    return directory


def write_table(path: Path, kind: str, count: int = 160, seed: int = 0) -> Path:
    """Write texts whose label is which of two words they hold, or how often, or both."""
    chance = np.random.default_rng(seed)
    lines = []
    for _ in range(count):
        text = [str(word) for word in chance.choice(WORDS[4:], chance.integers(2, 9))]
        first, second = chance.integers(0, 2, 2)
        text += [WORDS[0]] * int(first) + [WORDS[1]] * int(second)
        several = [name for name, has in (("a", first), ("b", second)) if has]
        label = {"single": "yes" if first else "no", "multi": several,
                 "regression": float(first + 2 * second)}[kind]  # fmt: skip
        lines.append(json.dumps({"text": " ".join(chance.permutation(text)), "label": label}))
    path.write_text("\n".join(lines) + "\n")
    return path


def finetune_table(start: Path, out: Path, data: Path, kind: str, **changes: Any) -> FinetuneResult:
    """Fine-tune on ``data`` for some quick steps."""
    values = {**FAST_SETTINGS, "schedule": {"epochs": 6.0}, **changes}
    values["task"] = {**FAST_SETTINGS["task"], "kind": kind, **changes.get("task", {})}
    return finetune("classify", start, out, data=data, values=values)


@pytest.mark.parametrize(("kind", "least"), [("single", 0.95), ("multi", 0.9), ("regression", 0.9)])
def test_each_kind_is_learnt(start: Path, tmp_path: Path, kind: str, least: float) -> None:
    """Held-out scores are near 1, and evaluate and predict say the same of a fresh file."""
    data = write_table(tmp_path / "train.jsonl", kind, 320)
    result = finetune_table(
        start, tmp_path / "run", data, kind, model=NO_DROPOUT, schedule={"epochs": 10.0}
    )
    assert result.figures[result.metrics[0]] >= least
    assert result.figures["examples"] == 32
    fresh = write_table(tmp_path / "fresh.jsonl", kind, 60, seed=9)
    assert result.model is not None
    assert evaluate(result.model, fresh)[result.metrics[0]] >= least - 0.1
    rows = [json.loads(line) for line in fresh.read_text().splitlines()]
    said = predict(tmp_path / "run", [row["text"] for row in rows])
    if kind == "single":
        hits = [answer.labels[0][0] == row["label"] for answer, row in zip(said, rows, strict=True)]
        assert np.mean(hits) == pytest.approx(evaluate(result.model, fresh)["accuracy"])
        assert all(sum(share for _, share in answer.labels) == pytest.approx(1) for answer in said)


def test_a_stopped_run_ends_with_the_same_bytes(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in the middle of an epoch and taken up, weights and journal equal the undisturbed."""
    data = write_table(tmp_path / "train.jsonl", "single", 60)
    changes: dict[str, Any] = {"schedule": {"epochs": 3.0}, "checkpoint": {"every": 4}}
    whole = finetune_table(start, tmp_path / "whole", data, "single", **changes)
    from bertsmith.train.engine import loop

    steps = 0

    def failing(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 11:
            raise KeyboardInterrupt
        return take_step(*arguments, **named)

    monkeypatch.setattr(loop, "take_step", failing)
    with pytest.raises(KeyboardInterrupt):
        finetune_table(start, tmp_path / "cut", data, "single", **changes)
    assert not (tmp_path / "cut" / "model").exists()
    monkeypatch.undo()
    cut = finetune_table(start, tmp_path / "cut", data, "single", **changes)
    assert steps == 11
    assert whole.model is not None
    assert cut.model is not None
    one, two = (load_file(model / bundle.WEIGHTS_FILE) for model in (whole.model, cut.model))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert cut.figures == whole.figures


def test_a_finished_run_is_not_repeated(start: Path, tmp_path: Path) -> None:
    """The same call returns the same result; changed data are refused."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    once = finetune_table(start, tmp_path / "run", data, "single", schedule={"steps": 3})
    written = (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns
    assert finetune_table(start, tmp_path / "run", data, "single", schedule={"steps": 3}) == once
    assert (tmp_path / "run" / "metrics.jsonl").stat().st_mtime_ns == written
    write_table(tmp_path / "train.jsonl", "single", 40, seed=5)
    with pytest.raises(RunError, match=r"the data files have changed .*train\.jsonl"):
        finetune_table(start, tmp_path / "run", data, "single", schedule={"steps": 3})


def test_patience_ends_a_run_early_with_the_best_weights(start: Path, tmp_path: Path) -> None:
    """At a rate of almost nothing no evaluation beats the first; the model is that of the first."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    result = finetune_table(start, tmp_path / "run", data, "single", optim={"lr": 1e-12},
                  schedule={"epochs": 9.0}, run={"threads": 1, "patience": 2})  # fmt: skip
    epoch = result.steps // 9
    assert result.step == 3 * epoch
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first = json.loads(next(line for line in lines if '"heldout"' in line))
    assert result.figures == {k: v for k, v in first.items() if k not in ("step", "kind")}
    # The run is finished, so its checkpoints need no optimizer state to write the model again.
    assert not list((tmp_path / "run").rglob("moments.safetensors"))
    weights = (tmp_path / "run" / "model" / bundle.WEIGHTS_FILE).read_bytes()
    shutil.rmtree(tmp_path / "run" / "model")
    again = finetune_table(start, tmp_path / "run", data, "single", optim={"lr": 1e-12},
                 schedule={"epochs": 9.0}, run={"threads": 1, "patience": 2})  # fmt: skip
    assert again.figures == result.figures
    assert (tmp_path / "run" / "model" / bundle.WEIGHTS_FILE).read_bytes() == weights


def test_scoring_at_the_end_only(start: Path, tmp_path: Path) -> None:
    """The same weights and figures, with nothing scored on the way; a choice among scores fails."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    results = [
        finetune_table(start, tmp_path / when, data, "single", schedule={"epochs": 3.0},
             run={"threads": 1, "evaluate": when})
        for when in ("epoch", "end")
    ]  # fmt: skip
    assert results[0].figures == results[1].figures
    scored = [(own.run / "metrics.jsonl").read_text().count('"heldout"') for own in results]
    assert scored == [3, 1]
    for more, said in (({"choose": "best"}, "choose"), ({"patience": 1}, "patience")):
        with pytest.raises(SettingsError, match=f"{said}.* wants scores on the way"):
            finetune_table(start, tmp_path / said, data, "single", run={"evaluate": "end", **more})
        assert not (tmp_path / said).exists()


def test_several_seeds_keep_the_best(start: Path, tmp_path: Path) -> None:
    """Median and spread over the seeds; the best one's model is the folder's; none is repeated."""
    data = write_table(tmp_path / "train.jsonl", "single", 60)
    values = {**FAST_SETTINGS, "schedule": {"epochs": 2.0}}
    found = run_sweep("classify", start, tmp_path / "all", seeds=3, data=data, values=values)
    (only,) = found.points
    scores = [run.figures["accuracy"] for run in only.runs]
    assert only.metric_over_seeds("accuracy") == (sorted(scores)[1], min(scores), max(scores))
    assert found.best is not None
    assert found.best.figures["accuracy"] == max(scores)
    ours, best = ((path / bundle.WEIGHTS_FILE).read_bytes() for path in
                  (tmp_path / "all" / "model", found.best.run / "model"))  # fmt: skip
    assert ours == best
    losses = {run.figures["loss"] for run in only.runs}
    assert len(losses) == 3
    again = run_sweep("classify", start, tmp_path / "all", seeds=3, data=data, values=values)
    assert again.points == found.points


def test_several_seeds_resume_past_a_damaged_checkpoint(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped in its second run and its newest checkpoint damaged, the result is the same."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    values = {**FAST_SETTINGS, "schedule": {"steps": 6}, "checkpoint": {"every": 2}}
    expected = run_sweep("classify", start, tmp_path / "undisturbed", seeds=2, data=data,
                                values=values)  # fmt: skip
    steps = 0

    def interrupted(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 6 + 5:
            raise KeyboardInterrupt
        return take_step(*arguments, **named)

    out = tmp_path / "interrupted"
    monkeypatch.setattr(loop, "take_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_sweep("classify", start, out, seeds=2, data=data, values=values)
    newest = out / "seed-1" / "checkpoints" / "step-4" / "moments.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"!")
    result = run_sweep("classify", start, out, seeds=2, data=data, values=values)
    assert steps == 6 + 5 + 4, "resumed after step 2"
    for run, other in zip(result.points[0].runs, expected.points[0].runs, strict=True):
        assert (run.run / "model" / bundle.WEIGHTS_FILE).read_bytes() == (
            other.run / "model" / bundle.WEIGHTS_FILE
        ).read_bytes()


def test_a_signal_at_the_end_of_a_run_stops_those_that_follow(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It came too late to stop the first; the second is not begun, and the same call goes on."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    values = {**FAST_SETTINGS, "schedule": {"steps": 2}}
    steps = 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            signal.raise_signal(signal.SIGTERM)
        return take_step(*arguments, **named)

    monkeypatch.setattr(loop, "take_step", counted)
    out = tmp_path / "all"
    found = run_sweep("classify", start, out, seeds=2, data=data, values=values)
    assert found.stopped_run is not None
    assert (found.stopped_run.late, found.model, steps) == (signal.SIGTERM, None, 2)
    found = run_sweep("classify", start, out, seeds=2, data=data, values=values)
    assert (found.stopped_run, found.model, steps) == (None, out / "model", 4)


def test_the_best_by_an_error_is_the_least(start: Path, tmp_path: Path) -> None:
    """Of epochs and of seeds the one with the lowest mean squared error is kept."""
    data = write_table(tmp_path / "train.jsonl", "regression", 40)
    task = {**FAST_SETTINGS["task"], "kind": "regression", "metrics": ["mse", "pearson"]}
    values = {**FAST_SETTINGS, "task": task, "schedule": {"epochs": 3.0},
              "run": {"threads": 1, "choose": "best"}}  # fmt: skip
    found = run_sweep("classify", start, tmp_path / "all", seeds=3, data=data, values=values)
    (only,) = found.points
    errors = [run.figures["mse"] for run in only.runs]
    assert len(set(errors)) == 3
    assert found.best is not None
    assert found.best.figures["mse"] == min(errors)
    for run in only.runs:
        lines = map(json.loads, (run.run / "metrics.jsonl").read_text().splitlines())
        assert run.figures["mse"] == min(one["mse"] for one in lines if one["kind"] == "heldout")


def test_a_seed_without_a_number_is_the_worst(tmp_path: Path) -> None:
    """NaN is above any error and below any other score."""
    runs = [FinetuneResult(tmp_path, None, None, 1, 1, ["mse"], {"mse": error, "f1": error}, {}, 0.0)
            for error in (2.0, float("nan"), 1.0)]  # fmt: skip
    setting = several.GridPoint({}, runs)
    assert setting.metric_over_seeds("mse")[:2] == (2.0, 1.0)
    assert np.isnan(setting.metric_over_seeds("mse")[2])
    assert np.isnan(setting.metric_over_seeds("f1")[1])
    assert setting.metric_over_seeds("f1")[2] == 2.0


def test_several_never_replace_what_stands_there(start: Path, tmp_path: Path) -> None:
    """The model that a run begins with, or another run's, is no place for them."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    with pytest.raises(RunError, match="a model or a single run stands here"):
        run_sweep("classify", start, start.parent, seeds=2, data=data)
    assert (start / bundle.WEIGHTS_FILE).exists()


def test_the_defaults_are_the_papers(start: Path, tmp_path: Path) -> None:
    """3e-5, three epochs, 32 a batch, unless said; another optimizer setting changes no rate."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    values = {"optim": {"weight_decay": 0.0}, "schedule": {}, "run": {"threads": 1}}
    result = finetune("classify", start, tmp_path / "run", data=data, values=values)
    stored = read_toml(tmp_path / "run" / "settings.toml")
    assert (stored["optim"]["lr"], stored["optim"]["weight_decay"]) == (3e-5, 0.0)
    assert (stored["schedule"]["epochs"], stored["task"]["batch"]) == (3.0, 32)
    assert result.steps == 3 * 2


def test_a_resume_needs_the_same_columns(start: Path, tmp_path: Path) -> None:
    """Without --pair, which the first command had, it is refused."""
    lines = [{"text": f"w {n}", "b": "w", "label": n % 2} for n in range(20)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = {"schedule": {"steps": 1}}
    finetune_table(
        start, tmp_path / "run", tmp_path / "t.jsonl", "single", task={"pair": "b"}, **run
    )
    with pytest.raises(RunError, match=r"task\.pair: 'b' there, None now"):
        finetune_table(start, tmp_path / "run", tmp_path / "t.jsonl", "single", **run)


def test_the_grid_has_eighteen_places(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch, rate and epochs of appendix A.3 reach the runs."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    monkeypatch.setattr(several, "GRID", {"task.batch": (4, 8), "optim.lr": (1e-3, 2e-3)})
    values = {"run": FAST_SETTINGS["run"], "schedule": {"epochs": 0.5}}
    found = run_sweep("classify", start, tmp_path / "all", grid=True, data=data, values=values)
    assert [one.hyperparameters for one in found.points] == [
        {"task.batch": batch, "optim.lr": rate} for batch in (4, 8) for rate in (1e-3, 2e-3)
    ]
    stored = read_toml(tmp_path / "all" / "batch-4_lr-0.002_seed-0" / "settings.toml")
    assert (stored["task"]["batch"], stored["optim"]["lr"]) == (4, 2e-3)
    monkeypatch.undo()
    assert np.prod([len(values) for values in several.GRID.values()]) == 18


@pytest.mark.parametrize(
    "said", ["task.batch=4", "optim.lr=0.5", "schedule.epochs=1.0", "schedule.steps=2"]
)
def test_the_grid_refuses_what_it_would_override(start: Path, tmp_path: Path, said: str) -> None:
    """Batch, rate, epochs and steps that were said beside it are an error, and nothing is made."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    with pytest.raises(SettingsError, match=rf"{said.partition('=')[0]} is .*, but the grid sets"):
        run_sweep("classify", start, tmp_path / "all", grid=True, data=data, assignments=[said])
    assert not (tmp_path / "all").exists()


def test_steps_and_epochs_exclude_each_other(start: Path, tmp_path: Path) -> None:
    """One of them would be stored and not obeyed; also where a file says the one."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    (tmp_path / "s.toml").write_text("[schedule]\nepochs = 5.0\n")
    with pytest.raises(SettingsError, match=r"schedule\.steps is 2 and schedule\.epochs is 5\.0"):
        finetune("classify", start, tmp_path / "run", data=data, config=tmp_path / "s.toml",
                 assignments=["schedule.steps=2"])  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_micro_batches_and_weights_equal_the_whole(start: Path, tmp_path: Path) -> None:
    """A batch cut into pieces of 64 tokens ends near the same loss, class weights included."""
    data = write_table(tmp_path / "train.jsonl", "single", 60)
    task = {"class_weights": "balanced", "batch": 16}
    model = {"dropout": 0.0, "attention_dropout": 0.0}
    ends = [
        finetune_table(start, tmp_path / str(tokens), data, "single", task=task, model=model,
             schedule={"steps": 3},
             run={"threads": 1, "micro_batch_tokens": tokens, "precision": "fp32"}).figures["loss"]
        for tokens in (64, 4096)
    ]  # fmt: skip
    assert ends[0] == pytest.approx(ends[1], rel=1e-5)


def test_frozen_layers_stay(start: Path, tmp_path: Path) -> None:
    """Embeddings and the layers from below keep their bytes; the rest moves."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    result = finetune_table(
        start, tmp_path / "run", data, "single", run={"threads": 1, "freeze": 1}
    )
    assert result.model is not None
    before, after = (load_file(path / bundle.WEIGHTS_FILE) for path in (start, result.model))
    for name, value in after.items():
        if name.startswith(("bert.embeddings", "bert.encoder.layer.0.")):
            assert torch.equal(before[name], value), name
        elif name.startswith("bert.encoder.layer.1.") and name.endswith("weight"):
            assert not torch.equal(before[name], value), name


def test_losses_are_the_peers() -> None:
    """Means of the three losses equal those of transformers' loss functions."""
    torch.manual_seed(0)
    logits = torch.randn(7, 3)
    single = torch.randint(3, (7,))
    multi = torch.randint(2, (7, 3)).float()
    number = torch.randn(7)
    f = torch.nn.functional
    for head, targets, wanted in (
        (HeadConfig("single", ("a", "b", "c")), single, f.cross_entropy(logits, single)),
        (
            HeadConfig("multi", ("a", "b", "c")),
            multi,
            f.binary_cross_entropy_with_logits(logits, multi),
        ),
        (HeadConfig("regression"), number, f.mse_loss(logits[:, 0], number)),
    ):
        part = MicroBatch(pack_sequences([([1], [0])]), None, targets, torch.ones(7), [1] * 7)
        torch.testing.assert_close(compute_losses(logits, part, head).mean(), wanted)
