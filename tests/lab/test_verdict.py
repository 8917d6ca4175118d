"""Verdicts of experiments: computed from paired differences, and shown first in a report."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from bertsmith.lab.experiment_run import ExperimentRun
from bertsmith.lab.experiments import (
    EXPERIMENTS,
    features,
    masking,
    model_size,
    positions,
    pretraining_tasks,
)
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources
from bertsmith.lab.stages import INITIALIZED, RANDOM, TASK_METRICS, StageFactory
from bertsmith.lab.verdict import Claim, Outcome, Verdict, decide_verdict, find_minima, subtract
from tests.lab.helpers import TWO_DOCUMENTS


@pytest.mark.parametrize(
    ("differences", "outcome"),
    [
        ([0.01, 0.015, 0.02], "holds"),
        ([-0.01, -0.015, -0.02], "contradicted"),
        # All seeds agree, but p = 0.11 and 0.07.
        ([-0.001, -0.036, -0.015], "open"),
        ([0.01, 0.02, 0.03], "open"),
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
    """A claim holds or is contradicted if at least three seeds agree by enough, with p < 0.05."""
    assert Claim("a is better", differences).outcome == outcome


@pytest.mark.parametrize("differences", [[0.01, 0.015, 0.02], [0.1, 0.11, 0.3], [0.2, 0.5, 0.3, 1]])
def test_significance_is_that_of_a_paired_t_test(differences: list[float]) -> None:
    """A claim with equal signs holds if SciPy's p-value is below 0.05."""
    p_value = stats.ttest_1samp(differences, 0.0).pvalue
    assert (Claim("a is better", differences).outcome == "holds") == (p_value < 0.05)


def test_differences_that_cancel_are_no_equality() -> None:
    """Two values are equal if they are for each seed, not only on average."""
    assert Claim("equal", [0.3, -0.3, 0.006], 0.01, is_equality=True).outcome == "open"
    claim = Claim("equal", [0.003, -0.003, 0.006], 0.01, is_equality=True)
    assert claim.outcome == "holds"
    assert "(mean difference +0.002; by seed" in claim.to_markdown()
    assert "less than 0.01 counts as equal" in claim.to_markdown()


def test_claim_is_open_without_benefit_of_pretraining() -> None:
    """If pre-training does not improve a task, its scores do not decide a claim."""
    claim = Claim("a is better", [0.1, 0.1, 0.1], benefits=[0.1, 0.1, -0.1])
    assert claim.outcome == "open"
    assert "pre-training does not improve this task" in claim.to_markdown()
    assert Claim("a is better", [0.1, 0.1, 0.1], benefits=[0.1, 0.1, 0.12]).outcome == "holds"


def test_too_few_seeds_are_no_lack_of_benefit() -> None:
    """With one seed, the line has the difference; with a missing benefit, it says so."""
    claim = Claim("a is better", [0.1], benefits=[0.2])
    assert (
        claim.to_markdown()
        == "- open: a is better (mean difference in its favor +0.100; by seed +0.100)"
    )
    claim = Claim("a is better", [0.1, 0.1, 0.1], benefits=[0.1, math.nan, 0.1])
    assert (
        claim.to_markdown() == "- open: a is better (some results are missing, or a run diverged)"
    )


def test_diverged_run_is_a_missing_result() -> None:
    """NaN counts as missing, wherever it stands."""
    assert find_minima([[0.1, math.nan, 0.3], [math.nan, 0.2, 0.2]]) == [None, None, 0.2]


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


def _make_results(tasks: Sequence[str], scores: dict[str, float]) -> dict[Any, dict[str, Any]]:
    """Return results of table 5 with the same score in all tasks, by row."""
    results: dict[Any, dict[str, Any]] = {}
    for name, score in scores.items():
        for seed in range(3):
            results[name, "model", seed] = {"heldout_metrics": {"mlm_loss": 5.0}}
            for task in tasks:
                metrics = {TASK_METRICS[task].name: score + 0.001 * seed}
                results[name, task, seed] = {"metrics": metrics}
    return results


def test_report_of_table_5_starts_with_its_verdict(tmp_path: Path) -> None:
    """The verdict changes with the results: reproduced, contradicted, or without benefit."""
    factory = _make_factory("medium", tmp_path)
    scores = {
        "not pre-trained, random initialization": 0.5,
        "not pre-trained, initialization of the runs": 0.55,
        "MLM + NSP": 0.8,
        "MLM, no NSP": 0.75,
        "left to right, no NSP": 0.6,
        "left to right + BiLSTM": 0.65,
    }

    def build_report(**changes: float) -> str:
        results = _make_results(factory.scale.tasks, scores | changes)
        return EXPERIMENTS["pretraining-tasks"].build_report(factory, results).to_markdown()

    markdown = build_report()
    assert markdown.startswith("**Reproduced.**\n\n- holds: SST-2, accuracy: masked LM is better")
    assert "- holds: CoNLL-2003, F1: masked LM is better than left to right" in markdown
    # The scale has no question answering, on which next-sentence prediction helps in the paper.
    assert "with NSP is better" not in markdown
    assert "| CoNLL-2003, F1 (paper, %) | SST-2, accuracy (paper, %) |" in markdown
    # At this scale, no attention head is initialized by hand.
    assert "structured initialization" not in markdown
    assert "| not pre-trained, initialization of the runs |" in markdown
    assert build_report(**{"left to right, no NSP": 0.9}).startswith("**Not reproduced.**")
    for initialization in ("random initialization", "initialization of the runs"):
        untrained = {f"not pre-trained, {initialization}": 0.9}
        assert build_report(**untrained).startswith("**Inconclusive at this size.**")


