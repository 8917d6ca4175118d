"""Figure 5: fine-tuning scores by pre-training steps, for masked LM and left-to-right LM."""

from collections.abc import Mapping, Sequence

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import Panel, Report, Table, format_mean_std, make_mean_plot
from bertsmith.lab.stage import Stage
from bertsmith.lab.stages import RANDOM, TASK_METRICS, StageFactory, get_task_score
from bertsmith.lab.verdict import Claim, find_minima, subtract

#: Tasks: sentiment and sentence similarity. A scale may have others.
TASKS = ("sst-2", "sts-b")
_MODELS = ("masked LM", "left to right")


def _create_pretraining_runs(factory: StageFactory, seed: int) -> dict[str, Stage]:
    return {
        "masked LM": factory.create_baseline_run(seed),
        "left to right": factory.create_left_to_right_run(seed),
    }


def _list_evaluated_steps(factory: StageFactory) -> list[int]:
    return [0, *factory.create_snapshots(factory.create_baseline_run())]


def _build_stages(factory: StageFactory) -> Stages:
    stages: Stages = {}
    for seed in range(factory.scale.num_seeds):
        for name, run in _create_pretraining_runs(factory, seed).items():
            stages[name, "run", seed] = run
            models = {0: factory.create_initialized_model(run), **factory.create_snapshots(run)}
            for step, model in models.items():
                for task in factory.scale.tasks or TASKS:
                    stages[name, task, step, seed] = factory.create_finetuning_run(
                        model, task, seed
                    )
        untrained = factory.create_untrained_models(factory.create_baseline_run(seed))
        for task in factory.scale.tasks or TASKS:
            stages[RANDOM, task, seed] = factory.create_finetuning_run(
                untrained[RANDOM], task, seed
            )
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    seeds = range(factory.scale.num_seeds)
    tasks = factory.scale.tasks or TASKS
    steps = _list_evaluated_steps(factory)
    scores = {
        (name, task, step): [
            get_task_score(results[name, task, step, seed], task) for seed in seeds
        ]
        for name in _MODELS
        for task in tasks
        for step in steps
    }
    rows = [
        [
            f"{step:,}",
            *(format_mean_std(scores[name, task, step]) for task in tasks for name in _MODELS),
        ]
        for step in steps
    ]
    columns = [
        "steps",
        *(f"{TASK_METRICS[task].task_label}, {name}" for task in tasks for name in _MODELS),
    ]
    title = (
        "Figure 5: held-out score by pre-training steps; step 0 is the initialization. As in the "
        "paper, the models are checkpoints of a single run, so only the last one has a fully "
        "decayed learning rate (the paper, MNLI: left to right rises faster at first, but masked "
        "LM is ahead almost immediately and stays ahead)"
    )
    panels = []
    for task in tasks:
        curves = {name: {step: scores[name, task, step] for step in steps} for name in _MODELS}
        metric = TASK_METRICS[task]
        plot = make_mean_plot(curves, "pre-training steps", metric.metric_label)
        panels.append(Panel(f"{metric.label}, held out", plot))
    data = {f"{name}, {task}, {step}": values for (name, task, step), values in scores.items()}
    random_scores = {
        task: [get_task_score(results[RANDOM, task, seed], task) for seed in seeds]
        for task in tasks
    }
    data |= {f"{RANDOM}, {task}": values for task, values in random_scores.items()}
    claims = _build_claims(tasks, scores, random_scores, steps)
    return Report([Table(title, columns, rows)], panels, data, claims)


def _build_claims(
    tasks: Sequence[str],
    scores: Mapping[tuple[str, str, int], Sequence[float | None]],
    random_scores: Mapping[str, Sequence[float | None]],
    steps: Sequence[int],
) -> list[Claim]:
    """Return the claims that masked LM ends higher, and improves until the end.

    Args:
        tasks: The tasks.
        scores: The score of each seed by model, task and step.
        random_scores: The scores of a randomly initialized model by task.
        steps: The evaluated steps; the first one is 0.
    """
    claims = []
    for task in tasks:
        label = TASK_METRICS[task].label
        start, early, final = (scores["masked LM", task, step] for step in (0, steps[1], steps[-1]))
        benefits = find_minima(
            [subtract(final, untrained) for untrained in (start, random_scores[task])]
        )
        causal = scores["left to right", task, steps[-1]]
        text = f"{label}: masked LM is better than left to right after {steps[-1]:,} steps"
        claims.append(Claim(text, subtract(final, causal), benefits=benefits))
        text = f"{label}: masked LM is better after {steps[-1]:,} steps than after {steps[1]:,}"
        claims.append(Claim(text, subtract(final, early), benefits=benefits))
    return claims


EXPERIMENT = Experiment(
    name="training-steps",
    source="appendix C.1, figure 5",
    question="Does masked LM learn more slowly than left to right at first, and end higher?",
    build_stages=_build_stages,
    build_report=_build_report,
)
