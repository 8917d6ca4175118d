"""Choose installed fonts that contain the characters of some words, for plots."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from bertsmith.errors import MissingExtraError

#: Replaces characters that no font contains.
_REPLACEMENT = "?"
#: Parts of names of fonts that matplotlib cannot draw, or that draw boxes instead of letters.
_UNUSABLE_FONTS = ("Emoji", "LastResort", "Last Resort", "Blank")


def choose_fonts(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Choose fonts for some words.

    Returns:
        Names of fonts that together contain all characters, and the words with a question mark in
        place of each character that no font contains or that is not printable.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib import font_manager, rcParams
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing words") from None
    manager = font_manager.fontManager
    default_properties = font_manager.FontProperties(family=rcParams["font.family"])
    default_file = manager.findfont(default_properties)
    characters = set("".join(words))
    missing = {ord(character) for character in characters if character.isprintable()}
    missing -= _read_font_characters(default_file)
    names = [font_manager.get_font(default_file).family_name]
    if missing:
        _register_new_fonts(manager)
    # Upright fonts and sans-serif fonts come first, because they match the default font.
    candidates = sorted(
        (font.style != "normal", "Sans" not in font.name, font.name, font.weight != 400, font.fname)
        for font in manager.ttflist
        if not any(part in font.name for part in _UNUSABLE_FONTS)
    )
    for *_, name, _, file in candidates:
        if not missing:
            break
        # All styles of a family contain the same characters.
        if name not in names and (covered := missing & _read_font_characters(file)):
            names.append(name)
            missing -= covered
    not_drawable = missing | {
        ord(character) for character in characters if not character.isprintable()
    }
    table: dict[int, Any] = dict.fromkeys(not_drawable, _REPLACEMENT)
    return names, [word.translate(table) for word in words]


def _register_new_fonts(manager: Any) -> None:
    """Register fonts that were installed after matplotlib cached its list of fonts."""
    from matplotlib import font_manager

    for file in set(font_manager.findSystemFonts()) - {font.fname for font in manager.ttflist}:
        with suppress(OSError, RuntimeError):
            manager.addfont(file)


def _read_font_characters(file: str) -> set[int]:
    """Return the code points of a font; empty if it cannot be read."""
    from matplotlib import font_manager

    try:
        return set(font_manager.get_font(file).get_charmap())
    except (OSError, RuntimeError):
        return set()
