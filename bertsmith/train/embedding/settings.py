"""Settings of a run that trains an embedding model; does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bertsmith.bundle.directory import locate_model, pin_model_path
from bertsmith.errors import SettingsError, TaskError
from bertsmith.model.config import ModelConfig
from bertsmith.settings import Settings, get_table, load_user_settings, merge_settings
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.train.engine.finetuning_settings import FinetuneRunSettings
from bertsmith.train.engine.run_directory import check_run_directory
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, OptimSettings

_DEFAULT_LR, _DEFAULT_EPOCHS = 3e-5, 3.0
#: Default tokens of a micro-batch, which limit the memory of a batch of any size. With a `mini`
#: model, training on batches of 8,192 pairs of short texts needs 1.8 GB.
_DEFAULT_MICRO_BATCH_TOKENS = 8192
#: Fields of the model config that training may change.
_MUTABLE_MODEL_FIELDS: Final = {"dropout", "attention_dropout"}


class EmbeddingRunSettings(Settings):
    """All settings of a run that trains an embedding model, stored in RUN/settings.toml."""

    model: ModelConfig
    embedding: EmbeddingSettings = EmbeddingSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: FinetuneRunSettings = FinetuneRunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()


def read_overrides(
    config: Path | None, values: Mapping[str, Any] | None, assignments: Sequence[str]
) -> dict[str, Any]:
    """Return the user's settings as nested tables.

    ``values`` override the TOML file, and ``assignments`` override ``values``. If the file is the
    settings.toml of a run, the values that the run computed are removed.

    Raises:
        SettingsError: If a setting has the wrong form, or the file has the settings of a run of
            another kind.
    """
    file_values = load_user_settings(config)
    if file_values.keys() & {"task", "data"}:
        raise SettingsError(
            f"{config}: these are not the settings of `finetune embed`: it has no table "
            f"{min(file_values.keys() & {'task', 'data'})!r}; give the settings of such a run"
        )
    user_values = load_user_settings(None, values, assignments)
    if get_table(file_values, "embedding").get("fingerprint"):
        file_values = _drop_computed_values(file_values, user_values)
    overrides = merge_settings(file_values, user_values)
    for name, value in overrides.items():
        if not isinstance(value, Mapping):
            raise SettingsError(f"{name} is {value!r}; expected a table of settings")
    return overrides


def _drop_computed_values(
    settings: Mapping[str, Any], user_values: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of another run without the values that the new run computes itself.

    These are the model config except for the dropout rates, the start model, the hash of the files,
    and the number of steps if epochs are set or the user sets a new length.
    """
    tables = {name: get_table(settings, name) for name in settings}
    tables["model"] = {
        name: value
        for name, value in get_table(settings, "model").items()
        if name in _MUTABLE_MODEL_FIELDS
    }
    del tables["embedding"]["fingerprint"]
    tables.get("run", {}).pop("start_from", None)
    schedule = tables.get("schedule", {})
    has_new_length = bool(get_table(user_values, "schedule").keys() & {"steps", "epochs"})
    if has_new_length or schedule.get("epochs") is not None:
        schedule.pop("steps", None)
    if has_new_length:
        schedule.pop("epochs", None)
    return tables


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
    """
    schedule = get_table(overrides, "schedule")
    if schedule.get("steps") is not None and schedule.get("epochs") is not None:
        raise SettingsError(
            f"schedule.steps is {schedule['steps']} and schedule.epochs is {schedule['epochs']}; "
            "set only one of them"
        )
    epochs = None if schedule.get("steps") is not None else _DEFAULT_EPOCHS
    defaults: dict[str, Any] = {
        "optim": {"lr": _DEFAULT_LR},
        "schedule": {"epochs": epochs},
        "run": {
            "start_from": str(model.resolve()),
            "micro_batch_tokens": _DEFAULT_MICRO_BATCH_TOKENS,
        },
    }
    get_model_overrides(overrides)
    values = merge_settings(defaults, overrides)
    if data:
        train_files = [str(file.resolve()) for file in data]
        values = merge_settings(values, {"embedding": {"train_files": train_files}})
    values["model"] = {"vocab_size": 1}
    settings = EmbeddingRunSettings.parse(values, "the settings")
    if not settings.embedding.train_files:
        raise SettingsError("no training file: give --data FILE")
    for file in settings.embedding.list_files():
        if not file.exists():
            raise TaskError(f"{file}: no such file")
    return settings


def get_model_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model table of the overrides.

    Raises:
        SettingsError: If the table has other fields than the dropout rates.
    """
    table = get_table(overrides, "model")
    invalid = sorted(set(table) - _MUTABLE_MODEL_FIELDS)
    if invalid:
        names = " and ".join(f"model.{name}" for name in sorted(_MUTABLE_MODEL_FIELDS))
        raise SettingsError(
            f"model.{invalid[0]} cannot be set: it is fixed by the model that training starts "
            f"from; only {names} can be set"
        )
    return table


def check_arguments(
    model: Path,
    data: Sequence[Path],
    out: Path,
    config: Path | None,
    assignments: Sequence[str],
    values: Mapping[str, Any],
) -> None:
    """Check the arguments of ``finetune_embedder`` without importing torch.

    Raises:
        BertsmithError: If ``finetune_embedder`` would reject these arguments.
    """
    check_run_directory(out)
    overrides = read_overrides(config, values, assignments)
    locate_model(model)
    resolve_settings(pin_model_path(model), data, overrides)
