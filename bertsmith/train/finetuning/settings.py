"""Settings of a fine-tuning run; does not import torch."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from bertsmith.bundle import TaskKind
from bertsmith.bundle.directory import locate_model, pin_model_path
from bertsmith.errors import SettingsError, TaskError
from bertsmith.files import describe_missing_path
from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.settings import (
    Settings,
    get_table,
    load_user_settings,
    merge_settings,
    parse_assignments,
)
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import (
    FAMILY_DEFAULTS,
    FAMILY_KINDS,
    TaskSettings,
    get_default_max_seqlen,
    get_family_name,
)
from bertsmith.train.engine.finetuning_overrides import (
    Tables,
    check_tables,
    compute_default_lr,
    drop_default,
    drop_default_lr,
    drop_default_max_seqlen,
    drop_model_and_machine,
    drop_replaced_files,
    get_model_overrides,
    resolve_length,
)
from bertsmith.train.engine.run_directory import check_run_directory
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, FinetuneRunSettings, OptimSettings
from bertsmith.train.engine.unused_settings import check_assignments

#: Default epochs: the middle value of the grid in appendix A.3.
_DEFAULT_EPOCHS = 3.0
#: Defaults with a BiLSTM, whose new weights need a higher learning rate and more epochs
#: (docs/deviations.md).
_FEATURE_LR, _FEATURE_EPOCHS = 1e-3, 8.0


class TaskRunSettings(FinetuneRunSettings):
    """Settings of a fine-tuning run on a task."""

    #: Whether to use torch.compile on a GPU, with shapes that vary between batches. On a CPU it has
    #: no effect.
    compile: bool = False

    def is_compiled(self, device_type: str) -> bool:
        """Return whether the model of a run on "cpu" or "cuda" is compiled."""
        return self.compile and device_type != "cpu"


class FinetuneSettings(Settings):
    """All settings of a fine-tuning run, stored in RUN/settings.toml. See appendix A.3."""

    model: ModelConfig
    task: TaskSettings = TaskSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: TaskRunSettings = TaskRunSettings()
    #: A BiLSTM between the encoder and the task's linear layer; None: no BiLSTM.
    features: BiLSTMSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()


def read_overrides(
    task: str,
    data: Path | None,
    config: Path | str | None,
    values: Mapping[str, Any] | None,
    assignments: Sequence[str],
) -> dict[str, Any]:
    """Return the user's settings as nested tables.

    ``values`` override the TOML file, and ``assignments`` override ``values``. If the file is the
    settings.toml of a run, the values that the run computed are removed. Its steps and epochs are
    also removed if ``values`` or ``assignments`` set one of them.

    Args:
        task: Name of a public task or of a task family.
        data: Folder of a public task, or training file.
        config: The TOML file.
        values: Nested settings.
        assignments: Settings as "section.name=value".

    Raises:
        SettingsError: If the file is invalid, or has the settings of a pre-training run or of a run
            on another task.
    """
    settings = load_user_settings(config)
    if get_table(settings, "run").get("store_id"):
        raise SettingsError(
            f"{config}: these are the settings of a pre-training run; give the settings of a "
            "fine-tuning run, or use --set"
        )
    if config is not None and get_table(settings, "task").get("fingerprint"):
        settings = _drop_computed_values(settings, task, data, config)
        overrides = merge_settings(values or {}, parse_assignments(assignments))
        settings["task"] = _drop_other_labels(settings["task"], get_table(overrides, "task"))
        # Only one of steps and epochs may be set: a new value of either replaces the file's value.
        if get_table(overrides, "schedule").keys() & {"steps", "epochs"}:
            schedule = get_table(settings, "schedule")
            for name in ("steps", "epochs", "min_steps"):
                schedule.pop(name, None)
            settings["schedule"] = schedule
    drop_replaced_files("task", settings, values)
    overrides = load_user_settings(settings, values, assignments)
    check_tables(overrides)
    check_assignments(overrides, assignments)
    return overrides


def _drop_computed_values(
    settings: Mapping[str, Any], task: str, data: Path | None, config: Path | str
) -> dict[str, Any]:
    """Return the settings of another run without the values that the new run computes itself.

    These are the path and config of the start model (except for the dropout rates), the defaults
    that depend on it, the hash of the data files, what depends on the machine, the number of steps
    if epochs are set, and task settings with their default value.
    The training file, its labels and the validation files are also removed if ``data`` is another
    file or folder.

    Raises:
        SettingsError: If the other run has another task.
    """
    tables = {name: get_table(settings, name) for name in settings}
    _drop_model_defaults(tables)
    drop_model_and_machine(tables)
    task_table, schedule = tables["task"], tables.get("schedule", {})
    name = task_table.pop("name", task)
    if name != task:
        raise SettingsError(
            f"{config}: these are the settings of a run on the task {name!r}, not on {task!r}; "
            "give the settings of a run on the same task"
        )
    del task_table["fingerprint"]
    recorded_paths = [Path(task_table.get("train_file", ""))]
    if task in PUBLIC_TASKS:
        folder = Path(task_table.pop("train_file", "")).parent
        recorded_paths.append(folder)
        dev_files = PUBLIC_TASKS[task].dev_files.items()
        validation_files = {dev: str(folder / file) for dev, file in dev_files}
        defaults = {**PUBLIC_TASKS[task].fixed_settings, "validation_files": validation_files}
    else:
        defaults = FAMILY_DEFAULTS.get(task, {})
    if data is not None and data.resolve() not in recorded_paths:
        for key in ("train_file", "labels", "validation_files"):
            task_table.pop(key, None)
    for key, field in TaskSettings.model_fields.items():
        default = defaults.get(key, field.get_default(call_default_factory=True))
        # The kind is not removed, because classes may be numbers only if it is set.
        if key != "kind" and task_table.get(key) in (default, {}):
            task_table.pop(key, None)
    if schedule.get("epochs") is not None:
        schedule.pop("steps", None)
    return tables


def _drop_other_labels(
    task_table: Mapping[str, Any], task_overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a recorded task table without the labels and their columns if the user changes these.

    Args:
        task_table: The table of another run.
        task_overrides: The user's settings of the task.
    """
    dropped: set[str] = set()
    if task_overrides.get("label_column") or task_overrides.get("label_columns"):
        dropped = {"label_column", "label_columns", "labels"}
    return {name: value for name, value in task_table.items() if name not in dropped}


