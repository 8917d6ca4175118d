"""Ask a fine-tuned model: labels with their probabilities, or a number, for each text.

It never knows where the texts come from.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.tasks.classification import TextExample, encode_examples
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.outputs import ComputeOutputs, compute_outputs
from bertsmith.use.masked_lm import check_is_text_list, chunked, resolve_task_model

#: Texts worked on at once: enough that like lengths meet.
_WINDOW = 1024


@dataclass(frozen=True)
class Prediction:
    """What the model says of one text or pair.

    labels: names and probabilities, the likeliest first; of a multi-label model each by itself,
    and of a regression model none. score: the number of a regression model, else None.
    cut_off: whether the text was longer than the model takes.
    """

    labels: tuple[tuple[str, float], ...]
    score: float | None
    cut_off: bool


def predict(
    model: FineTunedBundle | Path | str, texts: Sequence[str | tuple[str, str]]
) -> list[Prediction]:
    """Return what a fine-tuned model says of each text, or pair of texts, in their order.

    Raises ModelError for a model that is not fine-tuned for this, QuestionError for an empty text
    or for a lone one.
    """
    check_is_text_list(texts)
    return list(iter_predictions(model, texts))


def iter_predictions(
    model: FineTunedBundle | Path | str,
    texts: Iterable[str | tuple[str, str]],
    compute: ComputeOutputs = compute_outputs,
) -> Iterator[Prediction]:
    """Yield what ``predict`` returns, for input without end. An error names the text's number."""
    bundle = resolve_task_model(model, "single", "multi", "regression")
    examples = (to_text_example(given, f"text {number:,}") for number, given in enumerate(texts, 1))
    for window in chunked(examples, _WINDOW):
        yield from _answers(bundle, window, compute)


def to_text_example(given: str | tuple[str, str], where: str) -> TextExample:
    """Return a text or pair as an example; QuestionError, which names ``where``, for no words."""
    parts = (given,) if isinstance(given, str) else tuple(given)
    if not all(part.strip() for part in parts):
        raise InputError(f"{where} is empty; expected at least one word")
    return TextExample(parts, None, where)


def _answers(
    bundle: FineTunedBundle, examples: list[TextExample], compute: ComputeOutputs
) -> Iterator[Prediction]:
    head = bundle.head
    inputs = encode_examples(
        examples, bundle.tokenizer, head, get_task_settings(bundle), ExampleCounts()
    )
    cut = inputs.is_truncated
    logits = np.concatenate(compute(bundle.model, inputs)).astype(np.float64)
    if head.kind == "regression":
        yield from (Prediction((), float(row[0]), lost)
                    for row, lost in zip(logits, cut, strict=True))  # fmt: skip
        return
    if head.kind == "multi":
        shares = 1 / (1 + np.exp(-logits))
    else:
        shares = np.exp(logits - logits.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
    for row, lost in zip(shares, cut, strict=True):
        order = np.argsort(-row, kind="stable")
        named = tuple((head.labels[place], float(row[place])) for place in order)
        yield Prediction(named, None, lost)
