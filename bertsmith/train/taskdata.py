"""From a task's name and files to settings and examples.

It never knows how a run trains.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.bundle import Head, TaskBundle
from bertsmith.errors import RunError, SettingsError, TaskError
from bertsmith.files import sha256_of_file
from bertsmith.settings import merged
from bertsmith.tasks.classify import (
    Counts,
    Example,
    check_metrics,
    default_metrics,
    labels_of,
    read,
)
from bertsmith.tasks.public import TASKS, Source
from bertsmith.train.tunesettings import FinetuneSettings, TaskSettings

OWN = "classify"
#: Tokens of an input where nobody says: as in the original's run_classifier.py.
LENGTH = 128
#: In the middle of the choices of appendix A.3.
RATE, EPOCHS = 3e-5, 3.0
#: Fields of a model that fine-tuning may change.
_FREE = {"dropout", "attention_dropout"}


@dataclass(frozen=True)
class TaskData:
    """The examples of a run: ``heldout`` by name, and what became of the rows of each file."""

    train: list[Example]
    heldout: dict[str, list[Example]]
    counts: dict[str, Counts]


def resolve_task(
    task: str, model: Path, data: Path | None, said: Mapping[str, Any]
) -> FinetuneSettings:
    """Return the settings: the task's own facts, and over them what was said."""
    if task not in TASKS and task != OWN:
        known = ", ".join([*TASKS, OWN])
        raise SettingsError(f"unknown task {task!r}; known are {known}")
    base: dict[str, Any] = {"name": task}
    if task in TASKS:
        base |= _facts(task, data)
    elif data is not None:
        base["train"] = str(data.resolve())
    if "heldout" in said.get("task", {}):
        # A file that is given stands instead of the task's own, not beside them.
        base.pop("heldout", None)
    own: dict[str, Any] = {"task": base, "optim": {"lr": RATE}, "schedule": {"epochs": EPOCHS}}
    own["run"] = {"start_from": str(model.resolve())}
    _refuse_no_tables(said)
    values = merged(own, _without_epochs(said))
    # The model's own shape is read later; what is said of it is laid over it then.
    values["model"] = {"vocab_size": 1}
    settings = FinetuneSettings.parse(values, "the settings")
    if not settings.task.train:
        raise SettingsError("no training file: give --data FILE, or --set task.train=FILE")
    if task in TASKS and settings.task.kind != TASKS[task].kind:
        raise SettingsError(
            f"{task} is of the kind {TASKS[task].kind!r}; for another one give the task "
            f"'{OWN}' with --text and --label"
        )
    names = settings.task.metrics or list(default_metrics(settings.task.kind))
    check_metrics(names, settings.task.kind)
    return with_task(settings, {"metrics": names})


def _refuse_no_tables(said: Mapping[str, Any]) -> None:
    for name, value in said.items():
        if not isinstance(value, Mapping):
            raise SettingsError(f"{name} is {value!r}; expected a table of settings")


def _without_epochs(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what was said; where it names steps, the default number of epochs goes."""
    if "steps" in said.get("schedule", {}) and "epochs" not in said["schedule"]:
        return merged(said, {"schedule": {"epochs": None}})
    return said


def _facts(task: str, data: Path | None) -> dict[str, Any]:
    if data is None:
        raise SettingsError(f"{task}: give the folder with its files: --data FOLDER")
    known = TASKS[task]
    source = known.source
    return {
        "kind": known.kind,
        "labels": list(known.labels or ()),
        "metrics": list(known.metrics),
        "train": str((data / source.train).resolve()),
        "heldout": {name: str((data / file).resolve()) for name, file in source.dev.items()},
        "text": source.text, "pair": source.pair, "label": source.label,
        "header": source.header,
    }  # fmt: skip


def with_task(settings: FinetuneSettings, changes: dict[str, Any]) -> FinetuneSettings:
    """Return the settings with another task table."""
    return settings.model_copy(update={"task": settings.task.model_copy(update=changes)})


def model_changes(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was said of the model: its dropout may be set, its shape may not."""
    asked = said.get("model", {})
    strange = sorted(set(asked) - _FREE)
    if strange:
        raise SettingsError(
            f"model.{strange[0]}: the model that fine-tuning starts from says it; only "
            f"{' and '.join(f'model.{name}' for name in sorted(_FREE))} can be set"
        )
    return dict(asked)


def with_model(settings: FinetuneSettings, start: TaskBundle) -> FinetuneSettings:
    """Return the settings with the model's shape, and a length of inputs that it takes."""
    most = start.config.max_positions
    length = settings.task.length or min(LENGTH, most)
    if length > most:
        raise SettingsError(
            f"task.length is {length}, but the model takes {most} tokens; shorten task.length"
        )
    settings = settings.model_copy(update={"model": start.config})
    return with_task(settings, {"length": length})


def fingerprint(task: TaskSettings) -> str:
    """Return what tells the task's files from changed ones: a hash of their bytes, shortened.

    Raises TaskError where one is not there.
    """
    whole = hashlib.sha256()
    for file in (task.train, *task.heldout.values()):
        try:
            whole.update(sha256_of_file(Path(file)).encode())
        except OSError as error:
            raise TaskError(f"{file}: cannot be read: {error.strerror}") from None
    return whole.hexdigest()[:16]


def source_of(task: TaskSettings) -> Source:
    """Return where texts and labels stand in the task's files."""
    return Source(text=task.text, pair=task.pair, label=task.label, header=task.header)


def read_data(task: TaskSettings) -> TaskData:
    """Read the training and held-out examples; without held-out files a share is held out."""
    source, known = source_of(task), task.labels or None
    counts: dict[str, Counts] = {}
    train, counts["train"] = read(
        Path(task.train), source, task.kind, skip_bad=task.skip_bad, labels=known
    )
    if not task.heldout:
        # The same rows for every seed of a run, so that runs can be compared.
        order = np.random.default_rng(0).permutation(len(train))
        held = max(1, round(len(train) * task.heldout_share))
        if held >= len(train):
            raise RunError(f"{task.train}: {len(train)} examples are too few to hold some out")
        kept = np.sort(order[held:]), np.sort(order[:held])
        return TaskData(
            [train[i] for i in kept[0]], {"heldout": [train[i] for i in kept[1]]}, counts
        )
    if known is None and task.kind != "regression":
        known = list(labels_of(train, task.train))
    heldout = {}
    for name, file in task.heldout.items():
        heldout[name], counts[name] = read(
            Path(file), source, task.kind, skip_bad=task.skip_bad, labels=known
        )
    return TaskData(train, heldout, counts)


def head_of(task: TaskSettings, data: TaskData) -> Head:
    """Return what the outputs are to mean: the labels said, or those that occur."""
    if task.kind == "regression":
        return Head("regression")
    everything = [*data.train, *(one for own in data.heldout.values() for one in own)]
    found = labels_of(everything, task.train)
    return Head(task.kind, tuple(task.labels) or found)
