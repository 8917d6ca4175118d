"""What a fine-tuning run says before its first step: of its model, its data, and what it left out.

It never knows where that is shown.
"""

from collections.abc import Mapping
from pathlib import Path

from bertsmith.bundle import TaskBundle
from bertsmith.progress import Progress
from bertsmith.runtime import device
from bertsmith.tasks.inputs import Counts
from bertsmith.tasks.label_counts import (
    summarize_labels,
    warn_about_accuracy,
    warn_about_labels,
)
from bertsmith.tasks.settings import TaskSettings
from bertsmith.train.finetuning.task_data import TaskData


def tell(
    progress: Progress,
    run: Path,
    task: TaskSettings,
    start: TaskBundle,
    data: TaskData,
    machine: device.Machine,
) -> None:
    """Note what is trained on what, and what a reader of the scores should know."""
    held = ", ".join(f"{len(own):,} ({name})" for name, own in data.heldout.items())
    progress.note(
        f"{run}: {start.path} on {len(data.train):,} examples, held out {held} "
        f"({device.describe(machine)})"
    )
    if start.info["new"]:
        progress.note(f"drawn anew: {', '.join(start.info['new'])}")
    for note in start.notes():
        progress.note(note)
    for name, counts in data.counts.items():
        _tell_counts(progress, name, counts)
    _warn_unknown(progress, data.counts)
    for name, examples in {"train": data.train, **data.heldout}.items():
        progress.note(f"{name}: {summarize_labels(examples, task.kind)}")
    for warning in warn_about_labels(data.train, task):
        progress.note(f"warning: train: {warning}")
    for name, file in task.heldout.items():
        if Path(file).samefile(task.train):
            progress.note(
                f"{name}: this is the training file itself ({file}), so its scores do not tell how "
                "the model does on texts that it has not seen"
            )
    for name, own in data.heldout.items():
        labels = {one.label for one in own} if task.kind in ("single", "regression") else set()
        if len(labels) == 1:
            progress.note(
                f"{name}: {labels.pop()!r} is the label of every example, so that its scores tell "
                "nothing of other labels, and correlations are NaN"
            )


def tell_baseline(
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
        progress.note(f"warning: {name}: {warning}")


def _warn_unknown(progress: Progress, counts: Mapping[str, Counts]) -> None:
    """Warn about the file with the highest share of [UNK], if that is high."""
    name = max(counts, key=lambda name: counts[name].tokens.unknown_share)
    warning = counts[name].tokens.warning(f"the tokens of {name}")
    if warning is not None:
        progress.note(warning)


def _tell_counts(progress: Progress, name: str, counts: Counts) -> None:
    said = []
    for why, number in counts.skipped.items():
        first = f" (the first: {counts.first[why]})" if why in counts.first else ""
        said.append(f"{number:,} skipped: {why}{first}")
    if counts.cut_off:
        said.append(f"{counts.cut_off:,} cut off at the end")
    if counts.unreached:
        said.append(f"{counts.unreached:,} answers that stand whole in no window")
    if counts.untaught:
        said.append(f"{counts.untaught:,} inputs without a target, left out of training")
    if said:
        progress.note(f"{name}: of {counts.read:,} examples {'; '.join(said)}")
    for note in counts.notes:
        progress.note(note)
    if counts.unseen:
        progress.note(
            f"{name}: no example has the label {', '.join(map(repr, counts.unseen))}, so the "
            "model cannot learn it"
        )
