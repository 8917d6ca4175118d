"""Log messages about the model and data of a fine-tuning run, and warnings about its data."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.bundle import FineTunedBundle
from bertsmith.bundle.directory import format_model_path
from bertsmith.plurals import count_noun
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.tasks.label_counts import (
    get_accuracy_warning,
    get_label_warnings,
    summarize_labels,
)
from bertsmith.tasks.settings import FAMILY_KINDS, TaskSettings
from bertsmith.train.engine.example_counts import format_heldout_sizes, log_counts
from bertsmith.train.finetuning.task_data import TaskData


def log_run_summary(
    progress: Progress,
    run: Path,
    task: TaskSettings,
    bundle: FineTunedBundle,
    data: TaskData,
    machine: device.Machine,
) -> None:
    """Log the model, data and device of a fine-tuning run, and warnings about its data."""
    heldout_sizes = format_heldout_sizes(
        {name: len(examples) for name, examples in data.heldout.items()}, "example", "examples"
    )
    progress.log(
        f"{run}: {format_model_path(bundle.path)} on "
        f"{count_noun(len(data.train), 'training example')}, {heldout_sizes} "
        f"({device.describe_machine(machine)})"
    )
    if bundle.info["newly_initialized"]:
        progress.log(f"newly initialized: {', '.join(bundle.info['newly_initialized'])}")
    for note in bundle.notes():
        progress.log(note)
    log_counts(progress, data.counts)
    for name, examples in {"train": data.train, **data.heldout}.items():
        progress.log(f"{name}: {summarize_labels(examples, task.kind)}")
    for warning in get_label_warnings(data.train, task):
        progress.log(f"warning: train: {warning}")
    for name, examples in data.heldout.items():
        file = task.validation_files.get(name)
        if file is not None and Path(file).samefile(task.train_file):
            progress.log(
                f"{name}: the held-out file is the training file ({file}), so its scores "
                "do not measure the performance on new texts"
            )
            continue
        num_repeated = _count_repeated_inputs(data.train, examples, task.kind)
        if num_repeated:
            progress.log(
                f"{name}: inputs that also occur in the training data: {num_repeated:,} of "
                f"{len(examples):,}; the scores may be too high for new texts, so remove duplicates"
            )
    for name, examples in data.heldout.items():
        if task.kind not in ("single", "regression"):
            continue
        distinct_labels = {example.label for example in examples}
        if len(distinct_labels) == 1:
            progress.log(
                f"{name}: every example has the label {distinct_labels.pop()!r}, so the scores say "
                "nothing about other labels, and correlations are NaN"
            )


def _count_repeated_inputs(train: Sequence[Any], heldout: Sequence[Any], kind: str) -> int:
    """Return how many held-out examples have the same input as a training example."""
    train_inputs = {_get_input(example, kind) for example in train}
    return sum(_get_input(example, kind) in train_inputs for example in heldout)


def _get_input(example: Any, kind: str) -> tuple[Any, ...]:
    """Return the texts of an example, without its label."""
    if kind == "span":
        return example.question, example.context
    if kind == "choice":
        return example.prompt, example.endings
    if kind in FAMILY_KINDS["tag"]:
        return example.text, example.unit_offsets
    return (example.texts,)


def warn_below_majority_class(
    progress: Progress, task: TaskSettings, data: TaskData, metrics: Mapping[str, float]
) -> None:
    """Log a warning if always predicting the majority class would be at least as accurate.

    Balanced class weights lower the accuracy on purpose, so they cause no warning.
    """
    if task.kind != "single" or task.class_weights == "balanced":
        return
    name, examples = next(iter(data.heldout.items()))
    warning = get_accuracy_warning(examples, metrics["accuracy"])
    if warning:
        progress.log(f"warning: {name}: {warning}")
