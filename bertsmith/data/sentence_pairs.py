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

from bertsmith.data.counter_rng import Ints, Words, below, chance, draw, heads, key_of, states
from bertsmith.data.packing import ranges
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.errors import StoreError

#: The numbers of the random words of an example.
SHORT, TARGET, A_END, COIN, DOCUMENT, SENTENCE, ORDER = range(7)
#: The coins that say front or back, for A and for B, fall from here on in every second word.
CUT_A, CUT_B = 16, 17
#: The sentences looked at together: as many as the processor's cache holds well.
_GROUP = 1 << 16


@dataclass(frozen=True)
class Pairs:
    """n examples as ranges of a split's token ids; every array is [n].

    ``a_first``, ``b_first`` int64: the first token of each segment; ``a_size``, ``b_size`` int64:
    its tokens (``b_size`` is 0 throughout without pairs); ``not_next`` int64: 1 where B comes
    from another document; ``state`` uint64: the example's random state.
    """

    a_first: Ints
    a_size: Ints
    b_first: Ints
    b_size: Ints
    not_next: Ints
    state: Words

    def take(self, order: Ints) -> "Pairs":
        """Return the examples in another order, or some of them."""
        return Pairs(
            self.a_first[order],
            self.a_size[order],
            self.b_first[order],
            self.b_size[order],
            self.not_next[order],
            self.state[order],
        )


@dataclass(frozen=True)
class _Chunks:
    """What is gathered from each of n sentences on: targets, ends, the end of A, NSP's coin."""

    state: Words
    target: Ints
    end: Ints
    a_end: Ints
    is_random: Ints

    def take(self, chosen: Ints) -> "_Chunks":
        return _Chunks(
            self.state[chosen],
            self.target[chosen],
            self.end[chosen],
            self.a_end[chosen],
            self.is_random[chosen],
        )


class Walk:
    """The walk over one split in one epoch, at one length."""

    def __init__(
        self, split: Split, settings: DataSettings, length: int, seed: int, epoch: int
    ) -> None:
        self._split = split
        self._nsp = settings.nsp
        self._short_share = settings.short_share
        # [CLS] and one [SEP] a segment are not counted in the target.
        self._room = length - (3 if settings.nsp else 2)
        self._key = key_of(seed, epoch)
        self._check()

    def run_starts(self, run: int) -> tuple[Ints, int]:
        """Follow the walk through the whole split.

        Returns the sentence at which every ``run``-th example begins, int64 [runs], and the
        exact number of examples.
        """
        offsets, total = self._split.sentences, len(self._split.sentences) - 1
        kept: list[Ints] = []
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

    def examples(self, firsts: Ints, lasts: Ints) -> Pairs:
        """Return the examples of some stretches [first, last) of the walk, in their order.

        Each stretch of sentences must begin where an example does and end where another begins.
        """
        sizes = lasts - firsts
        sentences = ranges(firsts, sizes)
        documents = np.searchsorted(self._split.documents, sentences, "right") - 1
        ends = self._split.documents[documents + 1]
        chunks = self._gather(sentences, ends, self._split.sentences, 0)
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

    def _document_ends(self, first: int, last: int) -> Ints:
        """Return for each sentence in [first, last) the end of its document, int64."""
        documents = self._split.documents
        low = int(np.searchsorted(documents, first, "right")) - 1
        high = int(np.searchsorted(documents, last, "left"))
        bounds = documents[low : high + 1]
        return np.repeat(bounds[1:], np.diff(bounds.clip(first, last)).astype(np.int64))

    def _gather(self, sentences: Ints, ends: Ints, offsets: Ints, base: int) -> _Chunks:
        """Gather sentences to the target length from each of ``sentences`` on.

        ``offsets`` are the token offsets of the sentences from number ``base`` on.
        """
        state = states(self._key, sentences)
        room = np.full(len(sentences), self._room)
        short = chance(draw(state, SHORT), self._short_share)
        target = np.where(short, 2 + below(draw(state, TARGET), room - 1), room)
        reached = np.searchsorted(offsets, offsets[sentences - base] + target) + base
        end = np.minimum(reached, ends)
        count = end - sentences
        if not self._nsp:
            return _Chunks(state, target, end, end, np.zeros(len(sentences), np.int64))
        a_end = sentences + 1 + below(draw(state, A_END), count - 1)
        is_random = (count == 1) | chance(draw(state, COIN), 0.5)
        return _Chunks(state, target, end, a_end, is_random.astype(np.int64))

    @staticmethod
    def _used(sentences: Ints, chunks: _Chunks) -> Ints:
        """Return how many sentences each example uses up, int64 [n], at least 1."""
        return np.where(chunks.is_random == 1, chunks.a_end, chunks.end) - sentences

    def _pairs(self, sentences: Ints, documents: Ints, chunks: _Chunks) -> Pairs:
        """Turn chunks into ranges of tokens, cut to the room there is."""
        offsets = self._split.sentences
        a_first = offsets[sentences]
        a_size = offsets[chunks.a_end] - a_first
        b_first, b_last = offsets[chunks.a_end].copy(), offsets[chunks.end].copy()
        lanes = np.flatnonzero(chunks.is_random)
        b_first[lanes], b_last[lanes] = self._elsewhere(
            chunks.state[lanes], documents[lanes], (chunks.target - a_size)[lanes]
        )
        b_size = b_last - b_first
        a_cut, b_cut = _cuts(a_size, b_size, self._room)
        return Pairs(
            a_first=a_first + heads(chunks.state, CUT_A, a_cut),
            a_size=a_size - a_cut,
            b_first=b_first + heads(chunks.state, CUT_B, b_cut),
            b_size=b_size - b_cut,
            not_next=chunks.is_random,
            state=chunks.state,
        )

    def _elsewhere(self, state: Words, documents: Ints, wanted: Ints) -> tuple[Ints, Ints]:
        """Return the token ranges [n] of sentences from any document but ``documents`` [n]."""
        bounds, offsets = self._split.documents, self._split.sentences
        others = np.full(len(state), len(bounds) - 2)
        other = below(draw(state, DOCUMENT), others)
        other += other >= documents
        first = bounds[other] + below(draw(state, SENTENCE), bounds[other + 1] - bounds[other])
        last = np.searchsorted(offsets, offsets[first] + wanted)
        last = np.clip(last, first + 1, bounds[other + 1])
        return offsets[first], offsets[last]


def _follow(used: Ints) -> tuple[Ints, int]:
    """Walk from index 0 by steps of ``used`` [n]; return the indices visited, and where it left."""
    steps: list[int] = used.tolist()
    visited: list[int] = []
    place, end = 0, len(steps)
    while place < end:
        visited.append(place)
        place += steps[place]
    return np.array(visited, np.int64), place


def _cuts(a_size: Ints, b_size: Ints, room: int) -> tuple[Ints, Ints]:
    """Return how many tokens A and B lose when the longer one, B if equal, loses one in turn."""
    excess = np.maximum(a_size + b_size - room, 0)
    gap = a_size - b_size
    from_longer = np.minimum(excess, np.abs(gap))
    # From equality on they take turns, B first.
    rest = excess - from_longer
    a_cut = np.where(gap > 0, from_longer, 0) + rest // 2
    return a_cut, excess - a_cut
