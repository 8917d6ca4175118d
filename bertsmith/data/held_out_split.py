"""Chooses the held-out text: whole documents, and parts of long documents.

Whether a part is held out depends only on the hash of its document's text, on its number in the
document, and on one rule for the whole corpus. So equal documents are in the same split, and the
result does not depend on the number of worker processes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from bertsmith.data.counter_rng import BoolArray, IntArray, random_bits
from bertsmith.splitmix64 import UInt64Array

#: Share of all tokens that is held out by default.
DEFAULT_SHARE = 0.01
#: Minimum number of tokens held out by default: about a thousand pairs at length 128.
_DEFAULT_MIN_TOKENS = 1 << 17
#: Maximum share of all tokens that is held out by default. It outweighs the minimum number.
_DEFAULT_MAX_SHARE = 0.05
#: Minimum number of parts in a split: next-sentence pairs need two documents.
_MIN_PARTS = 2
#: A document with at most this share of the requested tokens is not cut: holding out whole
#: documents misses the request by at most half a document.
_MAX_UNCUT_SHARE = 0.4
#: Number of tokens that is enough for several sequences; parts need not be longer.
_MAX_USEFUL_TOKENS = 512
#: Minimum number of tokens per part, if the corpus is large enough: a shorter part has too few
#: sentences for pairs.
_MIN_PART_TOKENS = 64
_MAX_HASH = 2**64 - 1


class DocumentSizes(NamedTuple):
    """The sizes of a group of documents.

    Attributes:
        hashes: Hash of each document's text, uint64 [documents].
        sentences_per_document: Sentences in each document, int64 [documents], at least 1.
        tokens_per_sentence: Tokens in each sentence, int64 [sentences], at least 1.
    """

    hashes: UInt64Array
    sentences_per_document: IntArray
    tokens_per_sentence: IntArray


class SplitAssignment(NamedTuple):
    """The split of each sentence, and the sizes of the documents in both splits.

    Attributes:
        is_held_out: Whether each sentence is held out, bool [sentences].
        train_document_sizes: Sentences in each training document, int64, in order.
        held_out_document_sizes: Sentences in each held-out document, int64, in order.
    """

    is_held_out: BoolArray
    train_document_sizes: IntArray
    held_out_document_sizes: IntArray


class _Parts(NamedTuple):
    """Contiguous parts of documents, in order.

    Attributes:
        hashes: Hash of each part, which decides whether it is held out, uint64 [parts].
        num_tokens: Number of tokens in each part, int64 [parts].
        num_sentences: Number of sentences in each part, int64 [parts].
        is_first: Whether the part is the first of its document, bool [parts].
    """

    hashes: UInt64Array
    num_tokens: IntArray
    num_sentences: IntArray
    is_first: BoolArray


@dataclass(frozen=True)
class HeldOutRule:
    """Determines which parts of a corpus are held out.

    Attributes:
        hash_limit: Parts with a hash below this limit, in [0, 2**64), are held out.
        cut_hashes: Sorted hashes of the documents that are cut into parts. Any other document is
            a single part with the hash of the document.
        cut_counts: Number of parts of each document in ``cut_hashes``.
        excluded_hashes: Sorted hashes of parts that are too large to be held out.
        merge_training_parts: Whether adjacent training parts of a document are merged again.
    """

    hash_limit: int
    cut_hashes: UInt64Array
    cut_counts: IntArray
    excluded_hashes: UInt64Array
    merge_training_parts: bool = True

    @classmethod
    def hold_nothing_out(cls) -> "HeldOutRule":
        """Return the rule that holds nothing out."""
        hashes = np.zeros(0, np.uint64)
        return cls(0, hashes, np.zeros(0, np.int64), hashes)

    def assign(self, documents: DocumentSizes) -> SplitAssignment:
        """Assign each sentence to a split. Every held-out part becomes a document."""
        parts = self._cut_documents(documents)
        is_held_out = self._is_held_out(parts.hashes)
        starts = self._starts_training_document(parts, is_held_out)
        # Number of the training document that each training part belongs to.
        train_document_numbers = np.cumsum(starts[~is_held_out]) - 1
        train_sizes = np.bincount(
            train_document_numbers,
            parts.num_sentences[~is_held_out],
            minlength=int(starts.sum()),
        )
        return SplitAssignment(
            is_held_out=np.repeat(is_held_out, parts.num_sentences),
            train_document_sizes=train_sizes.astype(np.int64),
            held_out_document_sizes=parts.num_sentences[is_held_out],
        )

    def count_cut_documents(self, documents: DocumentSizes) -> int:
        """Count the documents that are cut into two parts or more."""
        is_first = self._cut_documents(documents).is_first
        # A document is cut if its first part is followed by another part of the same document.
        return int((is_first[:-1] & ~is_first[1:]).sum())

    def _count_parts(self, hashes: UInt64Array) -> IntArray:
        """Return the number of parts that each document is cut into, int64 [n], at least 1."""
        if not len(self.cut_hashes):
            return np.ones(len(hashes), np.int64)
        # Index of each hash in ``cut_hashes``, if it is there.
        index = np.searchsorted(self.cut_hashes, hashes).clip(max=len(self.cut_hashes) - 1)
        return np.where(self.cut_hashes[index] == hashes, self.cut_counts[index], 1)

    def _cut_documents(self, documents: DocumentSizes) -> _Parts:
        """Cut documents into parts of nearly equal numbers of tokens, between sentences."""
        document_numbers = np.repeat(
            np.arange(len(documents.hashes)), documents.sentences_per_document
        )
        token_ends = np.cumsum(documents.tokens_per_sentence)
        document_ends = np.append(0, token_ends)[np.cumsum(documents.sentences_per_document)]
        document_tokens = np.diff(document_ends, prepend=0)
        num_parts = self._count_parts(documents.hashes)
        # A sentence belongs to the part that contains its midpoint. Midpoints are doubled so that
        # they are integers.
        document_starts = (document_ends - document_tokens)[document_numbers]
        doubled_midpoints = 2 * (token_ends - document_starts) - documents.tokens_per_sentence
        part_numbers = (
            doubled_midpoints
            * num_parts[document_numbers]
            // (2 * document_tokens[document_numbers])
        )
        starts_document = np.diff(document_numbers, prepend=-1) != 0
        starts_part = starts_document | (np.diff(part_numbers, prepend=-1) != 0)
        first_sentences = np.flatnonzero(starts_part)
        # An uncut document is a single part with the hash of the document. The hash of a part of a
        # cut document also depends on the number of the part.
        hashes = documents.hashes[document_numbers[first_sentences]]
        is_cut = num_parts[document_numbers[first_sentences]] > 1
        cut_part_numbers = part_numbers[first_sentences][is_cut].astype(np.uint64)
        hashes[is_cut] = random_bits(hashes[is_cut], cut_part_numbers)
        token_offsets = np.append(0, token_ends)[np.append(first_sentences, len(token_ends))]
        return _Parts(
            hashes=hashes,
            num_tokens=np.diff(token_offsets),
            num_sentences=np.diff(first_sentences, append=len(token_ends)),
            is_first=starts_document[first_sentences],
        )

    def _is_held_out(self, hashes: UInt64Array) -> BoolArray:
        """Return whether the parts with these hashes are held out, bool [parts]."""
        is_below_limit = hashes < np.uint64(self.hash_limit)
        return is_below_limit & ~np.isin(hashes, self.excluded_hashes)

    def _starts_training_document(self, parts: _Parts, is_held_out: BoolArray) -> BoolArray:
        """Return whether each part is the first of a training document, bool [parts]."""
        if not self.merge_training_parts:
            return ~is_held_out
        # The text before a held-out part and the text after it are not contiguous, so they are
        # separate documents.
        return ~is_held_out & (parts.is_first | _follows_held_out(is_held_out))


def choose_held_out(
    iterate_sizes: Callable[[], Iterable[DocumentSizes]], share: float | None
) -> HeldOutRule:
    """Choose which parts of a corpus are held out.

    Documents are held out in the order of their hashes. A document that is long compared with
    the number of requested tokens is first cut into parts of about equal size.

    If at least 256 tokens are requested, at most 1.2 times the requested tokens are held out. At
    least 0.8 times the requested tokens are held out, unless a sentence (with all its copies) is
    longer than a sixteenth of the request. At least two parts are held out and at least two remain
    for training; if that is impossible, nothing is held out.

    Args:
        iterate_sizes: Yields the sizes of all documents, with the same result at each call. It is
            called at most twice.
        share: Share of all tokens to hold out. None holds out 1 %, or 131,072 tokens if that is
            more, but at most 5 %.
    """
    hashes, tokens = _count_tokens(iterate_sizes())
    if share == 0.0 or not len(hashes):
        return HeldOutRule.hold_nothing_out()
    total = int(tokens.sum())
    requested = share * total if share is not None else _compute_default_request(total)
    part_tokens = _choose_part_tokens(requested, total)
    max_uncut_tokens = max(part_tokens, _MAX_UNCUT_SHARE * min(requested, total - requested))
    cut_rule = _choose_cuts(hashes, tokens, part_tokens, max_uncut_tokens)
    part_hashes, part_sizes, is_first = _measure_parts(cut_rule, hashes, tokens, iterate_sizes)
    unique_hashes, sums = _sum_by_hash(part_hashes, part_sizes)
    # All copies of a part are in the same split, so a part is only eligible if its copies together
    # do not exceed the request by much.
    max_tokens = max(1.5 * part_tokens, max_uncut_tokens, min(_MIN_PART_TOKENS, total / 8))
    is_eligible = sums <= max_tokens
    candidates = unique_hashes[is_eligible]
    count = _find_nearest_count(np.cumsum(sums[is_eligible]), requested)
    count = min(max(count, _MIN_PARTS), len(unique_hashes) - _MIN_PARTS)
    if count < _MIN_PARTS or count > len(candidates):
        return HeldOutRule.hold_nothing_out()
    hash_limit = int(candidates[count]) if count < len(candidates) else _MAX_HASH
    rule = replace(cut_rule, hash_limit=hash_limit, excluded_hashes=unique_hashes[~is_eligible])
    is_held_out = rule._is_held_out(part_hashes)  # noqa: SLF001 - same module
    starts = ~is_held_out & (is_first | _follows_held_out(is_held_out))
    num_merged_documents = int(starts.sum())
    return replace(rule, merge_training_parts=num_merged_documents >= _MIN_PARTS)


def _measure_parts(
    cut_rule: HeldOutRule,
    hashes: UInt64Array,
    tokens: IntArray,
    iterate_sizes: Callable[[], Iterable[DocumentSizes]],
) -> tuple[UInt64Array, IntArray, BoolArray]:
    """Return the uncut documents and the parts of the cut documents.

    Args:
        cut_rule: Rule that cuts documents.
        hashes: Hash of each document, uint64 [documents].
        tokens: Number of tokens in each document, int64 [documents].
        iterate_sizes: Yields the sizes of all documents. It is only called if a document is cut.

    Returns:
        The hash of each part, uint64 [parts]; its number of tokens, int64 [parts]; whether it is
        the first of its document, bool [parts].
    """
    is_cut = np.isin(hashes, cut_rule.cut_hashes)
    part_hashes, part_sizes = [hashes[~is_cut]], [tokens[~is_cut]]
    is_first = [np.ones(len(part_hashes[0]), np.bool_)]
    if is_cut.any():
        for documents in iterate_sizes():
            cut_documents = _select_documents(documents, cut_rule.cut_hashes)
            parts = cut_rule._cut_documents(cut_documents)  # noqa: SLF001 - same module
            part_hashes.append(parts.hashes)
            part_sizes.append(parts.num_tokens)
            is_first.append(parts.is_first)
    return np.concatenate(part_hashes), np.concatenate(part_sizes), np.concatenate(is_first)


def _count_tokens(groups: Iterable[DocumentSizes]) -> tuple[UInt64Array, IntArray]:
    """Return the hash and the number of tokens of each document, [documents]."""
    # ``np.concatenate`` needs at least one array.
    hashes, tokens = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for sizes in groups:
        hashes.append(sizes.hashes)
        ends = np.append(0, np.cumsum(sizes.tokens_per_sentence))[
            np.cumsum(sizes.sentences_per_document)
        ]
        tokens.append(np.diff(ends, prepend=0))
    return np.concatenate(hashes), np.concatenate(tokens)


def _compute_default_request(total: int) -> float:
    """Return the number of tokens to hold out by default, for a corpus of ``total`` tokens."""
    return max(DEFAULT_SHARE * total, min(_DEFAULT_MIN_TOKENS, _DEFAULT_MAX_SHARE * total))


def _choose_part_tokens(requested: float, total: int) -> float:
    """Return the number of tokens per part of a long document.

    Many short parts meet the request more precisely and sample the corpus more evenly. Long parts
    give more and longer sequences. Two parts must not be a large share of a tiny corpus.
    """
    smaller_split = min(requested, total - requested)
    return max(
        # At most eight parts in the smaller split.
        smaller_split / 8,
        # At most four parts, or more if four parts would exceed _MAX_USEFUL_TOKENS each.
        min(smaller_split / 4, _MAX_USEFUL_TOKENS),
        # Long enough for pairs, unless the corpus is tiny.
        min(_MIN_PART_TOKENS, total / 16),
    )


def _choose_cuts(
    hashes: UInt64Array, tokens: IntArray, part_tokens: float, max_uncut_tokens: float
) -> HeldOutRule:
    """Return a rule that cuts long documents and holds nothing out.

    A document is long if it and its copies have more than ``max_uncut_tokens`` in total.
    """
    unique_hashes, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    tokens_with_copies = np.bincount(inverse, tokens)
    num_parts = np.where(
        tokens_with_copies > max_uncut_tokens, np.ceil(tokens_with_copies / part_tokens), 1
    )
    # A document cannot have more parts than tokens.
    num_parts = np.minimum(num_parts.astype(np.int64), tokens[first])
    return replace(
        HeldOutRule.hold_nothing_out(),
        cut_hashes=unique_hashes[num_parts > 1],
        cut_counts=num_parts[num_parts > 1],
    )


def _select_documents(documents: DocumentSizes, hashes: UInt64Array) -> DocumentSizes:
    """Return the documents that have one of ``hashes``."""
    is_selected = np.isin(documents.hashes, hashes)
    return DocumentSizes(
        documents.hashes[is_selected],
        documents.sentences_per_document[is_selected],
        documents.tokens_per_sentence[np.repeat(is_selected, documents.sentences_per_document)],
    )


def _sum_by_hash(hashes: UInt64Array, tokens: IntArray) -> tuple[UInt64Array, IntArray]:
    """Return the sorted unique hashes, and the number of tokens of all parts with each hash."""
    unique_hashes, inverse = np.unique(hashes, return_inverse=True)
    return unique_hashes, np.bincount(inverse, tokens).astype(np.int64)


def _find_nearest_count(cumulative: IntArray, requested: float) -> int:
    """Return how many parts, from the first on, have the total nearest to the requested tokens.

    Args:
        cumulative: Total tokens of the first 1, 2, 3, ... parts, int64 [parts].
        requested: Requested number of tokens.
    """
    count = int(np.searchsorted(cumulative, requested))
    if count == len(cumulative):
        return count
    shortfall = requested - (cumulative[count - 1] if count else 0)
    excess = cumulative[count] - requested
    return count + 1 if excess <= shortfall else count


def _follows_held_out(is_held_out: BoolArray) -> BoolArray:
    """Return whether each part comes right after a held-out part, bool [parts]."""
    result = np.zeros_like(is_held_out)
    result[1:] = is_held_out[:-1]
    return result
