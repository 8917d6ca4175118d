"""Resolves the settings of fine-tuning runs, also of embedding models, rerankers and students."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bertsmith.bundle.config import read_config
from bertsmith.bundle.directory import locate_model, pin_model_path
from bertsmith.bundle.metadata import read_info
from bertsmith.errors import SettingsError, TaskError
from bertsmith.files import describe_missing_path
from bertsmith.settings import (
    Settings,
    SettingsTable,
    get_table,
    load_user_settings,
    merge_settings,
)
from bertsmith.tasks.text_files import reject_ignored_settings
from bertsmith.train.engine.run_directory import check_run_directory
from bertsmith.train.engine.unused_settings import check_assignments

#: Fields of the model config that training may change.
MUTABLE_MODEL_FIELDS: Final = {"dropout", "attention_dropout", "classifier_dropout"}
#: Default learning rate of a model of this width, BERT-Base: the middle value of the grid in
#: appendix A.3.
_BASE_LR, _BASE_WIDTH = 3e-5, 768
#: Largest default learning rate of narrower models.
_MAX_LR = 3e-4
#: Minimum number of steps of a run with the default number of epochs.
_MIN_STEPS = 100
#: Defaults of earlier versions, by key: their runs can be resumed.
EARLIER_DEFAULTS: Final = {
    "optim.lr": (_BASE_LR,), "schedule.min_steps": (1,), "run.start_id": (None,),
}  # fmt: skip
#: Nested settings by the name of their table.
Tables = dict[str, dict[str, Any]]
#: Settings table of a kind of run -> the command.
_COMMANDS: Final = {
    "embedding": "finetune embed", "reranking": "finetune rerank", "distill": "distill",
}  # fmt: skip


def read_table_overrides(
    table: str,
    config: Path | str | None,
    values: Mapping[str, Any] | None,
    assignments: Sequence[str],
    drop_defaults: Callable[[Tables, Mapping[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Return the user's settings as nested tables.

    ``values`` override the TOML file, and ``assignments`` override ``values``. If the file is the
    settings.toml of a run, the values that the run computed are removed.

    Args:
        table: The settings table of this kind of run, such as "embedding".
        config: The TOML file.
        values: Nested settings.
        assignments: Settings as "section.name=value".
        drop_defaults: Removes the defaults that depend on the model or on other settings from the
            tables of a settings.toml; the second argument is the user's other settings.

    Raises:
        SettingsError: If a setting has the wrong form, or the file has the settings of a run of
            another kind.
    """
    file_values = load_user_settings(config)
    other_tables = file_values.keys() & ({"task", "data", *_COMMANDS} - {table})
    if other_tables:
        command = _COMMANDS[table]
        raise SettingsError(
            f"{config}: these are not the settings of `{command}`, which has no table "
            f"[{min(other_tables)}]; give the settings of such a run"
        )
    user_values = load_user_settings(None, values, assignments)
    if get_table(file_values, table).get("fingerprint"):
        tables: Tables = {name: get_table(file_values, name) for name in file_values}
        if drop_defaults is not None:
            drop_defaults(tables, user_values)
        _drop_computed_values(table, tables, user_values)
        file_values = tables
    drop_replaced_files(table, file_values, values)
    overrides = merge_settings(file_values, user_values)
    check_tables(overrides)
    check_assignments(overrides, assignments)
    return overrides


def drop_replaced_files(
    table: str, file_values: dict[str, Any], values: Mapping[str, Any] | None
) -> None:
    """Remove the validation files of a settings file if the user gives others.

    Otherwise both would be merged by their names, and a file of the settings file would select the
    best checkpoint.

    Args:
        table: The settings table of the command.
        file_values: The values of the settings file, which are changed in place.
        values: The values that replace them.
    """
    if get_table(get_table(values or {}, table), "validation_files"):
        file_table = get_table(file_values, table)
        file_table.pop("validation_files", None)
        file_values[table] = file_table


