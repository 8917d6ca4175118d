"""One word in several sentences: how far its vectors are apart, as a table and as a picture.

It never knows how a vector is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import InputError, MissingExtraError
from bertsmith.use.embed import Embedder, Floats, WordVector
from bertsmith.use.fonts import choose_fonts

#: The pictures that matplotlib draws anywhere.
_PICTURES = (".png", ".svg", ".pdf", ".jpg")
#: Characters around the word that a table or a picture shows.
_AROUND = 24
#: Places that are compared with each other, at most; that have a row in a picture; and of which
#: each distance is written there.
_MOST, _DRAWN, _WRITTEN = 1000, 60, 24


@dataclass(frozen=True)
class WordDistances:
    """Where the word stands, and cosine distances, float32 [n, n]: 0 the same, 1 unlike."""

    word: str
    occurrences: list[WordVector]
    contexts: list[str]
    distances: Floats

    def to_json(self) -> dict[str, Any]:
        """Return everything but the vectors as plain values."""
        places = [{"text": own.text, "start": own.start, "end": own.end, "context": context}
                  for own, context in zip(self.occurrences, self.contexts, strict=True)]  # fmt: skip
        return {"word": self.word, "places": places, "distances": self.distances.tolist()}


def similar(
    model: Embedder | Path | str, texts: Sequence[str], word: str, **settings: Any
) -> WordDistances:
    """Compare one word's vectors wherever it stands in texts.

    ``model`` is an Embedder, or any model directory, RUN or hub id; ``settings`` as of
    ``Embedder.word``.
    Raises QuestionError for a text without it, unless ``skip`` leaves those out, and where it
    stands nowhere, or in too many places.
    """
    embedder = model if isinstance(model, Embedder) else Embedder.load(model)
    places = embedder.encode_word(texts, word, **settings)
    if not places:
        raise InputError(f"the word {word!r} is in none of the {len(texts):,} texts")
    if len(places) > _MOST:
        raise InputError(
            f"the word {word!r} stands in {len(places):,} places; give fewer texts: {_MOST:,} "
            "places can be compared with each other"
        )
    distances = cosine_distances(np.stack([own.vector for own in places]))
    contexts = [_around(texts[own.text], own.start, own.end) for own in places]
    return WordDistances(word, places, contexts, distances)


def cosine_distances(vectors: Floats) -> Floats:
    """Return 1 - cosine between all of n vectors [n, W]: float32 [n, n], 0 with themselves."""
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-12)
    found: Floats = (1 - units @ units.T).clip(0, 2).astype(np.float32)
    np.fill_diagonal(found, 0)
    return found


def _around(text: str, start: int, end: int) -> str:
    before, after = text[max(start - _AROUND, 0) : start], text[end : end + _AROUND]
    left = "…" if start > _AROUND else ""
    right = "…" if end + _AROUND < len(text) else ""
    # A tab or an end of line would break the table.
    return " ".join(f"{left}{before}[{text[start:end]}]{after}{right}".split())


def check_plot_path(path: Path) -> None:
    """Raise QuestionError where no picture can be written: a file, no folder, another ending."""
    if path.exists():
        raise InputError(f"{path}: it is there already; give --plot another name")
    if not path.parent.is_dir():
        raise InputError(f"{path.parent}: no such folder, for the picture of --plot")
    if path.suffix not in _PICTURES:
        raise InputError(f"{path}: unknown kind of picture; expected {', '.join(_PICTURES)}")


def plot_distances(found: WordDistances, path: Path) -> None:
    """Draw the distances as a picture, in the form that the name ends with, such as .png.

    Raises MissingExtraError without matplotlib, QuestionError for too many places, or for a name
    that cannot be written, see ``check_plot_path``.
    """
    check_plot_path(path)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing distances") from None
    count = len(found.occurrences)
    if count > _DRAWN:
        raise InputError(
            f"{path}: a picture of {count:,} places cannot be read; give texts with at most "
            f"{_DRAWN} of them"
        )
    names = [f"{number}  {context}" for number, context in enumerate(found.contexts, 1)]
    title = f"cosine distances of \u201c{found.word}\u201d"
    fonts, (title, *names) = choose_fonts([title, *names])
    side = 2.5 + 0.45 * min(count, _WRITTEN) + 0.2 * max(count - _WRITTEN, 0)
    figure = Figure(figsize=(side + 4.5, side), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(found.distances, cmap="viridis_r", vmin=0)
    plain: dict[str, Any] = {"family": fonts, "parse_math": False}
    size = 10 if count <= _WRITTEN else 7
    axes.set_xticks(range(count), [str(number + 1) for number in range(count)], fontsize=size)
    axes.set_yticks(range(count), names, fontsize=size, **plain)
    if count <= _WRITTEN:
        _write_numbers(axes, found.distances)
    axes.set_title(title, loc="left", fontsize=11, **plain)
    figure.colorbar(image, shrink=0.8)
    try:
        figure.savefig(path, format=path.suffix[1:])
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: the picture cannot be written: {error}") from None


def _write_numbers(axes: Any, distances: Floats) -> None:
    middle = distances.max() / 2
    for (row, column), value in np.ndenumerate(distances):
        color = "white" if value > middle else "black"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, size=8)
