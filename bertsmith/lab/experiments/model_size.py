"""Table 6: whether a larger model does better, on held-out text and on tasks.

It never knows how a stage is made.
"""

from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import EMPTY_CELL, Panel, Report, Table, dot_plot, format_mean_std
from bertsmith.lab.stages import TASK_METRICS, StageFactory, task_score, validation_metric

TASKS = ("mrpc", "sts-b", "sst-2")
#: Layers, width, heads. The usual model of the scale is one of them.
_SIZES: dict[str, list[tuple[int, int, int]]] = {
    "smoke": [(2, 16, 2), (4, 16, 2)],
    "small": [(2, 128, 4), (4, 128, 2), (4, 128, 4), (8, 128, 4), (2, 256, 4), (4, 256, 4)],
    "full": [(3, 768, 12), (6, 768, 3), (6, 768, 12), (12, 768, 12), (12, 1024, 16),
             (24, 1024, 16)],
}  # fmt: skip
#: The paper's perplexity, and accuracy on MRPC and SST-2.
_PAPER = {
    (3, 768, 12): (5.84, 79.8, 88.4), (6, 768, 3): (5.24, 82.2, 90.7),
    (6, 768, 12): (4.68, 84.8, 91.3), (12, 768, 12): (3.99, 86.7, 92.9),
    (12, 1024, 16): (3.54, 86.9, 93.3), (24, 1024, 16): (3.23, 87.8, 93.7),
}  # fmt: skip


def _stages(kit: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(kit.scale.num_seeds):
        for size in _SIZES[kit.scale.name]:
            sizes = dict(zip(("layers", "width", "heads"), size, strict=True))
            model = kit.baseline_run(seed, model=sizes)
            stages[size, "model", seed] = model
            for task in TASKS:
                stages[size, task, seed] = kit.finetuning_run(model, task, seed)
    return stages


def _report(kit: StageFactory, found: Results) -> Report:
    seeds = range(kit.scale.num_seeds)
    rows, figures = [], {}
    for size in _SIZES[kit.scale.name]:
        models = [found[size, "model", seed] for seed in seeds]
        known: dict[str, Any] = {
            "parameters": next((own["parameters"] for own in models
                                if own and "parameters" in own), None),
            "perplexity": [validation_metric(own, "perplexity") for own in models],
        }  # fmt: skip
        known |= {
            task: [task_score(found[size, task, seed], task) for seed in seeds] for task in TASKS
        }
        figures[" x ".join(map(str, size))] = known
        count = known["parameters"]
        rows.append([
            *map(str, size), EMPTY_CELL if count is None else f"{count / 1e6:.2f} M",
            format_mean_std(known["perplexity"], ".1f"), *(format_mean_std(known[task]) for task in TASKS),
        ])  # fmt: skip
    columns = ["layers", "width", "heads", "parameters", "perplexity",
               *(TASK_METRICS[task][1] for task in TASKS)]  # fmt: skip
    paper = [[*map(str, size), *map(str, told)] for size, told in _PAPER.items()]
    tables = [
        Table("Table 6: model size (learning rate of the recipe)", columns, rows),
        Table(
            "The paper's", ["layers", "width", "heads", "perplexity", "MRPC, %", "SST-2, %"], paper
        ),
    ]
    return Report(tables, _panels(figures), figures)


def _panels(figures: dict[str, Any]) -> list[Panel]:
    """Return perplexity and scores of each size: some differ in their heads alone."""
    losses = {size: {"masked LM": own["perplexity"]} for size, own in figures.items()}
    scores = {size: {TASK_METRICS[task][1]: own[task] for task in TASKS}
              for size, own in figures.items()}  # fmt: skip
    sizes = "layers x width x heads"
    return [
        Panel(f"held-out perplexity by {sizes}", dot_plot(losses, "perplexity")),
        Panel(f"fine-tuned, by {sizes}", dot_plot(scores, "score, held out")),
    ]


EXPERIMENT = Experiment(
    name="model-size",
    source="section 5.2, table 6",
    question="Do more layers, width and heads pay, on held-out text and on tasks?",
    build_stages=_stages,
    build_report=_report,
)