def check_tables(overrides: Mapping[str, Any]) -> None:
    """Raise SettingsError if a top-level value of the overrides is not a table."""
    for name, value in overrides.items():
        if not isinstance(value, Mapping):
            raise SettingsError(f"{name} is {value!r}; expected a table of settings")


def drop_default(table: dict[str, Any], name: str, default: Any) -> None:
    """Remove a setting of another run that has the default value, which the new run may replace."""
    if name in table and table[name] == default:
        del table[name]


def drop_default_lr(tables: Tables) -> None:
    """Remove the learning rate of another run if it is the default of its model's width."""
    width = tables.get("model", {}).get("width")
    if isinstance(width, int) and width > 0:
        drop_default(tables.get("optim", {}), "lr", get_default_lr(width))


def drop_default_max_seqlen(tables: Tables, table: str, default: int) -> None:
    """Remove the maximum length of another run if it is the default, limited by its model."""
    max_positions = tables.get("model", {}).get("max_positions")
    if isinstance(max_positions, int):
        drop_default(tables[table], "max_seqlen", min(default, max_positions))


def _drop_computed_values(table: str, tables: Tables, user_values: Mapping[str, Any]) -> None:
    """Remove the values of another run that the new run computes itself.

    These are the model config except for the dropout rates, the start model, the hash of the files,
    what depends on the machine, the number of steps if epochs are set or the user sets a new
    length.
    """
    drop_model_and_machine(tables)
    del tables[table]["fingerprint"]
    schedule = tables.get("schedule", {})
    has_new_length = bool(get_table(user_values, "schedule").keys() & {"steps", "epochs"})
    if has_new_length or schedule.get("epochs") is not None:
        schedule.pop("steps", None)
    if has_new_length:
        schedule.pop("epochs", None)
        schedule.pop("min_steps", None)


def drop_model_and_machine(tables: Tables) -> None:
    """Remove the start model and its config except for the dropout rates, and the machine.

    The device, precision, attention kernel and threads are selected again if the device was
    "cuda", and the threads if there were several processes, which have fewer threads each.

    Args:
        tables: Settings of a run, changed in place.
    """
    tables["model"] = {
        name: value
        for name, value in tables.get("model", {}).items()
        if name in MUTABLE_MODEL_FIELDS
    }
    run = tables.get("run", {})
    run.pop("start_from", None)
    run.pop("start_id", None)
    if run.pop("world_size", None) is not None:
        run.pop("threads", None)
    if run.get("device") == "cuda":
        for name in ("device", "precision", "attention_kernel", "threads"):
            run.pop(name, None)


