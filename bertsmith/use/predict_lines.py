"""Predictions of any fine-tuned model for lines of text, as JSON values and as text lines."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import tee
from typing import Any

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.settings import is_column_number
from bertsmith.use.answer import iter_answers, to_question_example
from bertsmith.use.choose import iter_choices, to_choice_example
from bertsmith.use.predict import Prediction, iter_predictions, to_text_example
from bertsmith.use.tag import iter_tagged_texts, require_text

#: For each input line, the prediction as a JSON value and as a line of text.
LinePredictions = Iterator[tuple[dict[str, Any], str]]
#: Pairs (line, item parsed from the line).
_ParsedLines = Iterable[tuple[str, Any]]


@dataclass
class InvalidLines:
    """Number of invalid lines that were skipped, and the error of the first."""

    count: int = 0
    first_error: str = ""

    def add(self, problem: str) -> None:
        """Count a skipped line."""
        self.count += 1
        self.first_error = self.first_error or problem


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
        lines: Tab-separated input: a text, a pair of texts, a question and its context, or a
            prompt and its endings.
        location: Prefix of line numbers in error messages.
        skipped: Counts invalid lines; if None, an invalid line is an error.
        unbuffered: Yield each prediction before reading the next line; batching is faster.

    Raises:
        BertsmithError: A line is invalid; raised after the predictions for all lines before it.
    """
    parsed = _parse_lines(bundle, lines, location, skipped)
    predict = _PREDICTORS[bundle.head.kind]
    if not unbuffered:
        return predict(bundle, parsed)
    return (prediction for item in parsed for prediction in predict(bundle, [item]))


