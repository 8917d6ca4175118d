"""Fonts of this machine that have the characters of a picture's words.

It never draws.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from bertsmith.errors import MissingExtraError

#: What stands for a character that no font has.
_UNKNOWN = "?"
#: Parts of the names of fonts that matplotlib cannot draw, or that have boxes in place of letters.
_NO_LETTERS = ("Emoji", "LastResort", "Last Resort", "Blank")


def choose_fonts(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the names of fonts that together have the characters, and the words.

    A character that no font has, or that is not for print, becomes a question mark.
    Raises MissingExtraError without matplotlib.
    """
    try:
        from matplotlib import font_manager, rcParams
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing words") from None
    manager = font_manager.fontManager
    usual = font_manager.FontProperties(family=rcParams["font.family"])
    first = manager.findfont(usual)
    missing = {ord(one) for one in "".join(words) if one.isprintable()} - _characters(first)
    names = [font_manager.get_font(first).family_name]
    if missing:
        _look_again(manager)
    # Upright ones first, and those without serifs, which fit the usual font.
    others = sorted(
        (font.style != "normal", "Sans" not in font.name, font.name, font.weight != 400, font.fname)
        for font in manager.ttflist
        if not any(part in font.name for part in _NO_LETTERS)
    )
    for *_, name, _, file in others:
        if not missing:
            break
        # A family's other styles have the same characters.
        if name not in names and (has := missing & _characters(file)):
            names.append(name)
            missing -= has
    unknown = missing | {ord(one) for one in "".join(words) if not one.isprintable()}
    table: dict[int, Any] = dict.fromkeys(unknown, _UNKNOWN)
    return names, [own.translate(table) for own in words]


def _look_again(manager: Any) -> None:
    """Tell matplotlib of fonts that were installed after it made its list, which it keeps."""
    from matplotlib import font_manager

    for file in set(font_manager.findSystemFonts()) - {font.fname for font in manager.ttflist}:
        with suppress(OSError, RuntimeError):
            manager.addfont(file)


def _characters(file: str) -> set[int]:
    """Return the characters of a font; none of one that cannot be read."""
    from matplotlib import font_manager

    try:
        return set(font_manager.get_font(file).get_charmap())
    except (OSError, RuntimeError):
        return set()