def build_run_values(
    table: str,
    model: Path,
    data: Sequence[Path],
    overrides: Mapping[str, Any],
    *,
    lr: float,
    epochs: float,
    run: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return nested settings with defaults and the user's overrides, to be parsed.

    The model config is a placeholder, which is replaced when the model is loaded.

    Args:
        table: The settings table of this kind of run, such as "embedding".
        model: Model directory to start from.
        data: Training tables, which replace those of the overrides.
        overrides: Settings of the user, as nested tables.
        lr: Default learning rate.
        epochs: Default number of epochs, if the user has set no number of steps.
        run: Other default settings of the table "run".

    Raises:
        SettingsError: If a setting is invalid.
    """
    defaults: dict[str, Any] = {
        "optim": {"lr": lr},
        "schedule": resolve_length(overrides, epochs, min_steps=1),
        "run": {"start_from": str(model.resolve()), **(run or {})},
    }
    get_model_overrides(overrides)
    values = merge_settings(defaults, overrides)
    if data:
        train_files = [str(file.resolve()) for file in data]
        values = merge_settings(values, {table: {"train_files": train_files}})
    values["model"] = {"vocab_size": 1}
    return values


def check_run_arguments(
    read_overrides: Callable[
        [Sequence[Path], Path | str | None, Mapping[str, Any], Sequence[str]], dict[str, Any]
    ],
    resolve_settings: Callable[[Path, Sequence[Path], Mapping[str, Any]], Settings],
    model: Path,
    data: Sequence[Path],
    out: Path,
    config: Path | str | None,
    assignments: Sequence[str],
    values: Mapping[str, Any],
) -> None:
    """Check the arguments of ``finetune embed`` or ``finetune rerank`` without importing torch.

    Args:
        read_overrides: Returns the user's settings from ``data``, ``config``, ``values`` and
            ``assignments``.
        resolve_settings: Returns the settings of a run from its start model, training tables and
            overrides.
        model: Path or name of the model to start from.
        data: Training tables.
        out: Run directory.
        config: The TOML file.
        assignments: Settings as "section.name=value".
        values: Nested settings.

    Raises:
        BertsmithError: If the run would reject these arguments.
    """
    check_run_directory(out)
    overrides = read_overrides(data, config, values, assignments)
    locate_model(model)
    resolve_settings(pin_model_path(model), data, overrides)


def compute_default_lr(model: Path) -> float:
    """Return the default learning rate of a model with a new output layer."""
    directory = locate_model(model)
    return get_default_lr(read_config(directory, read_info(directory)).width)


def get_default_lr(width: int) -> float:
    """Return the default learning rate of a model of this width with a new output layer.

    It is 3e-5 for a width of 768 or more. It is higher for narrower models, which learn little in
    three epochs at 3e-5 (docs/notebook.md): multiplied by (768 / width)², at most 3e-4.
    """
    lr = _BASE_LR * max(1.0, _BASE_WIDTH / width) ** 2
    return min(_MAX_LR, float(f"{lr:.1e}"))


def resolve_length(
    overrides: Mapping[str, Any], default_epochs: float, min_steps: int = _MIN_STEPS
) -> dict[str, Any]:
    """Return the default table "schedule" for the overrides of the user.

    It is empty if the overrides set the length. Otherwise it has the default epochs and a minimum
    number of steps, because few epochs of a small file are too few steps.

    Raises:
        SettingsError: If the overrides set both, or a time budget.
    """
    schedule = get_table(overrides, "schedule")
    steps, epochs, minutes = (schedule.get(name) for name in ("steps", "epochs", "minutes"))
    if minutes is not None:
        raise SettingsError(
            f"schedule.minutes is {minutes}, but fine-tuning has no time budget; set "
            "schedule.epochs or schedule.steps"
        )
    if steps is not None and epochs is not None:
        raise SettingsError(
            f"schedule.steps is {steps} and schedule.epochs is {epochs}; set only one of them"
        )
    if steps is None and epochs is None:
        return {"epochs": default_epochs, "min_steps": min_steps}
    return {}


def check_data_files(settings: SettingsTable, files: Sequence[Path]) -> None:
    """Check the data files of a run, and the settings of how they are read.

    Args:
        settings: A settings table with the setting ``train_files``.
        files: All data files.

    Raises:
        SettingsError: If there is no training file, or a setting has no effect on any file.
        TaskError: If a file does not exist.
    """
    values = vars(settings)
    if not values["train_files"]:
        raise SettingsError("no training file: give --data FILE")
    for file in files:
        if not file.exists():
            raise TaskError(describe_missing_path(file, "file or folder"))
    # Models and folders in BEIR's format have no settings of how they are read.
    tables = [file for file in files if file.is_file()]
    reject_ignored_settings(settings.table, values, tables)


def get_model_overrides(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model table of the overrides.

    Raises:
        SettingsError: If the table has other fields than the dropout rates.
    """
    table = get_table(overrides, "model")
    invalid = sorted(set(table) - MUTABLE_MODEL_FIELDS)
    if invalid:
        names = ", ".join(f"model.{name}" for name in sorted(MUTABLE_MODEL_FIELDS))
        raise SettingsError(
            f"model.{invalid[0]} cannot be set: it is fixed by the model that training starts "
            f"from; only {names} can be set"
        )
    return table
