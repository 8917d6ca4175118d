"""Sentence pairs: the vectorized sampler against a plain loop, and its statistics."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from bertsmith.data import sentence_pairs
from bertsmith.data.counter_rng import IntArray, derive_key, init_states, random_bits
from bertsmith.data.sentence_pairs import PairSampler, SentencePairs
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.errors import StoreError


@dataclass
class Example:
    """An example of the reference implementation.

    Attributes:
        a: Token indices of segment A.
        b: Token indices of segment B.
        nsp_label: 1 if B is from another document, else 0.
        first_sentence: Sentence at which the example starts.
        num_consumed: Number of sentences before the next example starts.
        num_gathered: Number of sentences gathered for A and B.
    """

    a: list[int]
    b: list[int]
    nsp_label: int
    first_sentence: int
    num_consumed: int
    num_gathered: int


class ExampleRng:
    """Random numbers of the example that starts at a sentence, computed one at a time."""

    def __init__(self, seed: int, epoch: int, sentence: int) -> None:
        self.states = init_states(derive_key(seed, epoch), np.array([sentence]))

    def bits(self, index: int) -> int:
        """Return the random 64-bit value with this index."""
        return int(random_bits(self.states, index)[0])

    def integer(self, index: int, limit: int) -> int:
        """Return an integer in [0, limit)."""
        return ((self.bits(index) >> 32) * limit) >> 32

    def uniform(self, index: int) -> float:
        """Return a number in [0, 1)."""
        return (self.bits(index) >> 11) / 2**53

    def coin_flip(self, first_index: int, number: int) -> bool:
        """Return coin flip ``number`` of the series that starts at index ``first_index``."""
        # A value has 64 flips. Every second index is used, as in draw_fair_binomial.
        return bool(self.bits(first_index + 2 * (number // 64)) >> (number % 64) & 1)


def sample_reference(
    split: Split, settings: DataSettings, length: int, seed: int, epoch: int
) -> list[Example]:
    """Sample examples like the original program, one sentence after another, in plain Python."""
    max_tokens = length - (3 if settings.nsp else 2)
    offsets, document_offsets = split.sentence_offsets, split.document_offsets
    tokens = [list(range(int(offsets[i]), int(offsets[i + 1]))) for i in range(len(offsets) - 1)]
    documents = [
        list(range(int(document_offsets[i]), int(document_offsets[i + 1])))
        for i in range(len(document_offsets) - 1)
    ]
    examples = []
    for number, document in enumerate(documents):
        index = 0
        while index < len(document):
            rng = ExampleRng(seed, epoch, document[index])
            target = max_tokens
            if rng.uniform(sentence_pairs.RNG_SHORT) < settings.short_seq_prob:
                target = 2 + rng.integer(sentence_pairs.RNG_TARGET, max_tokens - 1)
            gathered: list[list[int]] = []
            while index + len(gathered) < len(document) and sum(map(len, gathered)) < target:
                gathered.append(tokens[document[index + len(gathered)]])
            num_a = len(gathered)
            if settings.nsp:
                num_choices = len(gathered) - 1
                num_a = 1
                if num_choices:
                    num_a = 1 + rng.integer(sentence_pairs.RNG_A_END, num_choices)
            a = [token for sentence in gathered[:num_a] for token in sentence]
            b = [token for sentence in gathered[num_a:] for token in sentence]
            num_consumed, nsp_label = len(gathered), 0
            if settings.nsp and (
                len(gathered) == 1 or rng.uniform(sentence_pairs.RNG_IS_RANDOM) < 0.5
            ):
                num_consumed, nsp_label = num_a, 1
                # One of the other documents: from this document's number on, numbers are shifted.
                other = rng.integer(sentence_pairs.RNG_DOCUMENT, len(documents) - 1)
                other += other >= number
                start = rng.integer(sentence_pairs.RNG_SENTENCE, len(documents[other]))
                b = []
                for sentence_number in documents[other][start:]:
                    b.extend(tokens[sentence_number])
                    if len(b) >= target - len(a):
                        break
            truncate_reference(a, b, max_tokens, rng)
            first = document[index]
            examples.append(Example(a, b, nsp_label, first, num_consumed, len(gathered)))
            index += num_consumed
    return examples


def truncate_reference(a: list[int], b: list[int], max_tokens: int, rng: ExampleRng) -> None:
    """Remove tokens from the longer segment, at its front or back, until both fit."""
    num_a_removed = num_b_removed = 0
    while len(a) + len(b) > max_tokens:
        if len(a) > len(b):
            a.pop(0 if rng.coin_flip(sentence_pairs.RNG_TRUNCATE_A, num_a_removed) else -1)
            num_a_removed += 1
        else:
            b.pop(0 if rng.coin_flip(sentence_pairs.RNG_TRUNCATE_B, num_b_removed) else -1)
            num_b_removed += 1


def sample_epoch(sampler: PairSampler, split: Split) -> SentencePairs:
    """Return all examples of an epoch, in the order of the documents."""
    return sampler.sample_pairs(np.array([0]), np.array([len(split.sentence_offsets) - 1]))


@pytest.mark.parametrize("nsp", [True, False])
@pytest.mark.parametrize(
    ("length", "short_seq_prob"), [(8, 0.1), (31, 0.5), (128, 0.1), (512, 1.0)]
)
def test_sampler_equals_the_reference(
    make_split: Callable[..., Split], length: int, short_seq_prob: float, nsp: bool
) -> None:
    """The vectorized sampler gives the examples of the plain loop, token by token."""
    split = make_split(60, seed=length)
    settings = DataSettings(short_seq_prob=short_seq_prob, nsp=nsp)
    expected = sample_reference(split, settings, length, seed=7, epoch=3)
    pairs = sample_epoch(PairSampler(split, settings, length, seed=7, epoch=3), split)
    assert len(pairs.a_first) == len(expected)
    for index, example in enumerate(expected):
        first, size = pairs.a_first[index], pairs.a_size[index]
        assert list(range(first, first + size)) == example.a
        first, size = pairs.b_first[index], pairs.b_size[index]
        assert list(range(first, first + size)) == example.b
        assert pairs.nsp_labels[index] == example.nsp_label


def test_long_sentences_are_truncated_as_in_the_reference() -> None:
    """Truncation by hundreds of tokens, which needs several random values, is correct."""
    rng = np.random.default_rng(5)
    split = Split.from_documents(
        [[[9] * int(rng.integers(1, 900)) for _ in range(5)] for _ in range(12)]
    )
    settings = DataSettings()
    expected = sample_reference(split, settings, 64, seed=1, epoch=0)
    pairs = sample_epoch(PairSampler(split, settings, 64, seed=1, epoch=0), split)
    assert [example.a[0] for example in expected] == pairs.a_first.tolist()
    assert [example.b[0] for example in expected] == pairs.b_first.tolist()
    assert [len(example.b) for example in expected] == pairs.b_size.tolist()


@pytest.mark.parametrize("sentences_per_pass", [7, 64, 1 << 16])
def test_chunk_starts_do_not_depend_on_the_passes(
    split: Split, monkeypatch: pytest.MonkeyPatch, sentences_per_pass: int
) -> None:
    """However many sentences are processed at a time, a chunk starts at every 16th example."""
    monkeypatch.setattr(sentence_pairs, "_SENTENCES_PER_PASS", sentences_per_pass)
    expected = sample_reference(split, DataSettings(), 96, seed=11, epoch=2)
    chunk_starts, count = PairSampler(
        split, DataSettings(), 96, seed=11, epoch=2
    ).find_chunk_starts(16)
    assert count == len(expected)
    assert chunk_starts.tolist() == [example.first_sentence for example in expected[::16]]


def test_every_sentence_is_consumed_once(split: Split) -> None:
    """The examples of an epoch consume all sentences of the split, in order."""
    examples = sample_reference(split, DataSettings(), 128, seed=3, epoch=0)
    sentence = 0
    for example in examples:
        assert example.first_sentence == sentence
        sentence += example.num_consumed
    assert sentence == len(split.sentence_offsets) - 1
    chunk_starts, _ = PairSampler(split, DataSettings(), 128, seed=3, epoch=0).find_chunk_starts(1)
    assert chunk_starts.tolist() == [example.first_sentence for example in examples]


def test_half_of_the_pairs_are_consecutive(make_split: Callable[..., Split]) -> None:
    """B follows A in half of the examples that have two sentences or more (5 sigma)."""
    split = make_split(500, sentences=30)
    examples = [
        example
        for example in sample_reference(split, DataSettings(), 128, seed=0, epoch=0)
        if example.num_gathered > 1
    ]
    pairs = sample_epoch(PairSampler(split, DataSettings(), 128, seed=0, epoch=0), split)
    num_random = sum(example.nsp_label for example in examples)
    assert abs(num_random / len(examples) - 0.5) < 5 * 0.5 / len(examples) ** 0.5
    follows = pairs.nsp_labels == 0
    # B starts after the end of A, and right there unless tokens were removed.
    gap = pairs.b_first - (pairs.a_first + pairs.a_size)
    assert (gap[follows] >= 0).all()
    assert (gap[follows] == 0).mean() > 0.2


def test_random_segments_are_from_other_documents(split: Split) -> None:
    """B is from the document of A if and only if the label says that it follows A."""
    for seed in range(5):
        pairs = sample_epoch(PairSampler(split, DataSettings(), 64, seed=seed, epoch=0), split)
        document_starts = split.sentence_offsets[split.document_offsets]
        a_documents = np.searchsorted(document_starts, pairs.a_first, "right")
        b_documents = np.searchsorted(document_starts, pairs.b_first, "right")
        b_last_tokens = pairs.b_first + pairs.b_size - 1
        assert ((a_documents == b_documents) == (pairs.nsp_labels == 0)).all()
        assert (b_documents == np.searchsorted(document_starts, b_last_tokens, "right")).all()


def test_all_other_documents_are_equally_likely() -> None:
    """With three documents, B is from each of the two others equally often (5 sigma)."""
    split = Split.from_documents([[[5, 6]] * 20_000] * 3)
    pairs = sample_epoch(PairSampler(split, DataSettings(), 8, seed=0, epoch=0), split)
    is_random = pairs.nsp_labels == 1
    document_starts = split.sentence_offsets[split.document_offsets]
    a_documents = np.searchsorted(document_starts, pairs.a_first[is_random], "right") - 1
    b_documents = np.searchsorted(document_starts, pairs.b_first[is_random], "right") - 1
    for document in range(3):
        others = b_documents[a_documents == document]
        share = np.mean(others == (document + 1) % 3)
        assert abs(share - 0.5) < 5 * 0.5 / len(others) ** 0.5


def test_a_tenth_of_the_examples_is_short() -> None:
    """A tenth of the target lengths is drawn uniformly from 2 tokens to the maximum (5 sigma)."""
    split = Split.from_documents([[[5]] * 200_000, [[5]]])
    pairs = sample_epoch(PairSampler(split, DataSettings(nsp=False), 52, seed=0, epoch=0), split)
    # The last example of each of the two documents ends with the document.
    sizes = pairs.a_size[:-2]
    # One in 49 short targets has the maximum of 50 tokens.
    share, expected = np.mean(sizes < 50), 0.1 * 48 / 49
    assert abs(share - expected) < 5 * (expected / len(sizes)) ** 0.5
    assert set(sizes[sizes < 50].tolist()) == set(range(2, 50))


def test_pairs_fit_the_length(split: Split) -> None:
    """A and B have at least one token each; together with [CLS] and two [SEP] they fit."""
    pairs = sample_epoch(PairSampler(split, DataSettings(), 40, seed=0, epoch=0), split)
    assert min(pairs.a_size.min(), pairs.b_size.min()) >= 1
    assert (pairs.a_size + pairs.b_size).max() == 40 - 3


def test_too_few_documents_are_rejected() -> None:
    """A split without documents is an error; with NSP, a split with one document is an error."""
    with pytest.raises(StoreError, match=r"no document.*--held-out share above 0"):
        PairSampler(Split.from_documents([]), DataSettings(), 128, seed=0, epoch=0)
    single = Split.from_documents([[[5, 6]]])
    with pytest.raises(StoreError, match=r"one document only.*nsp = false"):
        PairSampler(single, DataSettings(), 128, seed=0, epoch=0)
    sampler = PairSampler(single, DataSettings(nsp=False), 128, seed=0, epoch=0)
    assert sampler.find_chunk_starts(16)[1] == 1


SENTENCE_ORDER = DataSettings(pair_objective="sop")


def _restore_order(pairs: SentencePairs) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return (first token, size) of the earlier segment, then of the later one."""
    is_swapped = pairs.nsp_labels == 1
    return (
        np.where(is_swapped, pairs.b_first, pairs.a_first),
        np.where(is_swapped, pairs.b_size, pairs.a_size),
        np.where(is_swapped, pairs.a_first, pairs.b_first),
        np.where(is_swapped, pairs.a_size, pairs.b_size),
    )


