"""The plan of an experiment: missing stages and their estimated durations."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bertsmith.data.settings import DataSettings
from bertsmith.lab import cost, probe
from bertsmith.lab.cost import CostEstimator
from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.experiments import EXPERIMENTS
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


def make_factory(scale: str, folder: Path) -> StageFactory:
    """Return a factory whose English text is ``TWO_DOCUMENTS``."""
    (folder / "a.jsonl").write_text(TWO_DOCUMENTS)
    return StageFactory(SCALES[scale], Sources(english=folder / "a.jsonl"), folder)


def make_second_runner(folder: Path) -> Runner:
    """Return a runner with the same work directory as ``make_runner`` but other results."""
    functions = {"number": run_number_stage}
    return Runner(folder / "other", folder / "work", NullProgress(), functions)


def test_plan_lists_missing_stages_with_durations(tmp_path: Path) -> None:
    """Every missing stage has a description, its steps and an estimate."""
    run = ExperimentRun("masking", scale="smoke", out=tmp_path)
    planned = run.plan()
    kinds = [entry.stage.kind for entry in planned]
    # Six masking mixtures, each fine-tuned on SST-2, on entities, and on entities with a BiLSTM.
    assert kinds.count("pretrain") == 6
    assert kinds.count("finetune") == 6 * 3
    assert all(entry.seconds is not None and entry.seconds > 0 for entry in planned)
    descriptions = [entry.description for entry in planned]
    first_finetuning = planned[kinds.index("finetune")]
    # 48 training examples in batches of 8, for one epoch.
    assert first_finetuning.num_steps == 48 / 8
    assert planned[kinds.index("pretrain")].num_steps == SCALES["smoke"].num_steps
    assert descriptions[:2] == [
        "the text of (80, 10, 10), model, 0",
        "the vocabulary of (80, 10, 10), model, 0",
    ]
    assert len(set(descriptions)) == len(descriptions)
    assert not (tmp_path / "smoke" / "results.jsonl").exists()


def test_estimate_includes_evaluations(tmp_path: Path) -> None:
    """A run of 10 steps has one evaluation, a run of 1000 steps has twenty."""
    factory = StageFactory(
        SCALES["smoke"], fill_missing_sources(Sources(), tmp_path / "toy"), tmp_path
    )
    costs = CostEstimator()
    short, long = (
        costs.estimate_seconds(factory.create_pretraining_run(steps=steps)) for steps in (10, 1000)
    )
    assert short is not None
    assert long is not None
    # Each evaluation has 4 batches, and a forward pass takes a third of a training step.
    assert long == pytest.approx(short * (1000 + 20 * 4 / 3) / (10 + 4 / 3))


def test_left_to_right_step_is_measured_with_all_predictions() -> None:
    """A measured left-to-right step predicts all tokens, a masked-LM step less than a sixth."""
    causal = DataSettings(batch_size=8, max_seqlen=32, objective="left-to-right", nsp=False)
    batch = probe._build_random_batch(causal)
    assert batch.masked_positions.tolist() == list(range(len(batch.ids)))
    masked = probe._build_random_batch(DataSettings(batch_size=8, max_seqlen=32))
    assert 0 < len(masked.masked_positions) < len(masked.ids) / 6


def test_estimate_includes_the_long_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the paper's recipe, a tenth of the steps has sequences of 512 instead of 128 tokens."""
    monkeypatch.setattr(cost, "measure_step_seconds", lambda _, data, __: float(data.max_seqlen))
    run = make_factory("full", tmp_path).create_baseline_run()
    # Each of the 20 evaluations has 4,096 sequences in batches of 256. A forward pass takes a third
    # of a training step.
    num_eval_batches = 20 * 4096 / 256
    expected = 1_000_000 * (0.9 * 128 + 0.1 * 512) + num_eval_batches / 3 * 128
    assert CostEstimator().estimate_seconds(run) == pytest.approx(expected)