def predict_inputs(bundle: FineTunedBundle, items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the prediction for each item as a JSON value.

    Args:
        bundle: The model.
        items: Depending on the model's kind: texts or pairs, (question, context), or (prompt,
            endings).
    """
    for value, _ in _PREDICTORS[bundle.head.kind](bundle, [("", item) for item in items]):
        yield value


def _parse_lines(
    bundle: FineTunedBundle, lines: Iterable[str], location: str, skipped: InvalidLines | None
) -> Iterator[tuple[str, Any]]:
    parse = _PARSERS[bundle.head.kind]
    for number, line in enumerate(lines, 1):
        try:
            item = parse(bundle, line, f"{location} {number:,}")
        except InputError as error:
            if skipped is None:
                raise InputError(
                    f"{error}; correct it, or skip such lines with --skip-invalid"
                ) from None
            skipped.add(str(error))
        else:
            yield line, item


def _parse_text_or_pair(bundle: FineTunedBundle, line: str, location: str) -> str | tuple[str, str]:
    """Parse a line as the fine-tuning data was; if that is unknown, a tab makes it a pair."""
    task = bundle.info.get("provenance", {}).get("task")
    first, tab, second = line.partition("\t")
    if task is not None and task.get("pair_column") and not tab:
        raise InputError(
            f"{location}: there is no tab; the model is for pairs: expected two texts, separated "
            "by a tab"
        )
    is_pair = tab if task is None else task.get("pair_column")
    text_or_pair = (first, second) if is_pair else line
    to_text_example(text_or_pair, location)
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
    question, tab, context = line.partition("\t")
    if not tab:
        raise InputError(f"{location}: there is no tab; expected a question, a tab and its context")
    to_question_example((question, context), location)
    return question, context


def _parse_prompt(
    bundle: FineTunedBundle,  # noqa: ARG001
    line: str,
    location: str,
) -> tuple[str, list[str]]:
    prompt, *endings = line.split("\t")
    to_choice_example((prompt, endings), location)
    return prompt, endings


def _classify(bundle: FineTunedBundle, parsed: _ParsedLines) -> LinePredictions:
    first, second = tee(parsed)
    predictions = iter_predictions(bundle, (item for _, item in first))
    for (line, item), prediction in zip(second, predictions, strict=True):
        parts = (item,) if isinstance(item, str) else item
        value = dict(zip(("text", "pair"), parts, strict=False))
        value |= _prediction_to_json(prediction, bundle) | {"truncated": prediction.is_truncated}
        yield value, f"{_format_prediction(prediction, bundle)}\t{line}"


def _format_prediction(prediction: Prediction, bundle: FineTunedBundle) -> str:
    if prediction.score is not None:
        return f"{prediction.score:.4f}"
    if bundle.head.kind == "multi":
        likely = [(name, probability) for name, probability in prediction.labels
                  if probability > 0.5]  # fmt: skip
        probabilities = "|".join(f"{probability:.4f}" for _, probability in likely)
        return f"{'|'.join(name for name, _ in likely)}\t{probabilities}"
    name, probability = prediction.labels[0]
    return f"{name}\t{probability:.4f}"


def _prediction_to_json(prediction: Prediction, bundle: FineTunedBundle) -> dict[str, Any]:
    if prediction.score is not None:
        return {"score": prediction.score}
    is_multi_label = bundle.head.kind == "multi"
    label = _likely_labels(prediction) if is_multi_label else prediction.labels[0][0]
    return {"labels": dict(prediction.labels), "label": label}


def _likely_labels(prediction: Prediction) -> list[str]:
    return [name for name, probability in prediction.labels if probability > 0.5]


def _tag(bundle: FineTunedBundle, parsed: _ParsedLines) -> LinePredictions:
    for tagged in iter_tagged_texts(bundle, (item for _, item in parsed)):
        if bundle.head.kind == "tags":
            line = " ".join(f"{span.text}/{span.label}" for span in tagged.spans)
            yield {"text": tagged.text, "tags": [asdict(span) for span in tagged.spans]}, line
            continue
        line, line_end = "", 0
        for span in tagged.spans:
            line += f"{tagged.text[line_end : span.start]}[{span.label} {span.text}]"
            line_end = span.end
        value = {"text": tagged.text, "entities": [asdict(span) for span in tagged.spans]}
        yield value, line + tagged.text[line_end:]


def _answer(bundle: FineTunedBundle, parsed: _ParsedLines) -> LinePredictions:
    first, second = tee(item for _, item in parsed)
    for (question, context), answer in zip(first, iter_answers(bundle, second), strict=True):
        value = {"question": question, "context": context, **asdict(answer.best)}
        value |= {"candidates": [asdict(candidate) for candidate in answer.candidates],
                  "null_score_diff": answer.null_score_diff,
                  "truncated": answer.is_truncated}  # fmt: skip
        yield value, f"{answer.text}\t{answer.probability:.4f}\t{question}"


def _choose(bundle: FineTunedBundle, parsed: _ParsedLines) -> LinePredictions:
    first, second = tee(parsed)
    choices = iter_choices(bundle, (item for _, item in first))
    for (line, (prompt, endings)), choice in zip(second, choices, strict=True):
        best, columns = choice.best_index, get_task_settings(bundle).ending_columns
        # Column numbers are not reported as names.
        has_names = len(columns) == len(endings) and not any(map(is_column_number, columns))
        value = {"prompt": prompt, "endings": endings, "probabilities": choice.probabilities,
                 "best_index": best, "best_ending": endings[best],
                 "best_column": columns[best] if has_names else None,
                 "truncated": choice.is_truncated}  # fmt: skip
        yield value, f"{best}\t{choice.probabilities[best]:.4f}\t{endings[best]}\t{line}"


#: By the model's kind: the parser of a line, and the function that computes predictions.
_PARSERS: dict[str, Callable[[FineTunedBundle, str, str], Any]] = {
    "single": _parse_text_or_pair, "multi": _parse_text_or_pair,
    "regression": _parse_text_or_pair,
    "entities": _parse_text, "tags": _parse_text,
    "span": _parse_question,
    "choice": _parse_prompt,
}  # fmt: skip
_PREDICTORS: dict[str, Callable[[FineTunedBundle, _ParsedLines], LinePredictions]] = {
    "single": _classify, "multi": _classify, "regression": _classify,
    "entities": _tag, "tags": _tag,
    "span": _answer,
    "choice": _choose,
}  # fmt: skip
