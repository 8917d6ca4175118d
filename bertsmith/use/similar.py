"""One word in several sentences: how far its vectors are apart, as a table and as a picture.

It never knows how a vector is made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import MissingExtraError
from bertsmith.use.embed import Embedder, Floats, WordVector

#: Characters around the word that a table or a picture shows.
_AROUND = 24


@dataclass(frozen=True)
class Similarities:
    """Where the word stands, and cosine distances, float32 [n, n]: 0 the same, 1 unlike."""

    word: str
    places: list[WordVector]
    contexts: list[str]
    distances: Floats

    def to_json(self) -> dict[str, Any]:
        """Return everything but the vectors as plain values."""
        places = [{"text": own.text, "start": own.start, "end": own.end, "context": context}
                  for own, context in zip(self.places, self.contexts, strict=True)]  # fmt: skip
        return {"word": self.word, "places": places, "distances": self.distances.tolist()}


def similar(embedder: Embedder, texts: Sequence[str], word: str, **settings: Any) -> Similarities:
    """Compare a word's vectors wherever it stands; ``settings`` as of ``Embedder.word``.

    Raises QuestionError for a text without it.
    """
    places = embedder.word(texts, word, **settings)
    distances = cosine_distances(np.stack([own.vector for own in places]))
    contexts = [_around(texts[own.text], own.start, own.end) for own in places]
    return Similarities(word, places, contexts, distances)


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
    return f"{left}{before}[{text[start:end]}]{after}{right}"


def draw(found: Similarities, path: Path) -> None:
    """Draw the distances as a picture; MissingExtraError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError("matplotlib", "plot", "drawing distances") from None
    count = len(found.places)
    side = 2.5 + 0.45 * count
    figure = Figure(figsize=(side + 4.5, side), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(found.distances, cmap="viridis_r", vmin=0)
    axes.set_xticks(range(count), [str(number + 1) for number in range(count)])
    names = [f"{number + 1}  {context}" for number, context in enumerate(found.contexts)]
    axes.set_yticks(range(count), names)
    middle = found.distances.max() / 2
    for row in range(count):
        for column in range(count):
            value = found.distances[row, column]
            color = "white" if value > middle else "black"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", color=color, size=8)
    axes.set_title(f"cosine distances of {found.word!r}", loc="left", fontsize=11)
    figure.colorbar(image, shrink=0.8)
    figure.savefig(path)
