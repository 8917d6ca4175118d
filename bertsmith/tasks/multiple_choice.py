"""Multiple choice: a prompt with several endings, one of which is correct.

Section 4.4 of the paper: the prompt and each ending form a sequence, and the scores of a prompt's
endings go through one softmax.
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
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts, ModelInputs, TaskMicroBatch
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tables import (
    Row,
    drop_zero_decimals,
    get_cell,
    get_text,
    read_rows,
    read_task_rows,
    read_unique_id,
    require_text,
)
from bertsmith.tasks.text_pairs import add_special_tokens, iter_encoded_texts, truncate_texts
from bertsmith.text.wordpiece import Tokenizer


@dataclass(frozen=True)
class ChoiceExample:
    """A prompt with its endings.

    Attributes:
        prompt: The first text of each pair.
        endings: The second text of each pair.
        correct_index: Index of the correct ending, None for unlabeled data.
        location: File and line, for messages.
    """

    prompt: str
    endings: tuple[str, ...]
    correct_index: int | None
    location: str


def read_examples(
    path: Path,
    task: TaskSettings,
    *,
    labels: Sequence[str] | None = None,  # noqa: ARG001 - choices have no labels
    labeled: bool = True,
) -> tuple[list[ChoiceExample], ExampleCounts]:
    """Read prompts and endings from a table; see ``TaskFamily``."""
    if not task.ending_columns:
        raise SettingsError(
            f"{path}: the columns of the endings are not set; give --endings A,B,… (finetune), or "
            """--set 'task.ending_columns=["A","B"]'""",
        )
    label_file = task.get_label_file(path) if labeled else None
    answers = None if label_file is None else _read_label_file(label_file, task)
    examples, counts, seen_ids = [], ExampleCounts(), set[str]()
    for row in read_task_rows(path, task, counts):
        with counts.count_example(row.location, task, labeled=labeled):
            label = None
            row_id = read_unique_id(row, task.id_column, seen_ids, is_required=answers is not None)
            if answers is not None:
                label = _get_answer(row_id, answers)
            elif labeled:
                label = get_cell(row, task.label_column, "--label")
            examples.append(_parse_example(row, task, label, labeled=labeled))
    num_unmatched_answers = 0 if answers is None else len(answers.keys() - seen_ids)
    if num_unmatched_answers:
        counts.num_read += num_unmatched_answers
        counts.skipped["an answer without a row of that id"] += num_unmatched_answers
    return counts.require_examples(examples, path), counts


def read_prompt(row: Row, task: TaskSettings) -> tuple[str, tuple[str, ...]]:
    """Return the prompt and the endings of a row; raise BadExampleError for invalid texts."""
    prompt = get_text(row, task.text_column, "--text")
    endings = _get_endings(row, task.ending_columns)
    if task.pair_column:
        ending_start = get_text(row, task.pair_column, "--pair")
        endings = tuple(f"{ending_start} {ending}" for ending in endings)
    return prompt, endings


def _parse_example(row: Row, task: TaskSettings, label: Any, *, labeled: bool) -> ChoiceExample:
    """Convert a row and its label to an example; raise BadExampleError if one is invalid."""
    prompt, endings = read_prompt(row, task)
    correct_index = _parse_label(label, task.ending_columns, len(endings)) if labeled else None
    return ChoiceExample(prompt, endings, correct_index, row.location)


def _get_endings(row: Row, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the endings of a row: one from each column, or the list in a single column."""
    if len(columns) > 1:
        return tuple(get_text(row, column, "--endings") for column in columns)
    endings = get_cell(row, columns[0], "--endings")
    if not isinstance(endings, list):
        raise TaskError(
            f"{row.location}: the column {columns[0]!r} holds one ending; give a column for each "
            "ending, or a column whose cells are lists of endings",
        )
    if len(endings) < 2:
        raise BadExampleError("fewer than two endings", f" in column {columns[0]!r}")
    return tuple(require_text(ending, columns[0]) for ending in endings)


def _read_label_file(path: Path, task: TaskSettings) -> dict[str, Any]:
    """Read the label of each id from a file of "id,label" rows without a header.

    Raises:
        TaskError: A row has no label, or an id occurs twice.
    """
    answers: dict[str, Any] = {}
    delimiter = task.delimiter or None
    for row in read_rows(path, has_header=False, encoding=task.encoding, delimiter=delimiter):
        try:
            row_id = str(get_cell(row, "0")).strip()
            label = get_cell(row, "1")
        except BadExampleError as error:
            raise TaskError(f"{row.location}: {error}; expected an id and its label") from None
        if row_id in answers:
            raise TaskError(f"{row.location}: duplicate id {row_id!r}; remove one of the rows")
        answers[row_id] = label
    return answers


def _get_answer(row_id: str, answers: Mapping[str, Any]) -> Any:
    """Return the label that the separate label file has for a row."""
    if row_id not in answers:
        raise BadExampleError("an id without an answer", f": {row_id!r}")
    return answers[row_id]