def test_measured_step_respects_the_maximum_positions_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a model with 64 positions are measured with 64 tokens for longer examples."""
    measured_lengths: list[int] = []

    def record_length(_: ModelConfig, data: DataSettings, __: object) -> float:
        measured_lengths.append(data.max_seqlen)
        return 1.0

    monkeypatch.setattr(cost, "measure_step_seconds", record_length)
    config = ModelConfig(
        vocab_size=99, layers=1, width=8, heads=1, feed_forward=8, max_positions=64
    )
    monkeypatch.setattr(cost, "load_encoder", lambda _: SimpleNamespace(config=config))
    factory = StageFactory(SCALES["small"], Sources(model=str(tmp_path)), tmp_path)
    file = tmp_path / "a.tsv"
    file.write_text(f"{'a word ' * 50}\tb\n" * 9)
    monkeypatch.setattr(Sources, "find_task_files", lambda *_: (file, file))
    stage = factory.create_finetuning_run(None, "mrpc")
    assert CostEstimator().estimate_seconds(stage) is not None
    assert measured_lengths == [64]


def test_plan_omits_stages_with_output_in_a_shared_work_directory(tmp_path: Path) -> None:
    """The record of a stage that ran for another results file is copied."""
    base = Stage("number", {})
    first, second = (Stage("number", {"add": add}, {"base": base}) for add in (10, 20))
    make_runner(tmp_path).run_stages({"a": first})
    runner = make_second_runner(tmp_path)
    assert runner.find_missing_stages([first, second]) == [second]
    runner.run_stages({"a": first, "b": second})
    # The value of a stage is 1 + the value of its dependency + "add".
    assert [runner.get_result(stage) for stage in (base, first, second)] == [
        {"value": 1},
        {"value": 1 + 1 + 10},
        {"value": 1 + 1 + 20},
    ]
    (tmp_path / "work" / base.name / OUTPUT).unlink()
    third = Stage("number", {"add": 30}, {"base": base})
    assert runner.find_missing_stages([third]) == [base, third]


def test_learning_run_keeps_all_its_snapshots(tmp_path: Path) -> None:
    """The run keeps enough checkpoints for all snapshots, even if every evaluation saves one."""
    stages = EXPERIMENTS["learning"].build_stages(make_factory("small", tmp_path))
    run, steps = stages["run"].settings, [key[1] for key in stages if key != "run"]
    assert steps == [0, 400, 2000, 8000]
    num_evaluations = run["steps"] // run["run"]["eval_every"]
    num_snapshots = run["steps"] // run["checkpoint"]["steps"]
    assert run["checkpoint"]["keep"] >= num_evaluations + num_snapshots
    assert all(step % run["checkpoint"]["steps"] == 0 for step in steps)


@pytest.mark.parametrize("task", ["mrpc", "sts-b", "conll2003", "squad"])
def test_examples_are_counted_without_headers_and_empty_lines(task: str, tmp_path: Path) -> None:
    """The 72 examples of a training file are counted with LF and with CRLF line endings."""
    train, _ = fill_missing_sources(Sources(), tmp_path / "toy").find_task_files(task)
    for line_ending in (b"\n", b"\r\n"):
        train.write_bytes(train.read_bytes().replace(b"\n", line_ending))
        _, num_examples = cost._count_task_file(train)
        assert num_examples == 72


def test_copied_result_does_not_need_its_dependencies(tmp_path: Path) -> None:
    """A deleted dependency is not computed again if the dependent stage is only copied."""
    base = Stage("number", {})
    first = Stage("number", {"add": 10}, {"base": base})
    make_runner(tmp_path).run_stages({"a": first})
    shutil.rmtree(tmp_path / "work" / base.name)
    runner = make_second_runner(tmp_path)
    assert runner.find_missing_stages([first]) == []
    runner.run_stages({"a": first})
    # The value is 1 + the value of base + "add".
    assert runner.get_result(first) == {"value": 1 + 1 + 10}
    assert not (tmp_path / "work" / base.name).exists()


def test_plan_omits_stages_that_diverged_in_a_shared_work_directory(tmp_path: Path) -> None:
    """The plan has neither diverged stages nor stages that depend on them."""
    diverged = Stage("number", {"diverges": True})
    dependent = Stage("number", {"add": 1}, {"base": diverged})
    make_runner(tmp_path).run_stages({"a": dependent})
    runner = make_second_runner(tmp_path)
    assert runner.find_missing_stages([diverged, dependent]) == []
    runner.run_stages({"a": diverged, "b": dependent})
    results = [runner.get_result(stage) for stage in (diverged, dependent)]
    assert all("diverged" in (result or {}) for result in results)


def test_characters_are_estimated_from_bytes(tmp_path: Path) -> None:
    """Korean characters have three bytes in UTF-8, spaces have one."""
    (tmp_path / "a.txt").write_text("가나다라 " * 1000, encoding="utf-8")
    assert estimate_characters(tmp_path / "a.txt") == 5000


@pytest.mark.parametrize("frozen", [True, False])
def test_bilstm_step_is_measured_with_its_settings(
    frozen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The measured step trains a BiLSTM of the requested width on a batch of the requested size."""
    config = ModelConfig(
        vocab_size=99, layers=4, width=16, heads=2, feed_forward=32, max_positions=64
    )
    data = DataSettings(batch_size=8, max_seqlen=32)
    calls: list[tuple[BertWithBiLSTM, int]] = []
    forward = BertWithBiLSTM.forward

    def recording_forward(self: BertWithBiLSTM, packed: PackedBatch, *args: Any) -> Any:
        calls.append((self, len(packed.ids)))
        return forward(self, packed, *args)

    monkeypatch.setattr(BertWithBiLSTM, "forward", recording_forward)
    assert measure_step_seconds(config, data, {"width": 24, "frozen": frozen}) > 0
    model, num_tokens = calls[-1]
    assert model.features.width == 24
    # A random batch has 8 sequences of up to 32 tokens.
    assert 200 < num_tokens <= 8 * 32
    assert any(parameter.requires_grad for parameter in model.bert.parameters()) != frozen


