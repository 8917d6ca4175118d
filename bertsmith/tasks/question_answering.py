"""Extractive question answering (sections 4.2 and 4.3 of the paper).

The model predicts the span of the context that answers a question. Long contexts are split into
overlapping windows.
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
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs, TaskMicroBatch, TokenSequence
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
    "QuestionExample",
    "collect_labels",
    "compute_class_report",
    "compute_losses",
    "compute_metrics",
    "encode_examples",
    "list_metrics",
    "read_examples",
]

#: Number of tokens that consecutive windows share, for models trained with other tools: the default
#: of transformers' run_qa.py and pipeline.
DEFAULT_WINDOW_OVERLAP = 128
#: Token ids of a context and their character offsets, int64 [n, 2].
_ContextTokens = tuple[list[int], NDArray[np.int64]]


def collect_labels(examples: Sequence[QuestionExample], path: str) -> tuple[str, ...]:
    """Return no labels; raise TaskError if no question has an answer."""
    if not any(example.answers for example in examples):
        raise TaskError(f"{path}: no question has an answer; expected at least one")
    return ()


def encode_examples(
    examples: Sequence[QuestionExample],
    tokenizer: Tokenizer,
    head: HeadConfig,  # noqa: ARG001 - part of TaskFamily
    task: TaskSettings,
    counts: ExampleCounts,
) -> ModelInputs:
    """Encode each question as one or more inputs [CLS] question [SEP] window of context [SEP].

    Questions are truncated to ``task.max_question_length`` tokens, and to half of the input. Inputs
    have no target if the question is answerable but none of its answers contains a token.
    ``decoding_data`` has the ``ContextWindow`` of each input. See ``TaskFamily``.
    """
    assert task.max_seqlen is not None
    tokenizer = tokenizer.with_counter(counts.token_counts)
    contexts = _tokenize_contexts([example.context for example in examples], tokenizer)
    questions = tokenizer.encode_batch([example.question for example in examples])
    num_special_tokens = 3  # [CLS] and two [SEP] tokens
    max_question_tokens = min(task.max_question_length, (task.max_seqlen - num_special_tokens) // 2)
    inputs = ModelInputs(
        sequences=[], locations=[], is_truncated=[], targets=[], token_indices=[], decoding_data=[]
    )
    for example_index, (example, question_ids) in enumerate(zip(examples, questions, strict=True)):
        context_ids, offsets = contexts[example.context]
        answer = _find_answer_tokens(example, offsets)
        has_target = answer is not None or not example.answers
        is_truncated = len(question_ids) > max_question_tokens
        counts.num_truncated += is_truncated
        first_part = [tokenizer.cls_id, *question_ids[:max_question_tokens], tokenizer.sep_id]
        window_size = task.max_seqlen - len(first_part) - 1
        windows = split_into_windows(len(context_ids), window_size, _get_stride(task, window_size))
        if answer is not None and not _is_in_any_window(answer, windows):
            counts.num_unreachable_answers += 1
        span_starts = _get_span_starts(windows, task)
        for (start, stop), can_start_span in zip(windows, span_starts, strict=True):
            second_part = [*context_ids[start:stop], tokenizer.sep_id]
            segment_ids = [0] * len(first_part) + [1] * len(second_part)
            window = ContextWindow(
                example_index,
                len(first_part),
                offsets[start:stop],
                can_start_span,
            )
            target = _get_target(answer, start, stop, len(first_part)) if has_target else None
            _append_input(
                inputs,
                (first_part + second_part, segment_ids),
                example,
                window,
                is_truncated=is_truncated,
                target=target,
            )
    if any(example.answers is None for example in examples):
        inputs.targets = None
    return inputs


def _is_in_any_window(answer: tuple[int, int], windows: Sequence[tuple[int, int]]) -> bool:
    """Return whether a window contains both the first and the last token of an answer."""
    first, last = answer
    return any(start <= first and last < stop for start, stop in windows)


def _get_stride(task: TaskSettings, window_size: int) -> int:
    """Return the number of tokens between the starts of consecutive windows."""
    if task.window_overlap is None:
        # Even short windows share at least half of their tokens with the next window.
        return min(task.window_stride, max(window_size // 2, 1))
    # A large overlap of short windows would result in a window for almost every token.
    return max(window_size - task.window_overlap, window_size // 8, 1)


def _get_span_starts(
    windows: Sequence[tuple[int, int]],
    task: TaskSettings,
) -> list[NDArray[np.bool_]]:
    """Return whether a predicted span may start with each of the m tokens of a window: bool [m]."""
    if task.window_overlap is None:
        return assign_tokens_to_windows(windows)
    return [np.ones(stop - start, np.bool_) for start, stop in windows]


def _append_input(
    inputs: ModelInputs,
    sequence: TokenSequence,
    example: QuestionExample,
    window: ContextWindow,
    *,
    is_truncated: bool,
    target: tuple[int, int] | None,
) -> None:
    """Append the input of a window to ``inputs``."""
    assert inputs.targets is not None
    assert inputs.token_indices is not None
    inputs.sequences.append([sequence])
    inputs.locations.append(example.location)
    inputs.is_truncated.append(is_truncated)
    inputs.targets.append(np.array([] if target is None else [target], np.int64).reshape(-1, 2))
    # As in the original BERT, the softmax is over all tokens, including those of the question.
    inputs.token_indices.append(range(len(sequence[0])))
    inputs.decoding_data.append(window)


def _tokenize_contexts(contexts: Sequence[str], tokenizer: Tokenizer) -> dict[str, _ContextTokens]:
    """Tokenize each distinct context once, because several questions share a context."""
    distinct = list(dict.fromkeys(contexts))
    encoded = tokenizer.encode_batch_with_offsets(distinct)
    return {
        context: (ids, np.array(offsets, np.int64).reshape(-1, 2))
        for context, (ids, offsets) in zip(distinct, encoded, strict=True)
    }


def _find_answer_tokens(
    example: QuestionExample,
    offsets: NDArray[np.int64],
) -> tuple[int, int] | None:
    """Return the first and last token of the first answer that has tokens, None if none has."""
    answer_tokens = (
        find_covering_tokens(offsets, start, start + len(text))
        for text, start in example.answers or ()
    )
    return next((tokens for tokens in answer_tokens if tokens is not None), None)


def _get_target(
    answer: tuple[int, int] | None,
    start: int,
    stop: int,
    first_position: int,
) -> tuple[int, int]:
    """Return the positions of the first and last token of an answer in the input of a window.

    Both positions are 0, that of [CLS], if the window does not contain the complete answer.

    Args:
        answer: First and last token of the answer in the context, None if there is no answer.
        start: First context token of the window.
        stop: End of the window's context tokens, exclusive.
        first_position: Position of the first context token in the input.
    """
    if answer is None or answer[0] < start or answer[1] >= stop:
        return 0, 0
    return answer[0] - start + first_position, answer[1] - start + first_position


def compute_losses(
    outputs: Tensor,
    batch: TaskMicroBatch,
    head: HeadConfig,  # noqa: ARG001 - part of TaskFamily
) -> Tensor:
    """Return the loss of each window, float32 [B].

    The loss is the mean of the cross-entropies of the start and end positions.

    Args:
        outputs: float32 [T, 2], the start and end logits.
        batch: The micro-batch.
        head: Kind of the head.
    """
    lengths = batch.packed.cu_seqlens.diff().tolist()
    # Padding with -inf does not change a softmax.
    window_logits = list(torch.split(outputs, lengths))
    padded = pad_sequence(window_logits, batch_first=True, padding_value=-torch.inf)
    logits = padded.transpose(1, 2).reshape(2 * len(lengths), -1)  # [B, S, 2] -> [2 B, S]
    losses = F.cross_entropy(logits, batch.targets.reshape(-1), reduction="none")
    return losses.view(-1, 2).mean(-1)


def compute_metrics(
    outputs: list[NDArray[np.float32]],
    inputs: ModelInputs,
    examples: Sequence[QuestionExample],
    head: HeadConfig,  # noqa: ARG001 - part of TaskFamily
    task: TaskSettings,
) -> dict[str, float]:
    """Return the official SQuAD metrics; see ``compute_squad_metrics`` and ``TaskFamily``."""
    contexts = [example.context for example in examples]
    predictions = find_best_spans(
        outputs,
        inputs.decoding_data,
        contexts,
        max_answer_tokens=task.max_answer_length,
        num_spans=1,
    )
    texts = [prediction.spans[0].text for prediction in predictions]
    null_margins = np.array(
        [prediction.null_score - prediction.spans[0].score for prediction in predictions],
        np.float64,
    )
    answers = [[text for text, _ in example.answers or ()] for example in examples]
    # F1 is always computed, because the no-answer threshold is tuned on it.
    names = ["f1", "exact", *(name for name in task.metrics if name not in ("f1", "exact"))]
    return squad.compute_squad_metrics(texts, null_margins, answers, task.null_threshold, names)


def compute_class_report(
    outputs: list[NDArray[np.float32]],  # noqa: ARG001 - part of TaskFamily
    inputs: ModelInputs,  # noqa: ARG001
    examples: Sequence[QuestionExample],  # noqa: ARG001
    head: HeadConfig,  # noqa: ARG001
    task: TaskSettings,  # noqa: ARG001
) -> dict[str, Any]:
    """Return an empty report: spans have no classes."""
    return {}


def list_metrics(task: TaskSettings) -> tuple[tuple[str, ...], tuple[str, ...]]:  # noqa: ARG001
    """Return the default and the supported metrics; see ``TaskFamily``."""
    return ("f1", "exact"), tuple(squad.METRICS)
