"""Continued pre-training: the start model, its objectives, its network and its weights."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bertsmith.data.store import Split
from bertsmith.data.unigram import count_token_ids
from bertsmith.errors import RunError, SettingsError
from bertsmith.settings import read_toml
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.train.pretraining import session
from bertsmith.train.pretraining.pretrain import write_initial_model
from bertsmith.train.pretraining.resolve import check_pretrain_arguments
from tests.train.conftest import (
    TrainFunction,
    assert_same_weights,
    copy_interrupted_run,
    make_assignments,
)

LEFT_TO_RIGHT: dict[str, Any] = {
    "data__objective": "left-to-right", "data__nsp": "false", "model__attention": "causal",
}  # fmt: skip


def make_start_model(store: Path, folder: Path, **changes: Any) -> str:
    """Write a small model with other settings to ``folder``; return its path."""
    write_initial_model(store, folder, assignments=make_assignments(**changes))
    return str(folder)


def test_empty_names_are_rejected(resolve: Any, tmp_path: Path) -> None:
    """An empty start model, size or recipe, as from an unset shell variable, is no default."""
    config = tmp_path / SETTINGS_FILE
    config.write_text(resolve().to_toml())
    for overrides in (
        {"start_from": ""},
        {"assignments": ["run.start_from="]},
        {"config": config, "start_from": ""},
        {"config": config, "assignments": ["run.start_from="]},
    ):
        with pytest.raises(SettingsError, match=r"--from is empty, .* or leave out --from"):
            resolve(**overrides)
    with pytest.raises(SettingsError, match="unknown --size ''; the sizes are tiny"):
        resolve(size="")
    with pytest.raises(SettingsError, match=r"run\.recipe is ''; expected one of fast, paper"):
        resolve(assignments=["run.recipe="])


def test_sentence_order_model_keeps_its_objective(
    resolve: Any, store: Path, tmp_path: Path
) -> None:
    """Sentence order remains the default of a model trained on it; the user can change it."""
    start = make_start_model(store, tmp_path / "start", data__pair_objective="sop")
    common = ["data.max_seqlen=32"]
    continued = resolve(start_from=start, assignments=common)
    assert (continued.data.nsp, continued.data.pair_objective) == (True, "sop")
    assert continued == resolve(start_from=start, assignments=[*common, "data.pair_objective=sop"])
    other = resolve(start_from=start, assignments=[*common, "data.pair_objective=nsp"])
    assert other.data.pair_objective == "nsp"
    without_pairs = resolve(start_from=start, assignments=[*common, "data.nsp=false"])
    assert (without_pairs.data.nsp, without_pairs.data.pair_objective) == (False, "nsp")


@pytest.mark.parametrize("has_provenance", [True, False])
def test_left_to_right_model_keeps_its_objective(
    resolve: Any, store: Path, tmp_path: Path, has_provenance: bool
) -> None:
    """A left-to-right model is not trained on masked tokens by default."""
    start = make_start_model(store, tmp_path / "start", **LEFT_TO_RIGHT)
    if not has_provenance:
        path = tmp_path / "start" / "bertsmith.json"
        info = json.loads(path.read_text())
        del info["provenance"]
        path.write_text(json.dumps(info))
    common = ["data.max_seqlen=32"]
    continued = resolve(start_from=start, assignments=common)
    assert continued.data.objective == "left-to-right"
    assert (continued.data.masking_rate, continued.data.final_masking_rate) == (0.15, None)
    config = tmp_path / SETTINGS_FILE
    config.write_text(resolve(recipe="paper", assignments=["data.nsp=false"]).to_toml())
    options = ["schedule.phase2_max_seqlen=64"]
    from_run = resolve(start_from=start, config=config, assignments=common + options)
    assert from_run.data.objective == "left-to-right"
    masked = resolve(start_from=start, assignments=[*common, "data.objective=masked"])
    assert (masked.data.objective, masked.data.final_masking_rate) == ("masked", 0.15)


def test_resumed_run_keeps_its_objective(train: TrainFunction, tmp_path: Path) -> None:
    """A run of version 0.2, which ignored the objective of its start model, can be resumed."""
    train("start", steps=1, data__pair_objective="sop")
    options: dict[str, Any] = {"start_from": str(tmp_path / "start")}
    train("run", steps=1, data__pair_objective="nsp", **options)
    assert read_toml(tmp_path / "run" / SETTINGS_FILE)["data"]["pair_objective"] == "nsp"
    assert train("run", steps=1, **options).steps == 1
    assert train("new", steps=1, **options).steps == 1
    assert read_toml(tmp_path / "new" / SETTINGS_FILE)["data"]["pair_objective"] == "sop"


def test_learning_rate_is_half_of_that_from_scratch(
    resolve: Any, store: Path, tmp_path: Path
) -> None:
    """A trained model would first become worse at the learning rate from scratch."""
    start = make_start_model(store, tmp_path / "start", data__nsp="false")
    common = ["data.max_seqlen=32"]
    continued = resolve(start_from=start, assignments=common)
    assert continued.optim.lr == 0.001
    options = [*common, "data.nsp=false", "schedule.phase2_max_seqlen=64"]
    assert resolve(start_from=start, recipe="paper", assignments=options).optim.lr == 0.0001
    scratch = resolve(assignments=common)
    assert scratch.optim.lr == 0.002
    config = tmp_path / SETTINGS_FILE
    config.write_text(scratch.to_toml())
    assert resolve(start_from=start, config=config).optim.lr == 0.001
    config.write_text(continued.to_toml())
    assert resolve(config=config).optim.lr == 0.001


def test_start_model_is_evaluated_before_the_first_step(
    train: TrainFunction, tmp_path: Path
) -> None:
    """A continued run has the held-out loss of its start model, once even if it is interrupted."""
    start = train("start", steps=4)
    assert start.start_heldout == {}
    options: dict[str, Any] = {"start_from": str(tmp_path / "start"), "checkpoint__steps": 2}
    options |= {"checkpoint__keep": 9, "checkpoint__keep_optimizer": "true"}
    continued = train("continued", steps=4, **options)
    assert continued.start_heldout == start.heldout
    assert continued.heldout != start.heldout
    copy_interrupted_run(tmp_path / "continued", tmp_path / "resumed", last_step=2)
    assert train("resumed", steps=4, **options).start_heldout == start.heldout
    steps = [line["step"] for line in read_metrics(tmp_path / "resumed") if "perplexity" in line]
    assert steps.count(0) == 1


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("model.norm=pre", r"model\.norm is 'pre', but the model at .* has 'post'; leave it out"),
        ("model.activation=relu", r"model\.activation is 'relu', but the model at .* has 'gelu'"),
        ("model.positions=sinusoidal", r"model\.positions is 'sinusoidal', but"),
        ("model.norm_eps=0.001", r"model\.norm_eps is 0\.001, but the model at .* has 1e-12"),
        ("model.attention=causal", r"model\.attention is 'causal', but"),
        ("model.init_range=0.5", r"model\.init_range is 0\.5, but"),
    ],
)
def test_network_of_the_start_model_cannot_change(
    resolve: Any, store: Path, tmp_path: Path, assignment: str, message: str
) -> None:
    """Other settings than the dropout rates would break the trained network."""
    start = make_start_model(store, tmp_path / "start")
    common = ["data.max_seqlen=32", "model.dropout=0.3", "data.nsp=false"]
    model = resolve(start_from=start, assignments=common).model
    assert (model.dropout, model.nsp) == (0.3, False)
    with pytest.raises(SettingsError, match=message):
        resolve(start_from=start, assignments=[*common, assignment])


def test_repeated_run_of_several_processes_has_its_own_threads(
    resolve: Any, tmp_path: Path
) -> None:
    """The processes that torchrun starts have one thread each, too few for a single one."""
    config = tmp_path / SETTINGS_FILE
    settings = resolve(assignments=["run.threads=1"])
    config.write_text(settings.to_toml())
    assert resolve(config=config).run.threads == 1
    run = settings.run.model_copy(update={"world_size": 2})
    config.write_text(settings.model_copy(update={"run": run}).to_toml())
    repeated = resolve(config=config)
    assert (repeated.run.threads, repeated.run.world_size) == (None, None)


def test_only_the_main_process_needs_the_run_directory(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other processes of torchrun may run on machines where --out is not writable."""
    out = tmp_path / "file"
    out.touch()
    arguments = (store, out, {"steps": 1}, {"assignments": make_assignments()})
    with pytest.raises(RunError, match="this is a file"):
        check_pretrain_arguments(*arguments)
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    check_pretrain_arguments(*arguments)


def test_tokens_are_counted_only_for_a_new_initialization(
    train: TrainFunction, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counting reads the whole training text, which replaced weights do not need."""
    counted: list[int] = []

    def count(split: Split, vocab_size: int) -> Any:
        counted.append(vocab_size)
        return count_token_ids(split, vocab_size)

    monkeypatch.setattr(session, "count_token_ids", count)
    train("start", steps=4, checkpoint__steps=2, checkpoint__keep=9)
    assert len(counted) == 1
    train("continued", steps=1, start_from=str(tmp_path / "start"))
    copy_interrupted_run(tmp_path / "start", tmp_path / "resumed", last_step=4)
    train("resumed", steps=4, checkpoint__steps=2, checkpoint__keep=9)
    assert len(counted) == 1
    assert_same_weights(tmp_path / "resumed" / "model", tmp_path / "start" / "model")
    start = tmp_path / "start" / "model"
    state = load_file(start / "model.safetensors")
    encoder = {name: tensor for name, tensor in state.items() if not name.startswith("cls.")}
    save_file(encoder, start / "model.safetensors")
    train("new-heads", steps=1, start_from=str(start))
    assert len(counted) == 2
