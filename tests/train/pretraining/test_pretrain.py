"""Pre-training runs of a very small model: output, errors, resuming, continued pre-training."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith import bundle
from bertsmith.data.store import Store
from bertsmith.errors import RunError, SettingsError, StoreError
from bertsmith.runtime import device
from bertsmith.settings import read_toml
from bertsmith.train.engine import probe
from bertsmith.train.engine.checkpoint import (
    CHECKPOINTS_DIR,
    CHECKSUMS_FILE,
    MOMENTS_FILE,
    list_checkpoints,
    load_weights,
)
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.metrics_log import METRICS_FILE, read_metrics
from bertsmith.train.pretraining.estimate import estimate_run
from bertsmith.train.pretraining.objective import PretrainingObjective
from bertsmith.train.pretraining.pretrain import pretrain
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.data.synthetic_corpus import read_files
from tests.train.conftest import (
    SMALL_SETTINGS,
    TrainFunction,
    make_assignments,
    make_store,
)

WEIGHTS = "model/model.safetensors"
BATCH_SIZE = SMALL_SETTINGS["data.batch_size"]
MAX_SEQLEN = SMALL_SETTINGS["data.max_seqlen"]


def test_run_directory_is_complete(finished_run: Path) -> None:
    """A run writes settings, metrics, checkpoints, a loss curve and the model directory."""
    names = {path.name for path in finished_run.iterdir()} - {"curve.png", ".lock"}
    assert names == {"settings.toml", "metrics.jsonl", "checkpoints", "model"}
    lines = read_metrics(finished_run)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 9))
    assert [line["step"] for line in lines if line["kind"] == "heldout"] == [4, 8]
    for line in lines:
        if line["kind"] == "train":
            assert line["loss"] == pytest.approx(line["mlm_loss"] + line["nsp_loss"])
        else:
            assert line["perplexity"] == pytest.approx(math.exp(line["mlm_loss"]))
            assert line["num_sequences"] == SMALL_SETTINGS["run.max_eval_sequences"]
            assert 0 <= line["nsp_accuracy_low"] <= line["nsp_accuracy"]
    settings = read_toml(finished_run / "settings.toml")
    assert (settings["schedule"]["steps"], settings["run"]["threads"]) == (8, 1)
    assert bundle.load(finished_run).info["recipe"] == "fast"


def test_interrupted_start_leaves_no_directory(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is interrupted before its first file is written leaves no directory."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "check_heldout_split", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train()
    assert not (tmp_path / "run").exists()


def test_other_settings_are_rejected(finished_run: Path, store: Path) -> None:
    """Resuming with other settings is an error that lists all differences, and changes no file."""
    files = read_files(finished_run)
    with pytest.raises(RunError) as caught:
        pretrain(store, finished_run, steps=9, assignments=make_assignments(run__seed=4))
    assert "schedule.steps: 8 in the run, 9 now" in str(caught.value)
    assert "run.seed: 0 in the run, 4 now" in str(caught.value)
    assert read_files(finished_run) == files


def test_finished_run_without_its_metrics_log_is_evaluated_again(
    train: TrainFunction, tmp_path: Path
) -> None:
    """The message about a damaged log advises to remove it; the model then keeps its metrics."""
    expected = train(steps=2).heldout
    (tmp_path / "run" / METRICS_FILE).unlink()
    heldout = train(steps=2).heldout
    assert heldout.keys() == expected.keys()
    assert heldout["mlm_loss"] == pytest.approx(expected["mlm_loss"], abs=1e-6)


def test_run_with_a_damaged_checkpoint_ends_with_the_same_weights(
    train: TrainFunction, tmp_path: Path
) -> None:
    """A run whose last checkpoint is damaged resumes from an earlier one, with the same result."""
    settings = {"checkpoint__steps": 4, "run__eval_every": 4, "checkpoint__keep_optimizer": "true"}
    train("intact", steps=8, **settings)
    for name in ("weights.safetensors", "moments.safetensors"):
        shutil.copytree(tmp_path / "intact", tmp_path / name)
        shutil.rmtree(tmp_path / name / "model")
        damaged_file = tmp_path / name / CHECKPOINTS_DIR / "step-8" / name
        content = bytearray(damaged_file.read_bytes())
        content[-1] ^= 1
        damaged_file.write_bytes(content)
        train(name, steps=8, **settings)
        expected = (tmp_path / "intact" / WEIGHTS).read_bytes()
        assert (tmp_path / name / WEIGHTS).read_bytes() == expected


def test_weights_depend_only_on_the_seed(train: TrainFunction, finished_run: Path) -> None:
    """Runs with the same seed have equal weights; a run with another seed has different weights."""
    same = train("same", steps=8, run__eval_every=4)
    other = train("other", steps=8, run__eval_every=4, run__seed=1)
    weights = (finished_run / WEIGHTS).read_bytes()
    assert (same.run / WEIGHTS).read_bytes() == weights
    assert (other.run / WEIGHTS).read_bytes() != weights


def test_diverged_run_keeps_its_last_checkpoint(train: TrainFunction, tmp_path: Path) -> None:
    """A run that diverges ends with a RunError and keeps its last checkpoint."""
    with pytest.raises(RunError, match=r"step \d+: the loss is .*examples \d+ to \d+ of the phase"):
        train(steps=30, optim__lr=1e30, checkpoint__steps=1, run__eval_every=30)
    checkpoints = list_checkpoints(tmp_path / "run")
    assert checkpoints
    logged_steps = [line["step"] for line in read_metrics(tmp_path / "run")]
    assert logged_steps[-1] == checkpoints[-1][0]
    assert not (tmp_path / "run" / "model").exists()


def test_run_resumes_after_a_nan_loss(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A NaN loss in step 4 stops the run after checkpoint 3, whose weights are finite.

    Without the NaN, the same command resumes the run, which ends like an uninterrupted one.
    """
    train("uninterrupted", steps=6, checkpoint__steps=1)
    compute_losses = PretrainingObjective.compute_losses
    num_calls = 0

    def return_nan_in_step_4(
        self: Any, micro_batch: Any, micro_batches: Any, dropout_seed: Any
    ) -> Any:
        nonlocal num_calls
        num_calls += 1
        losses = compute_losses(self, micro_batch, micro_batches, dropout_seed)
        if num_calls == 4:
            return {name: loss * math.nan for name, loss in losses.items()}
        return losses

    monkeypatch.setattr(PretrainingObjective, "compute_losses", return_nan_in_step_4)
    with pytest.raises(RunError, match=r"step 4: the loss is nan.*examples 12 to 15.*length 32"):
        train(steps=6, checkpoint__steps=1)
    step, directory = list_checkpoints(tmp_path / "run")[-1]
    assert step == 3
    weights = load_file(directory / "weights.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values())
    train(steps=6, checkpoint__steps=1)
    expected = (tmp_path / "uninterrupted" / WEIGHTS).read_bytes()
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == expected


def test_estimate_writes_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An estimate has steps, tokens, memory and time, and writes no file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "_MAX_STEPS", 3)
    store_files = read_files(store)
    estimate = estimate_run(store, epochs=2.0, assignments=make_assignments())
    assert read_files(store) == store_files
    assert list(tmp_path.iterdir()) == []
    # The number of steps is rounded up.
    assert 2.0 <= estimate["epochs"] < 2.02
    assert estimate["batch_size"] == BATCH_SIZE
    # Most sequences have nearly the maximum length.
    mean_seqlen = estimate["tokens"] / (BATCH_SIZE * estimate["steps"])
    assert 0.6 * MAX_SEQLEN < mean_seqlen <= MAX_SEQLEN
    assert estimate["memory_bytes"] > 10_000_000
    assert estimate["minutes"] > 0 < estimate["tokens_per_second"]
    json.dumps(estimate)
    # The average, and the other weights while the average is evaluated.
    monkeypatch.setattr(device, "get_peak_memory_bytes", lambda _: 50_000_000)
    options = make_assignments(optim__average_fraction=0.1)
    averaged = estimate_run(store, epochs=2.0, assignments=options)
    assert averaged["memory_bytes"] == 50_000_000 + 2 * 4 * averaged["parameters"]


