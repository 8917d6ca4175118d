"""Splits documents into sentences with the rules of ``sentencex``."""

import re

from sentencex import segment

from bertsmith.errors import SettingsError


def check_language(code: str) -> str:
    """Return ``code`` if it has the form of a language code; else raise SettingsError."""
    if not re.fullmatch("[a-z]{2,3}(-[a-z]{2,8})*", code):
        raise SettingsError(
            f"language {code!r}: expected a language's ISO 639-1 code, such as en or ko"
        )
    return code


def split_sentences(text: str, language: str = "en", presplit: bool = False) -> list[str]:
    """Return the sentences of a text, in order, without surrounding whitespace.

    A line break always ends a sentence, so that a heading is separate from the text below it.

    Args:
        text: The text.
        language: ISO 639-1 code. For a language unknown to sentencex, general rules are used.
        presplit: Whether each line of the text is a sentence already.
    """
    if presplit:
        return [sentence for line in text.split("\n") if (sentence := line.strip())]
    # sentencex ends a sentence only at an empty line. Doubling the line breaks is faster than one
    # call per line.
    segments = segment(language, text.replace("\n", "\n\n"))
    return [sentence for part in segments if (sentence := part.strip())]
