"""Counts the characters of a corpus and chooses the alphabet of a vocabulary."""

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

#: One more than the last Unicode code point.
_NUM_CODE_POINTS: Final = 0x110000
#: Classes of code points, by how the tokenizer treats them: not examined yet, removed, whitespace,
#: a word by itself (punctuation, a Chinese character), or part of a word.
_UNSEEN, _REMOVED, _SPACE, _SINGLE, _LETTER = range(5)


def has_surrogates(text: str) -> bool:
    """Return whether a text has lone surrogates, which JSON can encode but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _find_long_runs(flags: NDArray[np.bool_], max_length: int) -> NDArray[np.bool_]:
    """Return whether each flag is in a run of more than ``max_length`` true flags, bool [n]."""
    # A run of true flags lies between two neighboring bounds.
    bounds = np.concatenate([[-1], np.flatnonzero(~flags), [len(flags)]])
    is_long = np.diff(bounds) - 1 > max_length
    # The cumulative sum of the steps is 1 inside long runs, else 0.
    steps = np.zeros(len(flags) + 1, np.int8)
    steps[bounds[:-1][is_long] + 1] = 1
    steps[bounds[1:][is_long]] = -1
    return np.cumsum(steps[:-1], dtype=np.int8).astype(np.bool_)


@dataclass(frozen=True)
class Alphabet:
    """The characters of a vocabulary.

    Attributes:
        characters: All characters, each a vocabulary entry.
        continuations: The characters that also have an entry with "##", to continue a word.
    """

    characters: tuple[str, ...]
    continuations: tuple[str, ...]

    @property
    def num_pieces(self) -> int:
        """The number of vocabulary entries."""
        return len(self.characters) + len(self.continuations)


def build_ascii_alphabet(*, lowercase: bool) -> Alphabet:
    """Return the alphabet of the ASCII digits, letters and punctuation.

    Only digits and letters continue a word, because the tokenizer splits at punctuation.

    Args:
        lowercase: Whether text is lowercased, so that capital letters are left out.
    """
    letters = string.ascii_lowercase if lowercase else string.ascii_letters
    continuations = sorted(string.digits + letters)
    return Alphabet(tuple(sorted([*continuations, *string.punctuation])), tuple(continuations))


class CharacterCounts:
    """Counts how often each character starts or continues a word, over a stream of texts."""

    def __init__(self, normalize: Callable[[str], str], max_word_length: int = 100) -> None:
        """Start with empty counts.

        Args:
            normalize: The tokenizer's normalizer. It is called once per distinct character, so it
                must treat each character independently.
            max_word_length: Words with more characters are not counted, since the tokenizer
                replaces them by [UNK].
        """
        self._normalize = normalize
        self._max_word_length = max_word_length
        self._pre_tokenize = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
        self._classes: NDArray[np.uint8] = np.zeros(_NUM_CODE_POINTS, dtype=np.uint8)
        # Row 0 counts how often each code point starts a word, row 1 how often it continues a word.
        self._counts: NDArray[np.int64] = np.zeros((2, _NUM_CODE_POINTS), dtype=np.int64)

    def add(self, text: str) -> None:
        """Count the characters of ``text``. Texts of some 100,000 characters are fastest."""
        points = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4")
        classes = self._classes[points]
        unseen = np.unique(points[classes == _UNSEEN])
        for point in unseen:
            self._classes[point] = self._classify(chr(point))
        if unseen.size:
            classes = self._classes[points]
        # A removed character does not separate words.
        is_retained = classes != _REMOVED
        points, classes = points[is_retained], classes[is_retained]
        is_letter = classes == _LETTER
        is_letter &= ~_find_long_runs(is_letter, self._max_word_length)
        continues = np.zeros_like(is_letter)
        continues[1:] = is_letter[1:] & is_letter[:-1]
        starts = (is_letter & ~continues) | (classes == _SINGLE)
        for row, is_counted in enumerate((starts, continues)):
            counts = np.bincount(points[is_counted])
            self._counts[row, : len(counts)] += counts

    @property
    def is_empty(self) -> bool:
        """Whether no text contained a word."""
        return not self._counts.any()

    def choose_alphabet(self, coverage: float, max_pieces: int, required: Alphabet) -> Alphabet:
        """Choose the required characters, and the most frequent of the other characters.

        Characters are added until the coverage or the maximum number of entries is reached. Equally
        frequent characters are ordered by code point.

        Args:
            coverage: Share of the text's characters that the alphabet should cover, 0 to 1.
            max_pieces: Maximum number of vocabulary entries for characters outside ``required``.
            required: Characters that are always included.
        """
        totals, counted_continuations = self._normalize_counts()
        order = sorted(totals, key=lambda character: (-totals[character], character))
        num_needed = coverage * sum(totals.values())
        characters, continuations = set(required.characters), set(required.continuations)
        num_covered = num_pieces = 0
        for character in order:
            if character not in characters:
                num_pieces += 2 if character in counted_continuations else 1
            if num_covered >= num_needed or num_pieces > max_pieces:
                break
            num_covered += totals[character]
            characters.add(character)
            if character in counted_continuations:
                continuations.add(character)
        return Alphabet(tuple(sorted(characters)), tuple(sorted(continuations)))

    def make_word_filter(self, alphabet: Alphabet) -> Callable[[str], str]:
        """Return a function that removes unsuitable words from a text that has been counted.

        Words are unsuitable if they have a character outside ``alphabet`` or are too long.
        """
        characters = set(alphabet.characters)
        is_outside = np.zeros(_NUM_CODE_POINTS, dtype=bool)
        for point in np.flatnonzero((self._classes == _LETTER) & (self._counts.sum(axis=0) > 0)):
            is_outside[point] = not characters.issuperset(self._normalize(chr(point)).strip())

        def filter_words(text: str) -> str:
            points = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4")
            classes = self._classes[points]
            # A removed character does not separate words.
            is_retained = classes != _REMOVED
            points = points[is_retained]
            is_letter = classes[is_retained] == _LETTER
            is_unsuitable = is_outside[points] | _find_long_runs(is_letter, self._max_word_length)
            if not is_unsuitable.any():
                return text
            starts = is_letter.copy()
            starts[1:] &= ~is_letter[:-1]
            word_numbers = np.where(is_letter, starts.cumsum(), 0)
            in_unsuitable_word = np.isin(word_numbers, word_numbers[is_unsuitable])
            filtered_points = points[~(is_letter & in_unsuitable_word)]
            filtered: str = filtered_points.tobytes().decode("utf-32-le")
            return filtered

        return filter_words

    def _classify(self, character: str) -> int:
        """Return the class of a character: removed, whitespace, letter, or a word by itself."""
        normalized = self._normalize(character)
        if not normalized:
            return _REMOVED
        if not normalized.strip():
            return _SPACE
        # The pre-tokenizer decides whether this character is part of a word.
        is_letter = len(self._pre_tokenize(self._normalize(f"a{character}a"))) == 1
        return _LETTER if is_letter else _SINGLE

    def _normalize_counts(self) -> tuple[dict[str, int], set[str]]:
        """Return the count of each normalized character, and the characters that continue words."""
        totals: dict[str, int] = {}
        continuations: set[str] = set()
        for point in np.flatnonzero(self._counts.sum(axis=0)):
            num_starts, num_continues = (int(count) for count in self._counts[:, point])
            # Normalization can turn one character into several, such as the capital dotted I.
            for index, character in enumerate(self._normalize(chr(point)).strip()):
                totals[character] = totals.get(character, 0) + num_starts + num_continues
                if num_continues or index:
                    continuations.add(character)
        return totals, continuations
