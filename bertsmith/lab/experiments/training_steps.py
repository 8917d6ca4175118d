"""Figure 5: fine-tuned accuracy against pre-training steps, masked LM against left to right.

It never knows how a stage is made.
"""

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import Panel, Report, Table, format_mean_std, mean_plot
from bertsmith.lab.stage import Stage
from bertsmith.lab.stages import StageFactory, task_score

TASKS = ("sst-2", "sts-b")
_MODELS = ("masked LM", "left to right")


def _runs(kit: StageFactory, seed: int) -> dict[str, Stage]:
    return {"masked LM": kit.baseline_run(seed), "left to right": kit.left_to_right_run(seed)}


def _moments(kit: StageFactory) -> list[int]:
    return [0, *kit.snapshots(kit.baseline_run())]


def _stages(kit: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(kit.scale.num_seeds):
        for name, run in _runs(kit, seed).items():
            stages[name, "run", seed] = run
            for moment, model in {0: kit.initialized_model(run), **kit.snapshots(run)}.items():
                for task in TASKS:
                    stages[name, task, moment, seed] = kit.finetuning_run(model, task, seed)
    return stages


def _report(kit: StageFactory, found: Results) -> Report:
    seeds, moments = range(kit.scale.num_seeds), _moments(kit)
    scores = {
        (name, task, moment): [task_score(found[name, task, moment, seed], task) for seed in seeds]
        for name in _MODELS for task in TASKS for moment in moments
    }  # fmt: skip
    rows = [
        [
            f"{moment:,}",
            *(format_mean_std(scores[name, task, moment]) for task in TASKS for name in _MODELS),
        ]
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
        panels.append(Panel(task, mean_plot(courses, "pre-training steps", "held-out score")))
    figures = {f"{name}, {task}, {moment}": own for (name, task, moment), own in scores.items()}
    return Report([Table(title, columns, rows)], panels, figures)


EXPERIMENT = Experiment(
    name="training-steps",
    source="appendix C.1, figure 5",
    question="Does masked LM start slower than left to right, and end higher?",
    build_stages=_stages,
    build_report=_report,
)
