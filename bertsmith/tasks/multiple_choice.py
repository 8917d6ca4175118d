"""Multiple choice: reading prompts with their endings, and scoring which ending a model prefers.

It never trains, and it never prints. Section 4.4 of the paper: each ending makes a sequence of its
own with the prompt, and the scores of one prompt's endings go through one softmax.
"""

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from bertsmith.bundle import HeadConfig
from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks import metrics
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts, MicroBatch, ModelInputs
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tables import (
    Row,
    check_text,
    get_cell,
    get_text,
    read_rows,
    read_task_rows,
    read_unique_id,
)
from bertsmith.tasks.text_pairs import add_special_tokens, truncate_texts
from bertsmith.text.wordpiece import Tokenizer

#: As in the original's run_classifier.py.
DEFAULT_LENGTH = 128


@dataclass(frozen=True)
class ChoiceExample:
    """A prompt and its endings. ``right``: the index of the right one, None where it is not known.

    location: file and line, for messages.
    """

    prompt: str
    endings: tuple[str, ...]
    correct_index: int | None
    location: str


def read_examples(
    path: Path,
    task: TaskSettings,
    *,
    labels: Sequence[str] | None = None,  # noqa: ARG001 - a choice has no labels
    labeled: bool = True,
) -> tuple[list[ChoiceExample], ExampleCounts]:
    """Read prompts and endings from a table; see ``Family``."""
    if not task.endings:
        raise SettingsError(
            f"{path}: the columns of the endings are not known; give --endings A,B,…, or "
            "task.endings"
        )
    file = task.answers_file(path) if labeled else None
    answers = None if file is None else _answers(file)
    examples, counts, seen = [], ExampleCounts(), set[str]()
    for row in read_task_rows(path, task, counts):
        with counts.count_example(row.location, task, labeled=labeled):
            value = None
            name = read_unique_id(row, task.id, seen, needed=answers is not None)
            if answers is not None:
                value = _answer(name, answers)
            elif labeled:
                value = get_cell(row, task.label)
            examples.append(_question(row, task, value, labelled=labeled))
    orphans = len((answers or {}).keys() - seen)
    if orphans:
        counts.num_read += orphans
        counts.skipped["an answer whose id no row has"] += orphans
    return counts.require_examples(examples, path), counts


def read_prompt(row: Row, task: TaskSettings) -> tuple[str, tuple[str, ...]]:
    """Return the prompt of a row and its endings. Raises BadExampleError."""
    prompt, endings = get_text(row, task.text), _endings(row, task.endings)
    if task.pair:
        start = get_text(row, task.pair)
        endings = tuple(f"{start} {ending}" for ending in endings)
    return prompt, endings


def _question(row: Row, task: TaskSettings, value: Any, *, labelled: bool) -> ChoiceExample:
    prompt, endings = read_prompt(row, task)
    right = _right(value, task.endings, len(endings)) if labelled else None
    return ChoiceExample(prompt, endings, right, row.location)


