"""Verdicts of experiments: computed from paired differences, and shown first in a report."""

import math
from pathlib import Path
from typing import Any

import pytest

from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.experiments import EXPERIMENTS, pretraining_tasks
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources
from bertsmith.lab.stages import TASK_METRICS, StageFactory
from bertsmith.lab.verdict import Claim, Outcome, Verdict, decide_verdict, subtract
from tests.lab.helpers import TWO_DOCUMENTS


@pytest.mark.parametrize(
    ("differences", "outcome"),
    [
        ([0.01, 0.02, 0.03], "holds"),
        ([-0.01, -0.02, -0.03], "contradicted"),
        ([0.01, 0.02, -0.001], "open"),
        # The mean is below half a point.
        ([0.001, 0.002, 0.003], "open"),
        # Two seeds agree by chance too often.
        ([0.01, 0.02], "open"),
        ([0.01, 0.02, None], "open"),
        ([0.01, 0.02, math.nan], "open"),
        ([0.01, 0.02, 0.03, None], "open"),
    ],
)
def test_outcome_needs_all_seeds(differences: list[float | None], outcome: Outcome) -> None:
    """A claim holds or is contradicted only if at least three seeds agree by enough."""
    assert Claim("a is better", differences).outcome == outcome


def test_claim_is_open_without_benefit_of_pretraining() -> None:
    """If pre-training does not improve a task, its scores do not decide a claim."""
    claim = Claim("a is better", [0.1, 0.1, 0.1], benefits=[0.1, 0.1, -0.1])
    assert claim.outcome == "open"
    assert "pre-training does not improve this task" in claim.to_markdown()
    assert Claim("a is better", [0.1, 0.1, 0.1], benefits=[0.1, 0.1, 0.2]).outcome == "holds"


@pytest.mark.parametrize(
    ("means", "verdict"),
    [
        ([0.1, 0.1], "reproduced"),
        ([0.1, 0.0], "inconclusive"),
        ([0.0, 0.0], "inconclusive"),
        ([0.1, 0.0, -0.1], "not reproduced"),
    ],
)
def test_verdict_depends_on_all_claims(means: list[float], verdict: Verdict) -> None:
    """One contradicted claim is enough for "not reproduced"; "reproduced" needs all claims."""
    assert decide_verdict([Claim("a is better", [mean] * 3) for mean in means]) == verdict


def test_differences_are_paired() -> None:
    """Each seed has its own difference, and None where a value is missing."""
    assert subtract([0.5, 0.75, None], [0.25, 0.25, 0.5]) == [0.25, 0.5, None]


def _make_factory(scale: str, folder: Path) -> StageFactory:
    (folder / "a.jsonl").write_text(TWO_DOCUMENTS)
    return StageFactory(SCALES[scale], Sources(english=folder / "a.jsonl"), folder)


def _make_results(scores: dict[str, float]) -> dict[Any, dict[str, Any]]:
    """Return results of table 5 with the same score in all tasks, by row."""
    results: dict[Any, dict[str, Any]] = {}
    for name, score in scores.items():
        for seed in range(3):
            results[name, "model", seed] = {"heldout_metrics": {"mlm_loss": 5.0}}
            for task in pretraining_tasks.TASKS:
                metrics = {TASK_METRICS[task].name: score + 0.001 * seed}
                results[name, task, seed] = {"metrics": metrics}
    return results


def test_report_of_table_5_starts_with_its_verdict(tmp_path: Path) -> None:
    """The verdict changes with the results: reproduced, contradicted, or without benefit."""
    factory = _make_factory("medium", tmp_path)
    scores = {
        "not pre-trained, random initialization": 0.5,
        "MLM + NSP": 0.8,
        "MLM, no NSP": 0.75,
        "left to right, no NSP": 0.6,
        "left to right + BiLSTM": 0.65,
    }

    def build_report(**changes: float) -> str:
        results = _make_results(scores | changes)
        return EXPERIMENTS["pretraining-tasks"].build_report(factory, results).to_markdown()

    markdown = build_report()
    assert markdown.startswith("**Reproduced.**\n\n- holds: MRPC, accuracy: masked LM is better")
    # At this scale, all untrained models have a random initialization.
    assert "structured initialization" not in markdown
    assert "| not pre-trained, random initialization |" in markdown
    assert build_report(**{"left to right, no NSP": 0.9}).startswith("**Not reproduced.**")
    untrained = {"not pre-trained, random initialization": 0.9}
    assert build_report(**untrained).startswith("**Inconclusive at this size.**")


def test_table_6_compares_models_that_differ_in_one_size(tmp_path: Path) -> None:
    """Perplexities are compared between neighbors, scores between the smallest and the largest."""
    factory = _make_factory("medium", tmp_path)
    results: dict[Any, dict[str, Any]] = {}
    for rank, size in enumerate([(2, 128, 4), (4, 128, 4), (2, 256, 4), (4, 256, 4)]):
        for seed in range(3):
            metrics = {"perplexity": 100.0 - 10 * rank}
            results[size, "model", seed] = {"heldout_metrics": metrics}
            for task in ("mrpc", "sts-b", "sst-2"):
                results[size, task, seed] = {"metrics": {TASK_METRICS[task].name: 0.1 * rank}}
    report = EXPERIMENTS["model-size"].build_report(factory, results)
    assert [claim.text for claim in report.claims] == [
        "4 x 128 x 4 has a lower log perplexity than 2 x 128 x 4",
        "2 x 256 x 4 has a lower log perplexity than 2 x 128 x 4",
        "4 x 256 x 4 has a lower log perplexity than 4 x 128 x 4",
        "4 x 256 x 4 has a lower log perplexity than 2 x 256 x 4",
        "MRPC, accuracy: 4 x 256 x 4 is better than 2 x 128 x 4",
        "SST-2, accuracy: 4 x 256 x 4 is better than 2 x 128 x 4",
    ]
    assert list(report.claims[0].differences) == pytest.approx([math.log(100 / 90)] * 3)
    assert report.to_markdown().startswith("**Reproduced.**")


def test_figure_5_compares_final_scores(tmp_path: Path) -> None:
    """The claims compare the last step with left to right and with the first snapshot."""
    factory = _make_factory("medium", tmp_path)
    results: dict[Any, dict[str, Any]] = {}
    for name, factor in (("masked LM", 1.0), ("left to right", 0.5)):
        for rank, step in enumerate((0, 700, 1400, 2100, 2800)):
            for task in ("sst-2", "sts-b"):
                metrics = {TASK_METRICS[task].name: factor * rank / 5}
                for seed in range(3):
                    results[name, task, step, seed] = {"metrics": metrics}
    report = EXPERIMENTS["training-steps"].build_report(factory, results)
    assert [claim.differences[0] for claim in report.claims] == [0.4, pytest.approx(0.6)] * 2
    assert report.to_markdown().startswith("**Reproduced.**")


def test_report_file_has_the_verdict(tmp_path: Path) -> None:
    """Without results the verdict is "inconclusive", in Markdown and in JSON."""
    outcome = ExperimentRun("training-steps", scale="smoke", out=tmp_path).write_report()
    assert outcome.files[0].read_text().startswith("**Inconclusive at this size.**\n\n- open:")
    assert '"verdict": "inconclusive"' in outcome.files[1].read_text()
    plain = ExperimentRun("activations", scale="smoke", out=tmp_path).write_report()
    assert "verdict" not in plain.files[1].read_text()
