"""The stream of training examples: a pure function of (seed, epoch, index).

An epoch uses every document of a split once. The examples of an epoch, in the order of the store,
are grouped into chunks of 16. The chunks are shuffled over the whole split. A fixed number of
shuffled chunks forms a block, and the examples of a block are shuffled. So reading an example
requires computing only its block, and the examples of a batch come from all parts of the store.
"""

import queue
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Final, TypeVar

import numpy as np

from bertsmith.data.causal_lm import build_causal_lm_labels
from bertsmith.data.counter_rng import IntArray, derive_key, init_states, random_bits
from bertsmith.data.masking import VocabularyInfo, mask_tokens
from bertsmith.data.packing import CuSeqlens, ExampleBatch, compute_max_seqlen, concat_batches
from bertsmith.data.sentence_pairs import RNG_ORDER, PairSampler, SentencePairs
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split, describe_out_of_vocabulary, make_damaged_file_error
from bertsmith.splitmix64 import UInt64Array

#: Number of examples per chunk of consecutive examples. A chunk is never divided between blocks.
#: Chunks are short, so that the many chunks of a block are a representative sample of the split.
CHUNK_LENGTH = 16
#: Approximate number of tokens in a block. Computing a block takes tens of milliseconds and a few
#: megabytes.
BLOCK_TOKENS = 1 << 20
#: Maximum number of cached blocks, and of cached epochs: a batch may need two of either. A run with
#: two phases first needs an epoch of each, to measure its speed.
_CACHE_SIZE = 2
#: Number that makes the random key of the chunk order different from that of the sentence pairs.
_CHUNK_ORDER: Final = 1
#: Maximum number of finished items in the queue of ``prefetch``.
_QUEUE_SIZE: Final = 2
#: Maximum number of items between the last requested one and the one that ``prefetch`` computes.
PREFETCH_DISTANCE: Final = _QUEUE_SIZE + 1
#: Type of the items of ``prefetch``.
Item = TypeVar("Item")


@dataclass(frozen=True)
class _Block:
    """Consecutive examples without labels of tokens, and the random state of each, uint64 [B]."""

    examples: ExampleBatch
    rng_states: UInt64Array


