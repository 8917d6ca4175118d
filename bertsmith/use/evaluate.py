"""Evaluate a fine-tuned model on labeled examples."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.bundle import FineTunedBundle, load_fine_tuned
from bertsmith.compatibility import upgrade_settings
from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks.families import get_family, get_task_settings, reject_unused_fields
from bertsmith.tasks.outputs import compute_outputs
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.use.model_setup import set_up_model
from bertsmith.use.predict import reject_pairs_of_single_text_model

#: Fields of ``TaskSettings`` that affect reading and scoring; the others affect training only.
_EVALUATION_FIELDS = (
    "text_column", "pair_column", "label_column", "label_columns", "label_separator",
    "label_threshold", "id_column", "header", "encoding", "delimiter", "ending_columns",
    "label_file_suffix", "tag_level", "context", "max_seqlen", "window_stride", "window_overlap",
    "max_question_length", "max_answer_length", "null_threshold", "metrics", "skip_invalid",
)  # fmt: skip


def evaluate(
    model: FineTunedBundle | Path | str,
    data: Path | str,
    *,
    changes: Mapping[str, Any] | None = None,
    fast: bool = False,
) -> dict[str, Any]:
    """Compute the metrics of a fine-tuned model on a labeled file.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        data: A labeled file in the format of the fine-tuning data, or the directory of a public
            task, whose held-out file is used.
        changes: Fields of ``TaskSettings`` that differ from fine-tuning, such as the name of the
            ``text_column``.
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Returns:
        The metrics by name, and ``counts``, the number of examples read, used and truncated. For
        classification also ``classes``, the precision, recall and F1 of each label, and
        ``confusion``, the confusion matrix.

    Raises:
        BertsmithError: The model or the data cannot be read, or a setting is invalid.
    """
    changes = upgrade_settings(changes or {}, "task")
    unknown_fields = [name for name in changes if name not in _EVALUATION_FIELDS]
    if unknown_fields:
        raise SettingsError(
            f"task.{unknown_fields[0]}: evaluation does not use this field; expected one of "
            f"{', '.join(_EVALUATION_FIELDS)}"
        )
    bundle = model if isinstance(model, FineTunedBundle) else load_fine_tuned(model)
    bundle = set_up_model(bundle, fast=fast)
    file, skip_invalid = _find_heldout_file(Path(data), bundle)
    reject_unused_fields(bundle.head.kind, changes, [file])
    reject_pairs_of_single_text_model(bundle, changes)
    task = get_task_settings(bundle, {"skip_invalid": skip_invalid, **changes})
    if task.null_threshold is None:
        # A model fine-tuned without unanswerable questions has no threshold, and always predicts a
        # span, as in ``answer``.
        task = task.model_copy(update={"null_threshold": math.inf})
    family = get_family(bundle.head.kind)
    examples, counts = family.read_examples(file, task, labels=bundle.head.labels or None)
    inputs = family.encode_examples(examples, bundle.tokenizer, bundle.head, task, counts)
    outputs = compute_outputs(bundle.model, inputs)
    metrics = family.compute_metrics(outputs, inputs, examples, bundle.head, task)
    report = family.compute_class_report(outputs, inputs, examples, bundle.head, task)
    return {**metrics, **report, "counts": counts.as_dict()}


def _find_heldout_file(data: Path, bundle: FineTunedBundle) -> tuple[Path, bool]:
    """Return the held-out file, and whether its invalid examples are skipped by default.

    A directory has the files of a public task. A file is returned unchanged.
    """
    if not data.is_dir():
        return data, False
    name = str(bundle.info.get("task", ""))
    public_task = PUBLIC_TASKS.get(name)
    if public_task is None:
        raise TaskError(
            f"{data}: a directory, but the model was not fine-tuned on a public task; expected a "
            "labeled table"
        )
    files = [data / file for file in public_task.dev_files.values()]
    heldout_file = next((file for file in files if file.is_file()), None)
    if heldout_file is None:
        raise TaskError(
            f"{data}: no held-out file in this directory; "
            f"{public_task.describe_expected_data(name)}"
        )
    return heldout_file, bool(public_task.fixed_settings.get("skip_invalid"))
