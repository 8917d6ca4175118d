"""The stream of training examples: a pure function of (seed, epoch, index).

It never knows a model, a device or how many workers read it.

An epoch walks every document of a split once. The walk's examples, in the order of the store,
are counted off in runs of 16; the runs are shuffled over the whole split; every so many runs
are a block, whose examples are shuffled among themselves. So any example is reached by
arithmetic and the making of its block, and neighbours in a batch come from all over the store.
"""

import queue
import threading
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial
from typing import Protocol

import numpy as np

from bertsmith.data.causal_lm import build_causal_lm_labels
from bertsmith.data.counter_rng import IntArray, derive_key, init_states, random_bits
from bertsmith.data.masking import VocabularyInfo, mask_tokens
from bertsmith.data.packing import Batch, CuSeqlens, compute_max_seqlen, concat_batches
from bertsmith.data.sentence_pairs import RNG_ORDER, PairSampler, SentencePairs
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split, damaged_file_error, describe_out_of_vocabulary

#: The examples of a run, which stay in one block. Short, so that a block is a fair sample.
RUN_LENGTH = 16
#: About how many tokens a block holds: some tens of milliseconds of work, a few megabytes.
BLOCK_TOKENS = 1 << 20
#: The blocks kept at hand: the one being read, and its neighbour.
_KEPT = 2
#: Sets the key of the order of runs apart from that of the walk.
_RUN_ORDER = 1


