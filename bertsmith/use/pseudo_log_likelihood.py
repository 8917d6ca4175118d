"""Compute the log-probability of each token of many sequences while the token is masked.

Each sequence is copied once for each of its tokens, with this token masked. The copies of all
sequences share batches. The last layer and the masked-LM head are computed only for the tokens to
predict.
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

#: Which tokens are masked while a token is predicted: only the token itself (``original``, Salazar
#: et al. 2020), or also the tokens after it in its word (``within-word``, PLL-word-l2r of Kauf and
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
        target_indices: Indices of the tokens to predict, which are all except [CLS] and [SEP].
        target_sequences: Index of the sequence of each token to predict.
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

    def compute_mask_ends(self, variant: PllVariant, tokenizer: Tokenizer) -> IntArray:
        """Return the index after the last masked token, for each token to predict."""
        if variant == "original":
            return self.target_indices + 1
        # A word ends where the next one starts. [SEP] also counts as a start, so the last word of a
        # sequence does not extend into the next sequence.
        word_starts = np.flatnonzero(~tokenizer.is_continuation[self.ids])
        next_words = np.searchsorted(word_starts, self.target_indices, side="right")
        ends: IntArray = word_starts[next_words]
        return ends


@dataclass(frozen=True)
class _MaskedCopies:
    """Copies of sequences with masked tokens. The first masked token of each copy is predicted.

    Attributes:
        sequences: The original sequences.
        sequence_indices: Index of the original sequence of each copy.
        mask_starts: Index of each copy's first masked token in ``sequences.ids``.
        mask_ends: Index after each copy's last masked token.
    """

    sequences: _Sequences
    sequence_indices: IntArray
    mask_starts: IntArray
    mask_ends: IntArray

    @classmethod
    def build(
        cls, sequences: _Sequences, variants: Sequence[PllVariant], tokenizer: Tokenizer
    ) -> tuple[Self, IntArray]:
        """Build the masked copies for all tokens to predict and all variants.

        Variants share the copies in which they mask the same tokens.

        Returns:
            The distinct copies, and the index of the copy for each variant and each token to
            predict, int64 [variants, tokens].
        """
        ends = np.stack([sequences.compute_mask_ends(variant, tokenizer) for variant in variants])
        # A token to predict and the end of its mask determine a copy. Both are combined into one
        # integer to find the distinct copies.
        factor = len(sequences.ids) + 1
        keys = np.arange(ends.shape[1]) * factor + ends
        distinct_keys, copy_indices = np.unique(keys, return_inverse=True)
        targets, mask_ends = np.divmod(distinct_keys, factor)
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
            The batch, and the index in the batch of each copy's token to predict, int64 [P].
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


def check_variants(variants: Sequence[PllVariant]) -> None:
    """Raise InputError if a PLL variant is unknown, or there is none."""
    expected = " or ".join(map(repr, PLL_VARIANTS))
    if not variants:
        raise InputError(f"no PLL variant; expected {expected}")
    for variant in variants:
        if variant not in PLL_VARIANTS:
            raise InputError(f"unknown PLL variant: {variant!r}; expected {expected}")


def compute_log_probabilities(
    bundle: PretrainedBundle,
    sequences: Sequence[Sequence[int]],
    variants: Sequence[PllVariant],
    progress: Progress,
) -> Mapping[PllVariant, list[list[float]]]:
    """Compute the log-probability of each token of each sequence while it is masked.

    Args:
        bundle: The model.
        sequences: The token ids of each sequence, without [CLS] and [SEP]. No sequence may be empty
            or longer than the model's maximum. Repeated sequences are computed once.
        variants: Which tokens are masked while a token is predicted.
        progress: Receives the number of predicted tokens, summed over the variants.

    Returns:
        Natural logarithms of the probabilities, by variant, sequence and token.

    Raises:
        ModelError: The model has no masked-LM head.
        InputError: A variant is unknown, or there is none.
    """
    bundle.require_mlm_head()
    check_variants(variants)
    if not sequences:
        return {variant: [] for variant in variants}
    sequences = [tuple(ids) for ids in sequences]
    distinct_indices = {ids: index for index, ids in enumerate(dict.fromkeys(sequences))}
    arrays = _Sequences.build(list(distinct_indices), bundle.tokenizer)
    copies, copy_indices = _MaskedCopies.build(arrays, variants, bundle.tokenizer)
    log_probabilities = np.zeros(len(copies.mask_starts))
    # The progress counts a copy once for each occurrence of its sequence and each variant.
    occurrences = np.bincount([distinct_indices[ids] for ids in sequences])
    weights = np.bincount(copy_indices.ravel()) * occurrences[copies.sequence_indices]
    for indices, values in _compute_batches(bundle, copies):
        log_probabilities[indices] = values
        progress.advance(int(weights[indices].sum()))
    boundaries = (arrays.lengths - 2).cumsum()[:-1]
    results: dict[PllVariant, list[list[float]]] = {}
    for variant, variant_copies in zip(variants, copy_indices, strict=True):
        values_by_sequence = np.split(log_probabilities[variant_copies], boundaries)
        results[variant] = [values_by_sequence[distinct_indices[ids]].tolist() for ids in sequences]
    return results


def _compute_batches(
    bundle: PretrainedBundle, copies: _MaskedCopies
) -> Iterator[tuple[IntArray, NDArray[np.float32]]]:
    """Yield the indices of the copies in each batch, and the log-probabilities of their tokens."""
    device = next(bundle.model.parameters()).device
    max_tokens = choose_batch_tokens(device, bundle.config.feed_forward)
    for batch_indices in batch_by_length(copies.lengths.tolist(), max_tokens):
        indices = np.array(batch_indices)
        batch, target_indices = copies.pack(indices, bundle.tokenizer.mask_id)
        labels = torch.from_numpy(copies.sequences.ids[copies.mask_starts[indices]])
        values = _compute_label_log_probabilities(
            bundle, batch.to(device), target_indices.to(device), labels.to(device)
        )
        yield indices, values.cpu().numpy()


@torch.inference_mode()
def _compute_label_log_probabilities(
    bundle: PretrainedBundle, batch: PackedBatch, token_indices: Tensor, labels: Tensor
) -> Tensor:
    """Return the log-probability of the label of each of P masked tokens, float32 [P].

    The decoder of a model may have more outputs than the vocabulary has tokens. The additional
    outputs are excluded.

    Args:
        bundle: The model.
        batch: The batch.
        token_indices: Indices of the masked tokens in the batch, int64 [P].
        labels: Token ids of the original tokens, int64 [P].
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
