"""Whole runs of a very small model: what they write, how they end, and how they go on."""

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
from bertsmith.settings import read_toml
from bertsmith.train.engine import probe
from bertsmith.train.engine.budget import TimeBudget
from bertsmith.train.engine.checkpoint import (
    CHECKPOINTS_DIR,
    CHECKSUMS_FILE,
    MOMENTS_FILE,
    list_checkpoints,
    load_weights,
)
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.engine.schedule import Phase
from bertsmith.train.pretraining import pretrain as pretraining
from bertsmith.train.pretraining.objective import PretrainingObjective
from bertsmith.train.pretraining.pretrain import estimate_run, pretrain
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import Train, assignments, make_store


@pytest.fixture(scope="module")
def finished(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of eight steps."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    pretrain(store, out, steps=8, assignments=assignments(run__eval_every=4))
    return out


def _content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_run_leaves_what_the_design_says(finished: Path) -> None:
    """Settings, journal, checkpoints, curve and the model directory; every step in the journal."""
    names = {path.name for path in finished.iterdir()} - {"curve.png", ".lock"}
    assert names == {"settings.toml", "metrics.jsonl", "checkpoints", "model"}
    lines = read_metrics(finished)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 9))
    assert [line["step"] for line in lines if line["kind"] == "heldout"] == [4, 8]
    for line in lines:
        if line["kind"] == "train":
            assert line["loss"] == pytest.approx(line["masked_lm"] + line["next_sentence"])
        else:
            assert line["perplexity"] == pytest.approx(math.exp(line["masked_lm"]))
            assert 0 <= line["next_sentence_low"] <= line["next_sentence_accuracy"]
    stored = read_toml(finished / "settings.toml")
    assert (stored["schedule"]["steps"], stored["run"]["threads"]) == (8, 1)
    assert bundle.load(finished).info["recipe"] == "fast"


def test_a_finished_run_is_left_as_it_is(finished: Path, store: Path) -> None:
    """The same command again trains nothing and writes the same model and journal."""
    before = _content(finished)
    result = pretrain(store, finished, steps=8, assignments=assignments(run__eval_every=4))
    after = _content(finished)
    assert result.outcome.state.step == 8
    for name in before.keys() - {"curve.png"}:
        assert after[name] == before[name], name


def test_another_command_is_refused(finished: Path, store: Path) -> None:
    """Other steps or settings name the differences, and the run stays as it is."""
    before = _content(finished)
    with pytest.raises(RunError) as told:
        pretrain(store, finished, steps=9, assignments=assignments(run__seed=4))
    assert "schedule.steps: 8 there, 9 now" in str(told.value)
    assert "run.seed: 0 there, 4 now" in str(told.value)
    assert _content(finished) == before


def test_a_run_resumes_from_the_checkpoint_before_a_damaged_one(
    train: Train, tmp_path: Path
) -> None:
    """Wherever the newest checkpoint is damaged, the run ends with the undisturbed run's bytes."""
    settings = {"checkpoint__every": 4, "run__eval_every": 4, "checkpoint__keep_optimizer": "true"}
    train("undisturbed", steps=8, **settings)
    name = "model/model.safetensors"
    for file in ("weights.safetensors", "moments.safetensors"):
        shutil.copytree(tmp_path / "undisturbed", tmp_path / file)
        damaged = tmp_path / file / CHECKPOINTS_DIR / "step-8" / file
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        train(file, steps=8, **settings)
        expected = (tmp_path / "undisturbed" / name).read_bytes()
        assert (tmp_path / file / name).read_bytes() == expected


def test_the_seed_decides_and_decides_alone(train: Train, finished: Path) -> None:
    """The same seed gives the same bytes in another folder; another seed gives others."""
    train("same", steps=8, run__eval_every=4)
    train("other", steps=8, run__eval_every=4, run__seed=1)
    here = finished.joinpath("model/model.safetensors").read_bytes()
    result = train("same", steps=8, run__eval_every=4)
    assert result.model is not None
    assert (result.run / "model/model.safetensors").read_bytes() == here
    assert (result.run.parent / "other/model/model.safetensors").read_bytes() != here


