"""Sentence pairs: the walk over documents that cuts them into training examples.

It never knows of masks, special ids or batches; it deals in ranges of the token array only.

The walk is that of the paper (section 3.1 and appendix A.2) and of the original program
(`create_pretraining_data.py`). From a sentence on, whole sentences are gathered until they reach
the target length, or the document ends; a random part of them from the front is segment A. Half
the time the rest is segment B. The other half, and whenever there is one sentence only, B comes
from another document, from a random sentence on, and the walk goes on right after A. The pair is
then cut to fit, token by token from the longer segment, at its front or back by chance.

What one example uses up depends on the sentence at which it begins and on random numbers looked
up by that sentence; no epoch begins two examples at the same sentence. So it is computed for all
sentences at once, and following the walk is a chain of look-ups, however long the documents are.
"""

from dataclasses import dataclass

import numpy as np

from bertsmith.data.counter_rng import (
    IntArray,
    UInt64Array,
    bernoulli,
    derive_key,
    fair_binomial,
    init_states,
    random_bits,
    uniform_integers,
)
from bertsmith.data.packing import concat_ranges
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.errors import StoreError

#: The numbers of the random words of an example.
RNG_SHORT, RNG_TARGET, RNG_A_END, RNG_IS_RANDOM, RNG_DOCUMENT, RNG_SENTENCE, RNG_ORDER = range(7)
#: The coins that say front or back, for A and for B, fall from here on in every second word.
RNG_TRUNCATE_A, RNG_TRUNCATE_B = 16, 17
#: The sentences looked at together: as many as the processor's cache holds well.
_GROUP = 1 << 16


@dataclass(frozen=True)
class SentencePairs:
    """n examples as ranges of a split's token ids; every array is [n].

    ``a_first``, ``b_first`` int64: the first token of each segment; ``a_size``, ``b_size`` int64:
    its tokens (``b_size`` is 0 throughout without pairs); ``not_next`` int64: 1 where B comes
    from another document; ``state`` uint64: the example's random state.
    """

    a_first: IntArray
    a_size: IntArray
    b_first: IntArray
    b_size: IntArray
    nsp_labels: IntArray
    rng_states: UInt64Array

    def take(self, order: IntArray) -> "SentencePairs":
        """Return the examples in another order, or some of them."""
        return SentencePairs(
            self.a_first[order],
            self.a_size[order],
            self.b_first[order],
            self.b_size[order],
            self.nsp_labels[order],
            self.rng_states[order],
        )


@dataclass(frozen=True)
class _Chunks:
    """What is gathered from each of n sentences on: targets, ends, the end of A, NSP's coin."""

    state: UInt64Array
    target: IntArray
    end: IntArray
    a_end: IntArray
    is_random: IntArray

    def take(self, chosen: IntArray) -> "_Chunks":
        return _Chunks(
            self.state[chosen],
            self.target[chosen],
            self.end[chosen],
            self.a_end[chosen],
            self.is_random[chosen],
        )