def test_table_6_compares_models_that_differ_in_one_size(tmp_path: Path) -> None:
    """Perplexities are compared between neighbors, scores between the smallest and the largest."""
    factory = _make_factory("medium", tmp_path)
    results: dict[Any, dict[str, Any]] = {}
    for rank, size in enumerate([(2, 128, 4), (4, 128, 4), (2, 256, 4), (4, 256, 4)]):
        for seed in range(3):
            metrics = {"perplexity": 100.0 - 10 * rank}
            results[size, "model", seed] = {"heldout_metrics": metrics}
            for task in factory.scale.tasks:
                results[size, task, seed] = {"metrics": {TASK_METRICS[task].name: 0.1 * rank}}
                for name in (RANDOM, INITIALIZED):
                    results[name, task, seed] = {"metrics": {TASK_METRICS[task].name: 0.1}}
    report = EXPERIMENTS["model-size"].build_report(factory, results)
    assert [claim.text for claim in report.claims] == [
        "4 x 128 x 4 has a lower log perplexity than 2 x 128 x 4",
        "2 x 256 x 4 has a lower log perplexity than 2 x 128 x 4",
        "4 x 256 x 4 has a lower log perplexity than 4 x 128 x 4",
        "4 x 256 x 4 has a lower log perplexity than 2 x 256 x 4",
        "SST-2, accuracy: 4 x 256 x 4 is better than 2 x 128 x 4",
        "CoNLL-2003, F1: 4 x 256 x 4 is better than 2 x 128 x 4",
    ]
    assert list(report.claims[0].differences) == pytest.approx([math.log(100 / 90)] * 3)
    assert report.to_markdown().startswith("**Reproduced.**")
    for task in factory.scale.tasks:
        for seed in range(3):
            results[RANDOM, task, seed] = {"metrics": {TASK_METRICS[task].name: 0.3}}
    markdown = EXPERIMENTS["model-size"].build_report(factory, results).to_markdown()
    assert markdown.startswith("**Inconclusive at this size.**")
    assert markdown.count("(pre-training does not improve this task)") == 2


def test_figure_5_compares_final_scores(tmp_path: Path) -> None:
    """The claims compare the last step with left to right and with the first snapshot."""
    factory = _make_factory("medium", tmp_path)
    results: dict[Any, dict[str, Any]] = {}
    for name, factor in (("masked LM", 1.0), ("left to right", 0.5)):
        for rank, step in enumerate((0, 1000, 2000, 3000, 4000)):
            for task in factory.scale.tasks:
                metrics = {TASK_METRICS[task].name: factor * rank / 5}
                for seed in range(3):
                    results[name, task, step, seed] = {"metrics": metrics}
    for random_score, verdict in ((0.7, "Reproduced"), (0.9, "Inconclusive at this size")):
        for task in factory.scale.tasks:
            for seed in range(3):
                metrics = {TASK_METRICS[task].name: random_score}
                results[RANDOM, task, seed] = {"metrics": metrics}
        report = EXPERIMENTS["training-steps"].build_report(factory, results)
        assert [claim.differences[0] for claim in report.claims] == [0.4, pytest.approx(0.6)] * 2
        assert report.to_markdown().startswith(f"**{verdict}.**")


def test_results_of_the_paper_are_reproduced(tmp_path: Path) -> None:
    """With the paper's own numbers, the verdict on tables 5 to 8 is "reproduced"."""
    factory = _make_factory("full", tmp_path)
    results: dict[str, dict[Any, dict[str, Any]]] = {}

    def add_score(name: str, key: tuple[Any, ...], task: str, percentage: float) -> None:
        for seed in range(3):
            metrics = {TASK_METRICS[task].name: percentage / 100}
            results.setdefault(name, {})[*key, seed] = {"metrics": metrics}

    def add_model(name: str, key: Any, **heldout_metrics: float) -> None:
        for seed in range(3):
            result = {"heldout_metrics": heldout_metrics}
            results.setdefault(name, {})[key, "model", seed] = result

    for row, scores in pretraining_tasks.PAPER.items():
        add_model("pretraining-tasks", row, mlm_loss=2.0)
        for task in pretraining_tasks.TASKS:
            add_score("pretraining-tasks", (row, task), task, scores.get(task, 50.0))
    for size, (perplexity, mrpc, sst_2) in model_size._PAPER.items():
        add_model("model-size", size, perplexity=perplexity)
        for task, score in (("mrpc", mrpc), ("sst-2", sst_2), ("sts-b", 50.0)):
            add_score("model-size", (size, task), task, score)
            add_score("model-size", (RANDOM, task), task, 50.0)
    for row, f1 in features.PAPER.items():
        add_score("features", (row,), "conll2003", f1)
    for mixture, (_, ner, ner_features) in masking.PAPER.items():
        add_model("masking", mixture, mlm_loss=2.0)
        add_score("masking", (mixture, "sst-2"), "sst-2", 50.0)
        add_score("masking", (mixture, "ner"), "conll2003", ner)
        add_score("masking", (mixture, "ner-features"), "conll2003", ner_features)
    assert len(results) == 4
    for name, experiment_results in results.items():
        report = EXPERIMENTS[name].build_report(factory, experiment_results)
        assert decide_verdict(report.claims) == "reproduced", report.to_markdown()


