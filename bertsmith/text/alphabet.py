"""Counts the characters of a corpus and chooses those that a vocabulary shall know.

It never knows words: only which characters begin one and which go on in one.
"""

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import pre_tokenizers

#: One more than the last Unicode code point.
CODE_POINTS: Final = 0x110000
#: What a code point is to the tokenizer: not looked at yet, removed, a gap between words, a word
#: of its own (punctuation, a Chinese character), or a part of a word.
_UNSEEN, _REMOVED, _GAP, _ALONE, _PART = range(5)


def has_surrogates(text: str) -> bool:
    """Tell whether a text has half of a character: JSON can write it, and no encoding has it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def _in_long_runs(flags: NDArray[np.bool_], longest: int) -> NDArray[np.bool_]:
    """Return which elements [n] are in a run of more than ``longest`` true elements."""
    bounds = np.concatenate([[-1], np.flatnonzero(~flags), [len(flags)]])
    is_long = np.diff(bounds) - 1 > longest
    steps = np.zeros(len(flags) + 1, np.int8)
    steps[bounds[:-1][is_long] + 1] = 1
    steps[bounds[1:][is_long]] = -1
    return np.cumsum(steps[:-1], dtype=np.int8).astype(np.bool_)


@dataclass(frozen=True)
class Alphabet:
    """The characters of a vocabulary: all of them, and those that continue a word."""

    characters: tuple[str, ...]
    continuations: tuple[str, ...]

    @property
    def num_pieces(self) -> int:
        """The number of vocabulary entries: one per character, one per continuing character."""
        return len(self.characters) + len(self.continuations)


def build_ascii_alphabet(*, lowercase: bool) -> Alphabet:
    """Return the ASCII digits, letters and punctuation, without capitals if text is lowercased.

    The tokenizer splits at punctuation, so only digits and letters continue a word.
    """
    letters = string.ascii_lowercase if lowercase else string.ascii_letters
    continuing = sorted(string.digits + letters)
    return Alphabet(tuple(sorted([*continuing, *string.punctuation])), tuple(continuing))


class CharacterCounts:
    """Counts, as a stream, how often each character begins or continues a word.

    ``clean`` is the tokenizer's normalizer on a string. It is asked for each character once, and
    must treat characters one by one. Words of more than ``longest_word`` characters are not
    counted: the tokenizer makes them [UNK].
    """

    def __init__(self, clean: Callable[[str], str], longest_word: int = 100) -> None:
        self._clean = clean
        self._longest_word = longest_word
        self._split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str
        self._kinds: NDArray[np.uint8] = np.zeros(CODE_POINTS, dtype=np.uint8)
        # [2, code points]: as the first of a word, and as one that continues it.
        self._counts: NDArray[np.int64] = np.zeros((2, CODE_POINTS), dtype=np.int64)

    def add(self, text: str) -> None:
        """Count the characters of ``text``; best some hundred thousand at once."""
        points = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4")
        kinds = self._kinds[points]
        unseen = np.unique(points[kinds == _UNSEEN])
        for point in unseen:
            self._kinds[point] = self._kind(chr(point))
        if unseen.size:
            kinds = self._kinds[points]
        # What the tokenizer removes does not part a word.
        stay = kinds != _REMOVED
        points, kinds = points[stay], kinds[stay]
        part = kinds == _PART
        part &= ~_in_long_runs(part, self._longest_word)
        goes_on = np.zeros_like(part)
        goes_on[1:] = part[1:] & part[:-1]
        for row, chosen in enumerate(((part & ~goes_on) | (kinds == _ALONE), goes_on)):
            counts = np.bincount(points[chosen])
            self._counts[row, : len(counts)] += counts

    @property
    def is_empty(self) -> bool:
        """Whether no text had a character that is part of a word."""
        return not self._counts.any()

    def choose_alphabet(self, coverage: float, max_pieces: int, required: Alphabet) -> Alphabet:
        """Choose ``required`` and the most frequent characters that cover ``coverage`` of the text.

        The chosen characters outside ``required`` take at most ``max_pieces`` vocabulary entries:
        one each, and one more if the character continues words. Ties are ordered by code point.
        """
        totals, continuing = self._cleaned()
        order = sorted(totals, key=lambda character: (-totals[character], character))
        needed = coverage * sum(totals.values())
        characters, continues = set(required.characters), set(required.continuations)
        covered = num_pieces = 0
        for character in order:
            if character not in characters:
                num_pieces += 2 if character in continuing else 1
            if covered >= needed or num_pieces > max_pieces:
                break
            covered += totals[character]
            characters.add(character)
            if character in continuing:
                continues.add(character)
        return Alphabet(tuple(sorted(characters)), tuple(sorted(continues)))

    def make_word_filter(self, alphabet: Alphabet) -> Callable[[str], str]:
        """Return what takes some words out of a counted text.

        They are the words with a character beyond ``alphabet`` and those that are too long.
        """
        known = set(alphabet.characters)
        beyond = np.zeros(CODE_POINTS, dtype=bool)
        for point in np.flatnonzero((self._kinds == _PART) & (self._counts.sum(axis=0) > 0)):
            beyond[point] = not known.issuperset(self._clean(chr(point)).strip())

        def limited(text: str) -> str:
            points = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4")
            kinds = self._kinds[points]
            # What the tokenizer removes does not part a word.
            stay = kinds != _REMOVED
            points, inside = points[stay], kinds[stay] == _PART
            strange = beyond[points] | _in_long_runs(inside, self._longest_word)
            if not strange.any():
                return text
            begins = inside.copy()
            begins[1:] &= ~inside[:-1]
            words = np.where(inside, begins.cumsum(), 0)
            stay = ~(inside & np.isin(words, words[strange]))
            left: str = points[stay].tobytes().decode("utf-32-le")
            return left

        return limited

    def _kind(self, character: str) -> int:
        cleaned = self._clean(character)
        if not cleaned:
            return _REMOVED
        if not cleaned.strip():
            return _GAP
        # The library itself tells whether a word goes on through this character.
        return _PART if len(self._split(self._clean(f"a{character}a"))) == 1 else _ALONE

    def _cleaned(self) -> tuple[dict[str, int], set[str]]:
        """Return how often each cleaned character occurs, and which of them continue words."""
        totals: dict[str, int] = {}
        continuing: set[str] = set()
        for point in np.flatnonzero(self._counts.sum(axis=0)):
            first, later = (int(count) for count in self._counts[:, point])
            # One character can become several, such as the Turkish capital dotted I.
            for place, character in enumerate(self._clean(chr(point)).strip()):
                totals[character] = totals.get(character, 0) + first + later
                if later or place:
                    continuing.add(character)
        return totals, continuing