def test_lost_numbers_stop_the_run(train: Train, tmp_path: Path) -> None:
    """A learning rate without measure ends in RunError, and the checkpoint before it stands."""
    with pytest.raises(RunError, match=r"step \d+: the loss is .*examples \d+ to \d+ of the phase"):
        train(steps=30, optim__lr=1e30, checkpoint__every=1, run__eval_every=30)
    standing = list_checkpoints(tmp_path / "run")
    assert standing
    assert [line["step"] for line in read_metrics(tmp_path / "run")][-1] == standing[-1][0]
    assert not (tmp_path / "run" / "model").exists()


def test_a_batch_without_a_loss_stops_the_run(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the loss of step 4 is not a number, checkpoint 3 is the last, with finite weights.

    The cause gone, the same command goes on from there to the undisturbed end.
    """
    train("calm", steps=6, checkpoint__every=1)
    real = PretrainingObjective.compute_losses
    calls = 0

    def losses(self: Any, piece: Any, whole: Any, noise: Any) -> Any:
        nonlocal calls
        calls += 1
        terms = real(self, piece, whole, noise)
        return {k: v * math.nan for k, v in terms.items()} if calls == 4 else terms

    monkeypatch.setattr(PretrainingObjective, "losses", losses)
    with pytest.raises(RunError, match=r"step 4: the loss is nan.*examples 12 to 15.*length 32"):
        train(steps=6, checkpoint__every=1)
    last, directory = list_checkpoints(tmp_path / "run")[-1]
    assert last == 3
    assert all(w.isfinite().all() for w in load_file(directory / "weights.safetensors").values())
    train(steps=6, checkpoint__every=1)
    name = "model/model.safetensors"
    assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "calm" / name).read_bytes()


def test_a_plan_writes_nothing(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--plan tells steps, tokens, memory and time, and no file appears or changes anywhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "_STEPS", 3)
    before = _content(store)
    told = estimate_run(store, epochs=2.0, assignments=assignments())
    assert _content(store) == before
    assert list(tmp_path.iterdir()) == []
    # The last step fills up, so it may be a little more.
    assert 2.0 <= told["epochs"] < 2.02
    # Sequences of at most 32 tokens, most of them full.
    assert 20 * 4 * told["steps"] < told["tokens"] <= 32 * 4 * told["steps"]
    assert told["batch"] == 4
    assert told["memory_bytes"] > 10_000_000
    assert told["minutes"] > 0 < told["tokens_per_second"]
    json.dumps(told)


def test_minutes_become_steps_that_a_resume_keeps(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe fixes the steps, they are written down, and a later start does not probe again."""
    cost = probe.Cost(
        step_seconds=0.5,
        evaluation_seconds=0.0,
        peak_memory_bytes=0,
        peak_macs=1e9,
        mfu=0.1,
        tokens_per_step=100.0,
    )
    clock = iter([100.0, 102.0])
    monkeypatch.setattr(pretraining, "perf_counter", lambda: next(clock, 102.0))
    monkeypatch.setattr(Session, "measure", lambda *_: cost)
    monkeypatch.setattr(TimeBudget, "replan", lambda *_: None)
    train(minutes=0.1)
    stored = read_toml(tmp_path / "run" / "settings.toml")["schedule"]
    # Six seconds, less the two that the start took, at half a second a step.
    assert stored["steps"] == 8
    assert stored["minutes"] == 0.1

    def never(*_: Any) -> probe.Cost:
        raise AssertionError("probed again")

    monkeypatch.setattr(Session, "measure", never)
    assert train(minutes=0.1).steps == stored["steps"]
    with pytest.raises(RunError, match=r"schedule\.minutes: 0\.1 there, 0\.2 now"):
        train(minutes=0.2)


def test_a_probe_leaves_no_trace(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose steps were probed ends with the bytes of one that was given them."""
    monkeypatch.setattr(probe, "_STEPS", 3)
    # No machine takes more than five steps in 60 microseconds.
    probed = train("probed", minutes=1e-6, schedule__min_steps=5)
    given = train("given", steps=5)
    assert probed.steps == 5
    assert probed.model is not None
    assert given.model is not None
    name = "model.safetensors"
    assert (probed.model / name).read_bytes() == (given.model / name).read_bytes()


def test_going_on_from_a_model(train: Train, finished: Path, store: Path, tmp_path: Path) -> None:
    """With --from the weights before the first step are the model's, head for head."""
    wishes = Overrides(data=store, start_from=str(finished), assignments=["data.length=32"])
    opened = Store.open(store)
    settings = resolve_settings(wishes, opened)
    assert settings.model == bundle.load(finished).config
    session = Session(settings, opened)
    source = bundle.load(finished).model.state_dict()
    for name, weight in session.model.state_dict().items():
        assert torch.equal(weight, source[name]), name
    small = {"data__length": 32, "data__batch": 4, "run__eval_sequences": 8}
    chosen = [f"{key.replace('__', '.')}={value}" for key, value in small.items()]
    result = pretrain(
        store, tmp_path / "on", steps=1, start_from=str(finished),
        assignments=[*chosen, "optim.lr=1e-12", "optim.weight_decay=0"],
    )  # fmt: skip
    assert result.model is not None
    for name, weight in bundle.load(result.model).model.state_dict().items():
        torch.testing.assert_close(weight, source[name], rtol=0, atol=1e-10)


def test_going_on_from_an_encoder_without_heads(
    finished: Path, store: Path, tmp_path: Path
) -> None:
    """A head that the model lacks starts as that of a new model does, and is named."""
    start = tmp_path / "start"
    shutil.copytree(bundle.locate_model(finished), start)
    state = load_file(start / "model.safetensors")
    kept = {name: own for name, own in state.items() if not name.startswith("cls.")}
    save_file(kept, start / "model.safetensors")
    wishes: dict[str, Any] = {"data": store, "assignments": ["data.length=32"]}
    opened = Store.open(store)
    plain = resolve_settings(Overrides(**wishes, start_from=str(finished)), opened).model_dump()
    plain["run"]["start_from"] = None
    new = Session(PretrainSettings.parse(plain, "here"), opened).model.state_dict()
    session = Session(resolve_settings(Overrides(**wishes, start_from=str(start)), opened), opened)
    source = bundle.load(start).model.state_dict()
    for name, weight in session.model.state_dict().items():
        head = name.startswith(("mlm.", "nsp.", "pooler.")) and name != "mlm.decoder.weight"
        assert torch.equal(weight, (new if head else source)[name]), name
    assert any("drawn anew" in note and "mlm.transform.weight" in note for note in session.notes)


def test_what_does_not_fit_the_model_is_refused(
    train: Train, finished: Path, store: Path, tmp_path: Path
) -> None:
    """Another tokenizer, another size and another width are refused, and nothing is begun."""
    other = make_store(tmp_path / "other", documents=20, extra=("zz",))
    start: dict[str, Any] = {"start_from": str(finished), "steps": 1}
    with pytest.raises(StoreError, match="tokenizer"):
        pretrain(other, tmp_path / "run", assignments=["data.length=32"], **start)
    with pytest.raises(SettingsError, match="exclude each other"):
        pretrain(store, tmp_path / "run", size="tiny", **start)
    with pytest.raises(SettingsError, match=r"model\.width is 32, but the model at .* has 16"):
        pretrain(store, tmp_path / "run", assignments=["model.width=32"], **start)
    assert not (tmp_path / "run").exists()


def test_a_model_with_rows_to_spare_goes_on(train: Train, store: Path, tmp_path: Path) -> None:
    """A model whose word table is larger than the store's vocabulary keeps its size."""
    first = train("first", steps=1, model__vocab_size=72)
    settings = resolve_settings(
        Overrides(data=store, start_from=str(first.model), assignments=["data.length=32"]),
        Store.open(store),
    )
    assert settings.model.vocab_size == 72
    Session(settings, Store.open(store))


def test_two_phases(train: Train, tmp_path: Path) -> None:
    """The last steps have the longer sequences; stopped and resumed in them changes nothing."""
    many: dict[str, Any] = {
        "steps": 8, "schedule__long_length": 64, "schedule__long_share": 0.25,
        "checkpoint__every": 1, "checkpoint__keep": 9, "checkpoint__keep_optimizer": "true",
    }  # fmt: skip
    train("whole", **many)
    settings = PretrainSettings.parse(read_toml(tmp_path / "whole" / "settings.toml"), "here")
    session = Session(settings, Store.open(settings.run.data))
    work = session.build_objective([Phase(0, 6, 32), Phase(6, 8, 64)])
    longest = [max(p.packed.max_seqlen for p in pieces) for pieces in work.iter_batches(0)]
    assert len(longest) == 8
    assert max(longest[:6]) <= 32 < min(longest[6:]) <= 64
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for first in (3, 6, 7):
        for step, directory in list_checkpoints(tmp_path / "run"):
            if step > first:
                shutil.rmtree(directory)
        train("run", **many)
        for name in ("model/model.safetensors", f"{CHECKPOINTS_DIR}/step-8/moments.safetensors"):
            whole = (tmp_path / "whole" / name).read_bytes()
            assert (tmp_path / "run" / name).read_bytes() == whole


def test_without_pairs(train: Train) -> None:
    """Without next sentence the model has no such head, and the journal no such figure."""
    result = train(steps=2, data__nsp="false")
    assert result.model is not None
    assert bundle.load(result.model).model.nsp is None
    assert not [key for line in read_metrics(result.run) for key in line if "next" in key]


def test_a_corpus_too_small_says_so(train: Train, tmp_path: Path) -> None:
    """A corpus that holds out nothing, or gives no pair, is a StoreError and no endless epoch."""
    small = make_store(tmp_path / "small", documents=1, max_sentences=3)
    with pytest.raises(StoreError, match=r"document|example"):
        train(data=small, steps=2)
    assert not (tmp_path / "run" / "settings.toml").exists(), "another store may be given there"


@pytest.mark.parametrize("documents", [1, 3])
def test_few_documents_can_be_learnt_from(train: Train, tmp_path: Path, documents: int) -> None:
    """A store of a single document of 200 sentences, or of three short ones, can be trained on."""
    sentences = 200 if documents == 1 else 12
    small = make_store(tmp_path / "small", documents=documents, max_sentences=sentences)
    assert Store.open(small).manifest.splits["heldout"].documents >= 2
    assert train(data=small, steps=2).heldout["next_sentence"] > 0


def test_damaged_store_is_refused(train: Train, store: Path, tmp_path: Path) -> None:
    """A new run verifies the checksums of its store; a changed id is found before any step."""
    shutil.copytree(store, tmp_path / "store")
    ids = tmp_path / "store" / "train.ids"
    ids.write_bytes(b"\6" + ids.read_bytes()[1:])
    with pytest.raises(StoreError, match=r"train\.ids: the file is damaged"):
        train(data=tmp_path / "store", steps=2)
    assert not (tmp_path / "run" / "settings.toml").exists()


def test_measures_exclude_each_other(train: Train) -> None:
    """Steps and minutes at once are refused; so are zero steps and zero epochs."""
    with pytest.raises(RunError, match=r"only one of --steps, --minutes"):
        train(steps=2, minutes=1.0)
    for name, nothing in (("steps", 0), ("epochs", 0.0), ("minutes", 0.0)):
        with pytest.raises(SettingsError, match=re.escape(f"schedule.{name}: Input should be")):
            train(**{name: nothing})


def test_epochs_walk_the_data(train: Train, store: Path) -> None:
    """One epoch takes as many steps as hold its examples."""
    settings = resolve_settings(Overrides(data=store, assignments=assignments()), Store.open(store))
    examples = Session(settings, Store.open(store)).count_epoch_examples(32)
    told = train(epochs=0.02).steps
    assert told == math.ceil(0.02 * examples / 4)


def test_threads_are_set_and_kept(train: Train, tmp_path: Path) -> None:
    """The threads of the first start are written down, and a resume takes the same number."""
    before = torch.get_num_threads()
    try:
        train(steps=1, run__threads=2)
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
        train(steps=1, run__threads=2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("device", ["gpu", "tpu", "cuda:x", ""])
def test_an_unknown_device_is_told(train: Train, device: str) -> None:
    """A device that PyTorch has not heard of is a RunError that lists the known ones."""
    with pytest.raises(RunError, match="known here: auto, cpu, cuda"):
        train(steps=1, run__device=f'"{device}"')


def test_a_foreign_checkpoint_is_no_pickle(finished: Path, tmp_path: Path) -> None:
    """A checkpoint is read by safetensors alone: what torch.save wrote is refused, not run."""
    step, directory = list_checkpoints(finished)[-1]
    copy = tmp_path / "run" / CHECKPOINTS_DIR / directory.name
    shutil.copytree(directory, copy)
    (copy / CHECKSUMS_FILE).unlink()
    torch.save({"weight": torch.zeros(1)}, copy / "weights.safetensors")
    model = bundle.load(finished).model
    with pytest.raises(RunError, match=f"step-{step}"):
        load_weights(copy, model)
    save_file({"weight": torch.zeros(1)}, copy / "weights.safetensors")
    with pytest.raises(RunError, match="cannot be read"):
        load_weights(copy, model)


def test_a_finished_run_keeps_no_optimizer_state(train: Train, tmp_path: Path) -> None:
    """Checkpoints of a finished run hold weights alone, unless checkpoint.keep_optimizer is set.

    The command that wrote the run decides: given once more without the setting, it removes them.
    """
    train("small", steps=4, checkpoint__every=2)
    train("large", steps=4, checkpoint__every=2, checkpoint__keep_optimizer="true")
    for run, files in (("small", set()), ("large", {MOMENTS_FILE})):
        for step, directory in list_checkpoints(tmp_path / run):
            assert {path.name for path in directory.iterdir()} == {
                "weights.safetensors", "state.json", CHECKSUMS_FILE, *files
            }, step  # fmt: skip
    weights = (tmp_path / "large/model/model.safetensors").read_bytes()
    train("large", steps=4, checkpoint__every=2)
    assert not list((tmp_path / "large").rglob(MOMENTS_FILE))
    # Neither a model that is gone nor a damaged checkpoint before the last needs optimizer state.
    shutil.rmtree(tmp_path / "large" / "model")
    train("large", steps=4, checkpoint__every=2)
    assert (tmp_path / "large/model/model.safetensors").read_bytes() == weights


def test_optimizer_state_is_removed_after_the_model_is_written(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the model cannot be written, the checkpoints keep all that training needs."""

    def failing(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(bundle, "save", failing)
        with pytest.raises(OSError, match="No space"):
            train(steps=4, checkpoint__every=2)
    assert len(list((tmp_path / "run").rglob(MOMENTS_FILE))) == 2
    train(steps=4, checkpoint__every=2)
    assert not list((tmp_path / "run").rglob(MOMENTS_FILE))


def test_a_finished_run_made_longer_by_hand_says_what_to_do(train: Train, tmp_path: Path) -> None:
    """Without optimizer state more steps are refused, and the error names the two ways out."""
    train(steps=4, checkpoint__every=2)
    file = tmp_path / "run" / "settings.toml"
    file.write_text(file.read_text().replace("steps = 4", "steps = 6"))
    with pytest.raises(RunError) as raised:
        train(steps=6, checkpoint__every=2)
    for words in ("a finished run has removed it (checkpoint.keep_optimizer keeps it)",
                  "trained further by a new run", "to train again from the first"):  # fmt: skip
        assert words in str(raised.value)
