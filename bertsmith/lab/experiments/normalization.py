"""Layer norm after and before each sum, batch norm, and none, at two rates and two batch sizes.

It never knows how a stage is made.
"""

from itertools import product
from statistics import mean, median, pstdev
from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import Panel, Report, Table, format_mean_std, line_plot
from bertsmith.lab.stages import StageFactory, validation_metric

NORMS = {
    "post": "layer norm after each sum", "pre": "layer norm before each part",
    "batch": "batch norm after each sum", "none": "none",
}  # fmt: skip
#: Of the usual steps, how many; of the usual batch, the smaller one; of the usual rate, the lower.
_STEPS, _BATCH, _RATE = 2, 4, 8
#: Figures of a run's way: how fast it was; how far from training it ended (training's loss still
#: falls in that quarter, and has dropout); how smooth.
_COURSE = {
    "early": "held out, after a quarter",
    "gap": "held out - training in the last quarter",
    "rough": "deviation of the gradient's norm / its mean, second half",
}  # fmt: skip


def _steps(kit: StageFactory) -> int:
    return max(2, kit.scale.num_steps // _STEPS)


def _places(kit: StageFactory) -> list[tuple[str, float, int]]:
    """Return each norm at each rate and batch."""
    high, whole = kit.learning_rate, kit.scale.batch_size
    rates, batches = (high, high / _RATE), (whole, max(1, whole // _BATCH))
    return list(product(NORMS, rates, batches))


def _stages(kit: StageFactory) -> Stages:
    return {
        (*place, seed): kit.mlm_only_run(
            seed, steps=_steps(kit), model={"norm": place[0]}, data={"batch": place[2]},
            optim={"lr": place[1]}, run={"log_gradients": True},
        )
        for seed in range(kit.scale.num_seeds)
        for place in _places(kit)
    }  # fmt: skip


def _report(kit: StageFactory, found: Results) -> Report:
    places, seeds = _places(kit), range(kit.scale.num_seeds)
    settings = sorted({(rate, batch) for _, rate, batch in places}, reverse=True)
    figures: dict[str, Any] = {}
    rows, courses = [], []
    for norm, words in NORMS.items():
        row = [words]
        for rate, batch in settings:
            runs = [found[norm, rate, batch, seed] for seed in seeds]
            told, losses = [_course(run) for run in runs], [validation_metric(run) for run in runs]
            place = f"{norm}, rate {rate:g}, batch {batch}"
            figures[place] = {"heldout": losses, "course": told}
            row.append(format_mean_std(losses))
            cells = (
                format_mean_std([own[what] if own else None for own in told]) for what in _COURSE
            )
            courses.append([words, f"{rate:g}", str(batch), *cells])
        rows.append(row)
    columns = ["normalization", *(f"rate {rate:g}, batch {batch}" for rate, batch in settings)]
    title = f"Held-out masked-LM loss, nats, after {_steps(kit):,} steps (small batches read less)"
    tables = [
        Table(title, columns, rows),
        Table("On the way", ["normalization", "rate", "batch", *_COURSE.values()], courses),
        _gradients(kit, found),
    ]
    panels = []
    for rate, batch in settings:
        firsts = {words: found[norm, rate, batch, 0] for norm, words in NORMS.items()}
        series = {words: own["heldout_curve"] if own else [] for words, own in firsts.items()}
        drawn = line_plot(series, "steps", "held-out masked-LM loss, nats")
        panels.append(Panel(f"rate {rate:g}, batch {batch}, seed 0", drawn))
    for norm, words in NORMS.items():
        parts = _by_part(found[norm, kit.learning_rate, kit.scale.batch_size, 0])
        panels.append(
            Panel(f"gradients: {words}", line_plot(parts, "steps", "norm of the gradient"))
        )
    return Report(tables, panels, figures)


def _course(run: dict[str, Any] | None) -> dict[str, float] | None:
    """Return the figures of a run's way, NaN where it diverged; None where there is none."""
    if run is None:
        return None
    curve, end = run["heldout_curve"], validation_metric(run)
    if "diverged" in run or not curve or end is None:
        return dict.fromkeys(_COURSE, float("nan"))
    last = max(step for step, _ in run["training"])
    training = [loss for step, loss in run["training"] if step > 0.75 * last]
    norms = [sum(part**2 for part in parts.values()) ** 0.5
             for step, parts in run["gradients"] if step > 0.5 * last]  # fmt: skip
    return {
        "early": _number(next(loss for step, loss in curve if step >= 0.25 * last)),
        "gap": end - mean(training),
        "rough": pstdev(norms) / mean(norms) if any(norms) else float("nan"),
    }


def _number(value: float | None) -> float:
    """Return a figure of a file, where what is not finite is null."""
    return float("nan") if value is None else value


def _by_part(run: dict[str, Any] | None) -> dict[str, list[tuple[int, float]]]:
    """Return the norms of the gradient over the steps, by part of the model."""
    told: dict[str, list[tuple[int, float]]] = {}
    for step, parts in run["gradients"] if run else ():
        for name, value in parts.items():
            told.setdefault(name, []).append((step, value))
    return told


def _gradients(kit: StageFactory, found: Results) -> Table:
    """Return the norm of the gradient in each layer: which of them hear of the loss."""
    rows, names = [], []
    for norm, words in NORMS.items():
        told = _by_part(found[norm, kit.learning_rate, kit.scale.batch_size, 0])
        if told:
            names = list(told)
            rows.append([words, *(f"{median(value for _, value in own):.3g} ({own[0][1]:.3g})"
                                  for own in told.values())])  # fmt: skip
    title = "Norm of the gradient, median of logged steps (first step), seed 0, higher rate"
    return Table(title, ["normalization", *names], rows)


EXPERIMENT = Experiment(
    name="normalization",
    source="section 3 (after Ba et al. 2016, and Xiong et al. 2020 for its place)",
    question="Does layer norm train faster, smoother, better, and whatever the batch size?",
    build_stages=_stages,
    build_report=_report,
)
