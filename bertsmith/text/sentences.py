"""Splits documents into sentences with the rules of ``sentencex``."""

import re
from collections.abc import Iterable
from importlib import metadata

from sentencex import segment

from bertsmith.errors import SettingsError

#: The two-letter codes of ISO 639-1.
_ISO_639_1 = """
aa ab ae af ak am an ar as av ay az ba be bg bh bi bm bn bo br bs ca ce ch co cr cs cu cv cy da
de dv dz ee el en eo es et eu fa ff fi fj fo fr fy ga gd gl gn gu gv ha he hi ho hr ht hu hy hz
ia id ie ig ii ik io is it iu ja jv ka kg ki kj kk kl km kn ko kr ks ku kv kw ky la lb lg li ln
lo lt lu lv mg mh mi mk ml mn mr ms mt my na nb nd ne ng nl nn no nr nv ny oc oj om or os pa pi
pl ps pt qu rm rn ro ru rw sa sc sd se sg sh si sk sl sm sn so sq sr ss st su sv sw ta te tg th
ti tk tl tn to tr ts tt tw ty ug uk ur uz ve vi vo wa wo xh yi yo za zh zu
"""


def check_language(code: str) -> str:
    """Return ``code`` if it is a language code, optionally with subtags such as ``zh-hans``.

    Raises:
        SettingsError: ``code`` does not have the form of a language code, or has two letters but
            is not in ISO 639-1. Three-letter codes (ISO 639-3) are not looked up.
    """
    match = re.fullmatch("([a-z]{2,3})(-[a-z]{2,8})*", code)
    if match is None or (len(match[1]) == 2 and match[1] not in _ISO_639_1.split()):
        raise SettingsError(
            f"language {code!r}: not a language code; give the ISO 639-1 code of the text's "
            "language, such as en or ko"
        )
    return code


def get_sentencex_version() -> str:
    """Return the installed version of ``sentencex``; another version may split otherwise."""
    return metadata.version("sentencex")


def guess_language(vocabulary: Iterable[str]) -> str:
    """Return the language of a vocabulary: "ko" if more than half of its words are, else "en".

    A word is Korean if it contains a syllable of Hangul. Words without letters do not count.
    """
    words = [word for word in vocabulary if re.search(r"[^\W\d_]", word)]
    num_korean = sum(re.search("[가-힣]", word) is not None for word in words)
    return "ko" if 2 * num_korean > len(words) else "en"


def split_sentences(text: str, language: str = "en", presplit: bool = False) -> list[str]:
    """Return the sentences of a text, in order, without surrounding whitespace.

    A line break always ends a sentence, so that a heading is separate from the text below it.

    Args:
        text: The text.
        language: ISO 639-1 code. Languages that sentencex does not know, such as Korean, are split
            with the rules of another language, usually English.
        presplit: Whether each line of the text already is a sentence.
    """
    if presplit:
        return [sentence for line in text.split("\n") if (sentence := line.strip())]
    # sentencex does not end a sentence at a line break, only at an empty line. Doubling the line
    # breaks is faster than one call per line.
    segments = segment(language, text.replace("\n", "\n\n"))
    return [sentence for part in segments if (sentence := part.strip())]
