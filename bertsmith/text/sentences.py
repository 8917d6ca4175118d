"""Cuts a document into sentences, by the rules of ``sentencex``.

It never knows where the document came from, nor what becomes of its words.
"""

import re

from sentencex import segment

from bertsmith.errors import SettingsError


def check_language(code: str) -> str:
    """Return ``code`` if it has the form of a language's code; SettingsError if not."""
    if not re.fullmatch("[a-z]{2,3}(-[a-z]{2,8})*", code):
        raise SettingsError(
            f"language {code!r}: expected a language's ISO 639-1 code, such as en or ko"
        )
    return code


def split_sentences(text: str, language: str = "en", presplit: bool = False) -> list[str]:
    """Return the sentences of ``text``, stripped, none empty, in order.

    A line end always ends a sentence (a heading does not run into the paragraph below it).
    ``language`` is an ISO 639-1 code; one that sentencex does not know falls back to general
    rules. ``presplit``: the text has a sentence a line already.
    """
    if presplit:
        return [sentence for line in text.split("\n") if (sentence := line.strip())]
    # Only an empty line is a border to sentencex; doubling also spares a call a line.
    pieces = segment(language, text.replace("\n", "\n\n"))
    return [sentence for piece in pieces if (sentence := piece.strip())]
