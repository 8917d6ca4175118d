"""Settings of a run that trains a reranker; does not import torch."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bertsmith.model.config import ModelConfig
from bertsmith.settings import Settings
from bertsmith.tasks.reranking_settings import (
    DEFAULT_BATCH_SIZES,
    DEFAULT_MAX_SEQLEN,
    DEFAULT_RANDOM_NEGATIVES,
    RerankingSettings,
)
from bertsmith.train.engine.finetuning_overrides import (
    Tables,
    build_run_values,
    check_data_files,
    compute_default_lr,
    drop_default,
    drop_default_lr,
    drop_default_max_seqlen,
    read_table_overrides,
)
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, FinetuneRunSettings, OptimSettings

_DEFAULT_EPOCHS = 3.0


class RerankingRunSettings(Settings):
    """All settings of a run that trains a reranker, stored in RUN/settings.toml."""

    model: ModelConfig
    reranking: RerankingSettings = RerankingSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: FinetuneRunSettings = FinetuneRunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()


def read_overrides(
    data: Sequence[Path],
    config: Path | str | None,
    values: Mapping[str, Any] | None,
    assignments: Sequence[str],
) -> dict[str, Any]:
    """Return the user's settings as nested tables, as ``read_table_overrides`` does.

    Args:
        data: Training tables, which replace those of ``config``.
        config: The TOML file.
        values: Nested settings.
        assignments: Settings as "section.name=value".
    """
    drop_defaults = partial(_drop_defaults, data=data)
    return read_table_overrides("reranking", config, values, assignments, drop_defaults)


def _drop_defaults(
    tables: Tables, _user_values: Mapping[str, Any], *, data: Sequence[Path]
) -> None:
    """Remove the defaults of another run that depend on its model, its loss and its data."""
    reranking = tables["reranking"]
    loss = reranking.get("loss", RerankingSettings().loss)
    drop_default(reranking, "batch_size", DEFAULT_BATCH_SIZES.get(loss))
    train_files = [str(file.resolve()) for file in data]
    if train_files and train_files != reranking.get("train_files"):
        # Other data can have negatives, or scores below that of random negatives.
        for default in (0, DEFAULT_RANDOM_NEGATIVES):
            drop_default(reranking, "random_negatives", default)
    drop_default_max_seqlen(tables, "reranking", DEFAULT_MAX_SEQLEN)
    drop_default_lr(tables)


def resolve_settings(
    model: Path, data: Sequence[Path], overrides: Mapping[str, Any]
) -> RerankingRunSettings:
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
        "reranking",
        model,
        data,
        overrides,
        lr=compute_default_lr(model),
        epochs=_DEFAULT_EPOCHS,
    )
    settings = RerankingRunSettings.parse(values, "the settings")
    check_data_files(settings.reranking, settings.reranking.list_files())
    return settings
