"""The walk that cuts documents into sentence pairs."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from bertsmith.data import sentence_pairs
from bertsmith.data.counter_rng import derive_key, init_states, random_bits
from bertsmith.data.sentence_pairs import PairSampler, SentencePairs
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.errors import StoreError


@dataclass
class Example:
    """An example of the plain walk: its token indices, its label, the sentences it used."""

    a: list[int]
    b: list[int]
    not_next: int
    first: int
    used: int
    gathered: int


class Draws:
    """The random numbers of the example that begins at one sentence, one at a time."""

    def __init__(self, seed: int, epoch: int, sentence: int) -> None:
        self.state = init_states(derive_key(seed, epoch), np.array([sentence]))

    def word(self, number: int) -> int:
        """Return the random word of this number."""
        return int(random_bits(self.state, number)[0])

    def below(self, number: int, limit: int) -> int:
        """Return a whole number in [0, limit)."""
        return ((self.word(number) >> 32) * limit) >> 32

    def share(self, number: int) -> float:
        """Return a number in [0, 1)."""
        return (self.word(number) >> 11) / 2**53

    def coin(self, first: int, toss: int) -> bool:
        """Return how the coin number ``toss`` of those from word ``first`` on falls."""
        return bool(self.word(first + 2 * (toss // 64)) >> (toss % 64) & 1)


def plain_walk(
    split: Split, settings: DataSettings, length: int, seed: int, epoch: int
) -> list[Example]:
    """Walk as the original program does, one sentence after another, in plain Python."""
    room = length - (3 if settings.nsp else 2)
    tokens = [
        list(range(int(split.sentence_offsets[i]), int(split.sentence_offsets[i + 1])))
        for i in range(len(split.sentence_offsets) - 1)
    ]
    documents = [
        list(range(int(split.document_offsets[i]), int(split.document_offsets[i + 1])))
        for i in range(len(split.document_offsets) - 1)
    ]
    result = []
    for number, document in enumerate(documents):
        place = 0
        while place < len(document):
            draws = Draws(seed, epoch, document[place])
            target = room
            if draws.share(sentence_pairs.RNG_SHORT) < settings.short_share:
                target = 2 + draws.below(sentence_pairs.RNG_TARGET, room - 1)
            chunk: list[list[int]] = []
            while place + len(chunk) < len(document) and sum(map(len, chunk)) < target:
                chunk.append(tokens[document[place + len(chunk)]])
            a_end = len(chunk)
            if settings.nsp:
                a_end = (
                    1
                    if len(chunk) == 1
                    else 1 + draws.below(sentence_pairs.RNG_A_END, len(chunk) - 1)
                )
            a = [token for sentence in chunk[:a_end] for token in sentence]
            b = [token for sentence in chunk[a_end:] for token in sentence]
            used, not_next = len(chunk), 0
            if settings.nsp and (
                len(chunk) == 1 or draws.share(sentence_pairs.RNG_IS_RANDOM) < 0.5
            ):
                used, not_next = a_end, 1
                other = draws.below(sentence_pairs.RNG_DOCUMENT, len(documents) - 1)
                other += other >= number
                start = draws.below(sentence_pairs.RNG_SENTENCE, len(documents[other]))
                b = []
                for sentence in documents[other][start:]:
                    b.extend(tokens[sentence])
                    if len(b) >= target - len(a):
                        break
            cut_a = cut_b = 0
            while len(a) + len(b) > room:
                if len(a) > len(b):
                    a.pop(0 if draws.coin(sentence_pairs.RNG_TRUNCATE_A, cut_a) else -1)
                    cut_a += 1
                else:
                    b.pop(0 if draws.coin(sentence_pairs.RNG_TRUNCATE_B, cut_b) else -1)
                    cut_b += 1
            result.append(Example(a, b, not_next, document[place], used, len(chunk)))
            place += used
    return result


def all_pairs(walk: PairSampler, split: Split) -> SentencePairs:
    """Return the examples of a whole epoch in the order of the walk."""
    return walk.sample_pairs(np.array([0]), np.array([len(split.sentence_offsets) - 1]))


@pytest.mark.parametrize("nsp", [True, False])
@pytest.mark.parametrize(("length", "short"), [(8, 0.1), (31, 0.5), (128, 0.1), (512, 1.0)])
def test_equals_the_plain_walk(
    make_split: Callable[..., Split], length: int, short: float, nsp: bool
) -> None:
    """The vectorized walk gives the plain loop's examples, token for token."""
    split = make_split(60, seed=length)
    settings = DataSettings(short_share=short, nsp=nsp)
    plain = plain_walk(split, settings, length, 7, 3)
    fast = all_pairs(PairSampler(split, settings, length, 7, 3), split)
    assert len(fast.a_first) == len(plain)
    for index, example in enumerate(plain):
        first, size = fast.a_first[index], fast.a_size[index]
        assert list(range(first, first + size)) == example.a
        first, size = fast.b_first[index], fast.b_size[index]
        assert list(range(first, first + size)) == example.b
        assert fast.nsp_labels[index] == example.not_next


def test_long_sentences_are_cut_as_in_the_plain_walk() -> None:
    """Cuts of hundreds of tokens, over several words of coins, equal the plain loop's."""
    chance = np.random.default_rng(5)
    split = Split.from_documents(
        [[[9] * int(chance.integers(1, 900)) for _ in range(5)] for _ in range(12)]
    )
    settings = DataSettings()
    plain = plain_walk(split, settings, 64, 1, 0)
    fast = all_pairs(PairSampler(split, settings, 64, 1, 0), split)
    assert [example.a[0] for example in plain] == fast.a_first.tolist()
    assert [example.b[0] for example in plain] == fast.b_first.tolist()
    assert [len(example.b) for example in plain] == fast.b_size.tolist()