def _write_table(path: Path, num_rows: int, num_bytes: int) -> None:
    """Write a table with a header and rows of ``num_bytes`` bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("header\n" + (("a" * (num_bytes - 1)) + "\n") * num_rows)


def _write_entities(path: Path, num_sentences: int) -> None:
    """Write sentences in CoNLL format, each with 15 words and tags."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(("word NN B-NP O\n" * 15 + "\n") * num_sentences)


def test_medium_scale_costs_at_most_20_core_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables 5 and 6 and figure 5 fit on one core, with tasks of the public sizes.

    The speed is that of a core that takes 1.15 s for a step of `mini` with 4,096 tokens.
    """

    def count_macs(config: ModelConfig, data: DataSettings) -> float:
        num_tokens = data.batch_size * data.max_seqlen
        masked_share = 1.0 if data.objective == "left-to-right" else 0.15
        macs = num_tokens * config.macs_per_token(data.max_seqlen)
        return macs + masked_share * num_tokens * config.macs_per_prediction()

    mini = ModelConfig(
        vocab_size=16_000, layers=4, width=256, heads=4, feed_forward=1024, max_positions=512
    )
    seconds_per_mac = 1.15 / count_macs(mini, DataSettings(batch_size=32))
    monkeypatch.setattr(
        cost,
        "measure_step_seconds",
        lambda config, data, _: count_macs(config, data) * seconds_per_mac,
    )
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    _write_table(tmp_path / "SST-2" / "train.tsv", 67_349, 56)
    _write_table(tmp_path / "SST-2" / "dev.tsv", 872, 109)
    _write_entities(tmp_path / "conll2003" / "train.txt", 14_041)
    _write_entities(tmp_path / "conll2003" / "valid.txt", 3_250)
    sources = Sources(english=tmp_path / "a.jsonl", tasks_dir=tmp_path)
    seconds: dict[str, float] = {}
    for name in ("pretraining-tasks", "model-size", "training-steps"):
        run = ExperimentRun(name, scale="medium", sources=sources, out=tmp_path / "lab")
        seconds |= {planned.stage.name: planned.seconds or 0.0 for planned in run.plan()}
        for stage in run.find_missing_stages():
            if stage.kind == "pretrain":
                assert stage.settings["run"]["initialization"] == "unigram"
                is_masked = stage.settings["data"].get("objective", "masked") == "masked"
                bias_steps = stage.settings["schedule"]["neighbor_bias_steps"]
                assert bias_steps == (1000 if is_masked else 0)
                assert stage.settings["optim"]["optimizer"] == "muon"
            elif stage.kind == "initialized-model":
                # Claims on tasks need a benefit over random weights and over the initialization.
                assert stage.settings["run"]["initialization"] in {"random", "unigram"}
    assert 12 < sum(seconds.values()) / 3600 <= 20


def test_small_scale_keeps_its_settings(tmp_path: Path) -> None:
    """Its runs have the initialization of the recipe and five checkpoints, as in stored results."""
    settings = make_factory("small", tmp_path).create_baseline_run().settings
    assert settings["run"]["initialization"] == "cross-segment-heads"
    assert "optimizer" not in settings["optim"]
    assert settings["checkpoint"]["steps"] == 800 // 5


def test_core_hours_count_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that compute for half an hour take one core-hour."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert cost.convert_to_core_hours(1800) == 1.0