def test_sentence_order_swaps_half_of_the_consecutive_pairs(split: Split) -> None:
    """Segments are consecutive parts of one document, swapped with probability 1/2 (5 sigma)."""
    pairs = sample_epoch(PairSampler(split, SENTENCE_ORDER, 64, seed=2, epoch=1), split)
    count = len(pairs.nsp_labels)
    assert abs(pairs.nsp_labels.mean() - 0.5) < 5 * 0.5 / count**0.5
    first, first_size, second, second_size = _restore_order(pairs)
    gap = second - (first + first_size)
    assert (gap >= 0).all()
    # Tokens are missing between the segments only if truncation removed them.
    assert (gap[first_size + second_size < 64 - 3] == 0).all()
    document_starts = split.sentence_offsets[split.document_offsets]
    documents = np.searchsorted(document_starts, first, "right")
    last_tokens = second + second_size - 1
    assert (documents == np.searchsorted(document_starts, last_tokens, "right")).all()


def test_sentence_order_consumes_all_gathered_sentences(split: Split) -> None:
    """The examples of an epoch are those without pairs, cut in two."""
    length = 10_000  # No document is as long, so nothing is truncated.
    settings = DataSettings(pair_objective="sop", short_seq_prob=0.0)
    pairs = sample_epoch(PairSampler(split, settings, length, seed=0, epoch=0), split)
    first, first_size, second, second_size = _restore_order(pairs)
    assert first.tolist() == split.sentence_offsets[split.document_offsets[:-1]].tolist()
    assert (first + first_size == second).all()
    ends = split.sentence_offsets[split.document_offsets[1:]]
    assert (second + second_size).tolist() == ends.tolist()


def test_sentence_order_cuts_a_single_sentence_in_the_middle() -> None:
    """One document is enough; a sentence of one token has no second segment and label 0."""
    split = Split.from_documents([[list(range(5, 12))]])
    pairs = sample_epoch(PairSampler(split, SENTENCE_ORDER, 64, seed=0, epoch=0), split)
    first, first_size, second, second_size = (int(x[0]) for x in _restore_order(pairs))
    assert (first, first_size, second, second_size) == (0, 4, 4, 3)
    split = Split.from_documents([[[5]]] * 40)
    pairs = sample_epoch(PairSampler(split, SENTENCE_ORDER, 64, seed=0, epoch=0), split)
    assert pairs.a_size.tolist() == [1] * 40
    assert not pairs.b_size.any()
    assert not pairs.nsp_labels.any()
