"""Predict for lines of text with any fine-tuned model, as JSON values and as lines of text."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, tee
from typing import Any

from bertsmith.bundle import FineTunedBundle
from bertsmith.bundle.metadata import get_recorded_task
from bertsmith.errors import InputError
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.settings import TaskSettings, is_column_number
from bertsmith.use.answer import iter_answers, to_question_example
from bertsmith.use.choose import iter_choices, to_choice_example
from bertsmith.use.predict import Prediction, iter_predictions, to_text_example
from bertsmith.use.tag import iter_tagged_texts, require_text

#: For each input line, the prediction as a JSON value, and as a line of text.
LinePredictions = Iterator[tuple[dict[str, Any], str]]
#: Pairs (line, input of the model parsed from the line).
_ParsedLines = Iterable[tuple[str, Any]]


@dataclass
class InvalidLines:
    """Number of invalid lines that were skipped, and the error message of the first one."""

    count: int = 0
    first_error: str = ""

    def add(self, error: str) -> None:
        """Count a line with an error message."""
        self.count += 1
        self.first_error = self.first_error or error


def predict_lines(
    bundle: FineTunedBundle,
    lines: Iterable[str],
    *,
    location: str = "line",
    skipped: InvalidLines | None = None,
    unbuffered: bool = False,
) -> LinePredictions:
    """Yield a prediction for each line, as a JSON value and as a line of text.

    Args:
        bundle: The model.
        lines: Depending on the kind of model: a text, two texts, a question and its context, or a
            prompt and its endings, separated by tabs.
        location: The word before the line number in error messages.
        skipped: Counts invalid lines, which are skipped. If None, an invalid line is an error.
        unbuffered: Whether to yield each prediction before reading the next line. This is slower,
            because lines are not batched.

    Raises:
        BertsmithError: A line is invalid; raised after the predictions for all lines before it.
    """
    parsed = _parse_lines(bundle, lines, location, skipped)
    predict = _PREDICTORS[bundle.head.kind]
    if not unbuffered:
        return predict(bundle, parsed)
    return chain.from_iterable(predict(bundle, [parsed_line]) for parsed_line in parsed)


def predict_inputs(bundle: FineTunedBundle, inputs: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the prediction for each input as a JSON value.

    Args:
        bundle: The model.
        inputs: Depending on the kind of model: texts, pairs of texts, pairs (question, context), or
            pairs (prompt, endings).
    """
    predict = _PREDICTORS[bundle.head.kind]
    for value, _ in predict(bundle, [("", model_input) for model_input in inputs]):
        yield value


def _parse_lines(
    bundle: FineTunedBundle, lines: Iterable[str], location: str, skipped: InvalidLines | None
) -> Iterator[tuple[str, Any]]:
    """Yield each valid line and the model's input parsed from it."""
    parse = _PARSERS[bundle.head.kind]
    for number, line in enumerate(lines, 1):
        try:
            model_input = parse(bundle, line, f"{location} {number:,}")
        except InputError as error:
            if skipped is None:
                raise InputError(
                    f"{error}; correct it, or skip such lines with --skip-invalid"
                ) from None
            skipped.add(str(error))
        else:
            yield line, model_input


def _parse_text_or_pair(bundle: FineTunedBundle, line: str, location: str) -> str | tuple[str, str]:
    """Parse a line as one text or as a pair of texts separated by a tab.

    A model fine-tuned on pairs needs pairs, and a model fine-tuned on single texts reads a tab as a
    space. If the model does not record its fine-tuning data, a line with a tab is a pair.
    """
    task = get_recorded_task(bundle.info)
    first, tab, second = line.partition("\t")
    is_pair = bool(task.get("pair_column")) if task else bool(tab)
    if is_pair and not tab:
        raise InputError(
            f"{location}: there is no tab, but this model was fine-tuned on pairs of texts; "
            "separate the two texts by a tab"
        )
    text_or_pair = (first, second) if is_pair else line
    to_text_example(text_or_pair, location)  # only to check the texts
    return text_or_pair


def _parse_text(
    bundle: FineTunedBundle,  # noqa: ARG001 - same signature for all parsers
    line: str,
    location: str,
) -> str:
    return require_text(line, location)


def _parse_question(
    bundle: FineTunedBundle,  # noqa: ARG001
    line: str,
    location: str,
) -> tuple[str, str]:
    """Parse a line as a question and its context, separated by a tab."""
    question, tab, context = line.partition("\t")
    if not tab:
        raise InputError(
            f"{location}: there is no tab; expected a question and its context, separated by a tab"
        )
    to_question_example((question, context), location)  # only to check the texts
    return question, context


def _parse_prompt(
    bundle: FineTunedBundle,  # noqa: ARG001
    line: str,
    location: str,
) -> tuple[str, list[str]]:
    """Parse a line as a prompt and its endings, separated by tabs."""
    prompt, *endings = line.split("\t")
    to_choice_example((prompt, endings), location)  # only to check the texts
    return prompt, endings


