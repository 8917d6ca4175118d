"""Score a fine-tuned model on a labelled file.

It never knows how the model was trained, save what its directory says of its task.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.bundle import TaskBundle, load_task
from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks.families import family_of, refuse_unread, task_of
from bertsmith.tasks.outputs import outputs
from bertsmith.tasks.public import TASKS

#: Fields of ``TaskSettings`` that say how a file is read and scored; the others are training's.
_FIELDS = (
    "text", "pair", "label", "id", "header", "encoding", "delimiter", "endings", "answers", "unit",
    "context", "length", "stride", "overlap", "longest_question", "longest_answer",
    "null_threshold", "metrics", "skip_bad",
)  # fmt: skip


def evaluate(
    model: TaskBundle | Path | str,
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
    bundle = model if isinstance(model, TaskBundle) else load_task(model)
    data = _file_in(Path(data), bundle)
    refuse_unread(bundle.head.kind, changes or {}, [data])
    task, family = task_of(bundle, changes), family_of(bundle.head.kind)
    if task.null_threshold is None:
        # A model that learnt of no question without an answer gives one always, as to ``predict``.
        task = task.model_copy(update={"null_threshold": math.inf})
    examples, counts = family.read(data, task, labels=bundle.head.labels or None)
    inputs = family.encode(examples, bundle.tokenizer, bundle.head, task, counts)
    found = outputs(bundle.model, inputs)
    figures = family.score(found, inputs, examples, bundle.head, task)
    report = family.report(found, inputs, examples, bundle.head)
    return {**figures, **report, "counts": counts.as_dict()}


def _file_in(data: Path, bundle: TaskBundle) -> Path:
    """Return the held-out file in the folder of a public task; any other path as it is."""
    if not data.is_dir():
        return data
    name = str(bundle.info.get("task", ""))
    public = TASKS.get(name)
    if public is None:
        raise TaskError(f"{data}: a folder; expected a labelled table")
    files = [data / file for file in public.dev.values()]
    found = next((file for file in files if file.is_file()), None)
    if found is None:
        raise TaskError(f"{data}: no held-out file in this folder; {public.expected(name)}")
    return found
