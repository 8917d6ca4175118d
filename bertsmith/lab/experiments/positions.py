"""Compares learned and sinusoidal positions, and measures similarities of learned positions."""

from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle import load_encoder
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.report import (
    EMPTY_CELL,
    DrawFunction,
    Panel,
    Report,
    Table,
    format_mean_std,
    make_dot_plot,
    make_line_plot,
    style_axes,
)
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.lab.stages import StageFactory, get_heldout_metric
from bertsmith.lab.verdict import MIN_LOSS_DIFFERENCE, Claim, subtract

#: The rows of the table, with the settings that differ from the baseline run. The baseline has the
#: initialization "cross-segment-heads": position embeddings start as sinusoids in separate
#: dimensions, and two attention heads initially attend to the neighboring tokens.
MODELS: dict[str, dict[str, Any]] = {
    "learned, random initialization": {"run": {"initialization": "random"}},
    "sinusoidal": {"model": {"positions": "sinusoidal"}, "run": {"initialization": "random"}},
    # Here and in the next row, the output bias is initialized with word frequencies.
    "learned, initialized as sinusoids": {"run": {"initialization": "unigram"}},
    "learned, initialized as sinusoids, with neighbor heads": {},
}
#: Maximum number of positions in the similarity map.
_MAX_MAP_POSITIONS = 128
_MAP_KIND = "position-map"
#: Minimum difference between unigram entropy and loss of a model that uses word order, in nats.
#: Models that know only the topic of a text have a difference of about 0.5.
_MIN_ORDER_GAIN = 1.0
#: Distances between two positions in the table.
_DISTANCES = (1, 2, 4, 8, 16, 32)


def _create_map_stage(factory: StageFactory, model: Stage | None) -> Stage:
    """Return the stage that compares the positions of a model; None stands for the user's model."""
    if model is None:
        assert factory.sources.model is not None
        files = {"model": Path(factory.sources.model)}
        return Stage(_MAP_KIND, {"max_positions": _MAX_MAP_POSITIONS}, {}, files)
    num_positions = min(_MAX_MAP_POSITIONS, factory.scale.max_length)
    return Stage(_MAP_KIND, {"max_positions": num_positions}, {"model": model})


def measure_position_similarity(job: Job) -> dict[str, Any]:
    """Return the cosine similarities of position embeddings [positions, D].

    Returns:
        ``similarities`` [positions, positions], and ``mean_similarity_by_distance`` [positions].
    """
    encoder = load_encoder(job.model).model
    table = encoder.embeddings.positions.weight.detach()[: job.stage.settings["max_positions"]]
    # The mean is subtracted, because it does not distinguish positions.
    normalized = torch.nn.functional.normalize(table - table.mean(0), dim=-1)
    similarities = normalized @ normalized.T
    by_distance = [
        float(similarities.diagonal(distance).mean()) for distance in range(len(normalized))
    ]
    return {
        "similarities": [[round(value, 3) for value in row] for row in similarities.tolist()],
        "mean_similarity_by_distance": by_distance,
    }


def _build_stages(factory: StageFactory) -> Stages:
    if factory.sources.model:
        return {("map", Path(factory.sources.model).name): _create_map_stage(factory, None)}
    baseline_overrides: dict[str, Any] = {}
    if factory.scale.recipe != "fast" or factory.scale.initialization is not None:
        # Other scales have another initialization than the recipe "fast".
        baseline_overrides = {"run": {"initialization": "cross-segment-heads"}}
    stages: Stages = {}
    for seed in range(factory.scale.num_seeds):
        for name, overrides in MODELS.items():
            stages[name, seed] = factory.create_mlm_only_run(
                seed, **(overrides or baseline_overrides)
            )
    for name in MODELS:
        if name != "sinusoidal":
            stages["map", name] = _create_map_stage(factory, stages[name, 0])
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    maps = {key[1]: result for key, result in results.items() if key[0] == "map" and result}  # type: ignore[index]
    tables: list[Table] = []
    losses: dict[str, Any] = {}
    if not factory.sources.model:
        seeds = range(factory.scale.num_seeds)
        losses = {
            name: [get_heldout_metric(results[name, seed]) for seed in seeds] for name in MODELS
        }
        rows = [[name, format_mean_std(values, ".4f")] for name, values in losses.items()]
        title = (
            "Position embeddings (in the last two rows, the output bias also starts with word "
            "frequencies)"
        )
        tables.append(Table(title, ["position embeddings", "held-out MLM loss, nats"], rows))
    rows = []
    for name, result in maps.items():
        by_distance = result["mean_similarity_by_distance"]
        cells = (
            f"{by_distance[distance]:.2f}" if distance < len(by_distance) else EMPTY_CELL
            for distance in _DISTANCES
        )
        rows.append([name, *cells])
    columns = ["model", *(f"distance {distance}" for distance in _DISTANCES)]
    title = "Mean cosine similarity of position embeddings by distance, after subtracting the mean"
    tables.append(Table(title, columns, rows))
    panels = [
        Panel(name, _make_similarity_map(result["similarities"])) for name, result in maps.items()
    ]
    if losses:
        groups = {name: {"loss": values} for name, values in losses.items()}
        panels.insert(0, Panel("held-out loss", make_dot_plot(groups, "MLM loss, nats")))
    # The last distance is omitted, because it has a single pair of positions.
    curves = {
        name: list(enumerate(result["mean_similarity_by_distance"]))[:-1]
        for name, result in maps.items()
    }
    plot = make_line_plot(curves, "distance between two positions", "mean cosine similarity")
    panels.append(Panel("similarity by distance", plot))
    return Report(tables, panels, losses, _build_claims(factory, results, losses))


def _build_claims(
    factory: StageFactory, results: Results, losses: dict[str, list[float | None]]
) -> list[Claim]:
    """Return the claim that learned and sinusoidal positions are nearly identical."""
    if not losses:
        return []
    learned, sinusoidal = "learned, random initialization", "sinusoidal"
    entropies = [
        get_heldout_metric(results[learned, seed], "unigram_entropy")
        for seed in range(factory.scale.num_seeds)
    ]
    gains = subtract(entropies, losses[learned])
    return [
        Claim(
            "learned and sinusoidal positions have the same loss",
            subtract(losses[sinusoidal], losses[learned]),
            MIN_LOSS_DIFFERENCE,
            benefits=subtract(gains, [_MIN_ORDER_GAIN] * len(gains)),
            no_benefit=f"the losses are less than {_MIN_ORDER_GAIN:g} nat below the unigram "
            "entropy, so the models hardly use word order",
            is_equality=True,
        )
    ]


def _make_similarity_map(values: list[list[float]]) -> DrawFunction:
    """Return a function that draws similarities [positions, positions] as an image."""

    def draw(axes: Any) -> None:
        image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1)
        style_axes(axes, "position", "position")
        axes.grid(visible=False)
        axes.figure.colorbar(image, ax=axes, shrink=0.8, label="cosine similarity")

    return draw


EXPERIMENT = Experiment(
    name="positions",
    source="section 3 (learned positions, unlike Vaswani et al. 2017, section 3.5)",
    question="Are learned positions better than sinusoidal ones, and what do they look like?",
    build_stages=_build_stages,
    build_report=_build_report,
    stage_functions={_MAP_KIND: measure_position_similarity},
)
