"""Table 6: effect of the model size on held-out perplexity and on tasks."""

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import EMPTY_CELL, Panel, Report, Table, format_mean_std, make_dot_plot
from bertsmith.lab.stages import TASK_METRICS, StageFactory, get_heldout_metric, get_task_score
from bertsmith.lab.verdict import MIN_LOSS_DIFFERENCE, Claim, find_minima, subtract

#: Tasks: paraphrases, sentence similarity and sentiment. A scale may have others.
TASKS = ("mrpc", "sts-b", "sst-2")
#: The tasks of the paper's table among these, and named entities, which the scale "medium" adds.
_CLAIMED_TASKS = ("mrpc", "sst-2", "conll2003")
#: Layers, width and heads of the models by scale, including the baseline model.
_SIZES: dict[str, list[tuple[int, int, int]]] = {
    "smoke": [(2, 16, 2), (4, 16, 2)],
    "small": [(2, 128, 4), (4, 128, 2), (4, 128, 4), (8, 128, 4), (2, 256, 4), (4, 256, 4)],
    "medium": [(2, 128, 4), (4, 128, 4), (2, 256, 4), (4, 256, 4)],
    "full": [(3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16),
             (24, 1024, 16)],
}  # fmt: skip
#: The paper's perplexity, and its accuracy on MRPC and SST-2.
_PAPER = {
    (3, 768, 12): (5.84, 79.8, 88.4), (6, 768, 3): (5.24, 82.2, 90.7),
    (6, 768, 12): (4.68, 84.8, 91.3), (12, 768, 12): (3.99, 86.7, 92.9),
    (12, 1024, 16): (3.54, 86.9, 93.3), (24, 1024, 16): (3.23, 87.8, 93.7),
}  # fmt: skip


def _build_stages(factory: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(factory.scale.num_seeds):
        for size in _SIZES[factory.scale.name]:
            settings = dict(zip(("layers", "width", "heads"), size, strict=True))
            model = factory.create_baseline_run(seed, model=settings)
            stages[size, "model", seed] = model
            for task in factory.scale.tasks or TASKS:
                stages[size, task, seed] = factory.create_finetuning_run(model, task, seed)
        baseline = factory.create_baseline_run(seed)
        for name, model in factory.create_untrained_models(baseline).items():
            for task in factory.scale.tasks or TASKS:
                stages[name, task, seed] = factory.create_finetuning_run(model, task, seed)
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    seeds = range(factory.scale.num_seeds)
    tasks = factory.scale.tasks or TASKS
    rows = []
    data = {}
    for size in _SIZES[factory.scale.name]:
        models = [results[size, "model", seed] for seed in seeds]
        num_parameters = _get_num_parameters(models)
        values: dict[str, Any] = {
            "num_parameters": num_parameters,
            "perplexity": [get_heldout_metric(model, "perplexity") for model in models],
        }
        for task in tasks:
            values[task] = [get_task_score(results[size, task, seed], task) for seed in seeds]
        data[_format_size(size)] = values
        rows.append(
            [
                *map(str, size),
                EMPTY_CELL if num_parameters is None else f"{num_parameters / 1e6:.2f} M",
                format_mean_std(values["perplexity"], ".1f"),
                *(format_mean_std(values[task]) for task in tasks),
            ]
        )
    columns = [
        "layers",
        "width",
        "heads",
        "parameters",
        "perplexity",
        *(TASK_METRICS[task].label for task in tasks),
    ]
    paper_columns = ["layers", "width", "heads", "perplexity", "MRPC, %", "SST-2, %"]
    paper_rows = [[*map(str, size), *map(str, values)] for size, values in _PAPER.items()]
    tables = [
        Table("Table 6: model size (same learning rate for all)", columns, rows),
        Table("Results of the paper", paper_columns, paper_rows),
    ]
    untrained = {
        name: {task: [get_task_score(results[name, task, seed], task) for seed in seeds]
               for task in tasks}
        for name in factory.create_untrained_models(factory.create_baseline_run())
    }  # fmt: skip
    scale = factory.scale
    baseline = data[_format_size((scale.layers, scale.width, scale.heads))]
    benefits = {
        task: find_minima([subtract(baseline[task], scores[task]) for scores in untrained.values()])
        for task in tasks
    }
    claims = _build_claims(_SIZES[scale.name], tasks, data, benefits)
    return Report(tables, _build_panels(tasks, data), data | untrained, claims)


def _build_claims(
    sizes: list[tuple[int, int, int]],
    tasks: Sequence[str],
    data: Mapping[str, Mapping[str, Any]],
    benefits: Mapping[str, Sequence[float | None]],
) -> list[Claim]:
    """Return the claims that larger models have a lower perplexity and higher task scores.

    Perplexities are compared between models that differ in one size only, and scores between the
    smallest and the largest model.

    Args:
        sizes: The sizes of the models.
        tasks: The tasks.
        data: Perplexities and scores of each model by seed.
        benefits: How much pre-training improves the scores of the baseline model by task.
    """
    values = [data[_format_size(size)] for size in sizes]
    claims = []
    for smaller, larger in combinations(range(len(sizes)), 2):
        axes = [axis for axis in range(3) if sizes[smaller][axis] != sizes[larger][axis]]
        if len(axes) == 1 and sizes[smaller][axes[0]] < sizes[larger][axes[0]]:
            losses = [_to_losses(values[index]["perplexity"]) for index in (smaller, larger)]
            text = (
                f"{_format_size(sizes[larger])} has a lower log perplexity than "
                f"{_format_size(sizes[smaller])}"
            )
            claims.append(Claim(text, subtract(*losses), MIN_LOSS_DIFFERENCE))
    order = sorted(range(len(sizes)), key=lambda index: sizes[index][0] * sizes[index][1] ** 2)
    smallest, largest = order[0], order[-1]
    for task in _CLAIMED_TASKS:
        if task not in tasks:
            continue
        text = (
            f"{TASK_METRICS[task].label}: {_format_size(sizes[largest])} is better than "
            f"{_format_size(sizes[smallest])}"
        )
        differences = subtract(values[largest][task], values[smallest][task])
        claims.append(Claim(text, differences, benefits=benefits[task]))
    return claims


def _format_size(size: tuple[int, int, int]) -> str:
    return " x ".join(map(str, size))


def _to_losses(perplexities: list[float | None]) -> list[float | None]:
    return [None if value is None else math.log(value) for value in perplexities]


def _get_num_parameters(models: list[dict[str, Any] | None]) -> int | None:
    """Return the number of parameters from the first result that has it."""
    for model in models:
        if model is not None and "num_parameters" in model:
            return int(model["num_parameters"])
    return None


def _build_panels(tasks: Sequence[str], data: dict[str, Any]) -> list[Panel]:
    """Return plots of perplexity and task scores by model size."""
    perplexities = {size: {"masked LM": values["perplexity"]} for size, values in data.items()}
    scores = {
        size: {TASK_METRICS[task].label: values[task] for task in tasks}
        for size, values in data.items()
    }
    sizes = "layers x width x heads"
    return [
        Panel(f"held-out perplexity by {sizes}", make_dot_plot(perplexities, "perplexity")),
        Panel(f"fine-tuning scores by {sizes}", make_dot_plot(scores, "score, held out")),
    ]


EXPERIMENT = Experiment(
    name="model-size",
    source="section 5.2, table 6",
    question="Do more layers, width and heads improve held-out perplexity and task scores?",
    build_stages=_build_stages,
    build_report=_build_report,
)
