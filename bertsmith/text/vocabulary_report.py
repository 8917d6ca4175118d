"""Tells how well a vocabulary fits a text, and what is in it.

It never knows how the vocabulary was learnt.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from bertsmith.text.tokenizer_spec import CONTINUATION_PREFIX, SPECIAL_TOKENS
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.words import WordCounts, tokenize_words

#: Words named in a report.
MAX_LISTED_WORDS = 10


@dataclass(frozen=True)
class VocabularyReport:
    """How a vocabulary fits a text.

    ``words`` are words and punctuation marks as WordPiece meets them, ``pieces`` what they become,
    ``unknown`` the words that become [UNK]. ``whole``: words that are one known piece.
    ``longest``: the longest words of the text that are one piece; ``most_pieces``: the words cut
    into the most pieces; ``unknown_words``: the most frequent unknown ones.
    """

    characters: int
    words: int
    pieces: int
    unknown: int
    whole: int
    longest: list[str]
    most_pieces: list[str]
    unknown_words: list[str]

    @property
    def unknown_share(self) -> float:
        """The share of words that become [UNK]."""
        return self.unknown / max(self.words, 1)

    @property
    def pieces_per_word(self) -> float:
        """Pieces a word, on average."""
        return self.pieces / max(self.words, 1)

    @property
    def whole_share(self) -> float:
        """The share of words that are one known piece."""
        return self.whole / max(self.words, 1)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        shares = {
            "unknown_share": self.unknown_share,
            "pieces_a_word": self.pieces_per_word,
            "whole_share": self.whole_share,
        }
        return asdict(self) | shares

    def lines(self) -> list[str]:
        """Return the report for people, a fact a line."""
        became = f"{self.words:,} words of text became {self.pieces:,} pieces"
        lines = [
            f"{became}: {self.pieces_per_word:.3f} pieces a word",
            f"words known whole: {self.whole_share:.2%}",
            f"words unknown ([UNK]): {self.unknown_share:.4%}",
        ]
        named = (
            ("most frequent unknown words", self.unknown_words),
            ("longest words known whole", self.longest),
            ("words in most pieces", self.most_pieces),
        )
        return lines + [f"{what}: {', '.join(words)}" for what, words in named if words]


def measure_fit(tokenizer: Tokenizer, texts: Iterable[str]) -> VocabularyReport:
    """Measure how ``tokenizer`` cuts ``texts``."""
    return measure_fit_from_counts(tokenizer, WordCounts.from_texts(tokenizer, texts))


def measure_fit_from_counts(tokenizer: Tokenizer, counted: WordCounts) -> VocabularyReport:
    """Measure how ``tokenizer`` cuts the words that were counted."""
    counts, unknown = counted.counts, tokenizer.unk_id
    pieces = Counter(
        {word: len(ids) for word, ids in tokenize_words(tokenizer, counts) if unknown not in ids}
    )
    whole = [word for word, size in pieces.items() if size == 1]
    lost = Counter({word: times for word, times in counts.items() if word not in pieces})
    long = sorted(whole, key=lambda word: (-len(word), word))
    broken = sorted(pieces, key=lambda word: (-pieces[word], word))[:MAX_LISTED_WORDS]
    # A word that is unknown is one piece, [UNK].
    return VocabularyReport(
        characters=counted.num_characters,
        words=counts.total() + counted.num_too_long,
        pieces=sum(times * (pieces[word] or 1) for word, times in counts.items())
        + counted.num_too_long,
        unknown=lost.total() + counted.num_too_long,
        whole=sum(counts[word] for word in whole),
        longest=long[:MAX_LISTED_WORDS],
        most_pieces=[
            " ".join(tokenizer.ids_to_tokens(ids)) for _, ids in tokenize_words(tokenizer, broken)
        ],
        unknown_words=[word for word, _ in lost.most_common(MAX_LISTED_WORDS)],
    )


@dataclass(frozen=True)
class VocabularyDescription:
    """What is in a vocabulary, for human eyes.

    ``special``: the special tokens' ids; ``scripts``: words by the script of their first letter.
    """

    size: int
    hash: str
    lowercase: bool
    strip_accents: bool
    split_chinese: bool
    segmenter: str | None
    special: dict[str, int]
    whole_words: int
    continuations: int
    characters: int
    repeated: int
    scripts: dict[str, int]
    longest: list[str]
    sample: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the description as plain values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the description for people, a fact a line."""
        case = "lowered" if self.lowercase else "kept as written"
        accents = "taken off" if self.strip_accents else "kept"
        chinese = "each a word" if self.split_chinese else "as other letters"
        ids = ", ".join(f"{token} {index}" for token, index in self.special.items())
        scripts = ", ".join(f"{name} {count:,}" for name, count in self.scripts.items())
        lines = [
            f"{self.size:,} words, hash {self.hash[:12]}",
            f"special tokens: {ids}",
            f"case {case}; accents {accents}; Chinese characters {chinese}",
            f"segmented beforehand by {self.segmenter}" if self.segmenter else "",
            f"{self.whole_words:,} begin a word, {self.continuations:,} continue one (##)",
            f"{self.characters:,} of both are single characters",
            f"{self.repeated:,} lines repeat a word" if self.repeated else "",
            f"scripts: {scripts}",
            f"longest: {', '.join(self.longest)}",
            f"from all over: {' '.join(self.sample)}",
        ]
        return [line for line in lines if line]


def describe_vocabulary(tokenizer: Tokenizer) -> VocabularyDescription:
    """Describe a vocabulary: its choices, its counts, and some of its words."""
    words = [word for word in tokenizer.vocab if word not in SPECIAL_TOKENS]
    bare = [word.removeprefix(CONTINUATION_PREFIX) for word in words]
    starts = [word for word in words if not word.startswith(CONTINUATION_PREFIX)]
    scripts = Counter(_script(word) for word in bare)
    # One word in each twentieth of the ids: the first are characters, the last are rare words.
    step = max(len(starts) // 20, 1)
    recipe = tokenizer.spec
    return VocabularyDescription(
        size=tokenizer.vocab_size,
        hash=tokenizer.hash,
        lowercase=recipe.lowercase,
        strip_accents=recipe.strip_accents,
        split_chinese=recipe.split_chinese,
        segmenter=" ".join(recipe.segmenter) if recipe.segmenter else None,
        special={
            token: index
            for token in SPECIAL_TOKENS
            if (index := tokenizer.token_to_id(token)) is not None
        },
        whole_words=len(starts),
        continuations=len(words) - len(starts),
        characters=sum(len(word) == 1 for word in bare),
        repeated=tokenizer.vocab_size - len(set(tokenizer.vocab)),
        scripts=dict(scripts.most_common(6)),
        longest=sorted(starts, key=lambda word: (-len(word), word))[:MAX_LISTED_WORDS],
        sample=starts[step // 2 :: step][:20],
    )


def _script(word: str) -> str:
    """Name the script of a word's first letter, as Unicode names its characters."""
    for character in word:
        if character.isalpha():
            return unicodedata.name(character, "UNKNOWN").split()[0].capitalize()
    return "Digits and signs"