def _endings(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    """Return the endings: a column each, or all in one column that holds lists."""
    if len(names) > 1:
        return tuple(get_text(row, name) for name in names)
    several = get_cell(row, names[0])
    if not isinstance(several, list):
        raise TaskError(
            f"{row.location}: the column {names[0]!r} holds one ending; name a column for each "
            "ending, or one whose cells are lists"
        )
    if len(several) < 2:
        raise BadExampleError("fewer than two endings", f" in column {names[0]!r}")
    return tuple(check_text(ending, names[0]) for ending in several)


def _answers(path: Path) -> dict[str, Any]:
    """Return the label of each id in a file of "id,label" without a header. Raises TaskError."""
    found: dict[str, Any] = {}
    for row in read_rows(path, header=False):
        try:
            name, label = str(get_cell(row, "0")).strip(), get_cell(row, "1")
        except BadExampleError as fault:
            raise TaskError(f"{row.location}: {fault}; expected an id and its label") from None
        if name in found:
            raise TaskError(f"{row.location}: the id {name!r} stood before; take one of them out")
        found[name] = label
    return found


def _answer(name: str, answers: Mapping[str, Any]) -> Any:
    """Return the label of a row, by its id."""
    if name not in answers:
        raise BadExampleError("an id without an answer", f": {name!r}")
    return answers[name]


def _right(value: Any, names: Sequence[str], count: int) -> int:
    """Return the index of the right ending of ``count``.

    A number is an index from 0, also where columns have numbers for names.
    """
    if isinstance(value, float) and value.is_integer():
        # As tables hold whole numbers beside missing ones.
        value = int(value)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise BadExampleError("an unknown label", f": {value!r}")
    name, letters = str(value).strip(), string.ascii_uppercase[:count]
    if not name:
        raise BadExampleError("an empty label")
    if re.fullmatch(r"[+-]?[0-9]{1,9}", name):
        if not 0 <= int(name) < count:
            raise BadExampleError(
                "an index out of range", f": {name}; the endings are 0 to {count - 1}"
            )
        return int(name)
    if len(names) == count and name in names:
        return names.index(name)
    if len(name) == 1 and name in letters:
        return letters.index(name)
    raise BadExampleError(
        "an unknown label",
        f": {name!r}; expected 0 to {count - 1}, {letters[0]} to {letters[-1]}, or the name of an "
        "ending's column",
    )


def collect_labels(examples: Sequence[ChoiceExample], where: str) -> tuple[str, ...]:  # noqa: ARG001
    """Return no labels: a choice has one output, the score of an ending."""
    return ()


def encode_examples(
    examples: Sequence[ChoiceExample],
    tokenizer: Tokenizer,
    head: HeadConfig,  # noqa: ARG001 - other families need it
    task: TaskSettings,
    counts: ExampleCounts,
) -> ModelInputs:
    """Return [CLS] prompt [SEP] ending [SEP] for each ending of each example; see ``Family``."""
    assert task.length is not None
    tokenizer = tokenizer.with_counter(counts.token_counts)
    texts = [text for example in examples for text in (example.prompt, *example.endings)]
    rest = iter(tokenizer.encode_batch(texts))
    sequences, cut_off = [], []
    for example in examples:
        prompt = next(rest)
        pairs = [(prompt, next(rest)) for _ in example.endings]
        kept = [truncate_texts(pair, task.length - 3) for pair in pairs]
        sequences.append([add_special_tokens(pair, tokenizer) for pair in kept])
        cut_off.append(any(len(a) + len(b) > task.length - 3 for a, b in pairs))
    counts.num_truncated += sum(cut_off)
    known = [one.correct_index for one in examples if one.correct_index is not None]
    targets = [np.array([right], np.int64) for right in known]
    where = [example.location for example in examples]
    return ModelInputs(sequences, where, cut_off, targets if len(known) == len(examples) else None)


def compute_losses(outputs: Tensor, part: MicroBatch, head: HeadConfig) -> Tensor:  # noqa: ARG001
    """Return float32 [U]: cross-entropy over the scores of each prompt's own endings.

    outputs: float32 [B, 1], an ending each.
    """
    # A prompt with fewer endings than others is filled up with some that have no probability.
    each = list(torch.split(outputs[:, 0], part.sequences_per_unit))
    scores = pad_sequence(each, batch_first=True, padding_value=float("-inf"))
    return F.cross_entropy(scores, part.targets, reduction="none")


def compute_metrics(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[ChoiceExample],  # noqa: ARG001 - other families need them
    head: HeadConfig,  # noqa: ARG001
    task: TaskSettings,
) -> dict[str, float]:
    """Return the named metrics; see ``Family``."""
    assert inputs.targets is not None
    chosen = np.array([scores[:, 0].argmax() for scores in outputs], np.int64)
    found = {"accuracy": metrics.accuracy(chosen, np.concatenate(inputs.targets))}
    return {name: found[name] for name in task.metrics}


def compute_class_report(
    outputs: list[NDArray[np.float32]],  # noqa: ARG001 - see Family
    inputs: ModelInputs,  # noqa: ARG001
    examples: Sequence[ChoiceExample],  # noqa: ARG001
    head: HeadConfig,  # noqa: ARG001
) -> dict[str, Any]:
    """Return nothing: the endings of different prompts are no classes."""
    return {}


def list_metrics(task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:  # noqa: ARG001
    """Return the usual metrics and the known ones; see ``Family``."""
    return ("accuracy",), ("accuracy",)
