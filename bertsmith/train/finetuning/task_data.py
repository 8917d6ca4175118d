"""Resolves the settings of a task and reads its training and held-out examples."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.bundle import FineTunedBundle, HeadConfig
from bertsmith.errors import RunError, SettingsError
from bertsmith.plurals import count_noun
from bertsmith.tasks.entities import find_non_entity_tags
from bertsmith.tasks.families import (
    get_family,
    reject_unused_fields,
    resolve_metrics,
)
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.label_counts import reject_numeric_labels
from bertsmith.tasks.settings import FAMILY_KINDS, TaskSettings, get_default_max_seqlen
from bertsmith.train.finetuning.settings import (
    FinetuneSettings,
    resolve_settings,
    update_task_settings,
)


@dataclass(frozen=True)
class TaskData:
    """The examples of a fine-tuning run.

    Attributes:
        train: Training examples.
        heldout: Held-out examples by name of the held-out file.
        counts: For "train" and each held-out file, how many examples were read and skipped.
    """

    train: list[Any]
    heldout: dict[str, list[Any]]
    counts: dict[str, ExampleCounts]


def resolve_task_settings(
    task: str, model: Path, data: Path | None, overrides: Mapping[str, Any]
) -> FinetuneSettings:
    """Return the settings of ``resolve_settings``, completed with the metrics of the task.

    Raises:
        SettingsError: If a setting is invalid, or has no effect on this task.
    """
    settings = resolve_settings(task, model, data, overrides)
    is_entity_task = settings.task.kind == "entities"
    invalid_tags = find_non_entity_tags(settings.task.labels) if is_entity_task else []
    if invalid_tags:
        raise SettingsError(
            f"task.labels: {invalid_tags[0]!r} is not an entity tag; use O, B-… and I-…, or set "
            "task.kind=tags for other tags"
        )
    files = [
        Path(file) for file in (settings.task.train_file, *settings.task.validation_files.values())
    ]
    reject_unused_fields(settings.task.kind, overrides.get("task", {}), files)
    return update_task_settings(settings, {"metrics": resolve_metrics(settings.task)})


def resolve_model_settings(settings: FinetuneSettings, bundle: FineTunedBundle) -> FinetuneSettings:
    """Return the settings with the config of the start model, and defaults that depend on it.

    These are task.max_seqlen and, for tagging, task.tagged_token.

    Raises:
        SettingsError: If task.max_seqlen exceeds the model's maximum, or the model has a single
            segment and the task has pairs of texts.
    """
    if settings.task.kind in ("choice", "span") or settings.task.pair_column is not None:
        bundle.config.require_two_segments()
    max_positions = bundle.config.max_positions
    default_max_seqlen = min(get_default_max_seqlen(settings.task.kind), max_positions)
    max_seqlen = settings.task.max_seqlen or default_max_seqlen
    bundle.config.check_max_seqlen("task.max_seqlen", max_seqlen)
    settings = settings.model_copy(update={"model": bundle.config})
    changes: dict[str, Any] = {"max_seqlen": max_seqlen}
    if settings.task.kind in FAMILY_KINDS["tag"] and settings.task.tagged_token is None:
        # With causal attention, only the last token of a word sees the whole word.
        is_causal = bundle.config.attention == "causal"
        changes["tagged_token"] = "last" if is_causal else "first"
    return update_task_settings(settings, changes)


def read_task_data(
    task: TaskSettings, *, allow_numeric: bool = True, labeled: bool = True
) -> TaskData:
    """Read the training and held-out examples.

    If there are no held-out files, the fraction ``task.validation_fraction`` of the training
    examples is held out.

    Args:
        task: Task settings.
        allow_numeric: Whether classes may be numbers that look like scores of a regression task.
        labeled: Whether to read the labels of the training file; held-out files have labels in any
            case.

    Raises:
        TaskError: If a file has invalid or no examples.
    """
    family = get_family(task.kind)
    labels = task.labels or None
    counts: dict[str, ExampleCounts] = {}
    all_train, counts["train"] = family.read_examples(
        Path(task.train_file), task, labels=labels, labeled=labeled
    )
    train = _draw_subset(all_train, task, counts["train"])
    if not allow_numeric:
        reject_numeric_labels(train, task)
    if not task.validation_files:
        train, held_out = _hold_out_examples(train, task)
        return TaskData(train, {"heldout": held_out}, counts)
    # A held-out example may have a label that is in the training file, but not in the subset.
    if labels is None and labeled:
        labels = list(family.collect_labels(all_train, task.train_file)) or None
    heldout = {}
    for name, file in task.validation_files.items():
        heldout[name], counts[name] = family.read_examples(Path(file), task, labels=labels)
    return TaskData(train, heldout, counts)


def _draw_subset(examples: list[Any], task: TaskSettings, counts: ExampleCounts) -> list[Any]:
    """Return at most ``task.max_train_examples`` examples in file order.

    Sets ``num_used`` of the counts, and counts the other examples as skipped.
    """
    size = task.max_train_examples
    if size is None or len(examples) <= size:
        return examples
    indices = list(range(size))
    if task.train_subset == "random":
        if task.context == "document":
            groups = _group_indices(examples, task)
        else:
            groups = [[index] for index in range(len(examples))]
        order = np.random.default_rng(task.train_subset_seed).permutation(len(groups)).tolist()
        shuffled_indices = [index for group in order for index in groups[group]]
        indices = sorted(shuffled_indices[:size])
    counts.num_used = size
    counts.skipped[f"not among the task.max_train_examples = {size}"] += len(examples) - size
    return [examples[index] for index in indices]


def _hold_out_examples(examples: list[Any], task: TaskSettings) -> tuple[list[Any], list[Any]]:
    """Split the examples into training and held-out examples.

    Raises:
        SettingsError: If ``task.validation_fold`` exceeds the number of folds.
        RunError: If no training example would remain.
    """
    groups = _group_indices(examples, task)
    # The split does not depend on run.seed, so that runs with different seeds are comparable.
    order = np.random.default_rng(0).permutation(len(groups))
    fraction = task.validation_fraction
    fold = task.validation_fold
    start = min(round(fold * fraction * len(groups)), len(groups))
    end = min(round((fold + 1) * fraction * len(groups)), len(groups))
    if fold and start == len(groups):
        raise SettingsError(
            f"task.validation_fold is {fold}, but there are too few folds: folds are counted "
            f"from 0, and each has {fraction:.4g} of the examples (task.validation_fraction); set "
            "a lower number"
        )
    held_out_groups = order[start : max(end, start + 1)]
    held_out_indices = {index for group in held_out_groups for index in groups[group]}
    if len(held_out_indices) == len(examples):
        if len(examples) == 1 or len(groups) > 1:
            num_examples = count_noun(len(examples), "example is", "examples are")
            reason = f"{num_examples} too few to hold some out"
        elif task.kind == "span":
            reason = "all questions have the same context, so none can be held out"
        else:
            reason = "all sentences are in one document, so none can be held out"
        raise RunError(f"{task.train_file}: {reason}; give a held-out file with --dev")
    train = [example for index, example in enumerate(examples) if index not in held_out_indices]
    held_out = [example for index, example in enumerate(examples) if index in held_out_indices]
    return train, held_out


def _group_indices(examples: list[Any], task: TaskSettings) -> list[list[int]]:
    """Group the indices of the examples that must be held out together.

    A group has all questions about the same context, or all sentences of the same document if
    ``task.context`` is "document". In other tasks, each example is a group of its own.
    """
    if task.kind == "span":
        keys: list[Any] = [example.context for example in examples]
    elif task.context == "document":
        keys = [example.document for example in examples]
    else:
        return [[index] for index in range(len(examples))]
    groups: dict[Any, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


def build_head(task: TaskSettings, data: TaskData) -> HeadConfig:
    """Return the config of the task's head, with the labels of the settings or of the data."""
    examples = [*data.train, *chain.from_iterable(data.heldout.values())]
    labels = get_family(task.kind).collect_labels(examples, task.train_file)
    return HeadConfig(task.kind, tuple(task.labels) or labels)


def find_unseen_labels(task: TaskSettings, head: HeadConfig, data: TaskData) -> list[str]:
    """Return the labels of the head that no training example has.

    Raises:
        TaskError: If all training examples have the same label.
    """
    location = (
        task.train_file
        if task.validation_files
        else f"{task.train_file} without the held-out examples"
    )
    labels = get_family(task.kind).collect_labels(data.train, location)
    return [name for name in head.labels if name not in labels]
