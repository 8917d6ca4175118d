"""Adds words to a vocabulary. Existing ids do not change; new words get the next ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from tokenizers import pre_tokenizers

from bertsmith.errors import TokenizerError
from bertsmith.text.tokenizer_spec import CONTINUATION_PREFIX, build_normalizer
from bertsmith.text.vocabulary_report import VocabularyReport, measure_fit_from_counts
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.words import WordCounts, tokenize_words

#: Minimum count of a word to add: nothing can be learned about a word that occurs once.
MIN_OCCURRENCES = 2


@dataclass
class WordCheck:
    """Which of the requested words can be added to a vocabulary.

    Attributes:
        accepted: Normalized forms of the words that can be added.
        existing: Requested words that are already in the vocabulary.
        normalized: Normalized form by requested word, for the words that normalization changes.
        rejected: Reason by requested word, for the words that cannot be added.
    """

    accepted: list[str] = field(default_factory=list)
    existing: list[str] = field(default_factory=list)
    normalized: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "words": self.accepted,
            "existing": self.existing,
            "normalized": self.normalized,
            "rejected": self.rejected,
        }


@dataclass(frozen=True)
class VocabularyExtension:
    """A vocabulary extended by new words.

    Attributes:
        tokenizer: The new tokenizer.
        words: The new words, in the order of their ids.
        first_id: Id of the first new word.
        piece_ids: For each new word, the ids of its pieces in the old vocabulary; the id of [UNK]
            if the old vocabulary cannot represent the word.
    """

    tokenizer: Tokenizer
    words: tuple[str, ...]
    first_id: int
    piece_ids: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class FitComparison:
    """How well a vocabulary fits a text before and after the vocabulary is extended.

    Attributes:
        before: Fit of the old vocabulary.
        after: Fit of the new vocabulary.
        num_dropped: Number of words in the text that were not counted; see ``WordCounts``.
    """

    before: VocabularyReport
    after: VocabularyReport
    num_dropped: int

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "before": self.before.to_json(),
            "after": self.after.to_json(),
            "num_dropped": self.num_dropped,
        }


def check_words(tokenizer: Tokenizer, lines: Iterable[str]) -> WordCheck:
    """Check which words can be added to a vocabulary.

    A word is normalized first, for example to lower case. A word that the tokenizer splits at
    spaces or punctuation is rejected, because it could never occur as one word.

    Args:
        tokenizer: Tokenizer to extend.
        lines: One word per line. A line that starts with "##" is a piece that continues a word.
    """
    normalize = build_normalizer(tokenizer.spec).normalize_str
    pre_tokenize = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
    check = WordCheck()
    seen: set[str] = set()
    for line in lines:
        requested = line.strip()
        if not requested:
            continue
        if tokenizer.token_to_id(requested) is not None:
            check.existing.append(requested)
            continue
        prefix = CONTINUATION_PREFIX if requested.startswith(CONTINUATION_PREFIX) else ""
        unprefixed = requested.removeprefix(prefix)
        normalized = normalize(unprefixed).strip()
        # A continuing piece occurs after a letter, so it is checked with a letter before it.
        preceding_letter = "a" if prefix and normalized else ""
        parts = [part for part, _ in pre_tokenize(normalize(preceding_letter + unprefixed))]
        reason = _find_rejection_reason(
            tokenizer, unprefixed, normalized, parts, continues=bool(prefix)
        )
        if reason:
            check.rejected[requested] = reason
            continue
        word = prefix + normalized
        if word != requested:
            check.normalized[requested] = word
        if tokenizer.token_to_id(word) is not None:
            check.existing.append(requested)
        elif word not in seen:
            seen.add(word)
            check.accepted.append(word)
    return check


def _find_rejection_reason(
    tokenizer: Tokenizer, unprefixed: str, normalized: str, parts: Sequence[str], *, continues: bool
) -> str:
    """Return why a word cannot be in the vocabulary; "" if it can.

    Args:
        tokenizer: Tokenizer to extend.
        unprefixed: The word without "##" and before normalization.
        normalized: The normalized word without "##".
        parts: Parts that the pre-tokenizer splits the word into.
        continues: Whether the word is a piece that continues a word.
    """
    if not normalized:
        return "nothing is left after normalization"
    if len(parts) > 1:
        joined = " | ".join(parts)
        return ("it never continues a word: " if continues else "it is split: ") + joined
    if len(normalized) > tokenizer.spec.max_word_chars:
        return f"it has more than {tokenizer.spec.max_word_chars} characters"
    if tokenizer.segmenter is not None and not continues:
        [boundaries] = tokenizer.segmenter.find_boundaries([unprefixed])
        if boundaries:
            ranges = pairwise([0, *boundaries, len(unprefixed)])
            segments = [unprefixed[start:end] for start, end in ranges]
            return f"{tokenizer.segmenter.name} splits it: {' | '.join(segments)}"
    return ""


def find_frequent_words(tokenizer: Tokenizer, word_counts: WordCounts, count: int) -> list[str]:
    """Return up to ``count`` words that the tokenizer splits, the most frequent first.

    Only words that contain a letter and occur at least twice are returned. Equally frequent words
    are ordered by code point.
    """
    counts = word_counts.counts
    candidates = [
        word
        for word, num_occurrences in counts.items()
        if num_occurrences >= MIN_OCCURRENCES
        and any(map(str.isalpha, word))
        and tokenizer.token_to_id(word) is None
    ]
    candidates.sort(key=lambda word: (-counts[word], word))
    words: list[str] = []
    for word, ids in tokenize_words(tokenizer, candidates):
        if len(words) == count:
            break
        # An unknown word is not split: its only piece is [UNK].
        if len(ids) > 1:
            words.append(word)
    return words


def extend_vocabulary(tokenizer: Tokenizer, words: Sequence[str]) -> VocabularyExtension:
    """Return a tokenizer with words appended to its vocabulary.

    Args:
        tokenizer: Tokenizer to extend.
        words: Words from ``check_words`` or ``find_frequent_words``.

    Raises:
        TokenizerError: ``words`` is empty, or added tokens have the ids after the vocabulary.
    """
    if not words:
        raise TokenizerError(
            "there is no word to add: all words are already in the vocabulary or cannot be added; "
            "choose other words"
        )
    spec = tokenizer.spec
    added_tokens = spec.tokens[len(spec.vocab) :]
    if added_tokens:
        raise TokenizerError(
            f"the vocabulary cannot be extended: added tokens ({', '.join(added_tokens[:5])}) have "
            "the ids that new words would need; remove the added tokens first"
        )
    new_spec = replace(spec, vocab=(*spec.vocab, *words))
    piece_ids = tuple(_tokenize_word(tokenizer, word) for word in words)
    return VocabularyExtension(
        Tokenizer(new_spec, tokenizer.segmenter), tuple(words), tokenizer.vocab_size, piece_ids
    )


def compare_fit(before: Tokenizer, after: Tokenizer, word_counts: WordCounts) -> FitComparison:
    """Measure how well two vocabularies fit the counted words."""
    return FitComparison(
        measure_fit_from_counts(before, word_counts),
        measure_fit_from_counts(after, word_counts),
        word_counts.num_dropped,
    )


def _tokenize_word(tokenizer: Tokenizer, word: str) -> tuple[int, ...]:
    """Return the ids of the pieces of a word, found by longest match from the left.

    Unlike the backend, this function also splits a piece that continues a word ("##").
    """
    ids: list[int] = []
    prefix = CONTINUATION_PREFIX if word.startswith(CONTINUATION_PREFIX) else ""
    remaining = word.removeprefix(prefix)
    while remaining:
        for end in range(len(remaining), 0, -1):
            piece_id = tokenizer.token_to_id(prefix + remaining[:end])
            if piece_id is not None:
                break
        else:
            return (tokenizer.unk_id,)
        ids.append(piece_id)
        prefix, remaining = CONTINUATION_PREFIX, remaining[end:]
    return tuple(ids)
