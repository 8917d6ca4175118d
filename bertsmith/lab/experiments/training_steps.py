"""Figure 5: fine-tuned accuracy against pre-training steps, masked LM against left to right.

It never knows how a stage is made.
"""

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import Panel, Report, Table, means, spread
from bertsmith.lab.stage import Stage
from bertsmith.lab.stages import Kit, score

TASKS = ("sst-2", "sts-b")
_MODELS = ("masked LM", "left to right")


def _runs(kit: Kit, seed: int) -> dict[str, Stage]:
    return {"masked LM": kit.usual(seed), "left to right": kit.left_to_right(seed)}


def _moments(kit: Kit) -> list[int]:
    return [0, *kit.moments(kit.usual())]


def _stages(kit: Kit) -> Stages:
    stages: Stages = {}
    for seed in range(kit.scale.seeds):
        for name, run in _runs(kit, seed).items():
            stages[name, "run", seed] = run
            for moment, model in {0: kit.begun(run), **kit.moments(run)}.items():
                for task in TASKS:
                    stages[name, task, moment, seed] = kit.tuned(model, task, seed)
    return stages


def _report(kit: Kit, found: Results) -> Report:
    seeds, moments = range(kit.scale.seeds), _moments(kit)
    scores = {
        (name, task, moment): [score(found[name, task, moment, seed], task) for seed in seeds]
        for name in _MODELS for task in TASKS for moment in moments
    }  # fmt: skip
    rows = [
        [f"{moment:,}", *(spread(scores[name, task, moment]) for task in TASKS for name in _MODELS)]
        for moment in moments
    ]
    columns = ["steps", *(f"{task}, {name}" for task in TASKS for name in _MODELS)]
    title = (
        "Figure 5: held-out score against pre-training steps, at 0 of the first weights (the "
        "paper, MNLI: left to right rises faster at first, masked LM is ahead almost at once and "
        "stays there)"
    )
    panels = []
    for task in TASKS:
        courses = {name: {moment: scores[name, task, moment] for moment in moments}
                   for name in _MODELS}  # fmt: skip
        panels.append(Panel(task, means(courses, "pre-training steps", "held-out score")))
    figures = {f"{name}, {task}, {moment}": own for (name, task, moment), own in scores.items()}
    return Report([Table(title, columns, rows)], panels, figures)


EXPERIMENT = Experiment(
    name="training-steps",
    source="appendix C.1, figure 5",
    question="Does masked LM start slower than left to right, and end higher?",
    stages=_stages,
    report=_report,
)
