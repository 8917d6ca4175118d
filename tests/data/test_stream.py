"""The example stream: a pure function of (seed, epoch, index), shuffled, with an exact length."""

import itertools
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np
import pytest

from bertsmith.data import stream as stream_module
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import ExampleBatch, concat_batches
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.data.stream import EndlessStream, EpochStreams, ExampleStream, prefetch
from bertsmith.errors import StoreError


def to_tuples(batch: ExampleBatch) -> list[tuple[object, ...]]:
    """Return the content of each sequence of a batch as a hashable tuple."""
    sequences: list[tuple[object, ...]] = []
    for index in range(len(batch)):
        sequence = batch.slice(index, index + 1)
        nsp_label = None if sequence.nsp_labels is None else int(sequence.nsp_labels[0])
        arrays = (
            sequence.ids,
            sequence.segments,
            sequence.positions,
            sequence.masked_positions,
            sequence.masked_labels,
        )
        sequences.append((*(tuple(array.tolist()) for array in arrays), nsp_label))
    return sequences


def unmask(batch: ExampleBatch) -> np.ndarray:
    """Return the ids of a batch before masking."""
    ids = batch.ids.copy()
    ids[batch.masked_positions] = batch.masked_labels
    return ids


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce blocks to 64 examples of 64 tokens, so that a small split has many blocks."""
    monkeypatch.setattr(stream_module, "BLOCK_TOKENS", 64 * 64)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("nsp", [True, False])
def test_example_depends_only_on_its_index(
    split: Split, vocabulary: VocabularyInfo, nsp: bool
) -> None:
    """An index gives the same example with any batch size and any order of access."""
    settings = DataSettings(nsp=nsp)
    stream = ExampleStream(split, vocabulary, settings, 64, seed=5, epoch=1)
    expected = to_tuples(stream.batch(0, len(stream)))
    assert len(expected) == len(stream) > 1000
    for size in (1, 17, 300):
        other_stream = ExampleStream(split, vocabulary, settings, 64, seed=5, epoch=1)
        firsts = list(range(0, len(stream), size))
        # Reading backwards rules out any dependence on earlier reads.
        sequences: list[tuple[object, ...]] = []
        for first in reversed(firsts):
            batch = other_stream.batch(first, min(size, len(stream) - first))
            sequences = to_tuples(batch) + sequences
        assert sequences == expected


@pytest.mark.usefixtures("small_blocks")
def test_epoch_contains_every_example_once(split: Split, vocabulary: VocabularyInfo) -> None:
    """Shuffling neither loses nor repeats examples, whatever the block size."""
    stream = ExampleStream(split, vocabulary, DataSettings(), 64, seed=5, epoch=1)
    pairs = stream._sampler.sample_pairs(np.array([0]), np.array([split.counts.sentences]))
    # Packing adds [CLS] and two [SEP].
    expected_sizes = Counter((pairs.a_size + pairs.b_size + 3).tolist())
    batch = stream.batch(0, len(stream))
    assert Counter(np.diff(batch.cu_seqlens).tolist()) == expected_sizes
    assert len(pairs.a_first) == len(stream)
    # The fixture ``small_blocks`` restores this value after the test.
    stream_module.BLOCK_TOKENS = 1 << 20
    stream_of_large_blocks = ExampleStream(split, vocabulary, DataSettings(), 64, seed=5, epoch=1)
    other_batch = stream_of_large_blocks.batch(0, len(stream))
    assert Counter(to_tuples(other_batch)) == Counter(to_tuples(batch))
    assert to_tuples(other_batch) != to_tuples(batch)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("whole_word_masking", [False, True])
def test_masking_rate_of_a_batch(
    split: Split, vocabulary: VocabularyInfo, whole_word_masking: bool
) -> None:
    """A batch at another rate has the same examples with the masks of a stream with that rate.

    The masks depend neither on the batches read before nor on the rate of the stream. A higher rate
    masks the same tokens and others, but not with whole-word masking.
    """
    settings = DataSettings(masking_rate=0.15, whole_word_masking=whole_word_masking)
    stream = ExampleStream(split, vocabulary, settings, 64, seed=5, epoch=1)
    other_settings = settings.model_copy(update={"masking_rate": 0.2})
    other_stream = ExampleStream(split, vocabulary, other_settings, 64, seed=5, epoch=1)
    low, high = stream.batch(10, 90), stream.batch(10, 90, 0.2)
    assert to_tuples(high) == to_tuples(other_stream.batch(10, 90))
    assert to_tuples(other_stream.batch(10, 90, 0.15)) == to_tuples(low)
    assert len(high.masked_labels) == pytest.approx(0.2 * len(high.ids), rel=0.05)
    is_subset = set(low.masked_positions) < set(high.masked_positions)
    assert is_subset != whole_word_masking


def test_epochs_and_seeds_give_different_examples(split: Split, vocabulary: VocabularyInfo) -> None:
    """Another epoch or another seed gives different pairs, order and masks."""
    streams = [
        ExampleStream(split, vocabulary, DataSettings(), 64, seed=seed, epoch=epoch)
        for seed, epoch in ((5, 0), (5, 1), (6, 0))
    ]
    example_sets = [set(to_tuples(stream.batch(0, len(stream)))) for stream in streams]
    for examples, other_examples in itertools.combinations(example_sets, 2):
        assert len(examples & other_examples) < 0.01 * len(examples)


@pytest.mark.usefixtures("small_blocks")
def test_block_mixes_documents(vocabulary: VocabularyInfo) -> None:
    """The 64 examples of a block come from four parts of the split, so from many documents."""
    documents = [[[5 + number % 90] * 20] * 6 for number in range(400)]
    stream = ExampleStream(
        Split.from_documents(documents),
        vocabulary,
        DataSettings(mask_replace_prob=0, random_replace_prob=0),
        length=64,
        seed=0,
        epoch=0,
    )
    batch = stream.batch(0, 64)
    first_ids = batch.ids[batch.cu_seqlens[:-1] + 1]
    assert len(set(first_ids.tolist())) >= 20


def test_pair_is_packed_with_special_tokens(split: Split, vocabulary: VocabularyInfo) -> None:
    """A sequence is [CLS] A [SEP] B [SEP]; segments, positions and cu_seqlens match it."""
    stream = ExampleStream(split, vocabulary, DataSettings(), 64, seed=0, epoch=0)
    batch = stream.batch(0, len(stream))
    original_ids = unmask(batch)
    assert batch.max_seqlen == np.diff(batch.cu_seqlens).max() == 64
    assert batch.cu_seqlens.dtype == np.int32
    for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids, segments = original_ids[first:last], batch.segments[first:last]
        separators = np.flatnonzero(ids == vocabulary.sep_id)
        assert ids[0] == vocabulary.cls_id
        assert len(separators) == 2
        assert separators[1] == len(ids) - 1
        a_length, b_length = separators[0] + 1, separators[1] - separators[0]
        assert segments.tolist() == [0] * a_length + [1] * b_length
        assert batch.positions[first:last].tolist() == list(range(last - first))


def test_segments_are_contiguous_text(vocabulary: VocabularyInfo) -> None:
    """Before masking, each segment is a contiguous range of one document's tokens."""
    rng = np.random.default_rng(0)
    documents = [[rng.integers(5, 97, 9).tolist() for _ in range(20)] for _ in range(30)]
    texts = [
        "," + ",".join(str(token) for sentence in document for token in sentence) + ","
        for document in documents
    ]
    split = Split.from_documents(documents)
    stream = ExampleStream(split, vocabulary, DataSettings(), 48, seed=0, epoch=0)
    batch = stream.batch(0, len(stream))
    original_ids = unmask(batch)
    for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids, segments = original_ids[first:last], batch.segments[first:last]
        for segment in (ids[segments == 0][1:-1], ids[segments == 1][:-1]):
            segment_text = "," + ",".join(str(token) for token in segment) + ","
            assert any(segment_text in text for text in texts)


