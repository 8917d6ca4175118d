"""Writes the latest checkpoint of a training run of any kind as a model directory."""

from pathlib import Path
from typing import Any

from bertsmith import bundle
from bertsmith.bundle.metadata import read_metadata
from bertsmith.errors import RunError
from bertsmith.settings import read_stored_settings
from bertsmith.train.distillation.distill import load_distillation
from bertsmith.train.distillation.settings import DistillRunSettings
from bertsmith.train.embedding.settings import EmbeddingRunSettings
from bertsmith.train.embedding.start_model import load_start_model, save_embedder
from bertsmith.train.engine import checkpoint, metrics_log
from bertsmith.train.engine.provenance import dump_settings
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.train.finetuning.settings import FinetuneSettings
from bertsmith.train.pretraining.snapshot import write_snapshot
from bertsmith.train.reranking.finetune import HEAD, save_reranker
from bertsmith.train.reranking.settings import RerankingRunSettings


def write_latest_snapshot(run: Path, out: Path) -> tuple[int, int | None]:
    """Write the model of the newest intact checkpoint of a run to the directory ``out``.

    Returns:
        The step of the checkpoint, and the total number of steps of the run. The total is None for
        an unfinished run with a time budget.

    Raises:
        RunError: If the run has no checkpoint that can be read.
    """
    tables = read_stored_settings(run / SETTINGS_FILE)
    write = write_snapshot
    if "task" in tables:
        write = _write_fine_tuned_snapshot
    elif "distill" in tables:
        write = _write_distilled_snapshot
    elif "embedding" in tables:
        write = _write_embedding_snapshot
    elif "reranking" in tables:
        write = _write_reranking_snapshot
    reasons = []
    for step, _ in reversed(checkpoint.list_checkpoints(run)):
        try:
            write(run, step, out)
        except RunError as error:
            reasons.append(f"\n  {error}")
            continue
        return step, read_stored_settings(run / SETTINGS_FILE)["schedule"].get("steps")
    raise RunError(f"{run}: no checkpoint of this run can be read:{''.join(reasons)}")


def _write_embedding_snapshot(run: Path, step: int, out: Path) -> None:
    """Write the embedding model of the checkpoint of ``step`` to the directory ``out``."""
    path = run / SETTINGS_FILE
    settings = EmbeddingRunSettings.parse(read_stored_settings(path), str(path))
    start = Path(settings.run.start_from)
    embedder = load_start_model(start, settings.embedding, settings.model.get_dropout_rates())
    checkpoint.load_weights(dict(checkpoint.list_checkpoints(run))[step], embedder.model)
    info = {"task": "embed", "provenance": dump_settings(settings), **_get_progress(run, step)}
    save_embedder(out, embedder, info)


def _write_distilled_snapshot(run: Path, step: int, out: Path) -> None:
    """Write the student of the checkpoint of ``step`` to the directory ``out``."""
    path = run / SETTINGS_FILE
    settings = DistillRunSettings.parse(read_stored_settings(path), str(path))
    distillation = load_distillation(settings, reads_data=False)
    checkpoint.load_weights(dict(checkpoint.list_checkpoints(run))[step], distillation.model)
    info = {"provenance": dump_settings(settings), **_get_progress(run, step)}
    distillation.save(out, info)


def _write_reranking_snapshot(run: Path, step: int, out: Path) -> None:
    """Write the reranker of the checkpoint of ``step`` to the directory ``out``."""
    path = run / SETTINGS_FILE
    settings = RerankingRunSettings.parse(read_stored_settings(path), str(path))
    start = settings.run.start_from
    reranker = bundle.load_for_fine_tuning(start, HEAD, settings.model.get_dropout_rates())
    checkpoint.load_weights(dict(checkpoint.list_checkpoints(run))[step], reranker.model)
    save_reranker(out, reranker, settings, _get_progress(run, step))


def _write_fine_tuned_snapshot(run: Path, step: int, out: Path) -> None:
    """Write the fine-tuned model of the checkpoint of ``step`` to the directory ``out``."""
    settings = FinetuneSettings.parse(
        read_stored_settings(run / SETTINGS_FILE), str(run / SETTINGS_FILE)
    )
    task = settings.task
    head = bundle.HeadConfig(task.kind, tuple(task.labels))
    model = head.build_model(settings.model, settings.features)
    checkpoint.load_weights(dict(checkpoint.list_checkpoints(run))[step], model)
    _, _, tokenizer = read_metadata(bundle.locate_model(settings.run.start_from))
    info = {"task": task.name, "provenance": dump_settings(settings), **_get_progress(run, step)}
    bundle.save_fine_tuned(out, model, tokenizer, head, info)


def _get_progress(run: Path, step: int) -> dict[str, Any]:
    """Return the step, and the held-out metrics of the last evaluation up to it, if there is one.

    The metrics of question answering include the threshold of the score of no answer.
    """
    evaluated_steps = [
        line["step"]
        for line in metrics_log.read_metrics(run)
        if line["kind"] == "heldout" and line["step"] <= step
    ]
    if not evaluated_steps:
        return {"step": step}
    metrics = metrics_log.read_heldout_metrics(run, max(evaluated_steps))
    return {"step": step, "heldout_metrics": metrics}
