"""Trains a sentence-embedding model and writes a sentence-transformers directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.bundle import pin_model_path
from bertsmith.bundle.directory import format_model_path
from bertsmith.plurals import count_noun
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.tasks.embedding_data import describe_kind
from bertsmith.train.embedding.denoising import DenoisingObjective
from bertsmith.train.embedding.objective import EmbeddingObjective
from bertsmith.train.embedding.settings import (
    EmbeddingRunSettings,
    read_overrides,
    resolve_settings,
)
from bertsmith.train.embedding.start_model import (
    EmbeddingBundle,
    load_start_model,
    resolve_triplet_margin,
    save_embedder,
)
from bertsmith.train.embedding.training_data import (
    EmbeddingData,
    build_tokenize_function,
    list_hashed_files,
    read_data,
    resolve_loss,
)
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


def finetune_embedder(
    model: Path | str,
    out: Path | str,
    *,
    data: Path | str | Sequence[Path | str] = (),
    config: Path | str | None = None,
    assignments: Sequence[str] = (),
    values: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> FinetuneResult:
    """Train a sentence-embedding model, and write the run and its model to ``out``.

    If the run was interrupted, a call with the same arguments resumes it.

    Args:
        model: Path or name of the model to start from, as in ``load``.
        out: Run directory. OUT/model is a sentence-transformers directory.
        data: Training table, or several tables with examples of the same kind.
        config: TOML file with settings.
        assignments: Settings as "section.name=value"; override ``values`` and ``config``.
        values: Nested settings as in ``EmbeddingRunSettings``; override ``config``.
        progress: Receives log messages and progress.

    Raises:
        BertsmithError: If the arguments or the data are invalid.
    """
    run, model = Path(out), pin_model_path(model)
    files = [Path(file) for file in ([data] if isinstance(data, Path | str) else data)]
    overrides = read_overrides(files, config, values, assignments)
    return start_run(
        run,
        "embedding",
        overrides,
        lambda: _load(model, files, overrides),
        _train,
        progress,
    )


def _load(
    model: Path, files: Sequence[Path], overrides: Mapping[str, Any]
) -> tuple[EmbeddingRunSettings, tuple[EmbeddingBundle, EmbeddingData]]:
    """Return the settings of a run, the start model and the examples."""
    settings = resolve_settings(model, files, overrides)
    bundle = load_start_model(model, settings.embedding, get_model_overrides(overrides))
    embedding = resolve_triplet_margin(settings.embedding, bundle.pooling)
    tokenize = build_tokenize_function(bundle.encoder.tokenizer, bundle.pooling)
    examples = read_data(embedding, tokenize, bundle.pooling)
    embedding = resolve_loss(embedding, examples.train).model_copy(
        update={
            "fingerprint": hash_files(list_hashed_files(settings.embedding)),
            "max_seqlen": bundle.pooling.max_seq_length,
        }
    )
    settings = settings.model_copy(update={"model": bundle.encoder.config, "embedding": embedding})
    return settings, (bundle, examples)


def _train(
    settings: EmbeddingRunSettings,
    inputs: tuple[EmbeddingBundle, EmbeddingData],
    context: RunContext,
) -> FinetuneResult:
    """Train or resume a run; if no signal stops it, write its model and result."""
    bundle, data = inputs
    mean_length = len(data.train.texts.ids) / len(data.train.texts)
    num_texts = 2 * min(settings.embedding.batch_size, len(data.train))
    batch_tokens = round(num_texts * mean_length)
    machine = resolve_run_machine(
        settings.run, settings.model, batch_tokens, context, settings.optim.optimizer
    )
    model = bundle.model.to(machine.device)
    model.bert.kernel = machine.kernel
    freeze_layers(model.bert, settings.run.num_frozen_layers)
    objective_class = (
        DenoisingObjective if settings.embedding.loss == "tsdae" else EmbeddingObjective
    )
    objective = objective_class(
        model,
        settings.embedding,
        data.train,
        data.heldout,
        machine,
        bundle.encoder.tokenizer,
        micro_batch_tokens=settings.run.micro_batch_tokens,
        seed=settings.run.seed,
    )
    _log_summary(context.progress, context.run, settings, bundle, data, machine)
    first_heldout = next(iter(data.heldout.values()))

    def save_model(settings: EmbeddingRunSettings, metrics: dict[str, float]) -> None:
        info = {"task": "embed", "provenance": dump_settings(settings)}
        save_embedder(context.run / MODEL_DIR, bundle, info | {"heldout_metrics": metrics})

    return train_and_save(
        settings,
        model,
        objective,
        machine,
        context,
        metric_names=first_heldout.metric_names,
        higher_is_better=first_heldout.higher_is_better,
        counts=data.counts,
        save_model=save_model,
    )


def _log_summary(
    progress: Progress,
    run: Path,
    settings: EmbeddingRunSettings,
    bundle: EmbeddingBundle,
    data: EmbeddingData,
    machine: device.Machine,
) -> None:
    """Log the model, data, loss and device of a run, and warnings about its data."""
    heldout_sizes = format_heldout_sizes(
        {name: len(heldout.examples) for name, heldout in data.heldout.items()},
        "example",
        "examples",
    )
    train = data.train
    progress.log(
        f"{run}: {format_model_path(bundle.encoder.path)} on {len(train):,} "
        f"{describe_kind(train.kind)} with "
        f"{count_noun(len(train.list_used_texts()), 'distinct text')}, "
        f"{heldout_sizes} ({device.describe_machine(machine)})"
    )
    embedding = settings.embedding
    dims = ", ".join(map(str, embedding.matryoshka_dims))
    progress.log(
        f"loss {embedding.loss}{f' at {dims} dimensions' if dims else ''}, "
        f"{'+'.join(bundle.pooling.modes)} pooling, batches of {embedding.batch_size} examples, "
        f"texts of up to {embedding.max_seqlen} tokens"
    )
    log_counts(progress, data.counts)
