"""Table 5: effect of next-sentence prediction and of bidirectional attention."""

from collections.abc import Sequence

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import EMPTY_CELL, Panel, Report, Table, format_mean_std, make_dot_plot
from bertsmith.lab.stage import Stage
from bertsmith.lab.stages import (
    INITIALIZED,
    RANDOM,
    STRUCTURED,
    TASK_METRICS,
    StageFactory,
    get_heldout_metric,
    get_task_score,
)
from bertsmith.lab.verdict import Claim, find_minima, subtract

#: Tasks: paraphrases, sentence similarity, sentiment and question answering. A scale may have
#: others.
TASKS = ("mrpc", "sts-b", "sst-2", "squad")
#: The tasks of the paper's table among these, and named entities, which the scale "medium" adds.
_CLAIMED_TASKS = ("mrpc", "sst-2", "squad", "conll2003")
#: The models without pre-training.
_UNTRAINED = (RANDOM, STRUCTURED, INITIALIZED)
_WITH_NSP, _MASKED, _CAUSAL = "MLM + NSP", "MLM, no NSP", "left to right, no NSP"
#: The rows of the table, with the results of the paper in percent by task.
PAPER: dict[str, dict[str, float]] = {
    RANDOM: {},
    STRUCTURED: {},
    INITIALIZED: {},
    _WITH_NSP: {"mrpc": 86.7, "sst-2": 92.7, "squad": 88.5},
    _MASKED: {"mrpc": 86.5, "sst-2": 92.6, "squad": 87.9},
    _CAUSAL: {"mrpc": 77.5, "sst-2": 92.1, "squad": 77.8},
    "left to right + BiLSTM": {"mrpc": 75.7, "sst-2": 91.6, "squad": 84.9},
}


def _build_models(factory: StageFactory, seed: int) -> dict[str, Stage]:
    """Return the stage of the model of each row."""
    masked = factory.create_mlm_only_run(seed)
    causal = factory.create_left_to_right_run(seed)
    return {
        **factory.create_untrained_models(masked),
        _WITH_NSP: factory.create_pretraining_run(seed),
        _MASKED: masked,
        _CAUSAL: causal,
        "left to right + BiLSTM": causal,
    }


def _build_stages(factory: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(factory.scale.num_seeds):
        bilstm = {"features": {"layers": "last", "width": factory.scale.width, "frozen": False}}
        for name, model in _build_models(factory, seed).items():
            stages[name, "model", seed] = model
            for task in factory.scale.tasks or TASKS:
                overrides = bilstm if name.endswith("BiLSTM") else {}
                stages[name, task, seed] = factory.create_finetuning_run(
                    model, task, seed, **overrides
                )
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    seeds = range(factory.scale.num_seeds)
    tasks = factory.scale.tasks or TASKS
    rows = []
    data = {}
    for name in _build_models(factory, 0):
        paper = PAPER[name]
        scores = {
            task: [get_task_score(results[name, task, seed], task) for seed in seeds]
            for task in tasks
        }
        models = [results[name, "model", seed] for seed in seeds]
        is_untrained = name in _UNTRAINED
        losses = [None if is_untrained else get_heldout_metric(model) for model in models]
        data[name] = {**scores, "held-out loss": losses}
        cells = [
            f"{format_mean_std(scores[task])} ({_format_percentage(paper.get(task))})"
            for task in tasks
        ]
        rows.append([name, format_mean_std(losses), *cells])
    columns = [
        "model",
        "held-out loss of the model's objective",
        *(f"{TASK_METRICS[task].label} (paper, %)" for task in tasks),
    ]
    title = "Table 5: pre-training tasks, scores on held-out examples"
    panels = []
    for task in tasks:
        metric = TASK_METRICS[task]
        groups = {name: {task: scores[task]} for name, scores in data.items()}
        plot = make_dot_plot(groups, metric.metric_label)
        panels.append(Panel(f"{metric.label}, held out", plot))
    return Report([Table(title, columns, rows)], panels, data, _build_claims(tasks, data))


def _build_claims(
    tasks: Sequence[str], data: dict[str, dict[str, list[float | None]]]
) -> list[Claim]:
    """Return the claims that bidirectional attention and next-sentence prediction help."""
    untrained = [data[name] for name in _UNTRAINED if name in data]
    masked, claims = data[_MASKED], []
    for task in _CLAIMED_TASKS:
        if task not in tasks:
            continue
        benefits = find_minima([subtract(masked[task], values[task]) for values in untrained])
        differences = subtract(masked[task], data[_CAUSAL][task])
        text = f"{TASK_METRICS[task].label}: masked LM is better than left to right"
        claims.append(Claim(text, differences, benefits=benefits))
        if task == "squad":
            # The paper reports that NSP matters for question answering and inference.
            text = f"{TASK_METRICS[task].label}: masked LM with NSP is better than without"
            differences = subtract(data[_WITH_NSP][task], masked[task])
            claims.append(Claim(text, differences, benefits=benefits))
    return claims


def _format_percentage(value: float | None) -> str:
    return EMPTY_CELL if value is None else f"{value:.1f}"


EXPERIMENT = Experiment(
    name="pretraining-tasks",
    source="section 5.1, table 5",
    question="How much do next-sentence prediction and bidirectional attention help fine-tuning?",
    build_stages=_build_stages,
    build_report=_build_report,
)
