"""Measures how well a vocabulary fits a text, and describes its content."""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bertsmith.plurals import count_noun
from bertsmith.text.tokenizer_spec import CONTINUATION_PREFIX, SPECIAL_TOKENS
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.words import WordCounts, tokenize_words

#: Number of words that a report lists as examples.
MAX_LISTED_WORDS = 10
#: Number of words in the sample of a vocabulary.
_SAMPLE_SIZE = 20
#: Maximum number of scripts that the description of a vocabulary lists.
_MAX_LISTED_SCRIPTS = 6


@dataclass(frozen=True)
class VocabularyReport:
    """How well a vocabulary fits a text.

    Attributes:
        num_characters: Number of characters in the text.
        num_words: Number of words and punctuation marks in the text.
        num_pieces: Number of pieces that the words are split into.
        num_unknown: Number of words that are replaced by [UNK].
        num_single_piece: Number of words that are a single known piece.
        longest: The longest words that are a single piece.
        most_pieces: The words with the most pieces, with spaces between the pieces.
        unknown_words: The most frequent words that are replaced by [UNK].
    """

    num_characters: int
    num_words: int
    num_pieces: int
    num_unknown: int
    num_single_piece: int
    longest: list[str]
    most_pieces: list[str]
    unknown_words: list[str]

    @property
    def unknown_share(self) -> float:
        """The share of words that are replaced by [UNK]."""
        return self.num_unknown / max(self.num_words, 1)

    @property
    def pieces_per_word(self) -> float:
        """The mean number of pieces per word."""
        return self.num_pieces / max(self.num_words, 1)

    @property
    def single_piece_share(self) -> float:
        """The share of words that are a single known piece."""
        return self.num_single_piece / max(self.num_words, 1)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "characters": self.num_characters,
            "words": self.num_words,
            "pieces": self.num_pieces,
            "unknown": self.num_unknown,
            "single_piece": self.num_single_piece,
            "longest": self.longest,
            "most_pieces": self.most_pieces,
            "unknown_words": self.unknown_words,
            "unknown_share": self.unknown_share,
            "pieces_per_word": self.pieces_per_word,
            "single_piece_share": self.single_piece_share,
        }

    def lines(self) -> list[str]:
        """Return the report as human-readable lines."""
        totals = (
            f"{count_noun(self.num_words, 'word')} of text became "
            f"{count_noun(self.num_pieces, 'piece')}"
        )
        lines = [
            f"{totals}: {self.pieces_per_word:.3f} pieces per word",
            f"words in the vocabulary: {self.single_piece_share:.2%}",
            f"words unknown ([UNK]): {self.unknown_share:.4%}",
        ]
        examples = (
            ("most frequent unknown words", self.unknown_words),
            ("longest words in the vocabulary", self.longest),
            ("words with the most pieces", self.most_pieces),
        )
        return lines + [f"{title}: {', '.join(words)}" for title, words in examples if words]


def measure_fit(tokenizer: Tokenizer, texts: Iterable[str]) -> VocabularyReport:
    """Measure how ``tokenizer`` splits the words of ``texts``."""
    return measure_fit_from_counts(tokenizer, WordCounts.from_texts(tokenizer, texts))


def measure_fit_from_counts(tokenizer: Tokenizer, word_counts: WordCounts) -> VocabularyReport:
    """Measure how ``tokenizer`` splits the counted words."""
    counts = word_counts.counts
    num_pieces: Counter[str] = Counter()
    for word, ids in tokenize_words(tokenizer, counts):
        if tokenizer.unk_id not in ids:
            num_pieces[word] = len(ids)
    single_piece = [word for word, pieces in num_pieces.items() if pieces == 1]
    unknown = Counter({word: count for word, count in counts.items() if word not in num_pieces})
    longest = sorted(single_piece, key=lambda word: (-len(word), word))[:MAX_LISTED_WORDS]
    most_split = sorted(num_pieces, key=lambda word: (-num_pieces[word], word))[:MAX_LISTED_WORDS]
    # An unknown word has no entry in ``num_pieces``. It counts as one piece, [UNK].
    total_pieces = sum(count * (num_pieces[word] or 1) for word, count in counts.items())
    most_pieces = [
        " ".join(tokenizer.ids_to_tokens(ids)) for _, ids in tokenize_words(tokenizer, most_split)
    ]
    return VocabularyReport(
        num_characters=word_counts.num_characters,
        num_words=counts.total() + word_counts.num_too_long,
        num_pieces=total_pieces + word_counts.num_too_long,
        num_unknown=unknown.total() + word_counts.num_too_long,
        num_single_piece=sum(counts[word] for word in single_piece),
        longest=longest,
        most_pieces=most_pieces,
        unknown_words=[word for word, _ in unknown.most_common(MAX_LISTED_WORDS)],
    )


