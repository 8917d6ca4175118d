"""The settings of a fine-tuning run.

It never knows of tensors, or where a run is written.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from bertsmith.errors import SettingsError, TaskError
from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.settings import Settings, SettingsTable, merge_settings
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import FAMILY_DEFAULTS, FAMILY_KINDS, TaskSettings
from bertsmith.train.engine import compute_settings
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, OptimSettings

#: Rate and epochs, in the middle of the choices of appendix A.3.
PLAN = 3e-5, 3.0
#: A BiLSTM that begins with random weights takes a higher rate, and longer (docs/deviations.md).
FEATURE_PLAN = 1e-3, 8.0
#: Fields of a model that fine-tuning may change.
_FREE = {"dropout", "attention_dropout"}


class FinetuneRunSettings(SettingsTable):
    """Where fine-tuning begins, and how its steps are computed."""

    table: ClassVar[str] = "run"

    start_from: str = ""
    seed: compute_settings.Seed = 0
    device: str = "auto"
    precision: compute_settings.Precision = "auto"
    kernel: compute_settings.Kernel = "auto"
    threads: compute_settings.Threads = None
    micro_batch_tokens: compute_settings.MicroTokens = compute_settings.MICRO_TOKENS
    log_every: compute_settings.LogEvery = compute_settings.LOG_EVERY
    #: When the held-out files are scored: after each epoch, or when all steps are done.
    evaluate: Literal["epoch", "end"] = "epoch"
    #: The weights that become the model: those of the last step, or of the best evaluation.
    choose: Literal["last", "best"] = "last"
    #: Evaluations without a better one after which a run ends early, with the best one's weights.
    patience: Annotated[int, Field(ge=1)] | None = None
    #: Layers from below that are not trained, the embeddings with them; None: all are trained.
    freeze: Annotated[int, Field(ge=0)] | None = None

    @model_validator(mode="after")
    def _scored_on_the_way(self) -> Self:
        asked = 'choose = "best"' if self.choose == "best" else "patience"
        if self.evaluate == "end" and (self.choose == "best" or self.patience is not None):
            raise ValueError(f'{asked} wants scores on the way, and evaluate is "end"; give up one')
        return self


class FinetuneSettings(Settings):
    """Everything that decides a fine-tuning run: RUN/settings.toml. Appendix A.3 of the paper."""

    model: ModelConfig
    task: TaskSettings = TaskSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: FinetuneRunSettings = FinetuneRunSettings()
    #: A BiLSTM on the encoder, which stays as it is or learns too; None: the task's Linear alone.
    features: FeatureSettings | None = None
    checkpoint: CheckpointSettings = CheckpointSettings()


def resolve_settings(
    task: str, model: Path, data: Path | None, said: Mapping[str, Any]
) -> FinetuneSettings:
    """Return the settings of a run as far as no file has to be read. Raises SettingsError."""
    if task not in PUBLIC_TASKS and task not in FAMILY_KINDS:
        known = ", ".join([*PUBLIC_TASKS, *FAMILY_KINDS])
        raise SettingsError(f"unknown task {task!r}; known are {known}")
    base: dict[str, Any] = {"name": task}
    if task in PUBLIC_TASKS:
        if data is None:
            raise SettingsError(f"{task}: give the folder with its files: --data FOLDER")
        base |= PUBLIC_TASKS[task].resolve_settings(data)
    else:
        base |= {"kind": FAMILY_KINDS[task][0], **FAMILY_DEFAULTS.get(task, {})}
        if data is not None:
            base["train"] = str(data.resolve())
    _refuse_no_tables(said)
    if "heldout" in said.get("task", {}):
        # A file that is given stands instead of the task's own, not beside them.
        base.pop("heldout", None)
    features = said.get("features")
    frozen = isinstance(features, Mapping) and features.get("frozen", True)
    rate, epochs = FEATURE_PLAN if frozen else PLAN
    defaults: dict[str, Any] = {"task": base, "optim": {"lr": rate}, "schedule": {"epochs": epochs}}
    defaults["run"] = {"start_from": str(model.resolve())}
    values = merge_settings(defaults, _without_epochs(said))
    model_overrides(said)
    # The model's own shape is read later; what is said of it is laid over it then.
    values["model"] = {"vocab_size": 1}
    settings = FinetuneSettings.parse(values, "the settings")
    if not settings.task.train:
        raise SettingsError("no training file: give --data FILE, or --set task.train=FILE")
    _check_kind(task, settings.task)
    return settings


def _check_kind(task: str, settings: TaskSettings) -> None:
    """Refuse a kind that the task has not."""
    kinds = (
        (PUBLIC_TASKS[task].fixed_settings["kind"],) if task in PUBLIC_TASKS else FAMILY_KINDS[task]
    )
    if settings.kind not in kinds:
        family = next(name for name, own in FAMILY_KINDS.items() if settings.kind in own)
        raise SettingsError(
            f"{task} is of the kind {' or '.join(map(repr, kinds))}; for {settings.kind!r} give "
            f"the task {family!r} and its columns"
        )


def check_files_exist(settings: TaskSettings) -> None:
    """Raise TaskError where a file of the task does not exist."""
    public = PUBLIC_TASKS.get(settings.name)
    for file in map(Path, (settings.train, *settings.heldout.values())):
        if not file.exists():
            hint = f"; {public.describe_expected_data(settings.name)}" if public else ""
            raise TaskError(f"{file}: no such file{hint}")


def _refuse_no_tables(said: Mapping[str, Any]) -> None:
    for name, value in said.items():
        if not isinstance(value, Mapping):
            raise SettingsError(f"{name} is {value!r}; expected a table of settings")


def _without_epochs(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what was said; where it names steps, the default number of epochs goes.

    Raises SettingsError where it names both.
    """
    timing = said.get("schedule", {})
    steps, epochs = timing.get("steps"), timing.get("epochs")
    if steps is None:
        return said
    if epochs is not None:
        raise SettingsError(
            f"schedule.steps is {steps} and schedule.epochs is {epochs}; give only one of them"
        )
    return merge_settings(said, {"schedule": {"epochs": None}})


def model_overrides(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was said of the model: its dropout may be set, its shape may not."""
    asked = said.get("model", {})
    strange = sorted(set(asked) - _FREE)
    if strange:
        raise SettingsError(
            f"model.{strange[0]}: the model that fine-tuning starts from says it; only "
            f"{' and '.join(f'model.{name}' for name in sorted(_FREE))} can be set"
        )
    return dict(asked)
