"""``bertsmith evaluate --embeddings``: evaluate the vectors of a model."""

from pathlib import Path
from typing import Any

from bertsmith.cli.console import print_example_counts, print_json, print_line
from bertsmith.cli.model_options import check_device, find_model, resolve_device
from bertsmith.errors import InputError


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
        raise InputError(f"{data}: no such file or folder")
    check_device(device)
    from bertsmith.tasks.embedding_settings import EmbeddingSettings

    settings = EmbeddingSettings.parse({"columns": columns, **reading}, "the options")
    path = find_model(model)
    from bertsmith.use.embed import Embedder
    from bertsmith.use.evaluate_embeddings import evaluate_embeddings

    embedder = Embedder.load(path, device=resolve_device(device), fast=fast)
    metrics = evaluate_embeddings(
        embedder, data, settings=settings, split=split or "test", dimensions=dimensions
    )
    if as_json:
        print_json(metrics)
        return
    counts = metrics.pop("counts")
    print_line(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    print_example_counts(counts)
