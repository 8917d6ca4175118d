"""Trains a reranker and writes a model directory with one output."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.bundle import (
    FineTunedBundle,
    HeadConfig,
    load_for_fine_tuning,
    pin_model_path,
    save_fine_tuned,
)
from bertsmith.bundle.directory import format_model_path
from bertsmith.model.config import ModelConfig
from bertsmith.plurals import count_noun
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.tasks.reranking_data import PairEncoder
from bertsmith.tasks.reranking_settings import DEFAULT_MAX_SEQLEN, RerankingSettings
from bertsmith.train.engine.data_files import hash_files
from bertsmith.train.engine.example_counts import format_heldout_sizes, log_counts
from bertsmith.train.engine.finetuning_overrides import get_model_overrides
from bertsmith.train.engine.finetuning_run import FinetuneResult, RunContext
from bertsmith.train.engine.finetuning_training import (
    freeze_layers,
    resolve_run_machine,
    train_and_save,
)
from bertsmith.train.engine.provenance import dump_settings
from bertsmith.train.engine.run_directory import MODEL_DIR
from bertsmith.train.engine.start_run import start_run
from bertsmith.train.reranking.objective import RerankingObjective
from bertsmith.train.reranking.settings import (
    RerankingRunSettings,
    read_overrides,
    resolve_settings,
)
from bertsmith.train.reranking.training_data import RerankingData, read_data

#: The head of a reranker. In config.json it is a regression with one output.
HEAD = HeadConfig("regression")


def finetune_reranker(
    model: Path | str,
    out: Path | str,
    *,
    data: Path | str | Sequence[Path | str] = (),
    config: Path | str | None = None,
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> FinetuneResult:
    """Train a reranker, and write the run and its model to ``out``.

    A reranker (cross-encoder) reads a query and a document together and predicts how relevant the
    document is. If the run was interrupted, a call with the same arguments resumes it.

    Args:
        model: Path or name of the model to start from, as in ``load``. The output layer of another
            reranker is kept.
        out: Run directory. ``transformers`` and the ``CrossEncoder`` of sentence-transformers load
            OUT/model.
        data: Training table, or several tables.
        config: TOML file with settings.
        assignments: Settings as "section.name=value"; override ``values`` and ``config``.
        values: Nested settings as in ``RerankingRunSettings``; override ``config``.
        progress: Receives log messages and progress.

    Raises:
        BertsmithError: If the arguments or the data are invalid.
    """
    run, model = Path(out), pin_model_path(model)
    files = [Path(file) for file in ([data] if isinstance(data, Path | str) else data)]
    overrides = read_overrides(files, config, values, assignments)
    return start_run(
        run,
        "reranking",
        overrides,
        lambda: _load(model, files, overrides),
        _train,
        progress,
    )


def _load(
    model: Path, files: Sequence[Path], overrides: Mapping[str, Any]
) -> tuple[RerankingRunSettings, tuple[FineTunedBundle, RerankingData]]:
    """Return the settings of a run, the start model and the examples."""
    settings = resolve_settings(model, files, overrides)
    torch.manual_seed(settings.run.seed)
    bundle = load_for_fine_tuning(model, HEAD, get_model_overrides(overrides), keep_head=True)
    bundle.config.require_two_segments()
    max_seqlen = _resolve_max_seqlen(settings.reranking, bundle.config)
    examples = read_data(
        settings.reranking.model_copy(update={"max_seqlen": max_seqlen}), bundle.tokenizer
    )
    reranking = examples.settings.model_copy(
        update={
            "fingerprint": hash_files(settings.reranking.list_files()),
            "batch_size": settings.reranking.get_batch_size(),
        }
    )
    settings = settings.model_copy(update={"model": bundle.config, "reranking": reranking})
    return settings, (bundle, examples)


def _resolve_max_seqlen(settings: RerankingSettings, config: ModelConfig) -> int:
    """Return the maximum number of tokens of a query and a document.

    Raises:
        SettingsError: If the model takes fewer tokens.
    """
    max_seqlen = settings.max_seqlen or min(DEFAULT_MAX_SEQLEN, config.max_positions)
    config.check_max_seqlen("reranking.max_seqlen", max_seqlen)
    return max_seqlen


def _train(
    settings: RerankingRunSettings,
    inputs: tuple[FineTunedBundle, RerankingData],
    context: RunContext,
) -> FinetuneResult:
    """Train or resume a run; if no signal stops it, write its model and result."""
    bundle, data = inputs
    batch_tokens = _estimate_batch_tokens(settings.reranking, bundle, data)
    machine = resolve_run_machine(
        settings.run, settings.model, batch_tokens, context, settings.optim.optimizer
    )
    model = bundle.model.to(machine.device)
    model.bert.kernel = machine.kernel
    freeze_layers(model.bert, settings.run.num_frozen_layers)
    objective = RerankingObjective(
        model,
        settings.reranking,
        data.train,
        data.heldout,
        machine,
        bundle.tokenizer,
        micro_batch_tokens=settings.run.micro_batch_tokens,
        seed=settings.run.seed,
        negatives=data.negatives,
    )
    _log_summary(context.progress, context.run, settings, bundle, data, machine)
    first_heldout = next(iter(data.heldout.values()))

    def save_model(settings: RerankingRunSettings, metrics: dict[str, float]) -> None:
        save_reranker(context.run / MODEL_DIR, bundle, settings, {"heldout_metrics": metrics})

    return train_and_save(
        settings,
        model,
        objective,
        machine,
        context,
        metric_names=list(first_heldout.metric_names),
        higher_is_better=True,
        counts=data.counts,
        save_model=save_model,
    )


def save_reranker(
    directory: Path,
    bundle: FineTunedBundle,
    settings: RerankingRunSettings,
    info: Mapping[str, Any],
) -> None:
    """Write the model directory of a reranker.

    Args:
        directory: The directory to write; an existing one is replaced.
        bundle: The model.
        settings: Settings of the run, which become its provenance.
        info: Other content of bertsmith.json.
    """
    info = {"task": "rerank", "provenance": dump_settings(settings), **info}
    save_fine_tuned(
        directory,
        bundle.model,
        bundle.tokenizer,
        HEAD,
        info,
        max_seqlen=settings.reranking.max_seqlen,
    )


def _estimate_batch_tokens(
    settings: RerankingSettings, bundle: FineTunedBundle, data: RerankingData
) -> int:
    """Return the approximate number of tokens of a batch."""
    assert settings.max_seqlen is not None
    train = data.train
    encoder = PairEncoder(train.texts, bundle.tokenizer, settings.max_seqlen)
    mean_length = encoder.count_tokens(train.queries[train.query_rows], train.documents).mean()
    num_documents = 1.0
    if settings.loss != "bce":
        num_documents = float(np.minimum(train.counts, settings.max_documents).mean())
    num_documents += settings.random_negatives or 0
    return round(settings.get_batch_size() * num_documents * float(mean_length))


def _log_summary(
    progress: Progress,
    run: Path,
    settings: RerankingRunSettings,
    bundle: FineTunedBundle,
    data: RerankingData,
    machine: device.Machine,
) -> None:
    """Log the model, data, loss and device of a run, and warnings about its data."""
    heldout_sizes = format_heldout_sizes(
        {name: len(heldout.examples) for name, heldout in data.heldout.items()}, "query", "queries"
    )
    train, reranking = data.train, settings.reranking
    progress.log(
        f"{run}: {format_model_path(bundle.path)} on "
        f"{count_noun(len(train), 'query', 'queries')} with "
        f"{count_noun(len(train.documents), 'document')}, {heldout_sizes} "
        f"({device.describe_machine(machine)})"
    )
    unit = "pairs" if reranking.loss == "bce" else "queries"
    negatives = ""
    if reranking.random_negatives:
        negatives = f", {count_noun(reranking.random_negatives, 'random negative')} each"
    progress.log(
        f"loss {reranking.loss}, batches of {reranking.get_batch_size()} {unit}{negatives}, "
        f"up to {reranking.max_seqlen} tokens"
    )
    log_counts(progress, data.counts)