def test_continued_pretraining_starts_with_all_weights(
    finished_run: Path, store: Path, tmp_path: Path
) -> None:
    """With --from, the encoder and the heads start with the weights of the start model."""
    opened_store = Store.open(store)
    overrides = Overrides(
        data=store, start_from=str(finished_run), assignments=["data.max_seqlen=32"]
    )
    settings = resolve_settings(overrides, opened_store)
    assert settings.model == bundle.load(finished_run).config
    assert settings.schedule.neighbor_bias_steps == 0
    session = Session(settings, opened_store)
    start_weights = bundle.load(finished_run).model.state_dict()
    for name, weight in session.model.state_dict().items():
        assert torch.equal(weight, start_weights[name]), name
    result = pretrain(
        store,
        tmp_path / "continued",
        steps=1,
        start_from=str(finished_run),
        assignments=[
            "data.max_seqlen=32",
            "data.batch_size=4",
            "run.max_eval_sequences=8",
            "optim.lr=1e-12",
            "optim.weight_decay=0",
        ],
    )
    assert result.model is not None
    for name, weight in bundle.load(result.model).model.state_dict().items():
        torch.testing.assert_close(weight, start_weights[name], rtol=0, atol=1e-10)
    assert f"started from `{finished_run.name}`" in (result.model / "README.md").read_text()


