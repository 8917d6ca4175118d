"""A plan: what is to be made, and what that costs here."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.settings import DataSettings
from bertsmith.lab import cost, probe
from bertsmith.lab.cost import CostEstimator
from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.experiments.registry import EXPERIMENTS
from bertsmith.lab.probe import measure_step_seconds
from bertsmith.lab.runner import Runner
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources, estimate_characters
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import OUTPUT
from bertsmith.lab.stages import StageFactory
from bertsmith.lab.toy_language import fill_missing_sources
from bertsmith.model.config import ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.packed import PackedBatch
from bertsmith.progress import NullProgress
from tests.lab.helpers import TWO_DOCUMENTS
from tests.lab.number_stages import make_runner, run_number_stage


def test_a_plan_tells_runs_and_minutes_and_makes_nothing(tmp_path: Path) -> None:
    """Every stage that is missing has its cost, by a probe of each shape; nothing is written."""
    laboratory = ExperimentRun("masking", scale="smoke", out=tmp_path)
    planned = laboratory.plan()
    kinds = [own.stage.kind for own in planned]
    assert kinds.count("pretrain") == 6
    assert kinds.count("finetune") == 18
    assert all(own.seconds is not None and own.seconds > 0 for own in planned)
    words = [own.description for own in planned]
    tuned = next(own for own in planned if own.stage.kind == "finetune")
    values = tuned.stage.settings["values"]
    assert tuned.num_steps == 48 * values["schedule"]["epochs"] / values["task"]["batch"] == 6
    assert next(own for own in planned if own.stage.kind == "pretrain").num_steps == 12
    assert words[:2] == [
        "the text of (80, 10, 10), model, 0",
        "the words of (80, 10, 10), model, 0",
    ]
    assert len(set(words)) == len(words)
    assert not (tmp_path / "smoke" / "results.jsonl").exists()
    costs = CostEstimator()
    kit = laboratory.factory
    short, long = (kit.pretraining_run(steps=steps) for steps in (10, 1000))
    one, other = costs.estimate_seconds(short), costs.estimate_seconds(long)
    assert one is not None
    assert other is not None
    # An evaluation of 32 sequences, forward alone, is a third of four steps; of ten steps there is
    # one, of a thousand there are twenty.
    assert other == pytest.approx(one * (1000 + 20 * 4 / 3) / (10 + 4 / 3))


def test_left_to_right_a_probe_predicts_every_word() -> None:
    """As a run does, whose head costs most of a small model; of masked words it is a seventh."""
    causal = DataSettings(batch=8, length=32, objective="left-to-right", nsp=False)
    found = probe._batch(causal)
    assert found.masked_positions.tolist() == list(range(len(found.ids)))
    masked = probe._batch(DataSettings(batch=8, length=32))
    assert 0 < len(masked.masked_positions) < len(masked.ids) / 6


def test_a_plan_counts_the_long_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the paper's steps have four times the tokens, and attention more than that."""
    monkeypatch.setattr(cost, "seconds_of_a_step", lambda _, data, __: float(data.length))
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    run = StageFactory(
        SCALES["full"], Sources(english=tmp_path / "a.jsonl"), tmp_path
    ).baseline_run()
    scored = 20 * 4096 / 256 / 3
    wanted = 1_000_000 * (0.9 * 128 + 0.1 * 512) + scored * 128
    assert CostEstimator().estimate_seconds(run) == pytest.approx(wanted)