@pytest.mark.parametrize("group", [7, 64, 1 << 16])
def test_runs_are_counted_over_any_grouping(
    split: Split, monkeypatch: pytest.MonkeyPatch, group: int
) -> None:
    """Counting in groups of sentences of any size finds the plain walk's every 16th example."""
    monkeypatch.setattr(sentence_pairs, "_CHUNK_SENTENCES", group)
    plain = plain_walk(split, DataSettings(), 96, 11, 2)
    starts, count = PairSampler(split, DataSettings(), 96, 11, 2).find_run_starts(16)
    assert count == len(plain)
    assert starts.tolist() == [example.first for example in plain[::16]]


def test_every_sentence_is_walked_once(split: Split) -> None:
    """The examples of an epoch use up all sentences of the split, in order, each once."""
    plain = plain_walk(split, DataSettings(), 128, 3, 0)
    place = 0
    for example in plain:
        assert example.first == place
        place += example.used
    assert place == len(split.sentence_offsets) - 1
    starts, _ = PairSampler(split, DataSettings(), 128, 3, 0).find_run_starts(1)
    assert starts.tolist() == [example.first for example in plain]


def test_half_of_the_pairs_follow(make_split: Callable[..., Split]) -> None:
    """Where there are two sentences or more, B truly follows half the time (5 sigma)."""
    split = make_split(500, sentences=30)
    plain = [e for e in plain_walk(split, DataSettings(), 128, 0, 0) if e.gathered > 1]
    fast = all_pairs(PairSampler(split, DataSettings(), 128, 0, 0), split)
    several = sum(example.not_next for example in plain)
    assert abs(several / len(plain) - 0.5) < 5 * 0.5 / len(plain) ** 0.5
    follows = fast.nsp_labels == 0
    # "Follows" is meant literally: the first token of B that was not cut stands behind A's last.
    gap = fast.b_first - (fast.a_first + fast.a_size)
    assert (gap[follows] >= 0).all()
    assert (gap[follows] == 0).mean() > 0.2


def test_negatives_come_from_other_documents(split: Split) -> None:
    """No B that does not follow comes from A's document; every B that follows does."""
    for seed in range(5):
        pairs = all_pairs(PairSampler(split, DataSettings(), 64, seed, 0), split)
        bounds = split.sentence_offsets[split.document_offsets]
        a = np.searchsorted(bounds, pairs.a_first, "right")
        b = np.searchsorted(bounds, pairs.b_first, "right")
        b_last = np.searchsorted(bounds, pairs.b_first + pairs.b_size - 1, "right")
        assert ((a == b) == (pairs.nsp_labels == 0)).all()
        assert (b == b_last).all()


def test_negatives_reach_every_document_alike() -> None:
    """With three documents, each is drawn by the other two equally often (5 sigma)."""
    split = Split.from_documents([[[5, 6]] * 20_000] * 3)
    pairs = all_pairs(PairSampler(split, DataSettings(), 8, 0, 0), split)
    negative = pairs.nsp_labels == 1
    bounds = split.sentence_offsets[split.document_offsets]
    a = np.searchsorted(bounds, pairs.a_first[negative], "right") - 1
    b = np.searchsorted(bounds, pairs.b_first[negative], "right") - 1
    for document in range(3):
        drawn = b[a == document]
        share = np.mean(drawn == (document + 1) % 3)
        assert abs(share - 0.5) < 5 * 0.5 / len(drawn) ** 0.5


def test_short_share(make_split: Callable[..., Split]) -> None:
    """A tenth of the targets is short (5 sigma), spread over all lengths from 2 on."""
    split = Split.from_documents([[[5]] * 200_000, [[5]]])
    pairs = all_pairs(PairSampler(split, DataSettings(nsp=False), 52, 0, 0), split)
    sizes = pairs.a_size[:-2]
    # A target of 50 may also be drawn as a short one: 1 in 49 of them.
    share, expected = np.mean(sizes < 50), 0.1 * 48 / 49
    assert abs(share - expected) < 5 * (expected / len(sizes)) ** 0.5
    assert set(sizes[sizes < 50].tolist()) == set(range(2, 50))


def test_pairs_fill_the_room(split: Split) -> None:
    """A and B hold one token at least, and together no more than length - 3."""
    pairs = all_pairs(PairSampler(split, DataSettings(), 40, 0, 0), split)
    assert min(pairs.a_size.min(), pairs.b_size.min()) >= 1
    assert (pairs.a_size + pairs.b_size).max() == 37


def test_too_little_text() -> None:
    """No document, or one document for pairs, is an error that says so; one is enough without."""
    with pytest.raises(StoreError, match=r"no document.*--held-out share above 0"):
        PairSampler(Split.from_documents([]), DataSettings(), 128, 0, 0)
    with pytest.raises(StoreError, match=r"one document only.*nsp = false"):
        PairSampler(Split.from_documents([[[5, 6]]]), DataSettings(), 128, 0, 0)
    single = PairSampler(Split.from_documents([[[5, 6]]]), DataSettings(nsp=False), 128, 0, 0)
    assert single.find_run_starts(16)[1] == 1
