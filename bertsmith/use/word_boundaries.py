r"""Determine whether a word ends at a position of a text, also in scripts with combining marks.

``re`` does not count combining marks as parts of a word (``\w``), such as the vowel signs of Hindi
or an accent in decomposed form.
"""

import unicodedata
from typing import Final

#: Zero-width non-joiner and joiner, which occur inside of words, for example in Persian and Hindi.
_JOINERS: Final = "\u200c\u200d"


def is_mark_or_joiner(character: str) -> bool:
    """Return whether a character belongs to the word of the letter before it."""
    return unicodedata.category(character).startswith("M") or character in _JOINERS


def is_inside_word(text: str, index: int) -> bool:
    """Return whether a mark or joiner before an index continues a word."""
    end = index
    while index and is_mark_or_joiner(text[index - 1]):
        index -= 1
    return index < end and bool(index) and (text[index - 1].isalnum() or text[index - 1] == "_")


def is_followed_by_mark(text: str, index: int, *, accents_only: bool) -> bool:
    """Return whether a mark or joiner at an index changes or continues the word before it.

    Args:
        text: The text.
        index: The index.
        accents_only: Whether only marks that make another letter of the letter before them count,
            such as accents, but not vowel signs.
    """
    character = text[index : index + 1]
    if not character:
        return False
    if accents_only:
        # A letter and an accent have a composed form, unlike a letter and a vowel sign.
        return len(unicodedata.normalize("NFC", text[index - 1] + character)) == 1
    return is_mark_or_joiner(character)
