"""``bertsmith evaluate --embeddings`` and ``--reranking``: evaluate vectors, or a reranker."""

from pathlib import Path
from typing import Any

from bertsmith.cli.console import print_example_counts, print_json, print_line
from bertsmith.cli.model_options import (
    check_device,
    check_unused_options,
    find_embedding_model,
    load_fine_tuned_model,
    resolve_device,
)
from bertsmith.errors import InputError
from bertsmith.files import describe_missing_path
from bertsmith.plurals import count_noun


def evaluate_vectors(
    model: Path,
    data: Path,
    columns: dict[str, Any],
    *,
    split: str | None,
    dimensions: int | None,
    reading: dict[str, Any],
    device: str,
    fast: bool,
    as_json: bool,
) -> None:
    """Compute and print the metrics of a model's vectors.

    Args:
        model: The model.
        data: A table, or a folder in BEIR's format.
        columns: Columns of the table by their name in ``TextColumns``.
        split: Split of a folder; None for "test".
        dimensions: Number of first dimensions to use; None for all.
        reading: Fields of ``EmbeddingSettings`` for reading the table.
        device: Device of the model.
        fast: Whether to use 8-bit or 16-bit arithmetic.
        as_json: Whether to print JSON.
    """
    if not data.exists():
        raise InputError(describe_missing_path(data, "file or folder"))
    check_device(device)
    _reject_unused_options(data, columns, reading, split)
    from bertsmith.tasks.embedding_settings import EmbeddingSettings

    settings = EmbeddingSettings.parse({"columns": columns, **reading}, "the options")
    path = find_embedding_model(model)
    from bertsmith.use.embed import Embedder
    from bertsmith.use.evaluate_embeddings import evaluate_embeddings

    embedder = Embedder.load(path, device=resolve_device(device), fast=fast)
    metrics = evaluate_embeddings(
        embedder, data, settings=settings, split=split or "test", dimensions=dimensions
    )
    _print_metrics(metrics, as_json=as_json)


def _reject_unused_options(
    data: Path, columns: dict[str, Any], reading: dict[str, Any], split: str | None
) -> None:
    """Raise InputError if an option has no effect on this file or folder."""
    if not data.is_dir():
        check_unused_options({"--split": split}, f"{data} is a table, without splits; remove it")
        return
    from bertsmith.tasks.beir import is_beir_folder

    if not is_beir_folder(data):
        return
    table_options = {
        f"--{name.replace('_', '-')}": value
        for name, value in {**columns, **reading}.items()
        if value is not False
    }
    check_unused_options(
        table_options, f"only valid with a table, and {data} is a BEIR folder; remove it"
    )


def evaluate_reranking(
    model: Path,
    data: Path,
    columns: dict[str, Any],
    reading: dict[str, Any],
    *,
    device: str,
    fast: bool,
    as_json: bool,
) -> None:
    """Compute and print the metrics of a reranker.

    Args:
        model: The model.
        data: A table of queries and documents.
        columns: Columns of the table by their name in ``TextColumns``.
        reading: Fields of ``RerankingSettings`` for reading the table.
        device: Device of the model.
        fast: Whether to use 8-bit or 16-bit arithmetic.
        as_json: Whether to print JSON.
    """
    if not data.exists():
        raise InputError(describe_missing_path(data))
    from bertsmith.tasks.reranking_settings import RerankingSettings

    settings = RerankingSettings.parse({"columns": columns, **reading}, "the options")
    bundle = load_fine_tuned_model(model, device, fast=fast)
    from bertsmith.use.evaluate_reranker import evaluate_reranker

    metrics = evaluate_reranker(bundle, data, settings=settings)
    examples = metrics.pop("examples")
    if not as_json:
        unit = ("query", "queries") if "map" in metrics else ("pair", "pairs")
        print_line(f"evaluated {count_noun(examples, *unit)}")
    _print_metrics(metrics if not as_json else {**metrics, "examples": examples}, as_json=as_json)


def _print_metrics(metrics: dict[str, Any], *, as_json: bool) -> None:
    """Print metrics and the counts of the rows."""
    if as_json:
        print_json(metrics)
        return
    counts = metrics.pop("counts")
    print_line(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    print_example_counts(counts)