class ExampleStream:
    """The examples of one epoch over one split, each reachable by its index at once."""

    def __init__(
        self,
        split: Split,
        facts: VocabularyInfo,
        settings: DataSettings,
        length: int,
        seed: int,
        epoch: int,
    ) -> None:
        """Count the epoch's examples; raise StoreError if there cannot be one.

        ``length`` is S, in tokens with [CLS] and [SEP] (it overrides that of the settings).
        """
        self.epoch = epoch
        self._split = split
        self.vocabulary = facts
        self._settings = settings
        self._walk = PairSampler(split, settings, length, seed, epoch)
        starts, self._count = self._walk.find_run_starts(RUN_LENGTH)
        self._bounds = np.append(starts, split.counts.sentences)
        # The last run may be short: it stays last, so that all others start at multiples of RUN.
        order = random_bits(
            init_states(derive_key(seed, epoch, _RUN_ORDER), np.arange(len(starts) - 1)), RNG_ORDER
        )
        self._order = np.append(np.argsort(order, kind="stable"), len(starts) - 1)
        self._block_runs = max(BLOCK_TOKENS // length // RUN_LENGTH, 1)
        self._blocks: OrderedDict[int, Batch] = OrderedDict()

    def __len__(self) -> int:
        """Return the exact number of examples in this epoch."""
        return self._count

    @property
    def is_masked_lm(self) -> bool:
        """Whether tokens are masked, so that the words stand in the labels."""
        return self._settings.objective == "masked"

    def batch(self, first: int, count: int) -> Batch:
        """Return the examples [first, first + count) of the epoch; cheap when read in order."""
        last = first + count
        if count < 1 or not 0 <= first < last <= self._count:
            raise IndexError(f"examples {first} to {last} of an epoch of {self._count}")
        size = self._block_runs * RUN_LENGTH
        pieces = []
        for number in range(first // size, (last - 1) // size + 1):
            low, high = max(first - number * size, 0), min(last - number * size, size)
            pieces.append(self._block(number).slice(low, high))
        return concat_batches(pieces)

    def _block(self, number: int) -> Batch:
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        block = self._make(number)
        self._blocks[number] = block
        while len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)
        return block

    def _make(self, number: int) -> Batch:
        """Draw all examples of a block."""
        runs = np.sort(self._order[number * self._block_runs : (number + 1) * self._block_runs])
        pairs = self._walk.sample_pairs(self._bounds[runs], self._bounds[runs + 1])
        pairs = pairs.take(np.argsort(random_bits(pairs.rng_states, RNG_ORDER), kind="stable"))
        ids, segments, positions, boundaries = pack_pairs(
            self._split, pairs, self.vocabulary, nsp=self._settings.nsp
        )
        if (largest := int(ids.max())) >= self.vocabulary.vocab_size:
            raise damaged_file_error(
                self._split.name, describe_out_of_vocabulary(largest, self.vocabulary.vocab_size)
            )
        if self.is_masked_lm:
            ids, masked, labels = mask_tokens(
                ids, boundaries, pairs.rng_states, self.vocabulary, self._settings
            )
        else:
            masked, labels = build_causal_lm_labels(ids, boundaries, self.vocabulary)
        return Batch(
            ids=ids,
            segments=segments,
            positions=positions,
            cu_seqlens=boundaries,
            max_seqlen=compute_max_seqlen(boundaries),
            masked_positions=masked,
            masked_labels=labels,
            nsp_labels=pairs.nsp_labels if self._settings.nsp else None,
        )


def pack_pairs(
    split: Split, pairs: SentencePairs, facts: VocabularyInfo, *, nsp: bool
) -> tuple[IntArray, IntArray, IntArray, CuSeqlens]:
    """Lay examples out in one row: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without ``nsp``.

    Returns:
        ids, segments and positions, int64 [T], and boundaries, int32 [B + 1].
    """
    count = len(pairs.a_first)
    # Two parts a sequence: "[CLS] A [SEP]" and "B [SEP]"; without NSP the second one is empty.
    sizes = np.zeros((count, 2), np.int64)
    sizes[:, 0] = pairs.a_size + 2
    sizes[:, 1] = pairs.b_size + 1 if nsp else 0
    ends = np.cumsum(sizes).reshape(count, 2)
    starts = ends - sizes
    # Where in the store's ids each part begins, had they a [CLS] before A as well.
    origin = np.stack([pairs.a_first - 1, pairs.b_first], axis=1)
    row = np.arange(int(ends[-1, 1]))
    ids = split.ids.take(row + np.repeat(origin - starts, sizes.ravel()), mode="clip")
    ids = ids.astype(np.int64)
    ids[starts[:, 0]] = facts.cls_id
    ids[ends[:, 0] - 1] = facts.sep_id
    ids[ends[:, 1] - 1] = facts.sep_id
    segments = np.repeat(np.tile(np.array([0, 1]), count), sizes.ravel())
    positions = row - np.repeat(starts[:, 0], sizes.sum(axis=1))
    boundaries = np.append(0, ends[:, 1]).astype(np.int32)
    return ids, segments, positions, boundaries


class EndlessStream:
    """The epochs of one phase one after another without end, as one sequence of examples.

    A batch that an epoch's end would leave ragged is filled from the next epoch, so every step
    has the same number of sequences and the examples of step n are [n * batch, (n + 1) * batch).
    """

    def __init__(
        self,
        split: Split,
        facts: VocabularyInfo,
        settings: DataSettings,
        *,
        length: int,
        seed: int,
        first_epoch: int = 0,
    ) -> None:
        """Begin at ``first_epoch``: a later phase begins with an epoch of its own."""
        self._make = partial(ExampleStream, split, facts, settings, length, seed)
        self._first = first_epoch
        self._streams: OrderedDict[int, ExampleStream] = OrderedDict()
        #: Where each epoch begins, as far as they have been counted.
        self._starts = [0]
        self.locate(0)

    def batch(self, first: int, count: int) -> Batch:
        """Return the examples [first, first + count) of the endless sequence."""
        pieces = []
        while count > 0:
            epoch, index = self.locate(first)
            stream = self._stream(epoch)
            size = min(count, len(stream) - index)
            pieces.append(stream.batch(index, size))
            first, count = first + size, count - size
        return concat_batches(pieces)

    def locate(self, index: int) -> tuple[int, int]:
        """Return (epoch, index within it) of an example of the endless sequence."""
        while self._starts[-1] <= index:
            epoch = self._first + len(self._starts) - 1
            self._starts.append(self._starts[-1] + len(self._stream(epoch)))
        number = int(np.searchsorted(self._starts, index, "right")) - 1
        return self._first + number, index - self._starts[number]

    def epoch_start(self, epoch: int) -> int:
        """Return the index at which an epoch begins in the endless sequence."""
        while len(self._starts) <= epoch - self._first:
            self.locate(self._starts[-1])
        return self._starts[epoch - self._first]

    def _stream(self, epoch: int) -> ExampleStream:
        if epoch not in self._streams:
            self._streams[epoch] = self._make(epoch)
            while len(self._streams) > _KEPT:
                self._streams.popitem(last=False)
        return self._streams[epoch]


class BatchSource(Protocol):
    """What batches are read from: a Stream or Epochs."""

    def batch(self, first: int, count: int) -> Batch:
        """Return the examples [first, first + count)."""


def prefetch_batches(
    source: BatchSource, first: int, count: int, *, steps: int, prefetch: int = 2
) -> Iterator[Batch]:
    """Yield ``steps`` batches of ``count`` examples from index ``first`` on.

    A thread of its own makes them, ``prefetch`` of the reader; an error in it is raised here. The
    thread ends with the iterator.
    """
    ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=prefetch)
    over = threading.Event()

    def hand_over(item: Batch | BaseException) -> None:
        while not over.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def work() -> None:
        try:
            for step in range(steps):
                if over.is_set():
                    return
                hand_over(source.batch(first + step * count, count))
        except BaseException as error:  # noqa: BLE001 - it is raised again in the reader's thread
            hand_over(error)

    thread = threading.Thread(target=work, name="bertsmith-batches", daemon=True)
    thread.start()
    try:
        for _ in range(steps):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        over.set()
        thread.join()