def test_a_plan_asks_a_given_model_for_no_more_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 64 positions is probed at 64."""
    probed: list[int] = []

    def probe(_: ModelConfig, data: DataSettings, __: object) -> float:
        probed.append(data.length)
        return 1.0

    monkeypatch.setattr(cost, "seconds_of_a_step", probe)
    config = ModelConfig(
        vocab_size=99, layers=1, width=8, heads=1, feed_forward=8, max_positions=64
    )
    monkeypatch.setattr(cost, "load_encoder", lambda _: type("M", (), {"config": config}))
    kit = StageFactory(SCALES["small"], Sources(model=str(tmp_path)), tmp_path)
    files = {"train": tmp_path / "a.tsv", "dev": tmp_path / "a.tsv"}
    (tmp_path / "a.tsv").write_text(f"{'a word ' * 50}\tb\n" * 9)
    monkeypatch.setattr(Sources, "files", lambda *_: tuple(files.values()))
    assert CostEstimator().estimate_seconds(kit.finetuning_run(None, "mrpc")) is not None
    assert probed == [64]


def test_a_plan_leaves_out_what_another_folder_of_results_has(tmp_path: Path) -> None:
    """With a shared work folder, what stands there is taken over and not made."""
    base = Stage("number", {})
    first, second = (Stage("number", {"add": add}, {"base": base}) for add in (10, 20))
    make_runner(tmp_path).run_stages({"a": first})
    other = Runner(
        tmp_path / "other", tmp_path / "work", NullProgress(), {"number": run_number_stage}
    )
    assert other.missing_stages([first, second]) == [second]
    other.run_stages({"a": first, "b": second})
    assert [other.get_result(own) for own in (base, first, second)] == [
        {"value": 1}, {"value": 12}, {"value": 22},
    ]  # fmt: skip
    (tmp_path / "work" / base.name / OUTPUT).unlink()
    third = Stage("number", {"add": 30}, {"base": base})
    assert other.missing_stages([third]) == [base, third]


def test_the_moments_of_learning_outlive_its_best_evaluations(tmp_path: Path) -> None:
    """Each evaluation may leave a checkpoint, and what is asked about is among the first ones."""
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    kit = StageFactory(SCALES["small"], Sources(english=tmp_path / "a.jsonl"), tmp_path)
    stages = EXPERIMENTS["learning"].build_stages(kit)
    run, moments = stages["run"].settings, [key[1] for key in stages if key != "run"]
    assert moments == [0, 400, 2000, 8000]
    left = run["steps"] // run["run"]["eval_every"] + run["steps"] // run["checkpoint"]["every"]
    assert run["checkpoint"]["keep"] >= left
    assert all(moment % run["checkpoint"]["every"] == 0 for moment in moments)


@pytest.mark.parametrize("task", ["mrpc", "sts-b", "conll2003", "squad"])
def test_examples_are_counted_as_they_are_read(task: str, tmp_path: Path) -> None:
    """A header and an empty line are none, whatever ends a line."""
    train = fill_missing_sources(Sources(), tmp_path / "toy").task_files(task)[0]
    assert cost._size(train)[1] == 72
    train.write_bytes(train.read_bytes().replace(b"\n", b"\r\n"))
    assert cost._size(train)[1] == 72


def test_what_is_taken_over_asks_for_nothing_that_it_was_made_of(tmp_path: Path) -> None:
    """A base that was thrown away is not made again for a result that stands elsewhere."""
    base = Stage("number", {})
    first = Stage("number", {"add": 10}, {"base": base})
    make_runner(tmp_path).run_stages({"a": first})
    shutil.rmtree(tmp_path / "work" / base.name)
    other = Runner(
        tmp_path / "other", tmp_path / "work", NullProgress(), {"number": run_number_stage}
    )
    assert other.missing_stages([first]) == []
    other.run_stages({"a": first})
    assert other.get_result(first) == {"value": 12}
    assert not (tmp_path / "work" / base.name).exists()


def test_what_diverged_for_another_folder_of_results_is_in_vain_here(tmp_path: Path) -> None:
    """Neither it nor what needs it is planned."""
    lost = Stage("number", {"diverges": True})
    vain = Stage("number", {"add": 1}, {"base": lost})
    make_runner(tmp_path).run_stages({"a": vain})
    other = Runner(
        tmp_path / "other", tmp_path / "work", NullProgress(), {"number": run_number_stage}
    )
    assert other.missing_stages([lost, vain]) == []
    other.run_stages({"a": lost, "b": vain})
    assert all("diverged" in (other.get_result(own) or {}) for own in (lost, vain))


def test_characters_are_told_from_bytes(tmp_path: Path) -> None:
    """Three bytes of Korean are one character, and cost what one does."""
    (tmp_path / "a.txt").write_text("가나다라 " * 1000, encoding="utf-8")
    assert estimate_characters(tmp_path / "a.txt") == 5000


@pytest.mark.parametrize("frozen", [True, False])
def test_a_bilstm_is_probed_as_it_is(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe times training steps of a BiLSTM of the requested width on the given batch."""
    config = ModelConfig(
        vocab_size=99, layers=4, width=16, heads=2, feed_forward=32, max_positions=64
    )
    data = DataSettings(batch=8, length=32)
    calls: list[tuple[BertWithBiLSTM, int]] = []
    forward = BertWithBiLSTM.forward

    def recording_forward(self: BertWithBiLSTM, packed: PackedBatch, *args: Any) -> Any:
        calls.append((self, len(packed.ids)))
        return forward(self, packed, *args)

    monkeypatch.setattr(BertWithBiLSTM, "forward", recording_forward)
    assert measure_step_seconds(config, data, {"width": 24, "frozen": frozen}) > 0
    model, num_tokens = calls[-1]
    assert model.features.width == 24
    assert 200 < num_tokens <= 8 * 32
    assert any(parameter.requires_grad for parameter in model.bert.parameters()) != frozen