def test_published_files_have_no_directories(finished_run: Path) -> None:
    """The files of a model name the texts and the store, but no directory of this machine."""
    model = finished_run / "model"
    info = json.loads((model / "bertsmith.json").read_text())
    assert info["provenance"]["settings"]["run"]["store_path"] == "store"
    for path in model.iterdir():
        assert str(finished_run.parent).encode() not in path.read_bytes(), path


def test_missing_heads_are_newly_initialized(
    finished_run: Path, store: Path, tmp_path: Path
) -> None:
    """Heads that the start model does not have are initialized as in a new model, and logged."""
    start = tmp_path / "start"
    shutil.copytree(bundle.locate_model(finished_run), start)
    state = load_file(start / "model.safetensors")
    encoder = {name: tensor for name, tensor in state.items() if not name.startswith("cls.")}
    save_file(encoder, start / "model.safetensors")
    options: dict[str, Any] = {"data": store, "assignments": ["data.max_seqlen=32"]}
    opened_store = Store.open(store)
    overrides = Overrides(**options, start_from=str(finished_run))
    values = resolve_settings(overrides, opened_store).model_dump()
    values["run"]["start_from"] = None
    new_session = Session(PretrainSettings.parse(values, "here"), opened_store)
    new_weights = new_session.model.state_dict()
    settings = resolve_settings(Overrides(**options, start_from=str(start)), opened_store)
    session = Session(settings, opened_store)
    start_weights = bundle.load(start).model.state_dict()
    for name, weight in session.model.state_dict().items():
        is_head = name.startswith(("mlm.", "nsp.", "pooler.")) and name != "mlm.decoder.weight"
        assert torch.equal(weight, (new_weights if is_head else start_weights)[name]), name
    assert any("mlm.transform.weight" in note for note in session.notes)


def test_mismatched_start_model_is_rejected(
    finished_run: Path, store: Path, tmp_path: Path
) -> None:
    """With --from, another tokenizer, size or width is an error before the run is created."""
    other_store = make_store(tmp_path / "other", num_documents=20, extra_words=("zz",))
    start: dict[str, Any] = {"start_from": str(finished_run), "steps": 1}
    with pytest.raises(StoreError, match="tokenizer"):
        pretrain(other_store, tmp_path / "run", assignments=["data.max_seqlen=32"], **start)
    with pytest.raises(SettingsError, match="are mutually exclusive"):
        pretrain(store, tmp_path / "run", size="tiny", **start)
    with pytest.raises(SettingsError, match=r"model\.width is 32, but the model at .* has 16"):
        pretrain(store, tmp_path / "run", assignments=["model.width=32"], **start)
    assert not (tmp_path / "run").exists()


def test_start_model_may_have_unused_embedding_rows(train: TrainFunction, store: Path) -> None:
    """A start model with more embedding rows than the store has tokens keeps them."""
    # The vocabulary of the store has 66 tokens.
    result = train("first", steps=1, model__vocab_size=72)
    overrides = Overrides(
        data=store, start_from=str(result.model), assignments=["data.max_seqlen=32"]
    )
    settings = resolve_settings(overrides, Store.open(store))
    assert settings.model.vocab_size == 72
    Session(settings, Store.open(store))


