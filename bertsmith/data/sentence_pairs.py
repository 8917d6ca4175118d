"""Sentence pairs: cuts documents into training examples, as ranges of token ids.

The procedure is that of the paper (section 3.1 and appendix A.2) and of its code
(`create_pretraining_data.py`). Whole sentences are gathered until they reach the target length or
the document ends. A random number of these sentences, from the first on, form segment A. With
probability 0.5 the remaining sentences form segment B. Otherwise, and whenever only one sentence
was gathered, B is drawn from another document, starting at a random sentence, and the next example
starts right after A. Finally the pair is truncated to the maximum length: tokens are removed one at
a time from the longer segment, and a coin flip decides between its front and its back.

For sentence-order prediction (Lan et al. 2019, arXiv:1909.11942), B always consists of the
remaining sentences, a single sentence is cut in the middle, and A and B are swapped with
probability 0.5.

An example depends only on its first sentence and on random numbers indexed by that sentence, and
no two examples of an epoch start at the same sentence. So NumPy computes for every sentence the
example that would start there, and only the search for the actual starts is a Python loop.
"""

from dataclasses import dataclass

import numpy as np

from bertsmith.data.counter_rng import (
    IntArray,
    derive_key,
    draw_bernoulli,
    draw_fair_binomial,
    draw_uniform_integers,
    init_states,
    random_bits,
)
from bertsmith.data.packing import concat_ranges
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.errors import StoreError
from bertsmith.splitmix64 import UInt64Array

#: Indices of the random values of an example.
(
    RNG_SHORT,
    RNG_TARGET,
    RNG_A_END,
    RNG_IS_RANDOM,
    RNG_DOCUMENT,
    RNG_SENTENCE,
    RNG_ORDER,
) = range(7)
#: First indices of the coin flips that decide whether a token is removed at the front or the back:
#: one for segment A and one for segment B. Each series uses every second index from its first.
RNG_TRUNCATE_A, RNG_TRUNCATE_B = 16, 17
#: Number of sentences processed at a time, chosen to fit the processor's cache.
_SENTENCES_PER_PASS = 1 << 16


@dataclass(frozen=True)
class SentencePairs:
    """n training examples, stored as ranges of a split's token ids.

    Attributes:
        a_first: First token of segment A, int64 [n].
        a_size: Number of tokens in segment A, int64 [n].
        b_first: First token of segment B, int64 [n].
        b_size: Number of tokens in segment B, int64 [n]; 0 without next-sentence prediction.
        nsp_labels: 1 where B is from another document, or where A and B are swapped, else 0;
            int64 [n].
        rng_states: Random state of each example, uint64 [n].
    """

    a_first: IntArray
    a_size: IntArray
    b_first: IntArray
    b_size: IntArray
    nsp_labels: IntArray
    rng_states: UInt64Array

    def take(self, indices: IntArray) -> "SentencePairs":
        """Return the examples at ``indices``, in that order."""
        return SentencePairs(
            self.a_first[indices],
            self.a_size[indices],
            self.b_first[indices],
            self.b_size[indices],
            self.nsp_labels[indices],
            self.rng_states[indices],
        )


@dataclass(frozen=True)
class _Candidates:
    """The examples that would start at each of n sentences; every array is [n].

    Attributes:
        rng_states: Random states, uint64.
        target: Target length in tokens.
        end: End of the gathered sentences.
        a_end: End of segment A, as a sentence number.
        is_random: 1 where segment B is drawn from another document, else 0.
    """

    rng_states: UInt64Array
    target: IntArray
    end: IntArray
    a_end: IntArray
    is_random: IntArray

    def take(self, indices: IntArray) -> "_Candidates":
        """Return the candidates at ``indices``, in that order."""
        return _Candidates(
            self.rng_states[indices],
            self.target[indices],
            self.end[indices],
            self.a_end[indices],
            self.is_random[indices],
        )


