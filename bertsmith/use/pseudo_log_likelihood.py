"""Log-probabilities of the tokens of many sequences, each token masked in turn.

The masked copies of all sequences share batches. Only the hidden states of the tokens to predict go
through the last layer and the masked-LM head.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.model.ops.cross_entropy import MAX_CHUNK_LOGITS
from bertsmith.model.packed import PackedBatch
from bertsmith.progress import Progress
from bertsmith.runtime.inference_batches import batch_by_length, choose_batch_tokens
from bertsmith.text.wordpiece import Tokenizer

#: Which tokens are masked when a token is predicted: only the token itself (``original``, Salazar
#: et al. 2020), or also the following tokens of its word (``within-word``, PLL-word-l2r of Kauf and
#: Ivanova 2023, arXiv:2305.10588).
PllVariant = Literal["original", "within-word"]
PLL_VARIANTS: tuple[PllVariant, ...] = ("original", "within-word")

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class _Sequences:
    """Token sequences in one array, each with [CLS] and [SEP].

    Attributes:
        ids: Token ids of all sequences.
        starts: Index of each sequence's [CLS] in ``ids``.
        lengths: Number of tokens of each sequence, with [CLS] and [SEP].
        target_indices: Indices of all tokens to predict: all but [CLS] and [SEP].
        target_sequences: The sequence of each of these tokens.
    """

    ids: IntArray
    starts: IntArray
    lengths: IntArray
    target_indices: IntArray
    target_sequences: IntArray

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int]], tokenizer: Tokenizer) -> Self:
        """Add [CLS] and [SEP] to sequences and concatenate them."""
        lengths = np.array([len(ids) + 2 for ids in sequences], dtype=np.int64)
        ids = np.fromiter(
            (
                token_id
                for sequence in sequences
                for token_id in (tokenizer.cls_id, *sequence, tokenizer.sep_id)
            ),
            dtype=np.int64,
            count=lengths.sum(),
        )
        ends = lengths.cumsum()
        starts = ends - lengths
        is_target = np.ones(len(ids), dtype=np.bool_)
        is_target[starts] = is_target[ends - 1] = False
        sequence_indices = np.repeat(np.arange(len(sequences)), lengths)
        return cls(ids, starts, lengths, np.flatnonzero(is_target), sequence_indices[is_target])

    def mask_ends(self, variant: PllVariant, tokenizer: Tokenizer) -> IntArray:
        """Return, for each token to predict, the index after the last token that is masked."""
        if variant == "original":
            return self.target_indices + 1
        # [CLS] and [SEP] are no continuations, so a word never extends into the next sequence.
        word_starts = np.flatnonzero(~tokenizer.is_continuation[self.ids])
        next_word = np.searchsorted(word_starts, self.target_indices, side="right")
        ends: IntArray = word_starts[next_word]
        return ends


@dataclass(frozen=True)
class _MaskedCopies:
    """Copies of sequences, each with a range of masked tokens, the first of which is predicted.

    Attributes:
        sequences: The original sequences.
        sequence_indices: The sequence of each copy.
        mask_starts: Index of each copy's first masked token in ``sequences.ids``.
        mask_ends: Index after its last masked token.
    """

    sequences: _Sequences
    sequence_indices: IntArray
    mask_starts: IntArray
    mask_ends: IntArray

    @classmethod
    def build(
        cls, sequences: _Sequences, variants: Sequence[PllVariant], tokenizer: Tokenizer
    ) -> tuple[Self, IntArray]:
        """Return the distinct copies, and the copy of each variant and token to predict.

        Variants share the copies in which they mask the same tokens.
        """
        ends = np.stack([sequences.mask_ends(variant, tokenizer) for variant in variants])
        num_tokens = len(sequences.ids) + 1
        keys, copy_indices = np.unique(
            np.arange(ends.shape[1]) * num_tokens + ends, return_inverse=True
        )
        targets, mask_ends = np.divmod(keys, num_tokens)
        copies = cls(
            sequences,
            sequences.target_sequences[targets],
            sequences.target_indices[targets],
            mask_ends,
        )
        return copies, copy_indices.reshape(ends.shape)

    @property
    def lengths(self) -> IntArray:
        """Number of tokens of each copy."""
        return self.sequences.lengths[self.sequence_indices]

    def pack(self, indices: IntArray, mask_id: int) -> tuple[PackedBatch, Tensor]:
        """Pack copies into a batch.

        Returns:
            The batch, and the index of each copy's token to predict, int64 [P].
        """
        lengths = self.lengths[indices]
        boundaries = np.concatenate([[0], lengths.cumsum()])
        starts = self.sequences.starts[self.sequence_indices[indices]]
        positions = np.arange(boundaries[-1]) - np.repeat(boundaries[:-1], lengths)
        source_indices = positions + np.repeat(starts, lengths)
        mask_starts, mask_ends = self.mask_starts[indices], self.mask_ends[indices]
        is_masked = source_indices >= np.repeat(mask_starts, lengths)
        is_masked &= source_indices < np.repeat(mask_ends, lengths)
        ids = np.where(is_masked, mask_id, self.sequences.ids[source_indices])
        batch = PackedBatch(
            ids=torch.from_numpy(ids),
            segments=torch.zeros(len(ids), dtype=torch.int64),
            positions=torch.from_numpy(positions),
            cu_seqlens=torch.from_numpy(boundaries.astype(np.int32)),
            max_seqlen=int(lengths.max()),
        )
        return batch, torch.from_numpy(mask_starts - starts + boundaries[:-1])


def compute_log_probabilities(
    bundle: PretrainedBundle,
    sequences: Sequence[Sequence[int]],
    variants: Sequence[PllVariant],
    progress: Progress,
) -> Mapping[PllVariant, list[list[float]]]:
    """Compute the log-probability of each token of each sequence while it is masked.

    Args:
        bundle: The model.
        sequences: Token ids without [CLS] and [SEP], none empty or longer than the model's maximum.
            Repeated sequences are computed once.
        variants: Which tokens are masked.
        progress: Advances by the number of tokens computed for each variant.

    Returns:
        Natural logarithms by variant, sequence and token.

    Raises:
        ModelError: The model has no masked-LM head.
        InputError: A variant is unknown.
    """
    bundle.require_mlm_head()
    for variant in variants:
        if variant not in PLL_VARIANTS:
            raise InputError(
                f"unknown PLL variant: {variant!r}; expected {' or '.join(map(repr, PLL_VARIANTS))}"
            )
    if not sequences:
        return {variant: [] for variant in variants}
    distinct = {tuple(ids): index for index, ids in enumerate(dict.fromkeys(map(tuple, sequences)))}
    arrays = _Sequences.build(list(distinct), bundle.tokenizer)
    copies, copy_indices = _MaskedCopies.build(arrays, variants, bundle.tokenizer)
    log_probabilities = np.zeros(len(copies.mask_starts))
    # A copy counts once for each occurrence of its sequence and each variant.
    occurrences = np.bincount([distinct[tuple(ids)] for ids in sequences], minlength=len(distinct))
    weights = np.bincount(copy_indices.ravel()) * occurrences[copies.sequence_indices]
    for indices, values in _compute_batches(bundle, copies):
        log_probabilities[indices] = values
        progress.advance(int(weights[indices].sum()))
    boundaries = (arrays.lengths - 2).cumsum()[:-1]
    results: dict[PllVariant, list[list[float]]] = {}
    for variant, variant_copies in zip(variants, copy_indices, strict=True):
        values_by_sequence = np.split(log_probabilities[variant_copies], boundaries)
        results[variant] = [values_by_sequence[distinct[tuple(ids)]].tolist() for ids in sequences]
    return results


def _compute_batches(
    bundle: PretrainedBundle, copies: _MaskedCopies
) -> Iterator[tuple[IntArray, NDArray[np.float32]]]:
    """Yield indices of copies and the log-probabilities of their tokens to predict."""
    device = next(bundle.model.parameters()).device
    max_tokens = choose_batch_tokens(device, bundle.config.feed_forward)
    for batch_indices in batch_by_length(copies.lengths.tolist(), max_tokens):
        indices = np.array(batch_indices)
        batch, target_indices = copies.pack(indices, bundle.tokenizer.mask_id)
        labels = torch.from_numpy(copies.sequences.ids[copies.mask_starts[indices]])
        values = _compute_batch(
            bundle, batch.to(device), target_indices.to(device), labels.to(device)
        )
        yield indices, values.cpu().numpy()


@torch.inference_mode()
def _compute_batch(
    bundle: PretrainedBundle, batch: PackedBatch, token_indices: Tensor, labels: Tensor
) -> Tensor:
    """Return the log-probabilities of labels at P tokens of a batch, float32 [P].

    Rows of the decoder beyond the tokenizer's vocabulary are excluded.
    """
    model = bundle.model
    hidden = model.mlm.apply_transform(model.bert(batch, token_indices=token_indices))
    chunk_rows = max(MAX_CHUNK_LOGITS // bundle.config.vocab_size, 1)
    chunks = []
    for hidden_chunk, label_chunk in zip(
        torch.split(hidden, chunk_rows), torch.split(labels, chunk_rows), strict=True
    ):
        logits = model.mlm.decoder(hidden_chunk)[:, : bundle.tokenizer.vocab_size].float()
        chunks.append(logits.log_softmax(-1).gather(1, label_chunk[:, None])[:, 0])
    return torch.cat(chunks)
