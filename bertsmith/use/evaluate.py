"""Score a fine-tuned model on a labelled file.

It never knows how the model was trained, save what its directory says of its task.
"""

from pathlib import Path
from typing import Any

from bertsmith.bundle import TaskBundle, load_task
from bertsmith.tasks.classify import default_metrics, encode, read, score
from bertsmith.tasks.outputs import outputs
from bertsmith.tasks.public import Source
from bertsmith.use.predict import length_of


def evaluate(
    model: TaskBundle | Path | str,
    data: Path | str,
    *,
    columns: Source | None = None,
    skip_bad: bool = False,
) -> dict[str, Any]:
    """Return the metrics of a fine-tuned model on the examples of a table, and what was read.

    The columns are those that the model was fine-tuned on, unless they are given. Raises
    BertsmithError.
    """
    bundle = model if isinstance(model, TaskBundle) else load_task(model)
    task = bundle.info.get("provenance", {}).get("task", {})
    source = columns or columns_of(bundle)
    examples, counts = read(
        Path(data), source, bundle.head.kind, skip_bad=skip_bad, labels=bundle.head.labels or None
    )
    inputs = encode(examples, bundle.tokenizer, bundle.head, length_of(bundle), counts)
    assert inputs.targets is not None
    names = task.get("metrics") or default_metrics(bundle.head.kind)
    figures = score(outputs(bundle.model, inputs.sequences), inputs.targets, bundle.head, names)
    return {**figures, "counts": counts.as_dict()}


def columns_of(bundle: TaskBundle) -> Source:
    """Return where texts and labels stood in the files that the model was fine-tuned on."""
    task = bundle.info.get("provenance", {}).get("task", {})
    return Source(
        text=task.get("text", "text"),
        pair=task.get("pair"),
        label=task.get("label", "label"),
        header=task.get("header", True),
    )
