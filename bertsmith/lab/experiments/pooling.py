"""Which layer, pooled how, makes the best sentence vectors; and what they look like.

It never knows how a model was trained.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.errors import TaskError
from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.experiments.context import SENSES_KIND, measure_senses, senses_stage
from bertsmith.lab.report import EMPTY_CELL, Panel, Report, Table, format_mean_std, heatmap
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job
from bertsmith.lab.stages import StageFactory
from bertsmith.tasks.metrics import spearman
from bertsmith.use.embed import Embedder

POOLINGS = ("mean", "max", "mean-max", "first", "last")
#: Sentences of the map.
_MAPPED = 300
_SIMILARITY, _MAP = "layer-similarity", "sentence-map"
#: The column of word vectors, each the mean of its word's pieces.
_WORDS = "words: same sense nearer than different (see context)"
#: Deviations from the middle of a map to its edge.
_EDGE = 3.0
#: SST-2's labels in words.
_LIKED = {"0": "negative", "1": "positive"}
Floats = NDArray[np.float32]


def measure_similarity(job: Job) -> dict[str, Any]:
    """Score the cosine of pairs against people's scores, by layer and pooling (Spearman)."""
    embedder = Embedder.load(job.model)
    pairs = _pairs(job.stage.files["pairs"], job.stage.settings["most"])
    sides = [first for first, _, _ in pairs], [second for _, second, _ in pairs]
    layers, poolings = range(embedder.config.layers + 1), job.stage.settings["poolings"]
    job.progress.start("embedding pairs", len(layers) * len(poolings), "layers x poolings")
    table: list[list[float]] = []
    for layer in layers:
        row: list[float] = []
        for pooling in poolings:
            left, right = (
                embedder.encode(own, layer=layer, pooling=pooling, normalize=True) for own in sides
            )
            cosines = (left * right).sum(-1).astype(np.float64)
            row.append(round(spearman(cosines, np.array([score for _, _, score in pairs])), 4))
            job.progress.advance(1)
        table.append(row)
    job.progress.finish()
    return {"layers": table, "pairs": len(pairs)}


def measure_map(job: Job) -> dict[str, Any]:
    """Lay labelled sentences out on a plane, layer by layer: the two axes along which most vary."""
    embedder = Embedder.load(job.model)
    rows = _rows(job.stage.files["sentences"], ("sentence", "label"), job.stage.settings["most"])
    sentences, labels = ([row[place] for row in rows] for place in range(2))
    maps, parted = [], []
    for layer in range(embedder.config.layers + 1):
        vectors = embedder.encode(sentences, layer=layer, pooling="mean")
        maps.append([[round(float(x), 3) for x in point] for point in _plane(vectors)])
        parted.append(_parted(vectors, labels))
    return {"labels": labels, "maps": maps, "parted": parted}


def _pairs(path: Path, most: int) -> list[tuple[str, str, float]]:
    """Read pairs of STS-B's form: sentence1, sentence2 and score."""
    return [
        (one, other, float(score))
        for one, other, score in _rows(path, ("sentence1", "sentence2", "score"), most, "score")
    ]


def _rows(
    path: Path, columns: tuple[str, ...], most: int, number: str | None = None
) -> list[tuple[str, ...]]:
    """Return the columns of a TSV file's first lines. TaskError, by line, where there are none.

    ``number``: which of them is a number.
    """
    found = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            for name in columns:
                if name not in (rows.fieldnames or ()):
                    told = ", ".join(columns)
                    raise TaskError(f"{path}, line 1: no column {name}; it needs {told}")
            for row in islice(rows, most):
                cells = tuple(row[name] for name in columns)
                place = f"{path}, line {rows.line_num}"
                if None in cells:
                    raise TaskError(f"{place}: it has fewer columns than the first line")
                if number is not None and not _is_number(row[number]):
                    raise TaskError(f"{place}: the {number} {row[number]!r} is no number")
                found.append(cells)
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: it is not UTF-8 text ({error.reason})") from None
    if len(found) <= 1:
        raise TaskError(f"{path}: it holds {len(found)} lines beside the header, too few")
    return found


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


def _plane(vectors: Floats) -> Floats:
    """Return the two principal components [n, 2], each scaled to a deviation of 1."""
    centred = vectors - vectors.mean(0)
    _, _, axes = np.linalg.svd(centred, full_matrices=False)
    found = centred @ axes[:2].T
    plane: Floats = (found / found.std(0).clip(1e-9)).astype(np.float32)
    return plane


def _parted(vectors: Floats, labels: list[str]) -> float:
    """Return how often a sentence's nearest neighbour (by cosine) has its label."""
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-9)
    near = units @ units.T
    np.fill_diagonal(near, -np.inf)
    best = near.argmax(-1)
    return float(np.mean([labels[own] == label for own, label in zip(best, labels, strict=True)]))