def _drop_model_defaults(tables: Tables) -> None:
    """Remove the learning rate and maximum length if they are the defaults of the run's model."""
    features = tables.get("features")
    if features is not None and features.get("frozen", True):
        drop_default(tables.get("optim", {}), "lr", _FEATURE_LR)
    else:
        drop_default_lr(tables)
    kind = tables["task"].get("kind", TaskSettings().kind)
    # An invalid kind is reported later.
    if kind in get_args(TaskKind):
        drop_default_max_seqlen(tables, "task", get_default_max_seqlen(kind))


def resolve_settings(
    task: str, model: Path, data: Path | None, overrides: Mapping[str, Any]
) -> FinetuneSettings:
    """Return the settings of a run that can be resolved without reading its model and data files.

    The model config is a placeholder, which ``resolve_model_settings`` replaces.

    Args:
        task: Name of a public task or of a task family.
        model: Model directory to start from.
        data: Folder of a public task, or training file.
        overrides: Settings of the user, as nested tables.

    Raises:
        SettingsError: If the task is unknown or a setting is invalid.
    """
    if task not in PUBLIC_TASKS and task not in FAMILY_KINDS:
        names = [*PUBLIC_TASKS, *FAMILY_KINDS]
        nearest = difflib.get_close_matches(task, names, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise SettingsError(
            f"unknown task {task!r}{hint}; choose one of {', '.join(names)}, or use `finetune "
            "embed` or `finetune rerank`"
        )
    task_defaults: dict[str, Any] = {"name": task}
    if task in PUBLIC_TASKS:
        if data is None:
            raise SettingsError(f"{task}: give the folder with its files: --data FOLDER")
        task_defaults |= PUBLIC_TASKS[task].resolve_settings(data)
    else:
        task_defaults |= {"kind": FAMILY_KINDS[task][0], **FAMILY_DEFAULTS.get(task, {})}
        if data is not None:
            task_defaults["train_file"] = str(data.resolve())
    check_tables(overrides)
    if task == "classify" and overrides.get("task", {}).get("label_columns"):
        task_defaults["kind"] = "multi"
    if "validation_files" in overrides.get("task", {}):
        # The user's held-out files replace those of a public task.
        task_defaults.pop("validation_files", None)
    features = overrides.get("features")
    is_frozen = isinstance(features, Mapping) and features.get("frozen", True)
    if is_frozen:
        lr, length = _FEATURE_LR, resolve_length(overrides, _FEATURE_EPOCHS, min_steps=1)
    else:
        lr, length = compute_default_lr(model), resolve_length(overrides, _DEFAULT_EPOCHS)
    defaults: dict[str, Any] = {
        "task": task_defaults,
        "optim": {"lr": lr},
        "schedule": length,
        "run": {"start_from": str(model.resolve())},
    }
    values = merge_settings(defaults, overrides)
    # Only check the overrides of the model config. They are applied when the model is loaded.
    get_model_overrides(overrides)
    values["model"] = {"vocab_size": 1}
    settings = FinetuneSettings.parse(values, "the settings")
    if settings.task.kind == "multi" and settings.task.label_columns and not settings.task.labels:
        settings = update_task_settings(settings, {"labels": settings.task.label_columns})
    if not settings.task.train_file:
        raise SettingsError("no training file: give --data FILE, or --set task.train_file=FILE")
    _check_kind(task, settings.task)
    _check_validation_settings(settings.task)
    return settings


def update_task_settings(settings: FinetuneSettings, changes: dict[str, Any]) -> FinetuneSettings:
    """Return the settings with changed values in the task table."""
    return settings.model_copy(update={"task": settings.task.model_copy(update=changes)})


def check_finetune_arguments(
    task: str,
    model: Path,
    data: Path | None,
    out: Path | None,
    config: Path | str | None,
    assignments: Sequence[str],
    values: Mapping[str, Any],
) -> None:
    """Check the arguments of ``finetune`` without importing torch; ``finetune`` checks them again.

    For a sweep, whose directory contains several runs, ``out`` is None.

    Raises:
        BertsmithError: If ``finetune`` would reject these arguments.
    """
    if out is not None:
        check_run_directory(out)
    overrides = read_overrides(task, data, config, values, assignments)
    locate_model(model)
    settings = resolve_settings(task, pin_model_path(model), data, overrides)
    check_files_exist(settings.task)


def _check_kind(task: str, settings: TaskSettings) -> None:
    """Raise SettingsError if ``settings.kind`` is not a kind of the task."""
    kinds = (
        (PUBLIC_TASKS[task].fixed_settings["kind"],) if task in PUBLIC_TASKS else FAMILY_KINDS[task]
    )
    if settings.kind not in kinds:
        family = get_family_name(settings.kind)
        raise SettingsError(
            f"task.kind is {settings.kind!r}, but {task} has the kind "
            f"{' or '.join(map(repr, kinds))}; for {settings.kind!r} use the task {family!r} and "
            "name its columns"
        )


def _check_validation_settings(settings: TaskSettings) -> None:
    """Raise SettingsError for settings of a held-out part or a subset that have no effect."""
    files = ", ".join(settings.validation_files.values())
    reasons = {}
    if files:
        problem = f"there are validation files: {files}; remove one of them"
        reasons = dict.fromkeys(("validation_fraction", "validation_fold"), problem)
    if settings.max_train_examples is None:
        problem = "task.max_train_examples is not set; set it or remove this setting"
        reasons |= dict.fromkeys(("train_subset", "train_subset_seed"), problem)
    for name, reason in reasons.items():
        if getattr(settings, name) != TaskSettings.model_fields[name].default:
            raise SettingsError(f"task.{name} has no effect, because {reason}")


def check_files_exist(settings: TaskSettings) -> None:
    """Raise TaskError if a data file of the task does not exist."""
    public_task = PUBLIC_TASKS.get(settings.name)
    for file in map(Path, (settings.train_file, *settings.validation_files.values())):
        if not file.exists():
            if public_task is None:
                raise TaskError(describe_missing_path(file))
            hint = public_task.describe_expected_data(settings.name)
            raise TaskError(f"{file}: no such file; {hint}")
