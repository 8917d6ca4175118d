"""Table 5: what next sentence and both directions are worth.

It never knows how a stage is made.
"""

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import EMPTY_CELL, Panel, Report, Table, dot_plot, format_mean_std
from bertsmith.lab.stages import TASK_METRICS, StageFactory, task_score, validation_metric

#: A pair task, a similarity task, sentiment, and question answering.
TASKS = ("mrpc", "sts-b", "sst-2", "squad")
#: What a task has without any pre-training: from chance, and from the recipe's first weights, whose
#: heads begin by looking at neighbours and at equal words of the other segment.
_CHANCE, _FIRST = _FLOORS = ("not pre-trained, from chance", "not pre-trained, first weights")
#: The models of the table, and the paper's figures for those of the tasks that it has.
PAPER: dict[str, dict[str, float]] = {
    _CHANCE: {},
    _FIRST: {},
    "MLM + NSP": {"mrpc": 86.7, "sst-2": 92.7, "squad": 88.5},
    "MLM, no NSP": {"mrpc": 86.5, "sst-2": 92.6, "squad": 87.9},
    "left to right, no NSP": {"mrpc": 77.5, "sst-2": 92.1, "squad": 77.8},
    "left to right + BiLSTM": {"mrpc": 75.7, "sst-2": 91.6, "squad": 84.9},
}


def _stages(kit: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(kit.scale.num_seeds):
        masked, causal = kit.mlm_only_run(seed), kit.left_to_right_run(seed)
        # The paper's recipe begins from chance as it is.
        by_chance = {} if kit.scale.recipe == "paper" else {"run": {"initialization": "random"}}
        models = {
            _CHANCE: kit.initialized_model(kit.mlm_only_run(seed, **by_chance)),
            _FIRST: kit.initialized_model(masked),
            "MLM + NSP": kit.pretraining_run(seed),
            "MLM, no NSP": masked,
            "left to right, no NSP": causal,
            "left to right + BiLSTM": causal,
        }
        lstm = {"features": {"layers": "last", "width": kit.scale.width, "frozen": False}}
        for name, model in models.items():
            stages[name, "model", seed] = model
            for task in TASKS:
                more = lstm if name.endswith("BiLSTM") else {}
                stages[name, task, seed] = kit.finetuning_run(model, task, seed, **more)
    return stages


def _report(kit: StageFactory, found: Results) -> Report:
    seeds = range(kit.scale.num_seeds)
    rows, figures = [], {}
    for name, paper in PAPER.items():
        scores = {
            task: [task_score(found[name, task, seed], task) for seed in seeds] for task in TASKS
        }
        models = [found[name, "model", seed] for seed in seeds]
        loss = [None if name in _FLOORS else validation_metric(own) for own in models]
        figures[name] = {**scores, "held-out loss": loss}
        told = [f"{format_mean_std(scores[task])} ({_percent(paper.get(task))})" for task in TASKS]
        rows.append([name, format_mean_std(loss), *told])
    columns = [
        "model",
        "held-out loss of its own objective",
        *(f"{TASK_METRICS[task][1]} (paper, %)" for task in TASKS),
    ]
    title = "Table 5: pre-training tasks, scored on held-out examples"
    panels = []
    for task in TASKS:
        groups = {name: {task: figures[name][task]} for name in PAPER}
        panels.append(
            Panel(f"{TASK_METRICS[task][1]}, held out", dot_plot(groups, TASK_METRICS[task][0]))
        )
    return Report([Table(title, columns, rows)], panels, figures)


def _percent(value: float | None) -> str:
    return EMPTY_CELL if value is None else f"{value:.1f}"


EXPERIMENT = Experiment(
    name="pretraining-tasks",
    source="section 5.1, table 5",
    question="What are next-sentence prediction and both directions worth to what is fine-tuned?",
    build_stages=_stages,
    build_report=_report,
)