def _stages(kit: StageFactory) -> Stages:
    settings = {"most": kit.scale.num_eval_sequences * 4, "poolings": list(POOLINGS)}
    files = {"pairs": kit.sources.task_files("sts-b")[1]}
    shown = {"sentences": kit.sources.task_files("sst-2")[1]}
    if kit.sources.model:
        given = {"model": Path(kit.sources.model)}
        return {
            ("similarity", 0): Stage(_SIMILARITY, settings, {}, files | given),
            ("map", 0): Stage(_MAP, {"most": _MAPPED}, {}, shown | given),
        }
    stages: Stages = {}
    for seed in range(kit.scale.num_seeds):
        needs = {"model": kit.baseline_run(seed)}
        stages["words", seed] = senses_stage(kit, "en", seed)
        stages["similarity", seed] = Stage(_SIMILARITY, settings, needs, files)
    stages["map", 0] = Stage(_MAP, {"most": _MAPPED}, {"model": kit.baseline_run(0)}, shown)
    return stages


def _report(kit: StageFactory, found: Results) -> Report:  # noqa: ARG001 - all reports are asked alike
    # A correlation with a constant is no number, and null in a file.
    runs = [np.array(own["layers"], np.float64) if own else None
            for key, own in found.items() if key[0] == "similarity"]  # type: ignore[index] # fmt: skip
    known = [own for own in runs if own is not None]
    shown = found["map", 0]
    tables, panels, figures = [], [], {}
    if known:
        finite = np.ma.masked_invalid(np.stack(known)).mean(0)
        mean = np.ma.filled(finite, np.nan)
        last = len(mean) - 1
        names = [f"{layer} ({layer - last - 1})" if layer else "embeddings"
                 for layer in range(last + 1)]  # fmt: skip
        parted = shown["parted"] if shown else [None] * (last + 1)
        words = [own for key, own in found.items() if key[0] == "words"]  # type: ignore[index]
        rows = [
            [names[layer],
             *(format_mean_std([None if own is None else float(own[layer, place]) for own in runs],
                      nonfinite_label="constant")
               for place in range(len(POOLINGS))),
             EMPTY_CELL if parted[layer] is None else f"{parted[layer]:.3f}",
             *_word_cell(words, layer)]
            for layer in range(last, -1, -1)
        ]  # fmt: skip
        title = "Spearman of the cosine with people's scores (STS-B, held out), no fine-tuning"
        columns = ["layer", *POOLINGS, "neighbour of the same label (SST-2, mean, seed 0)"]
        columns += [_WORDS] if words else []
        tables.append(Table(title, columns, rows))
        figures["spearman by layer from the embeddings on"] = mean.tolist()
        drawn = heatmap(mean.tolist()[::-1], names[::-1], POOLINGS)
        panels.append(Panel("Spearman by layer and pooling", drawn))
    if shown:
        for layer in range(len(shown["maps"]) - 1, -1, -1):
            title = f"layer {layer}" if layer else "embeddings"
            panels.append(Panel(title, _scattered(shown["maps"][layer], shown["labels"])))
    return Report(tables, panels, figures)


def _word_cell(words: Sequence[Mapping[str, Any] | None], layer: int) -> list[str]:
    """Return the cell of word vectors; a given model has a table of its own, of `context`."""
    parted = [own["layers"][layer]["parted"] if own else None for own in words]
    return [format_mean_std(parted)] if words else []


def _scattered(points: list[list[float]], labels: list[str]) -> Any:
    def drawn(axes: Any) -> None:
        for label, colour in zip(sorted(set(labels)), ("#D55E00", "#0072B2"), strict=False):
            # What lies far out stands at the edge, so that the rest is not pressed together.
            own = [
                [min(max(x, -_EDGE), _EDGE) for x in point]
                for point, name in zip(points, labels, strict=True)
                if name == label
            ]
            told = _LIKED.get(label, label)
            axes.scatter(*zip(*own, strict=True), s=8, color=colour, alpha=0.6, label=told)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("first principal component", fontsize=8)
        axes.set_ylabel("second", fontsize=8)
        axes.legend(frameon=False, fontsize=8)

    return drawn


EXPERIMENT = Experiment(
    name="pooling",
    source="section 5.3 (features), after bert-as-service",
    question="Which layer, pooled how, makes the best vectors of sentences, and of words?",
    build_stages=_stages,
    build_report=_report,
    stage_functions={
        _SIMILARITY: measure_similarity,
        _MAP: measure_map,
        SENSES_KIND: measure_senses,
    },
)
