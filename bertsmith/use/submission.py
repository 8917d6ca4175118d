"""Predict in the formats of the GLUE evaluation server and of SQuAD's evaluation script."""

from collections.abc import Iterator
from pathlib import Path

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import ModelError
from bertsmith.tasks import questions
from bertsmith.tasks.classification import read_examples
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.use.answer import iter_answers, require_span_model
from bertsmith.use.predict import iter_predictions


def format_glue_submission(
    bundle: FineTunedBundle, test: Path, counts: ExampleCounts | None = None
) -> Iterator[str]:
    """Yield the lines of a GLUE submission file, with the columns "index" and "prediction".

    A prediction is a label as spelled in the training file, or a score. An invalid row is an error,
    because a submission needs a prediction for every row.

    Args:
        bundle: A model fine-tuned on a GLUE task.
        test: The unlabeled test file.
        counts: Receives the number of truncated texts.

    Raises:
        BertsmithError: The task has no test file, or the file is invalid.
    """
    name = bundle.info.get("task", "")
    if name not in PUBLIC_TASKS or PUBLIC_TASKS[name].test_file is None:
        tasks = ", ".join(sorted(name for name, task in PUBLIC_TASKS.items() if task.test_file))
        problem = "not fine-tuned on a GLUE task"
        if name:
            problem = f"fine-tuned on {name!r}, which has no test file for the GLUE server"
        raise ModelError(
            f"{bundle.path}: this model was {problem}; expected a model fine-tuned on one of these "
            f"tasks: {tasks}"
        )
    examples, _ = read_examples(test, PUBLIC_TASKS[name].parse_test_settings(), labeled=False)
    texts = (
        example.texts[0] if len(example.texts) == 1 else (example.texts[0], example.texts[1])
        for example in examples
    )
    yield "index\tprediction"
    counts = ExampleCounts() if counts is None else counts
    for index, prediction in enumerate(iter_predictions(bundle, texts)):
        counts.num_truncated += prediction.is_truncated
        if prediction.score is None:
            most_probable_label, _ = prediction.labels[0]
            yield f"{index}\t{most_probable_label}"
        else:
            yield f"{index}\t{prediction.score:.3f}"


def predict_squad_answers(
    bundle: FineTunedBundle, file: Path, counts: ExampleCounts | None = None
) -> dict[str, str]:
    """Answer the questions of a file, in the format of SQuAD's evaluation script.

    Args:
        bundle: A model that predicts spans.
        file: A SQuAD JSON file or a table of questions. Answers in the file are ignored.
        counts: Receives the number of truncated questions.

    Returns:
        The text of the answer by question id; "" for no answer.

    Raises:
        BertsmithError: The model does not predict spans, or a question is invalid.
    """
    require_span_model(bundle, "a SQuAD file (--squad)")
    examples, _ = questions.read_examples(file, get_task_settings(bundle), labeled=False)
    answers = list(
        iter_answers(bundle, ((example.question, example.context) for example in examples))
    )
    if counts is not None:
        counts.num_truncated += sum(answer.is_truncated for answer in answers)
    return {example.id: answer.text for example, answer in zip(examples, answers, strict=True)}
