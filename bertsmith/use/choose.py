"""Ask a fine-tuned model of multiple choice: which of several endings fits a prompt.

It never knows where the prompts come from.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.multiple_choice import ChoiceExample, encode_examples
from bertsmith.tasks.outputs import ComputeOutputs, compute_outputs
from bertsmith.use.masked_lm import chunked, resolve_task_model

#: Prompts worked on at once: enough that like lengths meet.
_WINDOW = 256


@dataclass(frozen=True)
class Choice:
    """What the model says of one prompt.

    probabilities: of each ending, in their order. best: the index of the likeliest, from 0.
    cut_off: whether the prompt with one of the endings was longer than the model takes.
    """

    probabilities: tuple[float, ...]
    best: int
    cut_off: bool


def choose(
    model: FineTunedBundle | Path | str, questions: Sequence[tuple[str, Sequence[str]]]
) -> list[Choice]:
    """Return which ending fits, for each prompt with its endings, two of them or more.

    Where a task's endings have a common beginning (SWAG), each is given with it. Raises ModelError
    for a model of another kind, QuestionError for an empty prompt or ending.
    """
    return list(iter_choices(model, questions))


def iter_choices(
    model: FineTunedBundle | Path | str,
    questions: Iterable[tuple[str, Sequence[str]]],
    compute: ComputeOutputs = compute_outputs,
) -> Iterator[Choice]:
    """Yield what ``choose`` returns, for input without end. An error names the prompt's number."""
    bundle = resolve_task_model(model, "choice")
    examples = (
        to_prompt_example(given, f"prompt {number:,}") for number, given in enumerate(questions, 1)
    )
    for window in chunked(examples, _WINDOW):
        yield from _answers(bundle, window, compute)


def to_prompt_example(given: tuple[str, Sequence[str]], where: str) -> ChoiceExample:
    """Return a prompt and its endings as an example; QuestionError, which names ``where``."""
    prompt, endings = given
    if isinstance(endings, str) or len(endings) < 2:
        raise InputError(f"{where} has fewer than two endings to choose from")
    for which, text in enumerate((prompt, *endings)):
        if not text.strip():
            what = f"ending {which - 1} of {where}" if which else where
            raise InputError(f"{what} is empty; expected at least one word")
    return ChoiceExample(prompt, tuple(endings), None, where)


def _answers(
    bundle: FineTunedBundle, examples: list[ChoiceExample], compute: ComputeOutputs
) -> Iterator[Choice]:
    inputs = encode_examples(
        examples, bundle.tokenizer, bundle.head, get_task_settings(bundle), ExampleCounts()
    )
    for rows, cut in zip(compute(bundle.model, inputs), inputs.is_truncated, strict=True):
        scores = rows[:, 0].astype(np.float64)
        shares = np.exp(scores - scores.max())
        shares /= shares.sum()
        yield Choice(tuple(shares.tolist()), int(scores.argmax()), cut)