def test_run_with_two_phases_can_be_resumed(train: TrainFunction, tmp_path: Path) -> None:
    """The second phase has longer sequences; a run can be resumed in either phase."""
    arguments: dict[str, Any] = {
        "steps": 8,
        "schedule__phase2_max_seqlen": 64,
        "schedule__phase2_fraction": 0.25,
        "checkpoint__steps": 1,
        "checkpoint__keep": 9,
        "checkpoint__keep_optimizer": "true",
    }
    train("uninterrupted", **arguments)
    uninterrupted, run = tmp_path / "uninterrupted", tmp_path / "run"
    settings = PretrainSettings.parse(read_toml(uninterrupted / "settings.toml"), "here")
    session = Session(settings, Store.open(settings.run.store_path))
    objective = session.build_objective(StepDuration(8))
    max_lengths = [
        max(micro_batch.packed.max_seqlen for micro_batch in micro_batches)
        for micro_batches in objective.iter_batches(0)
    ]
    assert len(max_lengths) == 8
    # The second phase is the last quarter of the run.
    assert max(max_lengths[:6]) <= 32 < min(max_lengths[6:]) <= 64
    shutil.copytree(uninterrupted, run)
    for last_step in (3, 6, 7):
        shutil.rmtree(run / "model")
        for step, directory in list_checkpoints(run):
            if step > last_step:
                shutil.rmtree(directory)
        train("run", **arguments)
        for name in (WEIGHTS, f"{CHECKPOINTS_DIR}/step-8/moments.safetensors"):
            assert (run / name).read_bytes() == (uninterrupted / name).read_bytes()


def test_model_without_nsp_has_no_nsp_head(train: TrainFunction) -> None:
    """With data.nsp=false, the model has no NSP head, and the log has no NSP metrics."""
    result = train(steps=2, data__nsp="false")
    assert result.model is not None
    assert bundle.load(result.model).model.nsp is None
    assert not [key for line in read_metrics(result.run) for key in line if "nsp" in key]


def test_too_small_corpus_is_rejected(train: TrainFunction, tmp_path: Path) -> None:
    """A corpus without held-out text or sentence pairs is a StoreError before training."""
    store = make_store(tmp_path / "small", num_documents=1, max_sentences=3)
    with pytest.raises(StoreError, match=r"document|example"):
        train(data=store, steps=2)
    # Without stored settings, the same run directory can be used with another store.
    assert not (tmp_path / "run" / "settings.toml").exists()


@pytest.mark.parametrize("num_documents", [1, 3])
def test_few_documents_are_enough(train: TrainFunction, tmp_path: Path, num_documents: int) -> None:
    """A store with one long document or three short ones is enough for training."""
    max_sentences = 200 if num_documents == 1 else 12
    store = make_store(tmp_path / "small", num_documents=num_documents, max_sentences=max_sentences)
    assert Store.open(store).manifest.splits["heldout"].documents >= 2
    assert train(data=store, steps=2).heldout["nsp_loss"] > 0


def test_damaged_store_is_rejected(train: TrainFunction, store: Path, tmp_path: Path) -> None:
    """A new run verifies the checksums of its store before the first step."""
    shutil.copytree(store, tmp_path / "store")
    ids_file = tmp_path / "store" / "train.ids"
    ids_file.write_bytes(b"\6" + ids_file.read_bytes()[1:])
    with pytest.raises(StoreError, match=r"train\.ids: the file is damaged"):
        train(data=tmp_path / "store", steps=2)
    assert not (tmp_path / "run" / "settings.toml").exists()


def test_only_one_of_steps_epochs_and_minutes_is_allowed(train: TrainFunction) -> None:
    """Setting both steps and minutes is an error, and so is setting one of the three to zero."""
    with pytest.raises(RunError, match=r"only one of --steps, --minutes"):
        train(steps=2, minutes=1.0)
    for name, zero in (("steps", 0), ("epochs", 0.0), ("minutes", 0.0)):
        with pytest.raises(SettingsError, match=re.escape(f"schedule.{name}: Input should be")):
            train(**{name: zero})


def test_epochs_are_passes_over_the_examples(train: TrainFunction, store: Path) -> None:
    """The number of steps is the number of examples in the epochs divided by the batch size."""
    settings = resolve_settings(
        Overrides(data=store, assignments=make_assignments()), Store.open(store)
    )
    num_examples = Session(settings, Store.open(store)).count_epoch_examples(MAX_SEQLEN)
    assert train(epochs=0.02).steps == math.ceil(0.02 * num_examples / BATCH_SIZE)


