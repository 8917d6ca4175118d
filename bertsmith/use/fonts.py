"""Choose installed fonts that contain the characters of the texts in a plot."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from bertsmith.errors import MissingExtraError

#: Drawn instead of characters that no font contains.
_REPLACEMENT = "?"
#: Fonts whose names contain one of these are not used: matplotlib cannot draw emoji fonts, and the
#: other fonts draw boxes instead of letters.
_UNUSABLE_FONTS = ("Emoji", "LastResort", "Last Resort", "Blank")


def choose_fonts(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Choose fonts that can draw texts.

    Returns:
        Names of fonts that together contain the characters of the texts, and the texts. Characters
        that no font contains or that are not printable are replaced by question marks.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib import font_manager, rcParams
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing texts") from None
    manager = font_manager.fontManager
    default_properties = font_manager.FontProperties(family=rcParams["font.family"])
    default_file = manager.findfont(default_properties)
    characters = set("".join(texts))
    missing = {ord(character) for character in characters if character.isprintable()}
    missing -= _read_font_characters(default_file)
    names = [font_manager.get_font(default_file).family_name]
    if missing:
        _register_new_fonts(manager)
    usable_fonts = [
        font for font in manager.ttflist if not any(part in font.name for part in _UNUSABLE_FONTS)
    ]
    for font in sorted(usable_fonts, key=_get_font_priority):
        if not missing:
            break
        if font.name in names:
            # Another style of this font is used already, and contains the same characters.
            continue
        new_characters = missing & _read_font_characters(font.fname)
        if new_characters:
            names.append(font.name)
            missing -= new_characters
    not_drawable = missing | {
        ord(character) for character in characters if not character.isprintable()
    }
    table: dict[int, Any] = dict.fromkeys(not_drawable, _REPLACEMENT)
    return names, [text.translate(table) for text in texts]


def _get_font_priority(font: Any) -> tuple[bool, bool, str, bool, str]:
    """Return a sort key by which upright sans-serif fonts come first, like the default font."""
    is_italic = font.style != "normal"
    is_serif = "Sans" not in font.name
    has_other_weight = font.weight != 400  # 400 is the regular weight.
    return is_italic, is_serif, font.name, has_other_weight, font.fname


def _register_new_fonts(manager: Any) -> None:
    """Register fonts that were installed after matplotlib cached its list of fonts."""
    from matplotlib import font_manager

    for file in set(font_manager.findSystemFonts()) - {font.fname for font in manager.ttflist}:
        with suppress(OSError, RuntimeError):
            manager.addfont(file)


def _read_font_characters(file: str) -> set[int]:
    """Return the code points that a font contains; the empty set if it cannot be read."""
    from matplotlib import font_manager

    try:
        return set(font_manager.get_font(file).get_charmap())
    except (OSError, RuntimeError):
        return set()
