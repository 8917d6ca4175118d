"""What a fine-tuning run says before its first step: of its model, its data, and what it left out.

It never knows where that is shown.
"""

from collections.abc import Mapping
from pathlib import Path

from bertsmith.bundle import FineTunedBundle
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.label_counts import (
    summarize_labels,
    warn_about_accuracy,
    warn_about_labels,
)
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.finetuning.task_data import TaskData


def log_run_summary(
    progress: Progress,
    run: Path,
    task: TaskSettings,
    start: FineTunedBundle,
    data: TaskData,
    machine: device.Machine,
) -> None:
    """Note what is trained on what, and what a reader of the scores should know."""
    held = ", ".join(f"{len(own):,} ({name})" for name, own in data.heldout.items())
    progress.log(
        f"{run}: {start.path} on {len(data.train):,} examples, held out {held} "
        f"({device.describe_machine(machine)})"
    )
    if start.info["new"]:
        progress.log(f"drawn anew: {', '.join(start.info['new'])}")
    for note in start.notes():
        progress.log(note)
    for name, counts in data.counts.items():
        _tell_counts(progress, name, counts)
    _warn_unknown(progress, data.counts)
    for name, examples in {"train": data.train, **data.heldout}.items():
        progress.log(f"{name}: {summarize_labels(examples, task.kind)}")
    for warning in warn_about_labels(data.train, task):
        progress.log(f"warning: train: {warning}")
    for name, file in task.heldout.items():
        if Path(file).samefile(task.train):
            progress.log(
                f"{name}: this is the training file itself ({file}), so its scores do not tell how "
                "the model does on texts that it has not seen"
            )
    for name, own in data.heldout.items():
        labels = {one.label for one in own} if task.kind in ("single", "regression") else set()
        if len(labels) == 1:
            progress.log(
                f"{name}: {labels.pop()!r} is the label of every example, so that its scores tell "
                "nothing of other labels, and correlations are NaN"
            )


def warn_below_majority_class(
    progress: Progress, task: TaskSettings, data: TaskData, figures: Mapping[str, float]
) -> None:
    """Warn if a classifier is no more accurate than its commonest held-out label.

    Balanced class weights give up accuracy on purpose, so nothing is compared with them.
    """
    if task.kind != "single" or task.class_weights == "balanced":
        return
    name, examples = next(iter(data.heldout.items()))
    warning = warn_about_accuracy(examples, figures["accuracy"])
    if warning:
        progress.log(f"warning: {name}: {warning}")


def _warn_unknown(progress: Progress, counts: Mapping[str, ExampleCounts]) -> None:
    """Warn about the file with the highest share of [UNK], if that is high."""
    name = max(counts, key=lambda name: counts[name].token_counts.unknown_share)
    warning = counts[name].token_counts.warning(f"the tokens of {name}")
    if warning is not None:
        progress.log(warning)


def _tell_counts(progress: Progress, name: str, counts: ExampleCounts) -> None:
    said = []
    for why, number in counts.skipped.items():
        first = f" (the first: {counts.first_skipped[why]})" if why in counts.first_skipped else ""
        said.append(f"{number:,} skipped: {why}{first}")
    if counts.num_truncated:
        said.append(f"{counts.num_truncated:,} cut off at the end")
    if counts.num_unreachable_answers:
        said.append(f"{counts.num_unreachable_answers:,} answers that stand whole in no window")
    if counts.num_without_target:
        said.append(f"{counts.num_without_target:,} inputs without a target, left out of training")
    if said:
        progress.log(f"{name}: of {counts.num_read:,} examples {'; '.join(said)}")
    for note in counts.notes:
        progress.log(note)
    if counts.unseen_labels:
        progress.log(
            f"{name}: no example has the label {', '.join(map(repr, counts.unseen_labels))}, so the "
            "model cannot learn it"
        )
