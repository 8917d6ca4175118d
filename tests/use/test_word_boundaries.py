"""Occurrences of a word in texts of scripts with combining marks."""

import unicodedata

import pytest

from bertsmith.use.token_vectors import find_word

CAFE = unicodedata.normalize("NFD", "café")


@pytest.mark.parametrize(
    ("text", "word", "occurrences"),
    [
        ("काम", "म", []),
        ("काम म", "म", [(4, 5)]),
        ("काम कामना", "काम", [(0, 3)]),
        ("किताबें किताब", "किताब", [(8, 13)]),
        # Vowel signs continue the word of which it is the beginning, as in "hammers".
        ("किताबें", "किताब", [(0, 5)]),
        (f"the {CAFE} cafe", "cafe", [(10, 14)]),
        (f"the {CAFE}s", "cafe", []),
        (f"the {CAFE}s", CAFE, [(4, 9)]),
        # Vowel points, unlike accents, do not make other letters.
        ("شكراً لك", "شكرا", [(0, 4)]),
        ("کتاب\u200cها", "ها", []),
        ("کتاب\u200cها", "کتاب", [(0, 4)]),
        # The variation selector belongs to an emoji, and the joiner to no letter.
        ("\u2764\ufe0fhammer \u200dhammer", "hammer", [(2, 8), (10, 16)]),
    ],
)
def test_marks_and_joiners_continue_a_word(
    text: str, word: str, occurrences: list[tuple[int, int]]
) -> None:
    """A letter between marks, or before an accent, is not an occurrence of a word."""
    assert find_word(text, word, ignore_case=False) == occurrences