class PairSampler:
    """The walk over one split in one epoch, at one length."""

    def __init__(
        self, split: Split, settings: DataSettings, length: int, seed: int, epoch: int
    ) -> None:
        self._split = split
        self._nsp = settings.nsp
        self._short_share = settings.short_share
        # [CLS] and one [SEP] a segment are not counted in the target.
        self._room = length - (3 if settings.nsp else 2)
        self._key = derive_key(seed, epoch)
        self._check()

    def find_run_starts(self, run: int) -> tuple[IntArray, int]:
        """Follow the walk through the whole split.

        Returns the sentence at which every ``run``-th example begins, int64 [runs], and the
        exact number of examples.
        """
        offsets, total = self._split.sentence_offsets, len(self._split.sentence_offsets) - 1
        kept: list[IntArray] = []
        count = first = 0
        while first < total:
            last = min(first + _GROUP, total)
            # No example reaches further than its tokens, and no sentence is empty.
            reach = min(last + self._room, total)
            sentences = np.arange(first, last)
            ends = self._document_ends(first, last)
            chunks = self._gather(sentences, ends, offsets[first : reach + 1], first)
            visited, used = _follow(self._used(sentences, chunks))
            kept.append(first + visited[-count % run :: run])
            count += len(visited)
            first += used
        return np.concatenate(kept), count

    def sample_pairs(self, firsts: IntArray, lasts: IntArray) -> SentencePairs:
        """Return the examples of some stretches [first, last) of the walk, in their order.

        Each stretch of sentences must begin where an example does and end where another begins.
        """
        sizes = lasts - firsts
        sentences = concat_ranges(firsts, sizes)
        documents = np.searchsorted(self._split.document_offsets, sentences, "right") - 1
        ends = self._split.document_offsets[documents + 1]
        chunks = self._gather(sentences, ends, self._split.sentence_offsets, 0)
        visited, _ = _follow(self._used(sentences, chunks))
        return self._pairs(sentences[visited], documents[visited], chunks.take(visited))

    def _check(self) -> None:
        counts = self._split.counts
        if not counts.documents:
            raise StoreError(
                f"{self._split.name}: no document in this part of the store, and pretrain needs "
                "training and held-out text; prepare more text, with a --held-out share above 0"
            )
        if self._nsp and counts.documents < 2:
            raise StoreError(
                f"{self._split.name}: it holds one document only, and the second segment of half "
                "the sentence pairs must come from another; prepare more documents, or turn "
                "next-sentence prediction off with data.nsp = false"
            )

    def _document_ends(self, first: int, last: int) -> IntArray:
        """Return for each sentence in [first, last) the end of its document, int64."""
        documents = self._split.document_offsets
        low = int(np.searchsorted(documents, first, "right")) - 1
        high = int(np.searchsorted(documents, last, "left"))
        bounds = documents[low : high + 1]
        return np.repeat(bounds[1:], np.diff(bounds.clip(first, last)).astype(np.int64))

    def _gather(self, sentences: IntArray, ends: IntArray, offsets: IntArray, base: int) -> _Chunks:
        """Gather sentences to the target length from each of ``sentences`` on.

        ``offsets`` are the token offsets of the sentences from number ``base`` on.
        """
        state = init_states(self._key, sentences)
        room = np.full(len(sentences), self._room)
        short = bernoulli(random_bits(state, RNG_SHORT), self._short_share)
        target = np.where(
            short, 2 + uniform_integers(random_bits(state, RNG_TARGET), room - 1), room
        )
        reached = np.searchsorted(offsets, offsets[sentences - base] + target) + base
        end = np.minimum(reached, ends)
        count = end - sentences
        if not self._nsp:
            return _Chunks(state, target, end, end, np.zeros(len(sentences), np.int64))
        a_end = sentences + 1 + uniform_integers(random_bits(state, RNG_A_END), count - 1)
        is_random = (count == 1) | bernoulli(random_bits(state, RNG_IS_RANDOM), 0.5)
        return _Chunks(state, target, end, a_end, is_random.astype(np.int64))

    @staticmethod
    def _used(sentences: IntArray, chunks: _Chunks) -> IntArray:
        """Return how many sentences each example uses up, int64 [n], at least 1."""
        return np.where(chunks.is_random == 1, chunks.a_end, chunks.end) - sentences

    def _pairs(self, sentences: IntArray, documents: IntArray, chunks: _Chunks) -> SentencePairs:
        """Turn chunks into ranges of tokens, cut to the room there is."""
        offsets = self._split.sentence_offsets
        a_first = offsets[sentences]
        a_size = offsets[chunks.a_end] - a_first
        b_first, b_last = offsets[chunks.a_end].copy(), offsets[chunks.end].copy()
        lanes = np.flatnonzero(chunks.is_random)
        b_first[lanes], b_last[lanes] = self._elsewhere(
            chunks.state[lanes], documents[lanes], (chunks.target - a_size)[lanes]
        )
        b_size = b_last - b_first
        a_cut, b_cut = _cuts(a_size, b_size, self._room)
        return SentencePairs(
            a_first=a_first + fair_binomial(chunks.state, RNG_TRUNCATE_A, a_cut),
            a_size=a_size - a_cut,
            b_first=b_first + fair_binomial(chunks.state, RNG_TRUNCATE_B, b_cut),
            b_size=b_size - b_cut,
            nsp_labels=chunks.is_random,
            rng_states=chunks.state,
        )

    def _elsewhere(
        self, state: UInt64Array, documents: IntArray, wanted: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the token ranges [n] of sentences from any document but ``documents`` [n]."""
        bounds, offsets = self._split.document_offsets, self._split.sentence_offsets
        others = np.full(len(state), len(bounds) - 2)
        other = uniform_integers(random_bits(state, RNG_DOCUMENT), others)
        other += other >= documents
        first = bounds[other] + uniform_integers(
            random_bits(state, RNG_SENTENCE), bounds[other + 1] - bounds[other]
        )
        last = np.searchsorted(offsets, offsets[first] + wanted)
        last = np.clip(last, first + 1, bounds[other + 1])
        return offsets[first], offsets[last]


def _follow(used: IntArray) -> tuple[IntArray, int]:
    """Walk from index 0 by steps of ``used`` [n]; return the indices visited, and where it left."""
    steps: list[int] = used.tolist()
    visited: list[int] = []
    place, end = 0, len(steps)
    while place < end:
        visited.append(place)
        place += steps[place]
    return np.array(visited, np.int64), place


def _cuts(a_size: IntArray, b_size: IntArray, room: int) -> tuple[IntArray, IntArray]:
    """Return how many tokens A and B lose when the longer one, B if equal, loses one in turn."""
    excess = np.maximum(a_size + b_size - room, 0)
    gap = a_size - b_size
    from_longer = np.minimum(excess, np.abs(gap))
    # From equality on they take turns, B first.
    rest = excess - from_longer
    a_cut = np.where(gap > 0, from_longer, 0) + rest // 2
    return a_cut, excess - a_cut