def test_resumed_run_uses_the_stored_number_of_threads(
    train: TrainFunction, tmp_path: Path
) -> None:
    """The number of threads is stored and set again when the run is resumed."""
    previous = torch.get_num_threads()
    try:
        train(steps=1, run__threads=2)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        shutil.rmtree(tmp_path / "run" / "model")
        train(steps=1, run__threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(previous)


@pytest.mark.parametrize("device", ["gpu", "tpu", "cuda:x", ""])
def test_unknown_device_is_rejected(train: TrainFunction, device: str) -> None:
    """An unknown device is a SettingsError that lists the known devices."""
    with pytest.raises(SettingsError, match="auto, cpu, cuda"):
        train(steps=1, run__device=f'"{device}"')


def test_pickled_checkpoint_is_rejected(finished_run: Path, tmp_path: Path) -> None:
    """A checkpoint file written by torch.save is rejected without unpickling it."""
    step, directory = list_checkpoints(finished_run)[-1]
    copied = tmp_path / "run" / CHECKPOINTS_DIR / directory.name
    shutil.copytree(directory, copied)
    (copied / CHECKSUMS_FILE).unlink()
    torch.save({"weight": torch.zeros(1)}, copied / "weights.safetensors")
    model = bundle.load(finished_run).model
    with pytest.raises(RunError, match=f"step-{step}"):
        load_weights(copied, model)
    save_file({"weight": torch.zeros(1)}, copied / "weights.safetensors")
    with pytest.raises(RunError, match="cannot be read"):
        load_weights(copied, model)


def test_finished_run_has_no_optimizer_state(train: TrainFunction, tmp_path: Path) -> None:
    """A finished run keeps the optimizer state only with checkpoint.keep_optimizer.

    The setting is stored in the run: only repeating the command with the value false removes the
    optimizer state.
    """
    train("small", steps=4, checkpoint__steps=2)
    train("large", steps=4, checkpoint__steps=2, checkpoint__keep_optimizer="true")
    for run, optimizer_files in (("small", set()), ("large", {MOMENTS_FILE})):
        for step, directory in list_checkpoints(tmp_path / run):
            assert {path.name for path in directory.iterdir()} == {
                "weights.safetensors",
                "state.json",
                CHECKSUMS_FILE,
                *optimizer_files,
            }, step
    weights = (tmp_path / "large" / WEIGHTS).read_bytes()
    train("large", steps=4, checkpoint__steps=2)
    assert len(list((tmp_path / "large").rglob(MOMENTS_FILE))) == 2
    train("large", steps=4, checkpoint__steps=2, checkpoint__keep_optimizer="false")
    assert not list((tmp_path / "large").rglob(MOMENTS_FILE))
    # A missing model directory is written again without optimizer state.
    shutil.rmtree(tmp_path / "large" / "model")
    train("large", steps=4, checkpoint__steps=2)
    assert (tmp_path / "large" / WEIGHTS).read_bytes() == weights


def test_optimizer_state_is_kept_until_the_model_is_written(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If writing the model fails, the checkpoints keep the optimizer state."""

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bundle, "save", fail)
        with pytest.raises(OSError, match="No space"):
            train(steps=4, checkpoint__steps=2)
    assert len(list((tmp_path / "run").rglob(MOMENTS_FILE))) == 2
    train(steps=4, checkpoint__steps=2)
    assert not list((tmp_path / "run").rglob(MOMENTS_FILE))


def test_finished_run_cannot_be_extended(train: TrainFunction, tmp_path: Path) -> None:
    """More steps in the settings file of a finished run are an error with two solutions."""
    train(steps=4, checkpoint__steps=2)
    settings_file = tmp_path / "run" / "settings.toml"
    settings_file.write_text(settings_file.read_text().replace("steps = 4", "steps = 6"))
    with pytest.raises(RunError) as caught:
        train(steps=6, checkpoint__steps=2)
    for message in (
        "the run was finished (checkpoint.keep_optimizer=true keeps it)",
        "to train its model further, start a new run",
        "to train again from the first",
    ):
        assert message in str(caught.value)
