"""Micro-batches that all have the same shape, for a compiled model on a GPU.

The compiler then generates one graph per phase of a run and number of predictions, which changes
with the masking rate, and another one for steps with an attention bias. Each micro-batch is filled
up with short sequences of token 0 that predict nothing, so they change no loss and no gradient.
"""

from dataclasses import dataclass, replace

import numpy as np

from bertsmith.data.packing import ExampleBatch

#: Label of a prediction that does not count (``ignore_index`` of ``F.cross_entropy``).
IGNORED_LABEL = -100
#: The number of tokens is a multiple of this number, so that matrix products use full tiles.
_TOKEN_MULTIPLE = 128
#: The number of predictions is rounded up to a multiple of this fraction of the number of tokens.
_PREDICTION_FRACTION = 1 / 16
#: There are enough filler sequences for batches whose mean length is at least this fraction of the
#: maximum.
_MIN_FILL = 0.5


@dataclass(frozen=True)
class StaticShape:
    """Shape of all micro-batches of a phase.

    Attributes:
        num_parts: Number of micro-batches of a batch.
        num_sequences: B, with filler sequences.
        num_tokens: T, with the tokens of filler sequences.
        max_seqlen: S, the maximum length of a sequence.
    """

    num_parts: int
    num_sequences: int
    num_tokens: int
    max_seqlen: int

    @classmethod
    def choose(
        cls, batch_size: int, max_seqlen: int, max_tokens: int, num_processes: int = 1
    ) -> "StaticShape":
        """Return the shape that every micro-batch of a phase fits in.

        Args:
            batch_size: Number of sequences of a batch.
            max_seqlen: Maximum number of tokens of a sequence.
            max_tokens: Maximum number of tokens of a micro-batch, without filler sequences.
            num_processes: Number of processes that divide the micro-batches among them.
        """
        num_parts = -(-batch_size // max(1, max_tokens // max_seqlen))
        num_parts = min(-(-num_parts // num_processes) * num_processes, batch_size)
        part_size = -(-batch_size // num_parts)
        # Each filler sequence has at least one token. A smaller part has one of them more.
        num_tokens = part_size * (max_seqlen + 1) + 2
        num_tokens = -(-num_tokens // _TOKEN_MULTIPLE) * _TOKEN_MULTIPLE
        max_filler_tokens = num_tokens - int(_MIN_FILL * part_size * max_seqlen)
        num_fillers = -(-max_filler_tokens // max_seqlen)
        return cls(num_parts, part_size + num_fillers, num_tokens, max_seqlen)

    def split(self, batch: ExampleBatch) -> list[ExampleBatch]:
        """Split a batch into ``num_parts`` micro-batches with nearly the same number of sequences.

        The micro-batches are not filled up yet; see ``fill_up``.
        """
        ends = np.arange(1, self.num_parts + 1) * len(batch) // self.num_parts
        starts = np.append(0, ends[:-1])
        return [batch.slice(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]

    def fill_up(self, batch: ExampleBatch) -> ExampleBatch:
        """Return a micro-batch with filler sequences and predictions that do not count.

        If the sequences are much shorter than the maximum, there are more filler sequences than in
        other batches, and the compiler generates another graph.
        """
        filler_tokens = self.num_tokens - len(batch.ids)
        num_fillers = self.num_sequences - len(batch)
        while filler_tokens > num_fillers * self.max_seqlen:
            num_fillers += self.num_sequences
        ends = np.arange(1, num_fillers + 1) * filler_tokens // num_fillers
        lengths = np.diff(ends, prepend=0)
        unit = int(self.num_tokens * _PREDICTION_FRACTION)
        num_ignored = -len(batch.masked_labels) % unit
        zeros = np.zeros(filler_tokens, np.int64)
        nsp_labels = batch.nsp_labels
        if nsp_labels is not None:
            nsp_labels = np.append(nsp_labels, np.full(num_fillers, IGNORED_LABEL))
        return replace(
            batch,
            ids=np.append(batch.ids, zeros),
            segments=np.append(batch.segments, zeros),
            positions=np.append(
                batch.positions, np.concatenate([np.arange(length) for length in lengths])
            ),
            cu_seqlens=np.append(batch.cu_seqlens, (len(batch.ids) + ends).astype(np.int32)),
            max_seqlen=self.max_seqlen,
            masked_positions=np.append(
                batch.masked_positions, np.full(num_ignored, self.num_tokens - 1)
            ),
            masked_labels=np.append(batch.masked_labels, np.full(num_ignored, IGNORED_LABEL)),
            nsp_labels=nsp_labels,
        )