def test_single_segment_is_packed_without_nsp(split: Split, vocabulary: VocabularyInfo) -> None:
    """Without NSP a sequence is [CLS] A [SEP] in one segment, and there are no labels."""
    stream = ExampleStream(split, vocabulary, DataSettings(nsp=False), 64, seed=0, epoch=0)
    batch = stream.batch(0, 100)
    assert batch.nsp_labels is None
    assert not batch.segments.any()
    assert (batch.ids == vocabulary.sep_id).sum() == len(batch)
    assert batch.max_seqlen == 64


def test_concatenated_slices_equal_the_batch(split: Split, vocabulary: VocabularyInfo) -> None:
    """Slicing a batch and concatenating the slices restores it; indices of a slice start at 0.

    A slice that ends after the batch is an error.
    """
    batch = ExampleStream(split, vocabulary, DataSettings(), 64, seed=0, epoch=0).batch(3, 50)
    batch = replace(batch, neighbor_bias=0.5)
    slices = [batch.slice(first, first + 10) for first in range(0, 50, 10)]
    restored = concat_batches(slices)
    for name in ("ids", "segments", "positions", "cu_seqlens", "masked_positions", "masked_labels"):
        assert (getattr(restored, name) == getattr(batch, name)).all()
        assert getattr(restored, name).dtype == getattr(batch, name).dtype
    assert restored.neighbor_bias == 0.5
    assert slices[1].cu_seqlens[0] == 0
    with pytest.raises(IndexError):
        batch.slice(0, 51)