@pytest.mark.parametrize(
    ("learned", "sinusoidal", "verdict"),
    [
        ([5.0, 5.1, 5.2], [5.001, 5.099, 5.2], "reproduced"),
        ([5.0, 5.1, 5.2], [5.1, 5.2, 5.3], "not reproduced"),
        ([5.0, 5.1, 5.2], [5.1, 5.0, 5.3], "inconclusive"),
        # The losses are near the unigram entropy.
        ([6.0, 6.1, 6.2], [6.1, 6.2, 6.3], "inconclusive"),
    ],
)
def test_equal_positions_need_models_that_use_word_order(
    learned: list[float], sinusoidal: list[float], verdict: Verdict, tmp_path: Path
) -> None:
    """The claim that two losses are equal holds only for losses far below the unigram entropy."""
    factory = _make_factory("small", tmp_path)
    results: dict[Any, Any] = dict.fromkeys(EXPERIMENTS["positions"].build_stages(factory))
    for seed in range(3):
        for name, losses in (
            ("learned, random initialization", learned),
            ("sinusoidal", sinusoidal),
        ):
            metrics = {"mlm_loss": losses[seed], "unigram_entropy": 6.6}
            results[name, seed] = {"heldout_metrics": metrics}
    report = EXPERIMENTS["positions"].build_report(factory, results)
    assert decide_verdict(report.claims) == verdict


def test_external_model_needs_one_measurement(tmp_path: Path) -> None:
    """A measurement of a published model has no seeds; that of a trained model needs three."""
    correlations = [[0.1] * 5, [0.5] * 5, [0.4] * 5]
    similarity = {"spearman": correlations, "num_pairs": 9}
    results: dict[Any, Any] = {("similarity", 0): similarity, ("map", 0): None}
    external = StageFactory(SCALES["small"], Sources(model="a"), tmp_path)
    claims = EXPERIMENTS["pooling"].build_report(external, results).claims
    assert decide_verdict(claims) == "reproduced"
    claims = EXPERIMENTS["pooling"].build_report(_make_factory("small", tmp_path), results).claims
    assert decide_verdict(claims) == "inconclusive"


def test_learned_context_is_needed(tmp_path: Path) -> None:
    """Layers that are no better than the embeddings decide no claim about layers."""
    correlations = [[0.6] * 5, [0.5] * 5, [0.4] * 5]
    similarity = {"spearman": correlations, "num_pairs": 9}
    results: dict[Any, Any] = {("similarity", 0): similarity, ("map", 0): None}
    external = StageFactory(SCALES["small"], Sources(model="a"), tmp_path)
    claims = EXPERIMENTS["pooling"].build_report(external, results).claims
    assert decide_verdict(claims) == "inconclusive"
    assert "no clear gain over the embeddings" in claims[0].to_markdown()


def test_rows_of_positions_are_different_models(tmp_path: Path) -> None:
    """The four models of the experiment differ at each scale."""
    for scale in SCALES:
        stages = EXPERIMENTS["positions"].build_stages(_make_factory(scale, tmp_path))
        names = [stages[name, 0].name for name in positions.MODELS]
        assert len(set(names)) == 4, scale


def test_report_file_has_the_verdict(tmp_path: Path) -> None:
    """Without results the verdict is "inconclusive", in Markdown and in JSON."""
    outcome = ExperimentRun("training-steps", scale="smoke", out=tmp_path).write_report()
    assert outcome.files[0].read_text().startswith("**Inconclusive at this size.**\n\n- open:")
    assert '"verdict": "inconclusive"' in outcome.files[1].read_text()


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_each_report_starts_with_a_verdict(name: str, tmp_path: Path) -> None:
    """Without results, it is "inconclusive", or "exploratory" for the two without claims."""
    run = ExperimentRun(name, scale="smoke", out=tmp_path)
    report = run.experiment.build_report(run.factory, dict.fromkeys(run.stages))
    if name in ("vocabulary", "learning"):
        expected = "**Exploratory.**\n\nNo published claim is tested."
    else:
        expected = "**Inconclusive at this size.**\n\n- open:"
    assert report.to_markdown().startswith(expected)
