"""Multiple choice with a fine-tuned model: choose the ending that fits a prompt best."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.tasks.multiple_choice import ChoiceExample, encode_examples
from bertsmith.tasks.outputs import ComputeOutputs, compute_outputs
from bertsmith.use.inputs import chunked
from bertsmith.use.model_setup import resolve_task_model

#: Number of prompts encoded together, so that sequences of similar length can share a batch.
_CHUNK_SIZE = 256


@dataclass(frozen=True)
class Choice:
    """The model's choice for one prompt.

    Attributes:
        probabilities: Probability of each ending, in input order.
        best_index: Index of the most probable ending, from 0.
        is_truncated: Whether the prompt and one of its endings were too long together and were
            truncated.
    """

    probabilities: tuple[float, ...]
    best_index: int
    is_truncated: bool


def choose(
    model: FineTunedBundle | Path | str,
    questions: Sequence[tuple[str, Sequence[str]]],
    *,
    fast: bool = False,
) -> list[Choice]:
    """Choose the best ending for each prompt with a fine-tuned model.

    Args:
        model: A loaded model, or the path of a model directory or run directory.
        questions: Pairs (prompt, endings), each with two endings or more. If all endings of a
            prompt begin with the same words (as in SWAG), each ending must include these words.
        fast: Whether to use 8-bit or 16-bit arithmetic. This converts a loaded model in each call;
            ``quantize_model`` converts it once.

    Returns:
        One choice per prompt, in input order.

    Raises:
        ModelError: The model is not a multiple-choice model.
        InputError: A prompt or an ending is empty.
    """
    return list(iter_choices(resolve_task_model(model, "choice", fast=fast), questions))


def iter_choices(
    model: FineTunedBundle | Path | str,
    questions: Iterable[tuple[str, Sequence[str]]],
    compute: ComputeOutputs = compute_outputs,
    chunk_size: int = _CHUNK_SIZE,
) -> Iterator[Choice]:
    """Yield the choices of ``choose`` for any number of prompts, reading them in chunks.

    Args:
        model: As for ``choose``.
        questions: Pairs (prompt, endings). Error messages contain the number of the pair, from 1.
        compute: Computes the outputs of the model.
        chunk_size: Number of prompts encoded together.
    """
    bundle = resolve_task_model(model, "choice")
    examples = (
        to_choice_example(question, f"prompt {number:,}")
        for number, question in enumerate(questions, 1)
    )
    for chunk in chunked(examples, chunk_size):
        yield from _choose_endings(bundle, chunk, compute)


def to_choice_example(
    prompt_and_endings: tuple[str, Sequence[str]], location: str
) -> ChoiceExample:
    """Convert (prompt, endings) to an example.

    Args:
        prompt_and_endings: The prompt and its endings.
        location: Prefix of error messages, such as "prompt 3".

    Raises:
        InputError: A text is empty, or there are fewer than two endings.
    """
    prompt, endings = prompt_and_endings
    if isinstance(endings, str) or len(endings) < 2:
        raise InputError(f"{location} has fewer than two endings; give at least two")
    if not prompt.strip():
        raise InputError(f"{location} is empty; expected at least one word")
    for index, ending in enumerate(endings):
        if not ending.strip():
            raise InputError(f"ending {index} of {location} is empty; expected at least one word")
    return ChoiceExample(prompt, tuple(endings), None, location)


def _choose_endings(
    bundle: FineTunedBundle, examples: list[ChoiceExample], compute: ComputeOutputs
) -> Iterator[Choice]:
    """Yield the choices for the prompts of a chunk."""
    inputs = encode_examples(
        examples, bundle.tokenizer, bundle.head, get_task_settings(bundle), ExampleCounts()
    )
    outputs = compute(bundle.model, inputs)
    for output, is_truncated in zip(outputs, inputs.is_truncated, strict=True):
        # The output is float32 [number of endings, 1].
        logits = torch.from_numpy(output[:, 0]).double()
        yield Choice(tuple(logits.softmax(0).tolist()), int(logits.argmax()), is_truncated)
