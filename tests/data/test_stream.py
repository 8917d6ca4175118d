"""The stream of examples: pure in (seed, epoch, index), shuffled, exact in number."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Generator

import numpy as np
import pytest

from bertsmith.data import stream as module
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import Batch, concat_batches
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.data.stream import EndlessStream, ExampleStream, prefetch_batches
from bertsmith.errors import StoreError


def flat(batch: Batch) -> list[tuple[object, ...]]:
    """Return each sequence of a batch as a tuple of all that it holds."""
    result: list[tuple[object, ...]] = []
    for number in range(len(batch)):
        one = batch.slice(number, number + 1)
        label = None if one.nsp_labels is None else int(one.nsp_labels[0])
        arrays = (one.ids, one.segments, one.positions, one.masked_positions, one.masked_labels)
        result.append((*(tuple(array.tolist()) for array in arrays), label))
    return result


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks of 64 examples, so that a small split has many."""
    monkeypatch.setattr(module, "BLOCK_TOKENS", 64 * 64)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("nsp", [True, False])
def test_pure_in_the_index(split: Split, facts: VocabularyInfo, nsp: bool) -> None:
    """The same (seed, epoch, index) gives the same example however the epoch is cut or entered."""
    settings = DataSettings(nsp=nsp)
    whole = ExampleStream(split, facts, settings, 64, 5, 1)
    expected = flat(whole.batch(0, len(whole)))
    assert len(expected) == len(whole) > 1000
    for size in (1, 17, 300):
        other = ExampleStream(split, facts, settings, 64, 5, 1)
        firsts = list(range(0, len(whole), size))
        # From the back, so that nothing can depend on what was read before.
        found: list[tuple[object, ...]] = []
        for first in reversed(firsts):
            found = flat(other.batch(first, min(size, len(whole) - first))) + found
        assert found == expected


@pytest.mark.usefixtures("small_blocks")
def test_an_epoch_holds_every_example_of_the_walk_once(split: Split, facts: VocabularyInfo) -> None:
    """Shuffling loses and repeats nothing: whatever the blocks, an epoch has the same examples."""
    small = ExampleStream(split, facts, DataSettings(), 64, 5, 1)
    walk = small._sampler
    pairs = walk.sample_pairs(np.array([0]), np.array([split.counts.sentences]))
    tokens = Counter((pairs.a_size + pairs.b_size + 3).tolist())
    batch = small.batch(0, len(small))
    assert Counter(np.diff(batch.cu_seqlens).tolist()) == tokens
    assert len(pairs.a_first) == len(small)
    module.BLOCK_TOKENS = 1 << 20
    big = ExampleStream(split, facts, DataSettings(), 64, 5, 1)
    assert Counter(flat(big.batch(0, len(big)))) == Counter(flat(batch))
    assert flat(big.batch(0, len(big))) != flat(batch)


def test_epochs_and_seeds_differ(split: Split, facts: VocabularyInfo) -> None:
    """Another epoch or another seed gives other pairs, another order and other masks."""
    streams = [
        ExampleStream(split, facts, DataSettings(), 64, seed, epoch)
        for seed, epoch in ((5, 0), (5, 1), (6, 0))
    ]
    sets = [set(flat(stream.batch(0, len(stream)))) for stream in streams]
    for one, two in itertools.combinations(sets, 2):
        assert len(one & two) < 0.01 * len(one)


@pytest.mark.usefixtures("small_blocks")
def test_a_batch_comes_from_all_over(
    make_split: Callable[..., Split], facts: VocabularyInfo
) -> None:
    """A block of 64 examples takes them from four places of the split, not from one stretch."""
    documents = [[[5 + number % 90] * 20] * 6 for number in range(400)]
    stream = ExampleStream(
        Split.from_documents(documents),
        facts,
        DataSettings(mask_token_share=0, random_share=0),
        64,
        0,
        0,
    )
    batch = stream.batch(0, 64)
    firsts = batch.ids[batch.cu_seqlens[:-1] + 1]
    assert len(set(firsts.tolist())) >= 20


def test_layout(split: Split, facts: VocabularyInfo) -> None:
    """A sequence is [CLS] A [SEP] B [SEP]; segments, positions and boundaries say the same."""
    stream = ExampleStream(split, facts, DataSettings(), 64, 0, 0)
    batch = stream.batch(0, len(stream))
    plain = batch.ids.copy()
    plain[batch.masked_positions] = batch.masked_labels
    assert batch.max_seqlen == np.diff(batch.cu_seqlens).max() == 64
    assert batch.cu_seqlens.dtype == np.int32
    for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids, segments = plain[first:last], batch.segments[first:last]
        ends = np.flatnonzero(ids == facts.sep_id)
        assert ids[0] == facts.cls_id
        assert len(ends) == 2
        assert ends[1] == len(ids) - 1
        assert segments.tolist() == [0] * (ends[0] + 1) + [1] * (ends[1] - ends[0])
        assert batch.positions[first:last].tolist() == list(range(last - first))


def test_tokens_are_the_documents_own(facts: VocabularyInfo) -> None:
    """Before masking, each segment is a stretch of one document's tokens, as they stand there."""
    chance = np.random.default_rng(0)
    documents = [[chance.integers(5, 97, 9).tolist() for _ in range(20)] for _ in range(30)]
    texts = [
        "," + ",".join(str(word) for s in document for word in s) + "," for document in documents
    ]
    stream = ExampleStream(Split.from_documents(documents), facts, DataSettings(), 48, 0, 0)
    batch = stream.batch(0, len(stream))
    plain = batch.ids.copy()
    plain[batch.masked_positions] = batch.masked_labels
    for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        ids, segments = plain[first:last], batch.segments[first:last]
        for segment in (ids[segments == 0][1:-1], ids[segments == 1][:-1]):
            stretch = "," + ",".join(str(word) for word in segment) + ","
            assert any(stretch in text for text in texts)


