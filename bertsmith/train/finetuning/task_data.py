"""From a task's name and files to settings and examples.

It never knows how a run trains.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.bundle import FineTunedBundle, HeadConfig
from bertsmith.errors import RunError, SettingsError, TaskError
from bertsmith.files import sha256_of_file
from bertsmith.settings import read_toml
from bertsmith.tasks.entities import find_invalid_tags
from bertsmith.tasks.families import get_family, reject_unused_fields, resolve_metrics
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.label_counts import reject_numeric_labels
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.train.finetuning.settings import FinetuneSettings, resolve_settings


@dataclass(frozen=True)
class TaskData:
    """The examples of a run: ``heldout`` by name, and what became of the rows of each file."""

    train: list[Any]
    heldout: dict[str, list[Any]]
    counts: dict[str, ExampleCounts]


def resolve_task_settings(
    task: str, model: Path, data: Path | None, said: Mapping[str, Any]
) -> FinetuneSettings:
    """Return the settings: the task's own facts, and over them what was said."""
    settings = resolve_settings(task, model, data, said)
    wrong = find_invalid_tags(settings.task.labels) if settings.task.kind == "entities" else []
    if wrong:
        raise SettingsError(
            f"task.labels: {wrong[0]!r} is no entity's tag; expected O, B-…, I-…; for tags that "
            "are no entities give task.kind=tags"
        )
    tables = [Path(file) for file in (settings.task.train, *settings.task.heldout.values())]
    reject_unused_fields(settings.task.kind, said.get("task", {}), tables)
    return with_task(settings, {"metrics": resolve_metrics(settings.task)})


def with_task(settings: FinetuneSettings, changes: dict[str, Any]) -> FinetuneSettings:
    """Return the settings with another task table."""
    return settings.model_copy(update={"task": settings.task.model_copy(update=changes)})


def with_model(settings: FinetuneSettings, start: FineTunedBundle) -> FinetuneSettings:
    """Return the settings with the model's shape, and a length of inputs that it takes."""
    most = start.config.max_positions
    length = settings.task.length or min(get_family(settings.task.kind).DEFAULT_LENGTH, most)
    if length > most:
        raise SettingsError(
            f"task.length is {length}, but the model takes {most} tokens; shorten task.length"
        )
    settings = settings.model_copy(update={"model": start.config})
    return with_task(settings, {"length": length})


def hash_task_files(task: TaskSettings) -> str:
    """Return what tells the task's files from changed ones: a hash of their bytes, shortened.

    Raises TaskError where one is not there.
    """
    whole = hashlib.sha256()
    for file in task.files():
        try:
            whole.update(sha256_of_file(file).encode())
        except OSError as error:
            raise TaskError(f"{file}: cannot be read: {error.strerror}") from None
    return whole.hexdigest()[:16]


def check_files_unchanged(run: Path, task: TaskSettings) -> None:
    """Raise RunError if the run was begun with these files, and something else in them."""
    if not (run / SETTINGS_FILE).exists():
        return
    stored = FinetuneSettings.parse(read_toml(run / SETTINGS_FILE), str(run / SETTINGS_FILE)).task
    if stored.files() == task.files() and stored.fingerprint != task.fingerprint:
        raise RunError(
            f"{run}: the data files have changed since this run was begun "
            f"({', '.join(map(str, task.files()))}); put the old ones back to go on with it, or "
            "give --out another directory for a new run"
        )


def read_task_data(task: TaskSettings, *, allow_numeric: bool = True) -> TaskData:
    """Read the training and held-out examples; without held-out files a share is held out.

    allow_numeric: whether the classes may be a scale of numbers. Raises TaskError.
    """
    family, known = get_family(task.kind), task.labels or None
    counts: dict[str, ExampleCounts] = {}
    train, counts["train"] = family.read_examples(Path(task.train), task, labels=known)
    everything, train = train, _subset(train, task, counts["train"])
    if not allow_numeric:
        reject_numeric_labels(train, task)
    if not task.heldout:
        kept, held = _parted(train, task)
        return TaskData(kept, {"heldout": held}, counts)
    # A subset may lack a label of the file; a held-out example with it is no error.
    known = known or list(family.collect_labels(everything, task.train)) or None
    heldout = {}
    for name, file in task.heldout.items():
        heldout[name], counts[name] = family.read_examples(Path(file), task, labels=known)
    return TaskData(train, heldout, counts)


def _subset(examples: list[Any], task: TaskSettings, counts: ExampleCounts) -> list[Any]:
    """Return ``task.examples`` of the training examples, in their order; count the others."""
    size = task.examples
    if size is None or len(examples) <= size:
        return examples
    chosen = list(range(size))
    if task.examples_draw == "random":
        by_document = task.context == "document"
        groups = _groups(examples, task) if by_document else [[n] for n in range(len(examples))]
        order = np.random.default_rng(task.examples_seed).permutation(len(groups)).tolist()
        chosen = sorted([number for group in order for number in groups[group]][:size])
    counts.num_used = size
    counts.skipped[f"not among the task.examples = {size}"] += len(examples) - size
    return [examples[number] for number in chosen]


def _parted(examples: list[Any], task: TaskSettings) -> tuple[list[Any], list[Any]]:
    """Return the examples less the share that is held out, and that share."""
    groups = _groups(examples, task)
    # The same ones for every seed of a run, so that runs can be compared.
    order = np.random.default_rng(0).permutation(len(groups))
    share, fold = task.heldout_share, task.heldout_fold
    first, last = (min(round(place * share * len(groups)), len(groups))
                   for place in (fold, fold + 1))  # fmt: skip
    if fold and first == len(groups):
        raise SettingsError(
            f"task.heldout_fold is {fold}, but shares of {share} end before; the first is 0"
        )
    chosen = {one for group in order[first : max(last, first + 1)] for one in groups[group]}
    if len(chosen) == len(examples):
        what = f"{len(examples)} examples are too few"
        if len(groups) == 1 < len(examples):
            what = ("all its questions are about one context" if task.kind == "span" else
                    "all its sentences are one document")  # fmt: skip
            what += ", which stays together: nothing is left"
        raise RunError(f"{task.train}: {what} to hold some out; give a held-out file with --dev")
    return (
        [one for number, one in enumerate(examples) if number not in chosen],
        [one for number, one in enumerate(examples) if number in chosen],
    )


def _groups(examples: list[Any], task: TaskSettings) -> list[list[int]]:
    """Return the numbers of the examples that stay together when a share is held out.

    Questions about one context, and the sentences of a document where that is their context.
    """
    if task.kind == "span":
        keys: list[Any] = [example.context for example in examples]
    elif task.context == "document":
        keys = [example.document for example in examples]
    else:
        return [[number] for number in range(len(examples))]
    found: dict[Any, list[int]] = {}
    for number, key in enumerate(keys):
        found.setdefault(key, []).append(number)
    return list(found.values())


def build_head(task: TaskSettings, data: TaskData) -> HeadConfig:
    """Return what the outputs are to mean: the labels said, or those that occur."""
    everything = [*data.train, *(one for own in data.heldout.values() for one in own)]
    found = get_family(task.kind).collect_labels(everything, task.train)
    return HeadConfig(task.kind, tuple(task.labels) or found)


def find_unseen_labels(task: TaskSettings, head: HeadConfig, data: TaskData) -> list[str]:
    """Return the labels that no training example has. TaskError if they have one label only."""
    where = task.train if task.heldout else f"{task.train} without what is held out"
    found = get_family(task.kind).collect_labels(data.train, where)
    return [name for name in head.labels if name not in found]
