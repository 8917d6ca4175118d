"""Compares sentence vectors by layer and pooling on STS-B, and draws 2-D maps of SST-2."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bertsmith.lab.experiment import Experiment, Results, Stages
from bertsmith.lab.experiments.context import SENSES_KIND, create_senses_stage, measure_senses
from bertsmith.lab.report import (
    COLORS,
    EMPTY_CELL,
    DrawFunction,
    Panel,
    Report,
    Table,
    format_mean_std,
    make_heatmap,
)
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage_runners import Job, read_public_examples
from bertsmith.lab.stages import StageFactory
from bertsmith.lab.verdict import MIN_SEEDS, Claim
from bertsmith.runtime.device import resolve_device
from bertsmith.tasks.metrics import spearman_correlation
from bertsmith.tasks.retrieval import rank_documents
from bertsmith.use.embed import Embedder

POOLINGS = ("mean", "max", "mean-max", "first", "last")
#: Number of sentences in a map.
_MAP_SENTENCES = 300
_SIMILARITY_KIND, _MAP_KIND = "layer-similarity", "sentence-map"
#: Title of the column with the AUC of word senses, a measure of the experiment "context".
_SENSES_COLUMN = "word senses, AUC (see context)"
#: Limit of the axes of a map in standard deviations. Points beyond it are drawn at the edge.
_MAP_LIMIT = 3.0
#: Title of the column with the layers. Negative numbers count from the last layer.
_LAYER_LABEL = "layer (from the end)"
#: Names of SST-2's labels.
_SENTIMENTS = {"0": "negative", "1": "positive"}
Floats = NDArray[np.float32]


def measure_layer_similarity(job: Job) -> dict[str, Any]:
    """Compare similarities of sentence vectors with human scores, for each layer and pooling.

    Returns:
        ``spearman``, Spearman's correlations of cosine similarities and human scores [layers,
        poolings]; and ``num_pairs``, the number of sentence pairs.
    """
    embedder = Embedder.load(job.model, device=resolve_device("auto", "--device"))
    pairs = read_public_examples(job.stage.files["pairs"], "sts-b")
    pairs = pairs[: job.stage.settings["max_pairs"]]
    first_texts = [pair.texts[0] for pair in pairs]
    second_texts = [pair.texts[1] for pair in pairs]
    human_scores = np.array([pair.label for pair in pairs])
    layers = range(embedder.config.layers + 1)
    poolings = job.stage.settings["poolings"]
    job.progress.start("embedding pairs", len(layers) * len(poolings), "layers x poolings")
    correlations: list[list[float]] = []
    for layer in layers:
        row: list[float] = []
        for pooling in poolings:
            first, second = (
                embedder.encode(texts, layer=layer, pooling=pooling, normalize=True)
                for texts in (first_texts, second_texts)
            )
            cosines = (first * second).sum(-1).astype(np.float64)
            row.append(round(spearman_correlation(cosines, human_scores), 4))
            job.progress.advance(1)
        correlations.append(row)
    job.progress.finish()
    return {"spearman": correlations, "num_pairs": len(pairs)}


def measure_sentence_map(job: Job) -> dict[str, Any]:
    """Project sentence vectors of each layer onto their first two principal components.

    Returns:
        ``labels``; ``points``, the coordinates [layers, sentences, 2]; and
        ``nearest_neighbor_accuracy`` by layer.
    """
    embedder = Embedder.load(job.model, device=resolve_device("auto", "--device"))
    examples = read_public_examples(job.stage.files["sentences"], "sst-2")
    examples = examples[: job.stage.settings["max_sentences"]]
    sentences = [example.texts[0] for example in examples]
    labels = [str(example.label) for example in examples]
    maps, neighbor_accuracies = [], []
    for layer in range(embedder.config.layers + 1):
        vectors = embedder.encode(sentences, layer=layer, pooling="mean")
        projected = _project_on_principal_components(vectors)
        maps.append([[round(float(x), 3) for x in point] for point in projected])
        neighbor_accuracies.append(_measure_nearest_neighbor_accuracy(vectors, labels))
    return {"labels": labels, "points": maps, "nearest_neighbor_accuracy": neighbor_accuracies}


def _project_on_principal_components(vectors: Floats) -> Floats:
    """Project vectors [N, D] onto their first two principal components.

    Returns:
        Coordinates [N, 2] with a standard deviation of 1 on both axes.
    """
    centered = vectors - vectors.mean(0)
    _, _, axes = np.linalg.svd(centered, full_matrices=False)
    projected = centered @ axes[:2].T
    scaled: Floats = (projected / projected.std(0).clip(1e-9)).astype(np.float32)
    return scaled


def _measure_nearest_neighbor_accuracy(vectors: Floats, labels: list[str]) -> float:
    """Return the share of vectors [N, D] whose nearest neighbor by cosine has the same label."""
    nearest = rank_documents(vectors, vectors, top=1, excluded=np.arange(len(vectors)))[:, 0]
    matches = [labels[index] == label for index, label in zip(nearest, labels, strict=True)]
    return float(np.mean(matches))


def _build_stages(factory: StageFactory) -> Stages:
    similarity_settings = {
        "max_pairs": factory.scale.num_eval_sequences * 4,
        "poolings": list(POOLINGS),
    }
    map_settings = {"max_sentences": _MAP_SENTENCES}
    pairs = {"pairs": factory.sources.find_task_files("sts-b")[1]}
    sentences = {"sentences": factory.sources.find_task_files("sst-2")[1]}
    if factory.sources.model:
        model = {"model": Path(factory.sources.model)}
        return {
            ("similarity", 0): Stage(_SIMILARITY_KIND, similarity_settings, {}, pairs | model),
            ("map", 0): Stage(_MAP_KIND, map_settings, {}, sentences | model),
        }
    stages: Stages = {}
    for seed in range(factory.scale.num_seeds):
        run = {"model": factory.create_baseline_run(seed)}
        stages["senses", seed] = create_senses_stage(factory, "en", seed)
        stages["similarity", seed] = Stage(_SIMILARITY_KIND, similarity_settings, run, pairs)
    run = {"model": factory.create_baseline_run(0)}
    stages["map", 0] = Stage(_MAP_KIND, map_settings, run, sentences)
    return stages


def _build_report(factory: StageFactory, results: Results) -> Report:
    map_result = results["map", 0]
    tables, panels, data = [], [], {}
    # A correlation with a constant is null in JSON. The dtype float64 converts null to NaN.
    runs = [
        np.array(result["spearman"], np.float64) if result else None
        for key, result in results.items()
        if key[0] == "similarity"  # type: ignore[index]
    ]
    finished = [run for run in runs if run is not None]
    if finished:
        # The mean of each layer and pooling is over the seeds whose correlation is defined.
        valid = np.ma.masked_invalid(np.stack(finished))
        means = np.ma.filled(valid.mean(0), np.nan)
        names = _format_layer_names(len(means))
        accuracies = map_result["nearest_neighbor_accuracy"] if map_result else [None] * len(means)
        senses = [result for key, result in results.items() if key[0] == "senses"]  # type: ignore[index]
        rows = []
        for layer in reversed(range(len(means))):
            cells = [_format_correlations(runs, layer, column) for column in range(len(POOLINGS))]
            accuracy = accuracies[layer]
            cells.append(EMPTY_CELL if accuracy is None else f"{accuracy:.3f}")
            rows.append([names[layer], *cells, *_format_senses_cell(senses, layer)])
        num_pairs = next(
            result["num_pairs"] for key, result in results.items()
            if key[0] == "similarity" and result  # type: ignore[index]
        )  # fmt: skip
        title = (
            f"Spearman correlation of cosine and human similarity on the first {num_pairs:,} pairs "
            "of STS-B's validation set, without fine-tuning"
        )
        neighbor_column = (
            f"nearest neighbor has the same label ({_MAP_SENTENCES} sentences of SST-2, mean "
            "pooling, seed 0)"
        )
        columns = [_LAYER_LABEL, *POOLINGS, neighbor_column]
        if senses:
            columns.append(_SENSES_COLUMN)
        tables.append(Table(title, columns, rows))
        data["spearman by layer, from the embeddings to the last layer"] = means.tolist()
        plot = make_heatmap(means.tolist()[::-1], names[::-1], POOLINGS)
        panels.append(Panel("Spearman correlation on STS-B by layer and pooling", plot))
    if map_result:
        for layer in reversed(range(len(map_result["points"]))):
            title = f"SST-2 sentences, {f'layer {layer}' if layer else 'embeddings'}"
            plot = _make_scatter_plot(map_result["points"][layer], map_result["labels"])
            panels.append(Panel(title, plot))
    return Report(tables, panels, data, [_build_claim(factory, runs)])


def _build_claim(factory: StageFactory, runs: Sequence[NDArray[np.float64] | None]) -> Claim:
    """Return the claim about the last two layers; ``runs`` has the correlations of each seed."""
    mean_column = list(POOLINGS).index("mean")
    differences = [
        None if run is None else float(run[-2, mean_column] - run[-1, mean_column]) for run in runs
    ]
    benefits = [
        None if run is None else float(run[-2, mean_column] - run[0, mean_column]) for run in runs
    ]
    return Claim(
        "STS-B, mean pooling: the second-to-last layer is better than the last", differences,
        benefits=benefits, no_benefit="no clear gain over the embeddings, which have no context",
        min_seeds=1 if factory.sources.model else MIN_SEEDS,
    )  # fmt: skip


def _format_correlations(
    runs: Sequence[NDArray[np.float64] | None], layer: int, column: int
) -> str:
    """Return the cell of a layer and a pooling; ``runs`` has the correlations of each seed."""
    correlations = [None if run is None else float(run[layer, column]) for run in runs]
    return format_mean_std(correlations, nonfinite_label="undefined: equal vectors")


def _format_layer_names(num_states: int) -> list[str]:
    """Return the row labels of the embeddings and the layers, such as "3 (-2)"."""
    return [
        f"{layer} ({layer - num_states})" if layer else "embeddings" for layer in range(num_states)
    ]


def _format_senses_cell(senses: Sequence[Mapping[str, Any] | None], layer: int) -> list[str]:
    """Return a list with the cell for word senses; the list is empty for the user's model."""
    if not senses:
        return []
    aucs = [result["layers"][layer]["auc"] if result else None for result in senses]
    return [format_mean_std(aucs)]


