"""Compares post-norm, pre-norm, batch norm and no normalization in pre-training.

Each of them is trained with two learning rates and two batch sizes.
"""

from itertools import product
from statistics import mean, median, pstdev
from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import Panel, Report, Table, format_mean_std, make_line_plot
from bertsmith.lab.stages import StageFactory, get_heldout_metric
from bertsmith.lab.verdict import MIN_LOSS_DIFFERENCE, Claim, subtract

#: Normalization settings and their names in tables and plots.
NORMS = {
    "post": "LayerNorm after each sublayer (post-norm)",
    "pre": "LayerNorm before each sublayer (pre-norm)",
    "batch": "batch norm after each sublayer",
    "none": "no normalization",
}
#: The number of steps of other experiments is divided by this number.
_STEPS_DIVISOR = 2
#: The second batch size and learning rate are those of the scale, divided by these numbers.
_BATCH_DIVISOR, _LR_DIVISOR = 4, 8
#: Measures of speed, generalization and smoothness from training curves, and their column titles.
#: The generalization gap can be negative, because the training loss includes dropout and falls
#: during the last quarter.
_CURVE_MEASURES = {
    "early_loss": "held-out loss after a quarter of the steps",
    "generalization_gap": "held-out loss minus training loss, last quarter",
    "relative_gradient_deviation": "gradient norm: standard deviation / mean, second half",
}
#: Names of parts of the model in tables and plots, if different from the training log.
_PART_NAMES = {"heads": "output heads"}