def test_without_pairs(split: Split, facts: VocabularyInfo) -> None:
    """Without NSP a sequence is [CLS] A [SEP], in one segment, and there is no label."""
    stream = ExampleStream(split, facts, DataSettings(nsp=False), 64, 0, 0)
    batch = stream.batch(0, 100)
    assert batch.nsp_labels is None
    assert not batch.segments.any()
    assert (batch.ids == facts.sep_id).sum() == 100
    assert batch.max_seqlen == 64


def test_slice_equals_part(split: Split, facts: VocabularyInfo) -> None:
    """Slices of a batch, joined, are the batch; indices are based anew."""
    batch = ExampleStream(split, facts, DataSettings(), 64, 0, 0).batch(3, 50)
    parts = [batch.slice(first, first + 10) for first in range(0, 50, 10)]
    again = concat_batches(parts)
    for name in ("ids", "segments", "positions", "cu_seqlens", "masked_positions", "masked_labels"):
        assert (getattr(again, name) == getattr(batch, name)).all()
        assert getattr(again, name).dtype == getattr(batch, name).dtype
    assert parts[1].cu_seqlens[0] == 0
    with pytest.raises(IndexError):
        batch.slice(0, 51)


def test_out_of_range(split: Split, facts: VocabularyInfo) -> None:
    """Examples beyond the epoch are an error, not an empty batch."""
    stream = ExampleStream(split, facts, DataSettings(), 64, 0, 0)
    with pytest.raises(IndexError):
        stream.batch(len(stream) - 1, 2)


def test_too_small_a_corpus(facts: VocabularyInfo) -> None:
    """A split that cannot give an example is an error at once, not an endless empty epoch."""
    with pytest.raises(StoreError, match="no document"):
        EndlessStream(Split.from_documents([]), facts, DataSettings(), length=128, seed=0)
    with pytest.raises(StoreError, match="one document only"):
        ExampleStream(Split.from_documents([[[5, 6], [7]]]), facts, DataSettings(), 128, 0, 0)
    assert (
        len(ExampleStream(Split.from_documents([[[5]], [[6]]]), facts, DataSettings(), 128, 0, 0))
        == 2
    )


def test_epochs_follow_each_other(split: Split, facts: VocabularyInfo) -> None:
    """The endless sequence is epoch after epoch; a batch across the border is filled from both."""
    settings = DataSettings()
    first, second = (ExampleStream(split, facts, settings, 64, 9, epoch) for epoch in (4, 5))
    epochs = EndlessStream(split, facts, settings, length=64, seed=9, first_epoch=4)
    border = len(first)
    assert flat(epochs.batch(border - 3, 8)) == flat(first.batch(border - 3, 3)) + flat(
        second.batch(0, 5)
    )
    assert epochs.locate(border - 1) == (4, border - 1)
    assert epochs.locate(border) == (5, 0)
    assert epochs.epoch_start(4) == 0
    assert epochs.epoch_start(6) == border + len(second)
    tiny = EndlessStream(Split.from_documents([[[5]], [[6]]]), facts, settings, length=16, seed=0)
    assert len(tiny.batch(5, 32)) == 32


def test_batches_ahead(split: Split, facts: VocabularyInfo) -> None:
    """The thread gives the same batches in order, and ends when the reader leaves early."""
    epochs = EndlessStream(split, facts, DataSettings(), length=64, seed=0)
    found = list(prefetch_batches(epochs, 32, 16, steps=5))
    for step, batch in enumerate(found):
        assert flat(batch) == flat(epochs.batch(32 + 16 * step, 16))
    before = threading.active_count()
    early = prefetch_batches(epochs, 0, 16, steps=1000)
    next(early)
    assert threading.active_count() == before + 1
    assert isinstance(early, Generator)
    early.close()
    assert threading.active_count() == before


def test_an_error_in_the_thread_reaches_the_reader() -> None:
    """What goes wrong while a batch is made is raised where the batch is wanted."""

    class Broken:
        def batch(self, first: int, count: int) -> Batch:
            raise StoreError(f"broken at {first}")

    with pytest.raises(StoreError, match="broken at 7"):
        next(prefetch_batches(Broken(), 7, 1, steps=3))


def test_the_stream_never_changes(facts: VocabularyInfo) -> None:
    """These are the ids that this stream has always given: a change here breaks every resume."""
    documents = [[[5 + 7 * d + 3 * s + i for i in range(4)] for s in range(3)] for d in range(3)]
    batch = ExampleStream(Split.from_documents(documents), facts, DataSettings(), 16, 1, 0).batch(
        0, 2
    )
    assert batch.ids.tolist() == [
        2,
        5,
        6,
        7,
        40,
        3,
        8,
        4,
        10,
        11,
        11,
        12,
        13,
        14,
        3,
        2,
        19,
        4,
        21,
        4,
        3,
        22,
        23,
        24,
        25,
        25,
        26,
        27,
        28,
        3,
    ]
    assert batch.masked_positions.tolist() == [4, 7, 17, 19]
    assert batch.masked_labels.tolist() == [8, 9, 20, 22]