def test_index_beyond_the_epoch_is_rejected(split: Split, vocabulary: VocabularyInfo) -> None:
    """Examples beyond the end of the epoch are an error, not an empty batch."""
    stream = ExampleStream(split, vocabulary, DataSettings(), 64, seed=0, epoch=0)
    with pytest.raises(IndexError):
        stream.batch(len(stream) - 1, 2)


def test_too_small_corpus_is_rejected(vocabulary: VocabularyInfo) -> None:
    """A split without examples is an error at once, not an endless loop over empty epochs."""
    settings = DataSettings()
    with pytest.raises(StoreError, match="no document"):
        EndlessStream(
            EpochStreams(Split.from_documents([]), vocabulary, settings, seed=0), length=128
        )
    with pytest.raises(StoreError, match="one document only"):
        ExampleStream(
            Split.from_documents([[[5, 6], [7]]]), vocabulary, settings, 128, seed=0, epoch=0
        )
    two_documents = Split.from_documents([[[5]], [[6]]])
    assert len(ExampleStream(two_documents, vocabulary, settings, 128, seed=0, epoch=0)) == 2


def test_endless_stream_concatenates_epochs(split: Split, vocabulary: VocabularyInfo) -> None:
    """A batch at the end of an epoch continues with the next epoch."""
    settings = DataSettings()
    epoch_4, epoch_5 = (
        ExampleStream(split, vocabulary, settings, 64, seed=9, epoch=epoch) for epoch in (4, 5)
    )
    epochs = EpochStreams(split, vocabulary, settings, seed=9)
    endless = EndlessStream(epochs, length=64, first_epoch=4)
    end = len(epoch_4)
    assert to_tuples(endless.batch(end - 3, 8)) == to_tuples(epoch_4.batch(end - 3, 3)) + to_tuples(
        epoch_5.batch(0, 5)
    )
    assert endless.locate(end - 1) == (4, end - 1)
    assert endless.locate(end) == (5, 0)
    later = EndlessStream(epochs, length=64, first_epoch=5, epoch_start=end)
    assert later.locate(end + 2) == (5, 2)
    assert to_tuples(later.batch(end + 1, 6)) == to_tuples(endless.batch(end + 1, 6))
    two_documents = Split.from_documents([[[5]], [[6]]])
    short = EndlessStream(EpochStreams(two_documents, vocabulary, settings, seed=0), length=16)
    assert len(short.batch(5, 32)) == 32


def test_prefetched_batches_equal_those_of_the_stream(
    split: Split, vocabulary: VocabularyInfo
) -> None:
    """The batches come in the order of the stream; closing the iterator early ends the thread."""
    endless = EndlessStream(EpochStreams(split, vocabulary, DataSettings(), seed=0), length=64)
    batches = list(prefetch(endless.batch(32 + 16 * step, 16) for step in range(5)))
    for step, batch in enumerate(batches):
        assert to_tuples(batch) == to_tuples(endless.batch(32 + 16 * step, 16))
    num_threads = threading.active_count()
    iterator = prefetch(endless.batch(16 * step, 16) for step in range(1000))
    next(iterator)
    assert threading.active_count() == num_threads + 1
    assert isinstance(iterator, Generator)
    iterator.close()
    assert threading.active_count() == num_threads


def test_error_in_the_prefetch_thread_is_raised() -> None:
    """An error while a batch is computed is raised in the thread that reads the batch."""

    def compute_batches() -> Iterator[int]:
        yield 6
        raise StoreError("broken at 7")

    batches = prefetch(compute_batches())
    assert next(batches) == 6
    with pytest.raises(StoreError, match="broken at 7"):
        next(batches)


def test_examples_are_stable_across_versions(vocabulary: VocabularyInfo) -> None:
    """Recorded examples do not change: otherwise resumed runs would see other examples."""
    documents = [
        [[5 + 7 * document + 3 * sentence + token for token in range(4)] for sentence in range(3)]
        for document in range(3)
    ]
    split = Split.from_documents(documents)
    batch = ExampleStream(split, vocabulary, DataSettings(), 16, seed=1, epoch=0).batch(0, 2)
    first_sequence = [2, 5, 6, 7, 40, 3, 8, 4, 10, 11, 11, 12, 13, 14, 3]
    second_sequence = [2, 19, 4, 21, 4, 3, 22, 23, 24, 25, 25, 26, 27, 28, 3]
    assert batch.ids.tolist() == first_sequence + second_sequence
    assert batch.masked_positions.tolist() == [4, 7, 17, 19]
    assert batch.masked_labels.tolist() == [8, 9, 20, 22]