def _make_scatter_plot(points: list[list[float]], labels: list[str]) -> DrawFunction:
    """Return a function that draws points [N, 2] in one color per label."""

    def draw(axes: Any) -> None:
        for label, color in zip(sorted(set(labels)), (COLORS[1], COLORS[0]), strict=False):
            # Without clipping, outliers would compress the other points.
            clipped = [
                [min(max(x, -_MAP_LIMIT), _MAP_LIMIT) for x in point]
                for point, point_label in zip(points, labels, strict=True)
                if point_label == label
            ]
            axes.scatter(
                *zip(*clipped, strict=True),
                s=8,
                color=color,
                alpha=0.6,
                label=_SENTIMENTS.get(label, label),
            )
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel("first principal component", fontsize=8)
        axes.set_ylabel("second principal component", fontsize=8)
        axes.legend(frameon=False, fontsize=8)

    return draw


EXPERIMENT = Experiment(
    name="pooling",
    source="section 5.3 (features), after bert-as-service",
    question="Which layer and which pooling give the best sentence vectors and word vectors?",
    build_stages=_build_stages,
    build_report=_build_report,
    stage_functions={
        _SIMILARITY_KIND: measure_layer_similarity,
        _MAP_KIND: measure_sentence_map,
        SENSES_KIND: measure_senses,
    },
)