def _classify(bundle: FineTunedBundle, parsed: _ParsedLines) -> LinePredictions:
    """Predict labels or scores; the line is the prediction and the input line."""
    model_lines, output_lines = tee(parsed)
    task = get_task_settings(bundle)
    predictions = iter_predictions(bundle, (text_or_pair for _, text_or_pair in model_lines))
    for (line, text_or_pair), prediction in zip(output_lines, predictions, strict=True):
        parts = (text_or_pair,) if isinstance(text_or_pair, str) else text_or_pair
        value = dict(zip(("text", "pair"), parts, strict=False))
        value |= _prediction_to_json(prediction, task) | {"truncated": prediction.is_truncated}
        yield value, f"{_format_prediction(prediction, task)}\t{line}"


def _format_prediction(prediction: Prediction, task: TaskSettings) -> str:
    """Return a prediction as text: the score, or labels and probabilities."""
    if prediction.score is not None:
        return f"{prediction.score:.4f}"
    if task.kind == "multi":
        predicted = _select_predicted_labels(prediction, task)
        labels = task.label_separator.join(label for label, _ in predicted)
        probabilities = task.label_separator.join(
            f"{probability:.4f}" for _, probability in predicted
        )
        return f"{labels}\t{probabilities}"
    label, probability = prediction.labels[0]
    return f"{label}\t{probability:.4f}"


def _prediction_to_json(prediction: Prediction, task: TaskSettings) -> dict[str, Any]:
    """Return a prediction as a JSON value."""
    if prediction.score is not None:
        return {"score": prediction.score}
    label: str | list[str] = prediction.labels[0][0]
    if task.kind == "multi":
        label = [name for name, _ in _select_predicted_labels(prediction, task)]
    return {"labels": dict(prediction.labels), "label": label}


def _select_predicted_labels(prediction: Prediction, task: TaskSettings) -> list[tuple[str, float]]:
    """Return the labels that a multi-label model predicts, with their probabilities."""
    return [
        (label, probability)
        for label, probability in prediction.labels
        if probability > task.label_threshold
    ]


def _tag(bundle: FineTunedBundle, parsed: _ParsedLines) -> LinePredictions:
    """Tag texts; the line is text with bracketed entities, or "word/TAG" for each word."""
    for tagged in iter_tagged_texts(bundle, (text for _, text in parsed)):
        if bundle.head.kind == "tags":
            line = " ".join(f"{span.text}/{span.label}" for span in tagged.spans)
            yield {"text": tagged.text, "tags": [asdict(span) for span in tagged.spans]}, line
            continue
        line = ""
        previous_end = 0
        for span in tagged.spans:
            line += f"{tagged.text[previous_end : span.start]}[{span.label} {span.text}]"
            previous_end = span.end
        line += tagged.text[previous_end:]
        yield {"text": tagged.text, "entities": [asdict(span) for span in tagged.spans]}, line


def _answer(bundle: FineTunedBundle, parsed: _ParsedLines) -> LinePredictions:
    """Answer questions; the line is the answer, its probability and the question."""
    model_questions, output_questions = tee(question for _, question in parsed)
    answers = iter_answers(bundle, model_questions)
    for (question, context), answer in zip(output_questions, answers, strict=True):
        value = {"question": question, "context": context, **asdict(answer.best)}
        value |= {
            "candidates": [asdict(candidate) for candidate in answer.candidates],
            "null_score_diff": answer.null_score_diff,
            "truncated": answer.is_truncated,
        }
        yield value, f"{answer.text}\t{answer.probability:.4f}\t{question}"


def _choose(bundle: FineTunedBundle, parsed: _ParsedLines) -> LinePredictions:
    """Choose endings.

    The line is the index, probability and text of the best ending, and the input line.
    """
    model_lines, output_lines = tee(parsed)
    choices = iter_choices(bundle, (question for _, question in model_lines))
    columns = get_task_settings(bundle).ending_columns
    for (line, (prompt, endings)), choice in zip(output_lines, choices, strict=True):
        best = choice.best_index
        # The columns of a table without a header are numbers, which do not name the ending.
        has_names = len(columns) == len(endings) and not any(map(is_column_number, columns))
        value = {
            "prompt": prompt,
            "endings": endings,
            "probabilities": choice.probabilities,
            "best_index": best,
            "best_ending": endings[best],
            "best_column": columns[best] if has_names else None,
            "truncated": choice.is_truncated,
        }
        yield value, f"{best}\t{choice.probabilities[best]:.4f}\t{endings[best]}\t{line}"


#: For each kind of model, the function that parses an input line.
_PARSERS: dict[str, Callable[[FineTunedBundle, str, str], Any]] = {
    "single": _parse_text_or_pair, "multi": _parse_text_or_pair,
    "regression": _parse_text_or_pair,
    "entities": _parse_text, "tags": _parse_text,
    "span": _parse_question,
    "choice": _parse_prompt,
}  # fmt: skip
#: For each kind of model, the function that computes predictions for parsed lines.
_PREDICTORS: dict[str, Callable[[FineTunedBundle, _ParsedLines], LinePredictions]] = {
    "single": _classify, "multi": _classify, "regression": _classify,
    "entities": _tag, "tags": _tag,
    "span": _answer,
    "choice": _choose,
}  # fmt: skip
