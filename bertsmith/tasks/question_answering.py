"""Questions whose answer is a span of a context: windows of tokens, their loss, and scores.

It never trains, and it never prints. Sections 4.2 and 4.3 of the paper.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from bertsmith.bundle import HeadConfig
from bertsmith.errors import TaskError
from bertsmith.tasks import squad
from bertsmith.tasks.inputs import ExampleCounts, MicroBatch, ModelInputs, TokenSequence
from bertsmith.tasks.questions import QuestionExample, read_examples
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.spans import (
    ContextWindow,
    assign_tokens_to_windows,
    find_best_spans,
    find_covering_tokens,
    split_into_windows,
)
from bertsmith.text.wordpiece import Tokenizer

__all__ = [
    "DEFAULT_LENGTH",
    "QuestionExample",
    "collect_labels",
    "compute_class_report",
    "compute_losses",
    "compute_metrics",
    "encode_examples",
    "list_metrics",
    "read_examples",
]  # fmt: skip

#: As in the original's run_squad.py.
DEFAULT_LENGTH = 384
#: Tokens that the windows of models made elsewhere share; the default of transformers' run_qa.py
#: and of its pipeline.
DEFAULT_OVERLAP = 128
#: Ids of a context, and the characters that each stands for: int64 [n, 2].
_Tokens = tuple[list[int], NDArray[np.int64]]


def collect_labels(examples: Sequence[QuestionExample], where: str) -> tuple[str, ...]:
    """Return no label: spans have none. Raises TaskError where no question has an answer."""
    if not any(example.answers for example in examples):
        raise TaskError(f"{where}: no question has an answer; expected one at least")
    return ()


def encode_examples(
    examples: Sequence[QuestionExample],
    tokenizer: Tokenizer,
    head: HeadConfig,  # noqa: ARG001 - spans have no labels
    task: TaskSettings,
    counts: ExampleCounts,
) -> ModelInputs:
    """Return [CLS] question [SEP] context [SEP], in several windows where it is long.

    A question longer than ``task.max_question_length``, or than half an input, is cut at its end. One
    with answers of which the tokenizer leaves nothing has no target.
    ``memo`` is a ``ContextWindow`` for each input. See ``Family``.
    """
    assert task.length is not None
    tokenizer = tokenizer.with_counter(counts.token_counts)
    contexts = _tokenized([example.context for example in examples], tokenizer)
    questions = tokenizer.encode_batch([example.question for example in examples])
    longest = min(task.max_question_length, (task.length - 3) // 2)
    found = ModelInputs([], [], [], [], [], family_data=[])
    for number, (example, asked) in enumerate(zip(examples, questions, strict=True)):
        ids, offsets = contexts[example.context]
        right = _right(example, offsets)
        known = right is not None or not example.answers
        lost = len(asked) > longest
        counts.num_truncated += lost
        begin = [tokenizer.cls_id, *asked[:longest], tokenizer.sep_id]
        room = task.length - len(begin) - 1
        parts = split_into_windows(len(ids), room, _step(task, room))
        counts.num_unreachable_answers += right is not None and not any(
            start <= right[0] and right[1] < stop for start, stop in parts
        )
        for (start, stop), owned in zip(parts, _owned(parts, task), strict=True):
            end = [*ids[start:stop], tokenizer.sep_id]
            window = ContextWindow(number, len(begin), offsets[start:stop], owned)
            _append(found, (begin + end, [0] * len(begin) + [1] * len(end)), example, window,
                    cut_off=lost,
                    target=_target(right, start, stop, len(begin)) if known else None)  # fmt: skip
    if any(example.answers is None for example in examples):
        found.targets = None
    return found


def _step(task: TaskSettings, room: int) -> int:
    """Return the tokens from the start of one window of ``room`` tokens to that of the next."""
    if task.overlap is None:
        # Neighbours share at least half of their tokens, also where windows are short.
        return min(task.stride, max(room // 2, 1))
    # A large overlap of short windows would make one window for each token.
    return max(room - task.overlap, room // 8, 1)


def _owned(parts: Sequence[tuple[int, int]], task: TaskSettings) -> list[NDArray[np.bool_]]:
    """Return for each window which of its tokens a span may start with: bool [m] each."""
    if task.overlap is None:
        return assign_tokens_to_windows(parts)
    return [np.ones(stop - start, np.bool_) for start, stop in parts]


def _append(
    inputs: ModelInputs,
    sequence: TokenSequence,
    example: QuestionExample,
    window: ContextWindow,
    *,
    cut_off: bool,
    target: tuple[int, int] | None,
) -> None:
    assert inputs.targets is not None
    assert inputs.token_indices is not None
    inputs.sequences.append([sequence])
    inputs.locations.append(example.location)
    inputs.is_truncated.append(cut_off)
    inputs.targets.append(np.array([] if target is None else [target], np.int64).reshape(-1, 2))
    # The scores of all tokens compete, those of the question too, as in the original.
    inputs.token_indices.append(list(range(len(sequence[0]))))
    inputs.family_data.append(window)


def _tokenized(contexts: Sequence[str], tokenizer: Tokenizer) -> dict[str, _Tokens]:
    """Return the tokens of each context, tokenized once however many questions it has."""
    distinct = list(dict.fromkeys(contexts))
    found = tokenizer.encode_batch_with_offsets(distinct)
    return {
        context: (ids, np.array(offsets, np.int64).reshape(-1, 2))
        for context, (ids, offsets) in zip(distinct, found, strict=True)
    }


def _right(example: QuestionExample, offsets: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return the first and last token of the first answer that has tokens; None if none has."""
    each = (
        find_covering_tokens(offsets, start, start + len(text))
        for text, start in example.answers or ()
    )
    return next((found for found in each if found is not None), None)