def _parse_label(value: Any, columns: Sequence[str], num_endings: int) -> int:
    """Return the index of the correct ending.

    A label is the index of an ending from 0, the name of its column, or a letter from A. A number
    is always an index, even if the names of the columns are numbers.
    """
    if isinstance(value, float) and value.is_integer():
        # Integer columns with missing values are stored as floats.
        value = int(value)
    if not isinstance(value, str | int) or isinstance(value, bool):
        raise BadExampleError("an unknown label", f": {value!r}")
    label = drop_zero_decimals(str(value).strip())
    letters = string.ascii_uppercase[:num_endings]
    if not label:
        raise BadExampleError("an empty label")
    if re.fullmatch(r"[+-]?[0-9]{1,9}", label):
        if not 0 <= int(label) < num_endings:
            advice = "; if labels count from 1, subtract 1" if int(label) == num_endings else ""
            raise BadExampleError(
                "an index out of range",
                f": {label}; the endings are 0 to {num_endings - 1}{advice}",
            )
        return int(label)
    if len(columns) == num_endings and label in columns:
        return columns.index(label)
    if len(label) == 1 and label in letters:
        return letters.index(label)
    raise BadExampleError(
        "an unknown label",
        f": {label!r}; expected 0 to {num_endings - 1}, {letters[0]} to {letters[-1]}, or the name "
        "of an ending's column",
    )


def collect_labels(examples: Sequence[ChoiceExample], path: str) -> tuple[str, ...]:  # noqa: ARG001
    """Return no labels: the head has a single output, the score of an ending."""
    return ()


def encode_examples(
    examples: Sequence[ChoiceExample],
    tokenizer: Tokenizer,
    head: HeadConfig,  # noqa: ARG001 - part of TaskFamily
    task: TaskSettings,
    counts: ExampleCounts,
) -> ModelInputs:
    """Encode each ending as [CLS] prompt [SEP] ending [SEP]; see ``TaskFamily``."""
    assert task.max_seqlen is not None
    tokenizer = tokenizer.with_counter(counts.token_counts)
    texts = ((example.prompt, *example.endings) for example in examples)
    max_pair_tokens = task.max_seqlen - 3  # [CLS] and two [SEP] tokens
    sequences, is_truncated = [], []
    for prompt_ids, *ending_ids in iter_encoded_texts(tokenizer, texts):
        pairs = [(prompt_ids, ids) for ids in ending_ids]
        truncated_pairs = [truncate_texts(pair, max_pair_tokens) for pair in pairs]
        sequences.append([add_special_tokens(pair, tokenizer) for pair in truncated_pairs])
        is_truncated.append(any(len(a) + len(b) > max_pair_tokens for a, b in pairs))
    counts.num_truncated += sum(is_truncated)
    correct_indices = [
        example.correct_index for example in examples if example.correct_index is not None
    ]
    targets = [np.array([index], np.int64) for index in correct_indices]
    locations = [example.location for example in examples]
    is_labeled = len(correct_indices) == len(examples)
    return ModelInputs(sequences, locations, is_truncated, targets if is_labeled else None)


def compute_losses(
    outputs: Tensor,
    batch: TaskMicroBatch,
    head: HeadConfig,  # noqa: ARG001 - part of TaskFamily
) -> Tensor:
    """Return the loss of each of U prompts, float32 [U]: the cross-entropy over its endings.

    Args:
        outputs: float32 [B, 1], the score of each ending.
        batch: The micro-batch.
        head: Kind of the head.
    """
    # Prompts with fewer endings are padded with -inf, which has probability 0.
    ending_scores = list(torch.split(outputs[:, 0], batch.sequences_per_input))
    scores = pad_sequence(ending_scores, batch_first=True, padding_value=float("-inf"))
    return F.cross_entropy(scores, batch.targets, reduction="none")


def compute_metrics(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[ChoiceExample],  # noqa: ARG001 - part of TaskFamily
    head: HeadConfig,  # noqa: ARG001
    task: TaskSettings,
) -> dict[str, float]:
    """Return the requested metrics; see ``TaskFamily``."""
    assert inputs.targets is not None
    predicted = np.array([scores[:, 0].argmax() for scores in outputs], np.int64)
    values = {"accuracy": metrics.accuracy_score(predicted, np.concatenate(inputs.targets))}
    return {name: values[name] for name in task.metrics}


def compute_class_report(
    outputs: list[NDArray[np.float32]],  # noqa: ARG001 - part of TaskFamily
    inputs: ModelInputs,  # noqa: ARG001
    examples: Sequence[ChoiceExample],  # noqa: ARG001
    head: HeadConfig,  # noqa: ARG001
    task: TaskSettings,  # noqa: ARG001
) -> dict[str, Any]:
    """Return an empty report: endings of different prompts are not classes."""
    return {}


def list_metrics(task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:  # noqa: ARG001
    """Return the default and the supported metrics; see ``TaskFamily``."""
    return ("accuracy",), ("accuracy",)
