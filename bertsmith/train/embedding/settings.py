"""Settings of a run that trains an embedding model; does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.model.config import ModelConfig
from bertsmith.settings import Settings, get_table
from bertsmith.tasks.embedding_settings import DEFAULT_MAX_SEQLEN, LOSSES, EmbeddingSettings
from bertsmith.train.engine.finetuning_overrides import (
    Tables,
    build_run_values,
    check_data_files,
    drop_default,
    drop_default_max_seqlen,
    read_table_overrides,
)
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, FinetuneRunSettings, OptimSettings

_DEFAULT_LR, _DEFAULT_EPOCHS = 3e-5, 3.0
#: Default tokens of a micro-batch, which limit the memory of a batch of any size. With a `mini`
#: model, training on batches of 8,192 pairs of short texts needs 2 GiB (docs/benchmarks.md).
_DEFAULT_MICRO_BATCH_TOKENS = 8192


class EmbeddingRunSettings(Settings):
    """All settings of a run that trains an embedding model, stored in RUN/settings.toml."""

    model: ModelConfig
    embedding: EmbeddingSettings = EmbeddingSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: FinetuneRunSettings = FinetuneRunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()


def read_overrides(
    _data: Sequence[Path],
    config: Path | str | None,
    values: Mapping[str, Any] | None,
    assignments: Sequence[str],
) -> dict[str, Any]:
    """Return the user's settings as nested tables, as ``read_table_overrides`` does."""
    return read_table_overrides("embedding", config, values, assignments, _drop_defaults)


def _drop_defaults(tables: Tables, user_values: Mapping[str, Any]) -> None:
    """Remove the defaults of another run that depend on its model or on its loss."""
    drop_default_max_seqlen(tables, "embedding", DEFAULT_MAX_SEQLEN)
    # Each kind of examples has a default loss, which the new data determine.
    for losses in LOSSES.values():
        drop_default(tables["embedding"], "loss", losses[0])
    if "loss" in get_table(user_values, "embedding"):
        # The default margin of the triplet loss, which other losses do not use.
        tables["embedding"].pop("triplet_margin", None)


def resolve_settings(
    model: Path, data: Sequence[Path], overrides: Mapping[str, Any]
) -> EmbeddingRunSettings:
    """Return the settings of a run that can be resolved without reading its model and data files.

    The model config is a placeholder, which is replaced when the model is loaded.

    Args:
        model: Model directory to start from.
        data: Training tables, which replace those of the overrides.
        overrides: Settings of the user, as nested tables.

    Raises:
        SettingsError: If a setting is invalid.
        TaskError: If a data file does not exist.
    """
    values = build_run_values(
        "embedding",
        model,
        data,
        overrides,
        lr=_DEFAULT_LR,
        epochs=_DEFAULT_EPOCHS,
        run={"micro_batch_tokens": _DEFAULT_MICRO_BATCH_TOKENS},
    )
    settings = EmbeddingRunSettings.parse(values, "the settings")
    check_data_files(settings.embedding, settings.embedding.list_files())
    return settings