def _target(right: tuple[int, int] | None, start: int, stop: int, first: int) -> tuple[int, int]:
    """Return the places of an answer's ends in a window, [CLS] twice if it is not all in there."""
    if right is None or right[0] < start or right[1] >= stop:
        return 0, 0
    return right[0] - start + first, right[1] - start + first


def compute_losses(outputs: Tensor, part: MicroBatch, head: HeadConfig) -> Tensor:  # noqa: ARG001 - see encode
    """Return float32 [B]: the mean of the cross-entropies of start and end over a window's tokens.

    outputs: float32 [T, 2].
    """
    lengths = part.packed.cu_seqlens.diff().tolist()
    # Filled with -inf, which has no share in a softmax: [B, S, 2] -> [2 B, S].
    each = list(torch.split(outputs, lengths))
    rows = pad_sequence(each, batch_first=True, padding_value=-torch.inf)
    flat = rows.transpose(1, 2).reshape(2 * len(lengths), -1)
    both = F.cross_entropy(flat, part.targets.reshape(-1), reduction="none")
    return both.view(-1, 2).mean(-1)


def compute_metrics(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[QuestionExample],
    head: HeadConfig,  # noqa: ARG001 - see encode
    task: TaskSettings,
) -> dict[str, float]:
    """Return the official figures; see ``squad.compute_squad_metrics`` and ``Family``."""
    contexts = [example.context for example in examples]
    found = find_best_spans(
        outputs, inputs.family_data, contexts, max_answer_tokens=task.max_answer_length, num_spans=1
    )
    said = [one.spans[0].text for one in found]
    nulls = np.array([one.null_score - one.spans[0].score for one in found], np.float64)
    answers = [[text for text, _ in example.answers or ()] for example in examples]
    # The official ones always; the threshold of no answer is tuned for the best F1.
    names = ["f1", "exact", *(name for name in task.metrics if name not in ("f1", "exact"))]
    return squad.compute_squad_metrics(said, nulls, answers, task.null_threshold, names)


def compute_class_report(
    outputs: list[NDArray[np.float32]],  # noqa: ARG001 - see Family
    inputs: ModelInputs,  # noqa: ARG001
    examples: Sequence[QuestionExample],  # noqa: ARG001
    head: HeadConfig,  # noqa: ARG001
) -> dict[str, Any]:
    """Return nothing: spans have no classes."""
    return {}


def list_metrics(task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:  # noqa: ARG001
    """Return the usual metrics and the known ones; see ``Family``."""
    return ("f1", "exact"), tuple(squad.METRICS)
