"""Predictions for a benchmark's unlabelled test file, in the form that its server takes.

It never knows the server.
"""

from collections.abc import Iterator
from pathlib import Path

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import ModelError
from bertsmith.tasks import questions
from bertsmith.tasks.classification import read_examples
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.use.answer import iter_answers
from bertsmith.use.masked_lm import resolve_task_model
from bertsmith.use.predict import iter_predictions


def glue_submission(
    bundle: FineTunedBundle, test: Path, counts: ExampleCounts | None = None
) -> Iterator[str]:
    """Yield the lines of GLUE's submission file: "index", a tab and "prediction", then a row each.

    The prediction is the label as it stands in the training file, or the score. A bad row is an
    error: each must have its answer. ``counts``: to which texts that are cut off are added. Raises
    BertsmithError.
    """
    name = bundle.info.get("task", "")
    if name not in PUBLIC_TASKS or PUBLIC_TASKS[name].test_file is None:
        known = ", ".join(sorted(name for name, task in PUBLIC_TASKS.items() if task.test_file))
        raise ModelError(
            f"{bundle.path}: this model was fine-tuned on {name or 'no task'!r}, which has no test "
            f"file without labels; expected one of {known}"
        )
    examples, _ = read_examples(test, PUBLIC_TASKS[name].parse_test_settings(), labeled=False)
    given = (
        one.texts[0] if len(one.texts) == 1 else (one.texts[0], one.texts[1]) for one in examples
    )
    yield "index\tprediction"
    counts = ExampleCounts() if counts is None else counts
    for index, answer in enumerate(iter_predictions(bundle, given)):
        counts.num_truncated += answer.cut_off
        said = answer.labels[0][0] if answer.score is None else f"{answer.score:.3f}"
        yield f"{index}\t{said}"


def squad_predictions(
    bundle: FineTunedBundle, file: Path, counts: ExampleCounts | None = None
) -> dict[str, str]:
    """Return what SQuAD's official program scores: the answer to each question's id, "" for none.

    ``file``: SQuAD's JSON, or flat questions; its answers are not looked at. A bad question is an
    error. ``counts``: to which questions that are cut off are added. Raises BertsmithError.
    """
    resolve_task_model(bundle, "span")
    examples, _ = questions.read_examples(file, get_task_settings(bundle), labeled=False)
    asked = list(iter_answers(bundle, ((one.question, one.context) for one in examples)))
    if counts is not None:
        counts.num_truncated += sum(said.cut_off for said in asked)
    return {one.id: said.text for one, said in zip(examples, asked, strict=True)}