class ExampleStream:
    """The examples of one epoch over one split; any of them can be accessed by its index.

    Attributes:
        epoch: Number of the epoch.
        vocabulary: Special tokens and continuation pieces of the split's vocabulary.
    """

    def __init__(
        self,
        split: Split,
        vocabulary: VocabularyInfo,
        settings: DataSettings,
        length: int,
        seed: int,
        epoch: int,
    ) -> None:
        """Count the examples of the epoch.

        Args:
            split: The documents.
            vocabulary: Special tokens and continuation pieces.
            settings: How examples are made; ``settings.max_seqlen`` is ignored.
            length: Maximum number of tokens per sequence (S), with [CLS] and [SEP].
            seed: Random seed.
            epoch: Number of the epoch.

        Raises:
            StoreError: The split is too small for an example.
        """
        self.epoch = epoch
        self._split = split
        self.vocabulary = vocabulary
        self._settings = settings
        self._sampler = PairSampler(split, settings, length, seed, epoch)
        chunk_starts, self._num_examples = self._sampler.find_chunk_starts(CHUNK_LENGTH)
        self._chunk_offsets = np.append(chunk_starts, split.counts.sentences)
        # The last chunk may be shorter. It stays last, so that all others start at multiples of
        # CHUNK_LENGTH.
        chunk_states = init_states(
            derive_key(seed, epoch, _CHUNK_ORDER), np.arange(len(chunk_starts) - 1)
        )
        order = np.argsort(random_bits(chunk_states, RNG_ORDER), kind="stable")
        self._chunk_order = np.append(order, len(chunk_starts) - 1)
        self._chunks_per_block = max(BLOCK_TOKENS // length // CHUNK_LENGTH, 1)
        self._blocks: OrderedDict[int, _Block] = OrderedDict()

    def __len__(self) -> int:
        """Return the exact number of examples in this epoch."""
        return self._num_examples

    @property
    def is_masked_lm(self) -> bool:
        """Whether the objective is masked LM, so that the labels hold the original tokens."""
        return self._settings.objective == "masked"

    def batch(
        self,
        first: int,
        count: int,
        masking_rate: float | None = None,
        *,
        is_causal: bool = False,
    ) -> ExampleBatch:
        """Return the examples [first, first + count) of the epoch.

        Consecutive batches are read fastest, because blocks are cached.

        Args:
            first: Index of the first example.
            count: Number of examples.
            masking_rate: Share of tokens to predict; None: that of the settings. Tokens that are
                masked at a lower rate are also masked at a higher rate, except with whole-word
                masking: at a lower rate, a shorter word can replace one that does not fit.
            is_causal: Whether each token predicts the next one, without masks and NSP labels;
                requires the objective "masked".

        Raises:
            IndexError: The epoch does not have these examples.
            StoreError: The split holds an id outside the vocabulary.
        """
        last = first + count
        if count < 1 or not 0 <= first < last <= self._num_examples:
            raise IndexError(f"examples {first} to {last} of an epoch of {self._num_examples}")
        block_size = self._chunks_per_block * CHUNK_LENGTH
        parts, states = [], []
        for number in range(first // block_size, (last - 1) // block_size + 1):
            block_start = number * block_size
            slice_start = max(first - block_start, 0)
            slice_end = min(last - block_start, block_size)
            block = self._get_block(number)
            parts.append(block.examples.slice(slice_start, slice_end))
            states.append(block.rng_states[slice_start:slice_end])
        batch = concat_batches(parts)
        if is_causal:
            return replace(self._label_next_tokens(batch), nsp_labels=None, is_causal=True)
        if self.is_masked_lm:
            return self._mask(batch, np.concatenate(states), masking_rate)
        return self._label_next_tokens(batch)

    def _mask(
        self, batch: ExampleBatch, states: UInt64Array, masking_rate: float | None
    ) -> ExampleBatch:
        """Return a batch with masks.

        Args:
            batch: Examples without labels of tokens.
            states: Random state of each example, uint64 [B].
            masking_rate: Share of tokens to predict; None: that of the settings.
        """
        settings = self._settings
        if masking_rate is not None:
            settings = settings.model_copy(update={"masking_rate": masking_rate})
        ids, positions, labels = mask_tokens(
            batch.ids, batch.cu_seqlens, states, self.vocabulary, settings
        )
        return replace(batch, ids=ids, masked_positions=positions, masked_labels=labels)

    def _label_next_tokens(self, batch: ExampleBatch) -> ExampleBatch:
        """Return a batch in which each token is labeled with the next one."""
        positions, labels = build_causal_lm_labels(batch.ids, batch.cu_seqlens, self.vocabulary)
        return replace(batch, masked_positions=positions, masked_labels=labels)

    def _get_block(self, number: int) -> _Block:
        """Return a block from the cache, or compute it."""
        if number in self._blocks:
            self._blocks.move_to_end(number)
            return self._blocks[number]
        block = self._build_block(number)
        self._blocks[number] = block
        while len(self._blocks) > _CACHE_SIZE:
            self._blocks.popitem(last=False)
        return block

    def _build_block(self, number: int) -> _Block:
        """Compute all examples of a block."""
        first_chunk = number * self._chunks_per_block
        chunks = np.sort(self._chunk_order[first_chunk : first_chunk + self._chunks_per_block])
        pairs = self._sampler.sample_pairs(
            self._chunk_offsets[chunks], self._chunk_offsets[chunks + 1]
        )
        order_bits = random_bits(pairs.rng_states, RNG_ORDER)
        pairs = pairs.take(np.argsort(order_bits, kind="stable"))
        ids, segments, positions, cu_seqlens = pack_pairs(
            self._split, pairs, self.vocabulary, nsp=self._settings.nsp
        )
        max_id = int(ids.max())
        if max_id >= self.vocabulary.vocab_size:
            problem = describe_out_of_vocabulary(max_id, self.vocabulary.vocab_size)
            raise make_damaged_file_error(self._split.name, problem)
        no_labels = np.empty(0, np.int64)
        examples = ExampleBatch(
            ids=ids,
            segments=segments,
            positions=positions,
            cu_seqlens=cu_seqlens,
            max_seqlen=compute_max_seqlen(cu_seqlens),
            masked_positions=no_labels,
            masked_labels=no_labels,
            nsp_labels=pairs.nsp_labels if self._settings.nsp else None,
        )
        return _Block(examples, pairs.rng_states)


def pack_pairs(
    split: Split, pairs: SentencePairs, vocabulary: VocabularyInfo, *, nsp: bool
) -> tuple[IntArray, IntArray, IntArray, CuSeqlens]:
    """Pack examples into one row: [CLS] A [SEP] B [SEP], or [CLS] A [SEP] without ``nsp``.

    Returns:
        ids, segments and positions, int64 [T], and cu_seqlens, int32 [B + 1].
    """
    count = len(pairs.a_first)
    # Each sequence has two parts, "[CLS] A [SEP]" and "B [SEP]"; without NSP the second is empty.
    sizes = np.zeros((count, 2), np.int64)
    sizes[:, 0] = pairs.a_size + 2
    sizes[:, 1] = pairs.b_size + 1 if nsp else 0
    ends = np.cumsum(sizes).reshape(count, 2)
    starts = ends - sizes
    # Both parts are copied with one token more than the segment after it, and the first part also
    # with one token more before it. [CLS] and [SEP] then replace these tokens.
    sources = np.stack([pairs.a_first - 1, pairs.b_first], axis=1)
    indices = np.arange(int(ends[-1, 1]))
    # "clip" keeps indices valid where the split has no token before or after a segment.
    ids = split.ids.take(indices + np.repeat(sources - starts, sizes.ravel()), mode="clip")
    ids = ids.astype(np.int64)
    ids[starts[:, 0]] = vocabulary.cls_id
    ids[ends[:, 0] - 1] = vocabulary.sep_id
    ids[ends[:, 1] - 1] = vocabulary.sep_id
    segments = np.repeat(np.tile(np.array([0, 1]), count), sizes.ravel())
    positions = indices - np.repeat(starts[:, 0], sizes.sum(axis=1))
    cu_seqlens = np.append(0, ends[:, 1]).astype(np.int32)
    return ids, segments, positions, cu_seqlens


@dataclass(frozen=True)
class _Failure:
    """An exception in the thread that computes items."""

    error: BaseException


class EpochStreams:
    """The examples of each epoch over one split.

    Counting the examples of an epoch takes seconds for a large store, so the last epochs are kept.
    """

    def __init__(
        self, split: Split, vocabulary: VocabularyInfo, settings: DataSettings, seed: int
    ) -> None:
        """Create no stream yet; for the arguments, see ``ExampleStream``."""
        make_stream = partial(ExampleStream, split, vocabulary, settings, seed=seed)
        self._get_cached = lru_cache(_CACHE_SIZE)(make_stream)

    def get(self, length: int, epoch: int) -> ExampleStream:
        """Return the examples of an epoch with a maximum sequence length.

        Raises:
            StoreError: The split is too small for an example.
        """
        return self._get_cached(length=length, epoch=epoch)


class EndlessStream:
    """Consecutive epochs as one endless sequence of examples.

    A batch at the end of an epoch is filled with examples of the next epoch. So every step has the
    same number of sequences, and step n has the examples [n * batch_size, (n + 1) * batch_size).
    """

    def __init__(
        self, streams: EpochStreams, *, length: int, first_epoch: int = 0, epoch_start: int = 0
    ) -> None:
        """Start with epoch number ``first_epoch``.

        A sequence that started with an earlier epoch can continue without counting the examples of
        the epochs before ``first_epoch`` again.

        Args:
            streams: The examples of each epoch.
            length: Maximum number of tokens per sequence.
            first_epoch: Number of the first epoch whose examples are read.
            epoch_start: Index of its first example in the endless sequence.

        Raises:
            StoreError: The split is too small for an example.
        """
        self._streams = streams
        self._length = length
        self._first_epoch = first_epoch
        # Index of the first example of each epoch, for the epochs counted so far.
        self._epoch_starts = [epoch_start]
        # Count the first epoch now, so that a split that is too small raises StoreError here.
        self.locate(epoch_start)

    def batch(
        self,
        first: int,
        count: int,
        masking_rate: float | None = None,
        *,
        is_causal: bool = False,
    ) -> ExampleBatch:
        """Return the examples [first, first + count) of the endless sequence.

        ``masking_rate`` and ``is_causal`` are those of ``ExampleStream.batch``.
        """
        parts = []
        while count > 0:
            epoch, index = self.locate(first)
            stream = self._streams.get(self._length, epoch)
            size = min(count, len(stream) - index)
            parts.append(stream.batch(index, size, masking_rate, is_causal=is_causal))
            first, count = first + size, count - size
        return concat_batches(parts)

    def locate(self, index: int) -> tuple[int, int]:
        """Return the epoch of an example of the endless sequence, and its index in that epoch."""
        while self._epoch_starts[-1] <= index:
            epoch = self._first_epoch + len(self._epoch_starts) - 1
            num_examples = len(self._streams.get(self._length, epoch))
            self._epoch_starts.append(self._epoch_starts[-1] + num_examples)
        epoch_offset = bisect_right(self._epoch_starts, index) - 1
        return self._first_epoch + epoch_offset, index - self._epoch_starts[epoch_offset]


def prefetch(items: Iterator[Item]) -> Iterator[Item]:
    """Yield items, such as batches, that a background thread computes in advance.

    An exception in the thread is raised in the caller. The thread ends when the iterator is closed.
    """
    ready: queue.Queue[Item | _Failure | None] = queue.Queue(maxsize=_QUEUE_SIZE)
    stopped = threading.Event()

    def put(item: Item | _Failure | None) -> None:
        """Put an item in the queue; give up if the iterator is closed while the queue is full."""
        while not stopped.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def produce() -> None:
        try:
            for item in items:
                put(item)
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            put(_Failure(error))

    thread = threading.Thread(target=produce, name="bertsmith-batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stopped.set()
        thread.join()
