"""Run the masked-LM head on many sequences."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.bundle import PretrainedBundle
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.runtime.inference_batches import batch_by_length

#: Maximum number of log-probabilities computed at once (16 MiB of float32), so that memory does not
#: grow with the vocabulary.
_MAX_LOG_PROBABILITIES = 2**22


@dataclass(frozen=True)
class MaskedSequence:
    """A sequence with [MASK] tokens.

    Attributes:
        ids: Token ids, including [CLS] and [SEP].
        segments: Segment ids.
        masked_positions: Indices of the [MASK] tokens to predict.
    """

    ids: Sequence[int]
    segments: Sequence[int]
    masked_positions: Sequence[int]


@dataclass(frozen=True)
class MaskedPredictions:
    """Predictions at P masked positions.

    Attributes:
        rows: For each prediction, the index of its sequence, and the index of its position in the
            ``masked_positions`` of this sequence.
        log_probabilities: float32 [P, V], natural logarithms, over the tokenizer's vocabulary.
    """

    rows: Sequence[tuple[int, int]]
    log_probabilities: Tensor

    def select_top(self, num_tokens: int) -> "TopTokens":
        """Return the most probable tokens of each prediction."""
        return TopTokens(*self.log_probabilities.topk(num_tokens))


@dataclass(frozen=True)
class TopTokens:
    """The K most probable tokens at P masked positions, most probable first.

    Attributes:
        log_probabilities: float32 [P, K], natural logarithms.
        token_ids: int64 [P, K].
    """

    log_probabilities: Tensor
    token_ids: Tensor


def get_max_text_tokens(bundle: PretrainedBundle) -> int:
    """Return the maximum number of tokens of a text, without [CLS] and [SEP]."""
    return bundle.config.max_positions - 2


def pack_on_device(
    bundle: PretrainedBundle, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> PackedBatch:
    """Pack sequences into a batch on the model's device.

    Args:
        bundle: The model.
        sequences: The token ids and the segment ids of each sequence.
    """
    return pack_sequences(sequences).to(next(bundle.model.parameters()).device)


def predict_masked_tokens(
    bundle: PretrainedBundle, lengths: Sequence[int], get_sequence: Callable[[int], MaskedSequence]
) -> Iterator[MaskedPredictions]:
    """Predict the tokens at masked positions.

    Only the hidden states at these positions go through the masked-LM head. Sequences are batched
    by length, so the predictions are not in the order of the sequences.

    Args:
        bundle: The model.
        lengths: Number of tokens of each sequence.
        get_sequence: Returns the sequence with an index. It is called for one batch at a time, so
            that the sequences of all batches are never in memory together.

    Raises:
        ModelError: The model has no masked-LM head.
    """
    bundle.require_mlm_head()
    for indices in batch_by_length(lengths):
        sequences = [get_sequence(index) for index in indices]
        for predictions in predict_masked_batch(bundle, sequences):
            rows = [(indices[sequence], position) for sequence, position in predictions.rows]
            yield MaskedPredictions(rows, predictions.log_probabilities)


def predict_masked_batch(
    bundle: PretrainedBundle, sequences: Sequence[MaskedSequence]
) -> Iterator[MaskedPredictions]:
    """Predict the tokens at the masked positions of sequences, computed as one batch.

    Yields:
        Predictions of at most ``_MAX_LOG_PROBABILITIES`` log-probabilities, in the order of the
        sequences.
    """
    positions_per_step = max(_MAX_LOG_PROBABILITIES // bundle.config.vocab_size, 1)
    rows = [
        (sequence_index, position_index)
        for sequence_index, sequence in enumerate(sequences)
        for position_index in range(len(sequence.masked_positions))
    ]
    hidden = _compute_hidden_states(bundle, sequences)
    for start in range(0, len(rows), positions_per_step):
        selected = slice(start, start + positions_per_step)
        log_probabilities = _compute_log_probabilities(bundle, hidden[selected])
        yield MaskedPredictions(rows[selected], log_probabilities)


@torch.inference_mode()
def _compute_hidden_states(bundle: PretrainedBundle, sequences: Sequence[MaskedSequence]) -> Tensor:
    """Return the hidden states at the masked positions of a batch, [P, D]."""
    batch = pack_on_device(bundle, [(sequence.ids, sequence.segments) for sequence in sequences])
    starts = batch.first_token_indices.tolist()
    token_indices = [
        start + position
        for start, sequence in zip(starts, sequences, strict=True)
        for position in sequence.masked_positions
    ]
    hidden: Tensor = bundle.model.bert(
        batch, token_indices=torch.tensor(token_indices, device=batch.ids.device)
    )
    return hidden


@torch.inference_mode()
def _compute_log_probabilities(bundle: PretrainedBundle, hidden: Tensor) -> Tensor:
    """Return log-probabilities [P, V] over the tokenizer's vocabulary for hidden states [P, D].

    The decoder of a model may have more outputs than the vocabulary has tokens.
    """
    logits: Tensor = bundle.model.mlm(hidden)
    return logits[:, : bundle.tokenizer.vocab_size].float().log_softmax(-1)
