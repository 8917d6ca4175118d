"""Settings of a run that trains a reranker; does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.model.config import ModelConfig
from bertsmith.settings import Settings
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.train.engine.finetuning_overrides import (
    build_run_values,
    check_data_files,
    compute_default_lr,
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
