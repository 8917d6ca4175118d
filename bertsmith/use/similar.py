"""Cosine distances between the vectors of one word in several sentences, as a table or a plot."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import InputError, require_extra
from bertsmith.use.embed import Embedder
from bertsmith.use.token_vectors import Floats, WordVector

#: Suffixes of the image formats that matplotlib can write without additional packages.
_PLOT_SUFFIXES = (".png", ".svg", ".pdf", ".jpg")
#: Number of characters shown on each side of the word.
_CONTEXT_CHARACTERS = 24
#: Maximum number of occurrences that can be compared.
_MAX_OCCURRENCES = 1000
#: Maximum number of occurrences in a plot.
_MAX_PLOTTED = 60
#: Maximum number of occurrences for which the cells of the plot show the distances as numbers.
_MAX_ANNOTATED = 24
#: Drawn instead of characters that no font contains.
_REPLACEMENT_CHARACTER = "?"
#: Fonts whose names contain one of these are not used: matplotlib cannot draw emoji fonts, and the
#: other fonts draw boxes instead of letters.
_UNUSABLE_FONTS = ("Emoji", "LastResort", "Last Resort", "Blank")


@dataclass(frozen=True)
class WordDistances:
    """The n occurrences of a word in several texts, and the distances between their vectors.

    Attributes:
        word: The word.
        occurrences: Position and vector of each occurrence.
        contexts: Each occurrence in brackets, with the text around it.
        distances: Cosine distances, float32 [n, n], from 0 (same direction) to 2 (opposite).
    """

    word: str
    occurrences: list[WordVector]
    contexts: list[str]
    distances: Floats

    def to_json(self) -> dict[str, Any]:
        """Return everything except the vectors as a JSON value."""
        occurrences = [
            {
                "text_index": occurrence.text_index,
                "start": occurrence.start,
                "end": occurrence.end,
                "context": context,
            }
            for occurrence, context in zip(self.occurrences, self.contexts, strict=True)
        ]
        return {
            "word": self.word,
            "occurrences": occurrences,
            "distances": self.distances.tolist(),
        }


def similar(
    model: Embedder | Path | str, texts: Sequence[str], word: str, **settings: Any
) -> WordDistances:
    """Compute the distances between the vectors of all occurrences of a word in texts.

    Args:
        model: An ``Embedder``, or a path or name as in ``load``.
        texts: The texts.
        word: The word.
        settings: See ``Embedder.encode_word``.

    Raises:
        InputError: A text does not contain the word (unless ``skip`` is set), no text contains
            the word, or there are too many occurrences.
    """
    embedder = model if isinstance(model, Embedder) else Embedder.load(model)
    num_occurrences = sum(map(len, embedder.find_word(texts, word, skip=True).values()))
    if num_occurrences > _MAX_OCCURRENCES:
        raise InputError(
            f"the word {word!r} occurs {num_occurrences:,} times; at most {_MAX_OCCURRENCES:,} "
            "occurrences can be compared; give fewer texts"
        )
    occurrences = embedder.encode_word(texts, word, **settings)
    if not occurrences:
        if num_occurrences:
            raise InputError(
                f"the word {word!r} occurs only beyond the model's limit of {embedder.max_seqlen} "
                "tokens; shorten the texts"
            )
        problem = "not in the text" if len(texts) == 1 else f"in none of the {len(texts):,} texts"
        raise InputError(f"the word {word!r} is {problem}; give a text that contains it")
    distances = cosine_distances(np.stack([occurrence.vector for occurrence in occurrences]))
    contexts = [
        _format_context(texts[occurrence.text_index], occurrence.start, occurrence.end)
        for occurrence in occurrences
    ]
    return WordDistances(word, occurrences, contexts, distances)


def cosine_distances(vectors: Floats) -> Floats:
    """Return 1 - cosine similarity for all pairs of vectors: float32 [n, W] -> float32 [n, n]."""
    unit_vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-12)
    distances: Floats = (1 - unit_vectors @ unit_vectors.T).clip(0, 2).astype(np.float32)
    # Because of rounding errors, the distance of a vector to itself may differ slightly from 0.
    np.fill_diagonal(distances, 0)
    return distances


def _format_context(text: str, start: int, end: int) -> str:
    """Return a word in brackets with the text around it, on one line."""
    before = text[max(start - _CONTEXT_CHARACTERS, 0) : start]
    after = text[end : end + _CONTEXT_CHARACTERS]
    left_ellipsis = "…" if start > _CONTEXT_CHARACTERS else ""
    right_ellipsis = "…" if end + _CONTEXT_CHARACTERS < len(text) else ""
    context = f"{left_ellipsis}{before}[{text[start:end]}]{after}{right_ellipsis}"
    # In the table of results, a tab or line break would start a new cell or row.
    return " ".join(context.split())


def check_plot_path(path: Path) -> None:
    """Raise InputError if the file exists, its directory does not, or its suffix is unknown."""
    if path.exists():
        raise InputError(f"{path}: already exists; give --plot another name")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such directory; give --plot another path")
    if path.suffix not in _PLOT_SUFFIXES:
        raise InputError(f"{path}: unknown image format; expected {', '.join(_PLOT_SUFFIXES)}")


def plot_distances(result: WordDistances, path: Path) -> None:
    """Plot the distance matrix to an image file. The suffix of its name determines the format.

    Raises:
        MissingExtraError: matplotlib is not installed.
        InputError: There are too many occurrences, or the file cannot be written; see
            ``check_plot_path``.
    """
    check_plot_path(path)
    with require_extra("plot", "drawing distances", package="matplotlib"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    count = len(result.occurrences)
    if count > _MAX_PLOTTED:
        raise InputError(
            f"{path}: a plot of {count:,} occurrences would be unreadable; give texts with at most "
            f"{_MAX_PLOTTED} occurrences"
        )
    row_names = [f"{number}  {context}" for number, context in enumerate(result.contexts, 1)]
    title = f"cosine distances of \u201c{result.word}\u201d"
    fonts, (title, *row_names) = choose_fonts([title, *row_names])
    # In inches. Rows that have no numbers in their cells need less space.
    height = 2.5 + 0.45 * min(count, _MAX_ANNOTATED) + 0.2 * max(count - _MAX_ANNOTATED, 0)
    row_names_width = 4.5
    figure = Figure(figsize=(height + row_names_width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(result.distances, cmap="viridis_r", vmin=0)
    text_options: dict[str, Any] = {"family": fonts, "parse_math": False}
    fontsize = 10 if count <= _MAX_ANNOTATED else 7
    numbers = [str(index + 1) for index in range(count)]
    axes.set_xticks(range(count), numbers, fontsize=fontsize)
    axes.set_yticks(range(count), row_names, fontsize=fontsize, **text_options)
    if count <= _MAX_ANNOTATED:
        _annotate_cells(axes, result.distances)
    axes.set_title(title, loc="left", fontsize=11, **text_options)
    figure.colorbar(image, shrink=0.8)
    try:
        figure.savefig(path, format=path.suffix[1:])
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: the plot cannot be written: {error}") from None


def _annotate_cells(axes: Any, distances: Floats) -> None:
    """Write each distance into its cell, in white if the cell is dark."""
    # The colors get darker from distance 0 to the maximum.
    middle = distances.max() / 2
    for (row, column), value in np.ndenumerate(distances):
        color = "white" if value > middle else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, size=8)


def choose_fonts(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Choose fonts that can draw texts.

    Returns:
        Names of fonts that together contain the characters of the texts, and the texts. Characters
        that no font contains or that are not printable are replaced by question marks.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with require_extra("plot", "drawing texts", package="matplotlib"):
        from matplotlib import font_manager, rcParams
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
    table: dict[int, Any] = dict.fromkeys(not_drawable, _REPLACEMENT_CHARACTER)
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
