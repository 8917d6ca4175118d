"""Table 5: what next sentence and both directions are worth.

It never knows how a stage is made.
"""

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import NOTHING, Panel, Report, Table, dots, spread
from bertsmith.lab.stages import METRICS, Kit, heldout, score

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


def _stages(kit: Kit) -> Stages:
    stages: Stages = {}
    for seed in range(kit.scale.seeds):
        masked, causal = kit.masked_only(seed), kit.left_to_right(seed)
        # The paper's recipe begins from chance as it is.
        by_chance = {} if kit.scale.recipe == "paper" else {"run": {"first_weights": "random"}}
        models = {
            _CHANCE: kit.begun(kit.masked_only(seed, **by_chance)),
            _FIRST: kit.begun(masked),
            "MLM + NSP": kit.pretrained(seed),
            "MLM, no NSP": masked,
            "left to right, no NSP": causal,
            "left to right + BiLSTM": causal,
        }
        lstm = {"features": {"layers": "last", "width": kit.scale.width, "frozen": False}}
        for name, model in models.items():
            stages[name, "model", seed] = model
            for task in TASKS:
                more = lstm if name.endswith("BiLSTM") else {}
                stages[name, task, seed] = kit.tuned(model, task, seed, **more)
    return stages


def _report(kit: Kit, found: Results) -> Report:
    seeds = range(kit.scale.seeds)
    rows, figures = [], {}
    for name, paper in PAPER.items():
        scores = {task: [score(found[name, task, seed], task) for seed in seeds] for task in TASKS}
        models = [found[name, "model", seed] for seed in seeds]
        loss = [None if name in _FLOORS else heldout(own) for own in models]
        figures[name] = {**scores, "held-out loss": loss}
        told = [f"{spread(scores[task])} ({_percent(paper.get(task))})" for task in TASKS]
        rows.append([name, spread(loss), *told])
    columns = [
        "model",
        "held-out loss of its own objective",
        *(f"{METRICS[task][1]} (paper, %)" for task in TASKS),
    ]
    title = "Table 5: pre-training tasks, scored on held-out examples"
    panels = []
    for task in TASKS:
        groups = {name: {task: figures[name][task]} for name in PAPER}
        panels.append(Panel(f"{METRICS[task][1]}, held out", dots(groups, METRICS[task][0])))
    return Report([Table(title, columns, rows)], panels, figures)


def _percent(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1f}"


EXPERIMENT = Experiment(
    name="pretraining-tasks",
    source="section 5.1, table 5",
    question="What are next-sentence prediction and both directions worth to what is fine-tuned?",
    stages=_stages,
    report=_report,
)
