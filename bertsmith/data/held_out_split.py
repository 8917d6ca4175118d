"""Choose which text is held out: whole documents, and parts of documents that are too long.

A part's side depends on the hash of its document's text, on its number in the document and on one
rule for the whole corpus. So equal documents are on the same side, whichever worker reads them.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from bertsmith.data.counter_rng import BoolArray, IntArray, UInt64Array, random_bits

#: Share of all tokens that is held out by default ...
DEFAULT_SHARE = 0.01
#: ... but at least this many tokens (about a thousand pairs at length 128) ...
ENOUGH_TOKENS = 1 << 17
#: ... unless that is more than this share.
LARGEST_SHARE = 0.05
#: Next-sentence pairs need two documents on either side.
MIN_PARTS = 2
#: Documents of up to this share of the request stay whole: taking or leaving one misses the
#: request by half of it at most.
WHOLE_SHARE = 0.4
#: A part of this many tokens is long enough for several sequences; longer ones are not needed.
USEFUL_TOKENS = 512
#: A shorter part has too few sentences for pairs.
SHORTEST_TOKENS = 64
_LARGEST_HASH = 2**64 - 1


class DocumentSizes(NamedTuple):
    """The sizes of a group of documents.

    hashes: uint64 [documents], equal for equal documents.
    document_sizes: int64 [documents], sentences of each document, at least 1.
    sentence_sizes: int64 [sentences], tokens of each sentence, at least 1.
    """

    hashes: UInt64Array
    document_sizes: IntArray
    sentence_sizes: IntArray


class SplitAssignment(NamedTuple):
    """The side of each sentence, and the documents that result on either side.

    held_out: bool [sentences].
    train, heldout: int64, sentences of each document of the side, in order.
    """

    held_out: BoolArray
    train_document_sizes: IntArray
    held_out_document_sizes: IntArray


class _Parts(NamedTuple):
    """Contiguous parts of documents in order, each array [parts]; ``sizes`` counts sentences."""

    hashes: UInt64Array
    tokens: IntArray
    sizes: IntArray
    is_first: BoolArray


@dataclass(frozen=True)
class HeldOutRule:
    """Which parts of the documents of a corpus are held out.

    hash_limit: parts with a hash below it are held out, in [0, 2**64).
    cut_hashes, cut_counts: the documents that are cut into parts (sorted hashes), and into how
        many; any other document is one part, with the hash of the document.
    excluded_hashes: sorted hashes of parts that are never held out because they are too large.
    merge_training_parts: join adjacent training parts of a document again.
    """

    hash_limit: int
    cut_hashes: UInt64Array
    cut_counts: IntArray
    excluded_hashes: UInt64Array
    merge_training_parts: bool = True

    @classmethod
    def none(cls) -> "HeldOutRule":
        """Return the rule that holds nothing out."""
        hashes = np.zeros(0, np.uint64)
        return cls(0, hashes, np.zeros(0, np.int64), hashes)

    def assign(self, lengths: DocumentSizes) -> SplitAssignment:
        """Assign each sentence to a side; each held-out part becomes a document of its own."""
        parts = self._parts(lengths)
        held_out = self._is_held_out(parts.hashes)
        starts = self._starts_document(parts, held_out)
        train = np.bincount(
            np.cumsum(starts[~held_out]) - 1, parts.sizes[~held_out], minlength=int(starts.sum())
        )
        return SplitAssignment(
            held_out=np.repeat(held_out, parts.sizes),
            train_document_sizes=train.astype(np.int64),
            held_out_document_sizes=parts.sizes[held_out],
        )

    def count_cut_documents(self, lengths: DocumentSizes) -> int:
        """Count the documents that are cut into two parts or more."""
        is_first = self._parts(lengths).is_first
        return int((is_first[:-1] & ~is_first[1:]).sum())

    def _counts(self, hashes: UInt64Array) -> IntArray:
        """Return into how many parts each document [n] is to be cut, at least 1."""
        if not len(self.cut_hashes):
            return np.ones(len(hashes), np.int64)
        index = np.searchsorted(self.cut_hashes, hashes).clip(max=len(self.cut_hashes) - 1)
        return np.where(self.cut_hashes[index] == hashes, self.cut_counts[index], 1)

    def _parts(self, lengths: DocumentSizes) -> _Parts:
        """Cut documents at the sentence boundaries nearest to equal numbers of tokens."""
        documents = np.repeat(np.arange(len(lengths.hashes)), lengths.document_sizes)
        token_ends = np.cumsum(lengths.sentence_sizes)
        document_ends = np.append(0, token_ends)[np.cumsum(lengths.document_sizes)]
        document_tokens = np.diff(document_ends, prepend=0)
        counts = self._counts(lengths.hashes)
        # A sentence belongs to the part that its middle is in.
        twice_middle = 2 * (token_ends - (document_ends - document_tokens)[documents])
        twice_middle -= lengths.sentence_sizes
        numbers = twice_middle * counts[documents] // (2 * document_tokens[documents])
        is_first = np.diff(documents, prepend=-1) != 0
        firsts = np.flatnonzero(is_first | (np.diff(numbers, prepend=-1) != 0))
        hashes = lengths.hashes[documents[firsts]]
        cut = counts[documents[firsts]] > 1
        hashes[cut] = random_bits(hashes[cut], numbers[firsts][cut].astype(np.uint64))
        bounds = np.append(0, token_ends)[np.append(firsts, len(token_ends))]
        return _Parts(
            hashes=hashes,
            tokens=np.diff(bounds),
            sizes=np.diff(firsts, append=len(token_ends)),
            is_first=is_first[firsts],
        )

    def _is_held_out(self, hashes: UInt64Array) -> BoolArray:
        below = hashes < np.uint64(self.hash_limit)
        return below & ~np.isin(hashes, self.excluded_hashes)

    def _starts_document(self, parts: _Parts, held_out: BoolArray) -> BoolArray:
        """Return which parts are the first of a training document."""
        if not self.merge_training_parts:
            return ~held_out
        # No document spans a gap where a part was taken out.
        return ~held_out & (parts.is_first | _after(held_out))


def choose_held_out(
    iterate_shards: Callable[[], Iterable[DocumentSizes]], share: float | None
) -> HeldOutRule:
    """Choose the rule for a corpus.

    Documents are held out whole, in the order of their hashes, as long as they are short beside
    the requested tokens; longer ones are cut into parts of about equal size. If at least 256
    tokens are requested, at most 1.2 times as many are held out; at least 0.8 times as many,
    unless sentences (with all their copies) are longer than a sixteenth of the request. At least
    two parts are held out and two remain; if that is impossible, nothing is held out.

    Args:
        iterate_shards: yields the sizes of all documents, the same at each call; called up to twice.
        share: of all tokens; None for 1 %, but at least 131,072 tokens unless that is more than
            5 %.
    """
    hashes, tokens = _totals(iterate_shards())
    if share == 0.0 or not len(hashes):
        return HeldOutRule.none()
    total = int(tokens.sum())
    requested = share * total if share is not None else _default_request(total)
    part_tokens = _part_tokens(requested, total)
    whole_tokens = max(part_tokens, WHOLE_SHARE * min(requested, total - requested))
    cuts = _cuts(hashes, tokens, part_tokens, whole_tokens)
    is_cut = np.isin(hashes, cuts.cut_hashes)
    part_hashes, part_sizes = [hashes[~is_cut]], [tokens[~is_cut]]
    is_first = [np.ones(len(part_hashes[0]), np.bool_)]
    if is_cut.any():
        for lengths in iterate_shards():
            parts = cuts._parts(_only(lengths, cuts.cut_hashes))  # noqa: SLF001 - same module
            part_hashes.append(parts.hashes)
            part_sizes.append(parts.tokens)
            is_first.append(parts.is_first)
    all_hashes = np.concatenate(part_hashes)
    unique, sums = _group(all_hashes, np.concatenate(part_sizes))
    # All copies of a part are on one side, so together they must not overshoot the request.
    largest = max(1.5 * part_tokens, whole_tokens, min(SHORTEST_TOKENS, total / 8))
    eligible = sums <= largest
    candidates = unique[eligible]
    count = _nearest(np.cumsum(sums[eligible]), requested)
    count = min(max(count, MIN_PARTS), len(unique) - MIN_PARTS)
    if count < MIN_PARTS or count > len(candidates):
        return HeldOutRule.none()
    limit = int(candidates[count]) if count < len(candidates) else _LARGEST_HASH
    rule = replace(cuts, hash_limit=limit, excluded_hashes=unique[~eligible])
    held_out = rule._is_held_out(all_hashes)  # noqa: SLF001 - same module
    documents = int((~held_out & (np.concatenate(is_first) | _after(held_out))).sum())
    return replace(rule, merge_training_parts=documents >= MIN_PARTS)


def _totals(shards: Iterable[DocumentSizes]) -> tuple[UInt64Array, IntArray]:
    """Return the hash and the tokens of each document [documents] of all shards."""
    hashes, tokens = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for lengths in shards:
        hashes.append(lengths.hashes)
        ends = np.append(0, np.cumsum(lengths.sentence_sizes))[np.cumsum(lengths.document_sizes)]
        tokens.append(np.diff(ends, prepend=0))
    return np.concatenate(hashes), np.concatenate(tokens)


def _default_request(total: int) -> float:
    return max(DEFAULT_SHARE * total, min(ENOUGH_TOKENS, LARGEST_SHARE * total))


def _part_tokens(requested: float, total: int) -> float:
    """Return the tokens of the parts into which long documents are cut.

    Many parts meet the request exactly and sample the corpus evenly; long parts hold more and
    longer sequences. In a tiny corpus two parts shall not be a large share of it.
    """
    smaller_side = min(requested, total - requested)
    return max(
        smaller_side / 8,
        min(smaller_side / 4, USEFUL_TOKENS),
        min(SHORTEST_TOKENS, total / 16),
    )


def _cuts(
    hashes: UInt64Array, tokens: IntArray, part_tokens: float, whole_tokens: float
) -> HeldOutRule:
    """Return the rule that cuts long documents and holds nothing out yet.

    A document is long if it has, with all its copies, more than ``whole_tokens``.
    """
    unique, first, owner = np.unique(hashes, return_index=True, return_inverse=True)
    with_copies = np.bincount(owner, tokens)
    counts = np.where(with_copies > whole_tokens, np.ceil(with_copies / part_tokens), 1)
    # No document has more parts than tokens.
    counts = np.minimum(counts.astype(np.int64), tokens[first])
    return replace(HeldOutRule.none(), cut_hashes=unique[counts > 1], cut_counts=counts[counts > 1])


def _only(lengths: DocumentSizes, hashes: UInt64Array) -> DocumentSizes:
    """Return the documents that have one of ``hashes``."""
    chosen = np.isin(lengths.hashes, hashes)
    return DocumentSizes(
        lengths.hashes[chosen],
        lengths.document_sizes[chosen],
        lengths.sentence_sizes[np.repeat(chosen, lengths.document_sizes)],
    )


def _group(hashes: UInt64Array, tokens: IntArray) -> tuple[UInt64Array, IntArray]:
    """Return the sorted different hashes and the tokens of all parts that have each."""
    unique, owner = np.unique(hashes, return_inverse=True)
    return unique, np.bincount(owner, tokens).astype(np.int64)


def _nearest(sums: IntArray, requested: float) -> int:
    """Return how many parts in order come nearest to the request; ``sums`` are cumulative."""
    count = int(np.searchsorted(sums, requested))
    if count == len(sums):
        return count
    below = sums[count - 1] if count else 0
    return count + int(sums[count] - requested <= requested - below)


def _after(held_out: BoolArray) -> BoolArray:
    """Return which parts come right after one that is held out."""
    result = np.zeros_like(held_out)
    result[1:] = held_out[:-1]
    return result