def _count_steps(factory: StageFactory) -> int:
    return max(2, factory.scale.num_steps // _STEPS_DIVISOR)


def _list_configurations(factory: StageFactory) -> list[tuple[str, float, int]]:
    """Return all combinations of normalization, learning rate and batch size."""
    lr, batch_size = factory.learning_rate, factory.scale.batch_size
    lrs = (lr, lr / _LR_DIVISOR)
    batch_sizes = (batch_size, max(1, batch_size // _BATCH_DIVISOR))
    return list(product(NORMS, lrs, batch_sizes))


def _build_stages(factory: StageFactory) -> Stages:
    return {
        (norm, lr, batch_size, seed): factory.create_mlm_only_run(
            seed,
            steps=_count_steps(factory),
            model={"norm": norm},
            data={"batch_size": batch_size},
            optim={"lr": lr},
            run={"log_grad_norms": True},
        )
        for seed in range(factory.scale.num_seeds)
        for norm, lr, batch_size in _list_configurations(factory)
    }


def _build_report(factory: StageFactory, results: Results) -> Report:
    seeds = range(factory.scale.num_seeds)
    # Each pair of learning rate and batch size has a column in the first table.
    pairs = sorted(
        {(lr, batch_size) for _, lr, batch_size in _list_configurations(factory)}, reverse=True
    )
    data: dict[str, Any] = {}
    loss_rows, curve_rows = [], []
    for norm, label in NORMS.items():
        loss_row = [label]
        for lr, batch_size in pairs:
            runs = [results[norm, lr, batch_size, seed] for seed in seeds]
            curve_measures = [_measure_curve(run) for run in runs]
            losses = [get_heldout_metric(run) for run in runs]
            data[f"{norm}, lr {lr:g}, batch {batch_size}"] = {
                "heldout_loss": losses,
                "training_curve": curve_measures,
            }
            loss_row.append(format_mean_std(losses))
            cells = (
                format_mean_std(
                    [measures[name] if measures else None for measures in curve_measures]
                )
                for name in _CURVE_MEASURES
            )
            curve_rows.append([label, f"{lr:g}", str(batch_size), *cells])
        loss_rows.append(loss_row)
    columns = ["normalization", *(f"lr {lr:g}, batch {batch_size}" for lr, batch_size in pairs)]
    title = (
        f"Held-out MLM loss, nats, after {_count_steps(factory):,} steps (with less text for "
        "smaller batches)"
    )
    curve_columns = ["normalization", "lr", "batch", *_CURVE_MEASURES.values()]
    tables = [
        Table(title, columns, loss_rows),
        Table("Training curves", curve_columns, curve_rows),
        _build_gradient_table(factory, results),
    ]
    claims = [
        Claim(
            f"lr {lr:g}, batch {batch_size}: post-norm has a lower loss after a quarter of the "
            "steps than no normalization",
            subtract(
                *(_list_early_losses(data, norm, lr, batch_size) for norm in ("none", "post"))
            ),
            MIN_LOSS_DIFFERENCE,
        )
        for lr, batch_size in pairs
    ]
    return Report(tables, _build_panels(factory, results, pairs), data, claims)


def _list_early_losses(
    data: dict[str, Any], norm: str, lr: float, batch_size: int
) -> list[float | None]:
    """Return the held-out loss of each seed after a quarter of the steps."""
    curves = data[f"{norm}, lr {lr:g}, batch {batch_size}"]["training_curve"]
    return [measures["early_loss"] if measures else None for measures in curves]


def _build_panels(
    factory: StageFactory, results: Results, pairs: list[tuple[float, int]]
) -> list[Panel]:
    """Return plots of the held-out loss and of gradient norms, for seed 0."""
    panels = []
    for lr, batch_size in pairs:
        runs = {label: results[norm, lr, batch_size, 0] for norm, label in NORMS.items()}
        curves = {label: run["heldout_curve"] if run else [] for label, run in runs.items()}
        plot = make_line_plot(curves, "steps", "held-out MLM loss, nats")
        panels.append(Panel(f"lr {lr:g}, batch {batch_size}, seed 0", plot))
    for norm, label in NORMS.items():
        gradient_norms = _collect_gradient_norms(_get_baseline_result(factory, results, norm))
        panels.append(
            Panel(
                f"gradient norms by part of the model: {label}",
                make_line_plot(gradient_norms, "steps", "gradient norm"),
            )
        )
    return panels


def _get_baseline_result(
    factory: StageFactory, results: Results, norm: str
) -> dict[str, Any] | None:
    """Return the result with the higher learning rate and the larger batch size, for seed 0."""
    return results[norm, factory.learning_rate, factory.scale.batch_size, 0]


def _measure_curve(run: dict[str, Any] | None) -> dict[str, float] | None:
    """Return the ``_CURVE_MEASURES`` of a run.

    Returns:
        None without a result. The measures are NaN if the run diverged.
    """
    if run is None:
        return None
    curve, final_loss = run["heldout_curve"], get_heldout_metric(run)
    if "diverged" in run or not curve or final_loss is None:
        return dict.fromkeys(_CURVE_MEASURES, float("nan"))
    last_step = max(step for step, _ in run["training_curve"])
    train_losses = [loss for step, loss in run["training_curve"] if step > 0.75 * last_step]
    total_norms = [
        sum(norm**2 for norm in part_norms.values()) ** 0.5
        for step, part_norms in run["gradient_norms"]
        if step > 0.5 * last_step
    ]
    early_loss = next(loss for step, loss in curve if step >= 0.25 * last_step)
    gradient_deviation = float("nan")
    if any(total_norms):
        gradient_deviation = pstdev(total_norms) / mean(total_norms)
    return {
        "early_loss": _nan_if_none(early_loss),
        "generalization_gap": final_loss - mean(train_losses),
        "relative_gradient_deviation": gradient_deviation,
    }


def _nan_if_none(value: float | None) -> float:
    """Return NaN for None, because values that are not finite are null in JSON."""
    return float("nan") if value is None else value


def _collect_gradient_norms(run: dict[str, Any] | None) -> dict[str, list[tuple[int, float]]]:
    """Return the gradient norms of each part of the model, as pairs of step and norm."""
    curves: dict[str, list[tuple[int, float]]] = {}
    if run is None:
        return curves
    for step, part_norms in run["gradient_norms"]:
        for part, norm in part_norms.items():
            curves.setdefault(_PART_NAMES.get(part, part), []).append((step, norm))
    return curves


def _build_gradient_table(factory: StageFactory, results: Results) -> Table:
    """Return a table of gradient norms by part of the model."""
    rows, parts = [], []
    for norm, label in NORMS.items():
        curves = _collect_gradient_norms(_get_baseline_result(factory, results, norm))
        if curves:
            parts = list(curves)
            cells = []
            for curve in curves.values():
                gradient_norms = [gradient_norm for _, gradient_norm in curve]
                cells.append(f"{median(gradient_norms):.3g} ({gradient_norms[0]:.3g})")
            rows.append([label, *cells])
    title = (
        "Gradient norm: median of the logged steps (in parentheses: first step), seed 0, higher "
        "lr, larger batch"
    )
    return Table(title, ["normalization", *parts], rows)


EXPERIMENT = Experiment(
    name="normalization",
    source="section 3 (LayerNorm: Ba et al. 2016; pre-norm: Xiong et al. 2020)",
    question="Is training with LayerNorm faster, smoother and better, at any batch size?",
    build_stages=_build_stages,
    build_report=_build_report,
)