class PairSampler:
    """Cuts the documents of a split into the examples of one epoch, at one sequence length."""

    def __init__(
        self, split: Split, settings: DataSettings, length: int, seed: int, epoch: int
    ) -> None:
        """Check that the split has enough documents.

        Args:
            split: Documents to cut into examples.
            settings: Whether and how to form pairs, and the share of short examples.
            length: Maximum number of tokens per sequence, with [CLS] and [SEP].
            seed: Random seed.
            epoch: Number of the epoch; every epoch has different examples.

        Raises:
            StoreError: The split has no document, or only one although pairs need two.
        """
        self._split = split
        self._nsp = settings.nsp
        self._is_sentence_order = settings.nsp and settings.pair_objective == "sop"
        self._short_seq_prob = settings.short_seq_prob
        # [CLS] and one [SEP] per segment are added later.
        self._max_tokens = length - (3 if settings.nsp else 2)
        self._key = derive_key(seed, epoch)
        self._check_documents()

    def find_chunk_starts(self, chunk_length: int) -> tuple[IntArray, int]:
        """Divide the epoch into chunks of ``chunk_length`` consecutive examples.

        Returns:
            The first sentence of each chunk, int64 [chunks], and the exact number of examples.
        """
        offsets = self._split.sentence_offsets
        num_sentences = len(offsets) - 1
        chunk_starts: list[IntArray] = []
        count = first = 0
        while first < num_sentences:
            last = min(first + _SENTENCES_PER_PASS, num_sentences)
            # An example has at most max_tokens tokens and a sentence at least one, so no example
            # that starts before ``last`` needs sentences from ``reach`` on.
            reach = min(last + self._max_tokens, num_sentences)
            sentences = np.arange(first, last)
            document_ends = self._find_document_ends(first, last)
            candidates = self._gather_sentences(
                sentences, document_ends, offsets[first : reach + 1], first
            )
            starts, num_consumed = _follow_chain(self._count_consumed(sentences, candidates))
            # Examples of this pass that still belong to the last chunk of the previous pass.
            num_remaining = -count % chunk_length
            chunk_starts.append(first + starts[num_remaining::chunk_length])
            count += len(starts)
            first += num_consumed
        return np.concatenate(chunk_starts), count

    def sample_pairs(self, firsts: IntArray, lasts: IntArray) -> SentencePairs:
        """Return the examples in some ranges of sentences, in order.

        Args:
            firsts: First sentence of each range, int64 [ranges]; an example must start there.
            lasts: End of each range, int64 [ranges]; an example must start there, unless it is the
                end of the split.
        """
        sizes = lasts - firsts
        sentences = concat_ranges(firsts, sizes)
        document_offsets = self._split.document_offsets
        documents = np.searchsorted(document_offsets, sentences, "right") - 1
        document_ends = document_offsets[documents + 1]
        candidates = self._gather_sentences(
            sentences, document_ends, self._split.sentence_offsets, 0
        )
        starts, _ = _follow_chain(self._count_consumed(sentences, candidates))
        return self._build_pairs(sentences[starts], documents[starts], candidates.take(starts))

    def _check_documents(self) -> None:
        """Raise StoreError if the split has too few documents."""
        counts = self._split.counts
        if not counts.documents:
            raise StoreError(
                f"{self._split.name}: no document in this split, but pretrain needs "
                "training and held-out text; prepare more text, with a --held-out share above 0"
            )
        if self._nsp and not self._is_sentence_order and counts.documents < 2:
            raise StoreError(
                f"{self._split.name}: this split has one document only, but the second "
                "segment of half the sentence pairs must come from another document; prepare more "
                "documents, or turn next-sentence prediction off with data.nsp = false"
            )

    def _find_document_ends(self, first: int, last: int) -> IntArray:
        """Return, for each sentence in [first, last), the end of its document, int64."""
        documents = self._split.document_offsets
        low = int(np.searchsorted(documents, first, "right")) - 1
        high = int(np.searchsorted(documents, last, "left"))
        offsets = documents[low : high + 1]
        return np.repeat(offsets[1:], np.diff(offsets.clip(first, last)).astype(np.int64))

    def _gather_sentences(
        self, sentences: IntArray, document_ends: IntArray, offsets: IntArray, base: int
    ) -> _Candidates:
        """Gather sentences up to the target length, starting at each of ``sentences`` [n].

        Args:
            sentences: Numbers of the first sentences, int64 [n].
            document_ends: End of the document of each sentence, int64 [n].
            offsets: Token offsets of the sentences from number ``base`` on.
            base: Number of the sentence that ``offsets`` starts with.
        """
        states = init_states(self._key, sentences)
        max_tokens = np.full(len(sentences), self._max_tokens)
        is_short = draw_bernoulli(random_bits(states, RNG_SHORT), self._short_seq_prob)
        short_target = 2 + draw_uniform_integers(random_bits(states, RNG_TARGET), max_tokens - 1)
        target = np.where(is_short, short_target, max_tokens)
        target_end = np.searchsorted(offsets, offsets[sentences - base] + target) + base
        end = np.minimum(target_end, document_ends)
        count = end - sentences
        if not self._nsp:
            return _Candidates(states, target, end, end, np.zeros(len(sentences), np.int64))
        a_end = sentences + 1 + draw_uniform_integers(random_bits(states, RNG_A_END), count - 1)
        if self._is_sentence_order:
            return _Candidates(states, target, end, a_end, np.zeros(len(sentences), np.int64))
        is_random = (count == 1) | draw_bernoulli(random_bits(states, RNG_IS_RANDOM), 0.5)
        return _Candidates(states, target, end, a_end, is_random.astype(np.int64))

    @staticmethod
    def _count_consumed(sentences: IntArray, candidates: _Candidates) -> IntArray:
        """Return the number of sentences before the next example starts, int64 [n], at least 1."""
        return np.where(candidates.is_random == 1, candidates.a_end, candidates.end) - sentences

    def _build_pairs(
        self, sentences: IntArray, documents: IntArray, candidates: _Candidates
    ) -> SentencePairs:
        """Turn candidates into ranges of tokens, truncated to the maximum length."""
        offsets = self._split.sentence_offsets
        a_first, a_last = offsets[sentences], offsets[candidates.a_end]
        b_last = offsets[candidates.end].copy()
        if self._is_sentence_order:
            middle = (a_first + b_last + 1) // 2
            a_last = np.where(candidates.a_end == candidates.end, middle, a_last)
        a_size, b_first = a_last - a_first, a_last.copy()
        random_rows = np.flatnonzero(candidates.is_random)
        b_first[random_rows], b_last[random_rows] = self._draw_random_segments(
            candidates.rng_states[random_rows],
            documents[random_rows],
            (candidates.target - a_size)[random_rows],
        )
        b_size = b_last - b_first
        a_excess, b_excess = _compute_excess(a_size, b_size, self._max_tokens)
        states = candidates.rng_states
        pairs = SentencePairs(
            a_first=a_first + draw_fair_binomial(states, RNG_TRUNCATE_A, a_excess),
            a_size=a_size - a_excess,
            b_first=b_first + draw_fair_binomial(states, RNG_TRUNCATE_B, b_excess),
            b_size=b_size - b_excess,
            nsp_labels=candidates.is_random,
            rng_states=states,
        )
        return _swap_segments(pairs) if self._is_sentence_order else pairs

    def _draw_random_segments(
        self, states: UInt64Array, documents: IntArray, target: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Draw consecutive sentences of ``target`` [n] or more tokens from other documents.

        Args:
            states: Random states, uint64 [n].
            documents: Indices of the documents to exclude, int64 [n].
            target: Number of tokens to reach, int64 [n], unless the document ends before.

        Returns:
            First token and end of each segment, int64 [n].
        """
        document_offsets, offsets = self._split.document_offsets, self._split.sentence_offsets
        num_others = np.full(len(states), len(document_offsets) - 2)
        other = draw_uniform_integers(random_bits(states, RNG_DOCUMENT), num_others)
        other += other >= documents
        document_sizes = document_offsets[other + 1] - document_offsets[other]
        sentence = draw_uniform_integers(random_bits(states, RNG_SENTENCE), document_sizes)
        first = document_offsets[other] + sentence
        last = np.searchsorted(offsets, offsets[first] + target)
        last = np.clip(last, first + 1, document_offsets[other + 1])
        return offsets[first], offsets[last]


def _swap_segments(pairs: SentencePairs) -> SentencePairs:
    """Swap A and B with probability 0.5, and label the swapped pairs with 1.

    If the only sentence has a single token, B is empty, and the pair is not swapped.
    """
    is_swapped = draw_bernoulli(random_bits(pairs.rng_states, RNG_IS_RANDOM), 0.5)
    is_swapped &= pairs.b_size > 0
    return SentencePairs(
        a_first=np.where(is_swapped, pairs.b_first, pairs.a_first),
        a_size=np.where(is_swapped, pairs.b_size, pairs.a_size),
        b_first=np.where(is_swapped, pairs.a_first, pairs.b_first),
        b_size=np.where(is_swapped, pairs.a_size, pairs.b_size),
        nsp_labels=is_swapped.astype(np.int64),
        rng_states=pairs.rng_states,
    )


def _follow_chain(steps: IntArray) -> tuple[IntArray, int]:
    """Start at index 0 and jump ahead by ``steps[index]`` until past the end.

    Returns:
        The visited indices, int64, and the first index past the end.
    """
    step_list: list[int] = steps.tolist()
    visited: list[int] = []
    index, end = 0, len(step_list)
    while index < end:
        visited.append(index)
        index += step_list[index]
    return np.array(visited, np.int64), index


def _compute_excess(
    a_size: IntArray, b_size: IntArray, max_tokens: int
) -> tuple[IntArray, IntArray]:
    """Return the number of tokens to remove from A and from B, int64 [n].

    Tokens are removed one at a time from the longer segment, or from B if both are equally long.
    """
    excess = np.maximum(a_size + b_size - max_tokens, 0)
    difference = a_size - b_size
    from_longer = np.minimum(excess, np.abs(difference))
    # Once both segments are equally long, tokens are removed from B and A in turn, B first.
    remaining = excess - from_longer
    a_excess = np.where(difference > 0, from_longer, 0) + remaining // 2
    return a_excess, excess - a_excess