@dataclass(frozen=True)
class VocabularyDescription:
    """The content of a vocabulary.

    Attributes:
        size: Number of entries.
        hash: Hash of the tokenizer.
        lowercase: Whether text is lowercased.
        strip_accents: Whether accents are removed.
        split_chinese: Whether each Chinese character is a word.
        segmenter: Name and version of the segmenter, or None.
        special: Id of each special token.
        word_starts: Number of entries that start a word.
        continuations: Number of entries that continue a word ("##").
        characters: Number of entries with a single character.
        repeated: Number of entries that repeat an earlier entry.
        scripts: Number of entries for each of the most common scripts. The script of an entry is
            that of its first letter.
        longest: The longest entries that start a word.
        sample: Entries that start a word, evenly spaced over the ids.
    """

    size: int
    hash: str
    lowercase: bool
    strip_accents: bool
    split_chinese: bool
    segmenter: str | None
    special: dict[str, int]
    word_starts: int
    continuations: int
    characters: int
    repeated: int
    scripts: dict[str, int]
    longest: list[str]
    sample: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the description as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the description as human-readable lines."""
        case = "lowercased" if self.lowercase else "kept as written"
        accents = "removed" if self.strip_accents else "kept"
        chinese = "each a word" if self.split_chinese else "like other letters"
        ids = ", ".join(f"{token} {index}" for token, index in self.special.items())
        scripts = ", ".join(f"{name} {count:,}" for name, count in self.scripts.items())
        repeated = count_noun(self.repeated, "line repeats", "lines repeat")
        lines = [
            f"{self.size:,} words, hash {self.hash[:12]}",
            f"special tokens: {ids}",
            f"case {case}; accents {accents}; Chinese characters {chinese}",
            f"text is segmented first by {self.segmenter}" if self.segmenter else "",
            f"{self.word_starts:,} start a word, {self.continuations:,} continue one (##)",
            f"{self.characters:,} of these are single characters",
            f"{repeated} a word" if self.repeated else "",
            f"scripts: {scripts}",
            f"longest: {', '.join(self.longest)}",
            f"sample: {' '.join(self.sample)}",
        ]
        return [line for line in lines if line]


def describe_vocabulary(tokenizer: Tokenizer) -> VocabularyDescription:
    """Describe a vocabulary: its options, its counts and some of its words."""
    words = [word for word in tokenizer.vocab if word not in SPECIAL_TOKENS]
    unprefixed_words = [word.removeprefix(CONTINUATION_PREFIX) for word in words]
    word_starts = [word for word in words if not word.startswith(CONTINUATION_PREFIX)]
    scripts = Counter(_find_script(word) for word in unprefixed_words)
    # The sample is evenly spaced over the ids, because the first ids are characters and the last
    # ids are rare words.
    step = max(len(word_starts) // _SAMPLE_SIZE, 1)
    spec = tokenizer.spec
    return VocabularyDescription(
        size=tokenizer.vocab_size,
        hash=tokenizer.hash,
        lowercase=spec.lowercase,
        strip_accents=spec.strip_accents,
        split_chinese=spec.split_chinese,
        segmenter=" ".join(spec.segmenter) if spec.segmenter else None,
        special={
            token: index
            for token in SPECIAL_TOKENS
            if (index := tokenizer.token_to_id(token)) is not None
        },
        word_starts=len(word_starts),
        continuations=len(words) - len(word_starts),
        characters=sum(len(word) == 1 for word in unprefixed_words),
        repeated=tokenizer.vocab_size - len(set(tokenizer.vocab)),
        scripts=dict(scripts.most_common(_MAX_LISTED_SCRIPTS)),
        longest=sorted(word_starts, key=lambda word: (-len(word), word))[:MAX_LISTED_WORDS],
        sample=word_starts[step // 2 :: step][:_SAMPLE_SIZE],
    )


def _find_script(word: str) -> str:
    """Return the script of a word's first letter: the first word of its Unicode name."""
    for character in word:
        if character.isalpha():
            return unicodedata.name(character, "UNKNOWN").split()[0].capitalize()
    return "Digits and signs"
