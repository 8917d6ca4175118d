"""Layer norm after and before each sum, batch norm, and none, at two rates and two batch sizes.

It never knows how a stage is made.
"""

from itertools import product
from typing import Any

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.kit import Kit, heldout
from bertsmith.lab.report import Panel, Report, Table, lines, spread

NORMS = {
    "post": "layer norm after each sum", "pre": "layer norm before each part",
    "batch": "batch norm after each sum", "none": "none",
}  # fmt: skip
#: Of the usual steps, how many; of the usual batch, the smaller one; of the usual rate, the lower.
_STEPS, _BATCH, _RATE = 2, 4, 8


def _places(kit: Kit) -> list[tuple[str, float, int]]:
    """Return each norm at each rate and batch."""
    high, whole = kit.rate, kit.scale.batch
    rates, batches = (high, high / _RATE), (whole, max(1, whole // _BATCH))
    return list(product(NORMS, rates, batches))


def _stages(kit: Kit) -> Stages:
    steps = max(2, kit.scale.steps // _STEPS)
    return {
        (*place, seed): kit.pretrained(
            seed, steps=steps, model={"norm": place[0]}, data={"batch": place[2]},
            optim={"lr": place[1]}, run={"log_gradients": True},
        )
        for seed in range(kit.scale.seeds)
        for place in _places(kit)
    }  # fmt: skip


def _report(kit: Kit, found: Results) -> Report:
    places, seeds = _places(kit), range(kit.scale.seeds)
    settings = sorted({(rate, batch) for _, rate, batch in places}, reverse=True)
    figures: dict[str, Any] = {}
    rows = []
    for norm, words in NORMS.items():
        row = [words]
        for rate, batch in settings:
            losses = [heldout(found[norm, rate, batch, seed]) for seed in seeds]
            figures[f"{norm}, rate {rate:g}, batch {batch}"] = losses
            row.append(spread(losses))
        rows.append(row)
    columns = ["normalization", *(f"rate {rate:g}, batch {batch}" for rate, batch in settings)]
    tables = [Table("Held-out masked-LM loss, nats", columns, rows), _gradients(kit, found)]
    panels = []
    for rate, batch in settings:
        series = {}
        for norm, words in NORMS.items():
            first = found[norm, rate, batch, 0]
            series[words] = first["heldout_curve"] if first else []
        drawn = lines(series, "steps", "held-out masked-LM loss")
        panels.append(Panel(f"rate {rate:g}, batch {batch}, seed 0", drawn))
    return Report(tables, panels, figures)


def _gradients(kit: Kit, found: Results) -> Table:
    """Return the norm of the first step's gradient in each layer: which layers hear of the loss."""
    rate, batch = kit.rate, kit.scale.batch
    rows, names = [], []
    for norm, words in NORMS.items():
        result = found[norm, rate, batch, 0]
        if result and result["gradients"]:
            own = result["gradients"][0][1]
            names = list(own)
            rows.append([words, *(f"{value:.3g}" for value in own.values())])
    return Table("Norm of the gradient at the first step, seed 0", ["normalization", *names], rows)


EXPERIMENT = Experiment(
    name="normalization",
    source="section 3 (after Ba et al. 2016, and Xiong et al. 2020 for its place)",
    question="Does layer norm train faster, smoother, better, and whatever the batch size?",
    stages=_stages,
    report=_report,
)
