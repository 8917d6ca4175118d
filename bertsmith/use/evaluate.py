"""Score a fine-tuned model on a labelled file.

It never knows how the model was trained, save what its directory says of its task.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.bundle import FineTunedBundle, load_fine_tuned
from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks.families import get_family, get_task_settings, reject_unused_fields
from bertsmith.tasks.outputs import compute_outputs
from bertsmith.tasks.public import PUBLIC_TASKS

#: Fields of ``TaskSettings`` that say how a file is read and scored; the others are training's.
_FIELDS = (
    "text", "pair", "label", "id", "header", "encoding", "delimiter", "endings", "answers", "unit",
    "context", "length", "stride", "overlap", "max_question_length", "max_answer_length",
    "null_threshold", "metrics", "skip_bad",
)  # fmt: skip


def evaluate(
    model: FineTunedBundle | Path | str,
    data: Path | str,
    *,
    changes: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the metrics of a fine-tuned model on the examples of a file, and what was read.

    ``classes`` has the scores of each label and ``confusion`` the counts of predicted labels by
    right label; see ``Family.report``.
    ``data`` may be the folder of a public task, whose held-out file is read.
    The file is read as that which the model was fine-tuned on; ``changes`` are fields of
    ``TaskSettings`` that are others here, such as ``text``, a column. Raises BertsmithError.
    """
    strange = [name for name in changes or {} if name not in _FIELDS]
    if strange:
        raise SettingsError(
            f"task.{strange[0]}: evaluating does not read it; known here are {', '.join(_FIELDS)}"
        )
    bundle = model if isinstance(model, FineTunedBundle) else load_fine_tuned(model)
    data = _file_in(Path(data), bundle)
    reject_unused_fields(bundle.head.kind, changes or {}, [data])
    task, family = get_task_settings(bundle, changes), get_family(bundle.head.kind)
    if task.null_threshold is None:
        # A model that learnt of no question without an answer gives one always, as to ``predict``.
        task = task.model_copy(update={"null_threshold": math.inf})
    examples, counts = family.read_examples(data, task, labels=bundle.head.labels or None)
    inputs = family.encode_examples(examples, bundle.tokenizer, bundle.head, task, counts)
    found = compute_outputs(bundle.model, inputs)
    figures = family.compute_metrics(found, inputs, examples, bundle.head, task)
    report = family.compute_class_report(found, inputs, examples, bundle.head)
    return {**figures, **report, "counts": counts.as_dict()}


def _file_in(data: Path, bundle: FineTunedBundle) -> Path:
    """Return the held-out file in the folder of a public task; any other path as it is."""
    if not data.is_dir():
        return data
    name = str(bundle.info.get("task", ""))
    public = PUBLIC_TASKS.get(name)
    if public is None:
        raise TaskError(f"{data}: a folder; expected a labelled table")
    files = [data / file for file in public.dev_files.values()]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise TaskError(
            f"{data}: no held-out file in this folder; {public.describe_expected_data(name)}"
        )
    return found
