"""Predictions for a benchmark's unlabelled test file, in the form that its server takes.

It never knows the server.
"""

from collections.abc import Iterator
from pathlib import Path

from bertsmith.bundle import TaskBundle
from bertsmith.errors import ModelError
from bertsmith.tasks import questions
from bertsmith.tasks.classification import read
from bertsmith.tasks.families import task_of
from bertsmith.tasks.inputs import Counts
from bertsmith.tasks.public import TASKS
from bertsmith.use.answer import answer_each
from bertsmith.use.masked_lm import opened_task
from bertsmith.use.predict import predict_each


def submission(bundle: TaskBundle, test: Path, counts: Counts | None = None) -> Iterator[str]:
    """Yield the lines of GLUE's submission file: "index", a tab and "prediction", then a row each.

    The prediction is the label as it stands in the training file, or the score. A bad row is an
    error: each must have its answer. ``counts``: to which texts that are cut off are added. Raises
    BertsmithError.
    """
    name = bundle.info.get("task", "")
    if name not in TASKS or TASKS[name].test is None:
        known = ", ".join(sorted(name for name, task in TASKS.items() if task.test))
        raise ModelError(
            f"{bundle.path}: this model was fine-tuned on {name or 'no task'!r}, which has no test "
            f"file without labels; expected one of {known}"
        )
    examples, _ = read(test, TASKS[name].of_test(), labelled=False)
    given = (
        one.texts[0] if len(one.texts) == 1 else (one.texts[0], one.texts[1]) for one in examples
    )
    yield "index\tprediction"
    counts = Counts() if counts is None else counts
    for index, answer in enumerate(predict_each(bundle, given)):
        counts.cut_off += answer.cut_off
        said = answer.labels[0][0] if answer.score is None else f"{answer.score:.3f}"
        yield f"{index}\t{said}"


def squad_predictions(
    bundle: TaskBundle, file: Path, counts: Counts | None = None
) -> dict[str, str]:
    """Return what SQuAD's official program scores: the answer to each question's id, "" for none.

    ``file``: SQuAD's JSON, or flat questions; its answers are not looked at. A bad question is an
    error. ``counts``: to which questions that are cut off are added. Raises BertsmithError.
    """
    opened_task(bundle, "span")
    examples, _ = questions.read(file, task_of(bundle), labelled=False)
    asked = list(answer_each(bundle, ((one.question, one.context) for one in examples)))
    if counts is not None:
        counts.cut_off += sum(said.cut_off for said in asked)
    return {one.id: said.text for one, said in zip(examples, asked, strict=True)}
