"""Learned against sinusoidal positions, and how alike the learned ones are.

It never knows how a run is made.
"""

from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle import load_encoder
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import (
    EMPTY_CELL,
    Panel,
    Report,
    Table,
    dot_plot,
    format_mean_std,
    line_plot,
    style_axes,
)
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.lab.stages import StageFactory, validation_metric

#: What differs from the usual run, of which positions begin as sinusoids in dimensions of their
#: own, by which two heads begin to look at the neighbours (`cross-segment-heads`).
MODELS: dict[str, dict[str, Any]] = {
    "learned, from chance": {"run": {"initialization": "random"}},
    "sinusoidal": {"model": {"positions": "sinusoidal"}, "run": {"initialization": "random"}},
    # These two also begin with the words' shares as output bias.
    "learned, from sinusoids": {"run": {"initialization": "unigram"}},
    "learned, from sinusoids, with first heads": {},
}
#: Positions that the map compares.
_MOST = 128
_MAP = "position-map"


def _map_stage(kit: StageFactory, model: Stage | None) -> Stage:
    settings = {"most": min(_MOST, kit.scale.max_length)}
    if model is None:
        return Stage(_MAP, {"most": _MOST}, {}, {"model": Path(str(kit.sources.model))})
    return Stage(_MAP, settings, {"model": model})


def measure_map(job: Job) -> dict[str, Any]:
    """Return the cosine similarity of each two learned positions, [n, n]."""
    found = load_encoder(job.model)
    table = found.model.embeddings.positions.weight.detach()[: job.stage.settings["most"]]
    # What all have in common tells nothing of where a position is.
    own = torch.nn.functional.normalize(table - table.mean(0), dim=-1)
    similar = own @ own.T
    near = [float(similar.diagonal(shift).mean()) for shift in range(len(own))]
    return {"map": [[round(value, 3) for value in row] for row in similar.tolist()],
            "by_distance": near}  # fmt: skip


def _stages(kit: StageFactory) -> Stages:
    if kit.sources.model:
        return {("map", Path(kit.sources.model).name): _map_stage(kit, None)}
    stages: Stages = {}
    for seed in range(kit.scale.num_seeds):
        for name, changes in MODELS.items():
            looking = (
                {}
                if kit.scale.recipe == "fast"
                else {"run": {"initialization": "cross-segment-heads"}}
            )
            stages[name, seed] = kit.mlm_only_run(seed, **(changes or looking))
    for name in MODELS:
        if name != "sinusoidal":
            stages["map", name] = _map_stage(kit, stages[name, 0])
    return stages


def _report(kit: StageFactory, found: Results) -> Report:
    maps = {key[1]: own for key, own in found.items() if key[0] == "map" and own}  # type: ignore[index]
    tables: list[Table] = []
    figures: dict[str, Any] = {}
    if not kit.sources.model:
        seeds = range(kit.scale.num_seeds)
        figures = {
            name: [validation_metric(found[name, seed]) for seed in seeds] for name in MODELS
        }
        rows = [[name, format_mean_std(losses, ".4f")] for name, losses in figures.items()]
        title = "Positions; the last two rows also begin with the words' shares as output bias"
        columns = ["positions", "held-out masked-LM loss, nats"]
        tables.append(Table(title, columns, rows))
    shown = (1, 2, 4, 8, 16, 32)
    rows = []
    for name, own in maps.items():
        near = own["by_distance"]
        told = (f"{near[shift]:.2f}" if shift < len(near) else EMPTY_CELL for shift in shown)
        rows.append([name, *told])
    columns = ["table", *(f"{shift} apart" for shift in shown)]
    tables.append(Table("Cosine similarity of two positions, their mean taken off", columns, rows))
    panels = [Panel(name, _drawn(own["map"])) for name, own in maps.items()]
    if figures:
        losses = {name: {"loss": own} for name, own in figures.items()}
        panels.insert(0, Panel("held out", dot_plot(losses, "masked-LM loss, nats")))
    curves = {name: list(enumerate(own["by_distance"]))[:-1] for name, own in maps.items()}
    panels.append(Panel("by distance", line_plot(curves, "positions apart", "cosine similarity")))
    return Report(tables, panels, figures)


def _drawn(values: list[list[float]]) -> Any:
    def drawn(axes: Any) -> None:
        image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
        style_axes(axes, "position", "position")
        axes.grid(visible=False)
        axes.figure.colorbar(image, ax=axes, shrink=0.8)

    return drawn


EXPERIMENT = Experiment(
    name="positions",
    source="section 3 (learned positions, unlike Vaswani et al. 2017, section 3.5)",
    question="Do learned positions beat sinusoids, and what do they look like?",
    build_stages=_stages,
    build_report=_report,
    stage_functions={_MAP: measure_map},
)
