"""One word in several sentences, layer by layer: distances and a map. It never asks a model."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bertsmith.errors import InputError
from bertsmith.serve.page.markup import HUES, marked, safe, section
from bertsmith.use.embed import Floats, WordVector
from bertsmith.use.similar import cosine_distances

#: Sides of the picture and its margin, in units of its own.
_WIDTH, _HEIGHT, _MARGIN = 360, 260, 26


@dataclass(frozen=True)
class WordMaps:
    """Where a word stands in texts, and for each of L + 1 hidden states what its vectors are like.

    distances: float32 [L + 1, n, n], cosine distances. points: float32 [L + 1, n, 2], the two
    principal components of the vectors at length 1, turned so that neighbouring layers look alike.
    kept: float32 [L + 1], the share of the variance that the two hold.
    """

    word: str
    texts: tuple[str, ...]
    places: list[WordVector]
    distances: Floats
    points: Floats
    kept: Floats


def word_maps(word: str, texts: Sequence[str], places: list[WordVector], states: int) -> WordMaps:
    """Work out all layers; ``places`` have the vectors of all ``states``, one after another.

    Raises QuestionError for a single place.
    """
    if len(places) < 2:
        raise InputError(
            f"the word {word!r} stands in one place only; give two sentences with it or more"
        )
    every = np.stack([own.vector for own in places])
    layers = every.reshape(len(places), states, -1).swapaxes(0, 1)
    distances = np.stack([cosine_distances(layer) for layer in layers])
    # From the last layer down, each turned to the one above it.
    found: list[tuple[Floats, float]] = []
    for layer in layers[::-1]:
        own, share = _components(layer)
        found.append((_turned(own, found[-1][0]) if found else own, share))
    found.reverse()
    points = np.stack([own for own, _ in found])
    kept = np.array([share for _, share in found], np.float32)
    return WordMaps(word, tuple(texts), places, distances, points, kept)


def _components(vectors: Floats) -> tuple[Floats, float]:
    """Return the first two principal components of n vectors [n, W], [n, 2], and their share."""
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-12)
    left, sizes, _ = np.linalg.svd(units - units.mean(0), full_matrices=False)
    points = np.zeros((len(vectors), 2), np.float32)
    points[:, : len(sizes[:2])] = left[:, :2] * sizes[:2]
    whole = float((sizes**2).sum())
    # The same vectors everywhere have no directions: the embeddings without places do not differ.
    if whole < 1e-9:
        return np.zeros_like(points), 1.0
    return points, float((sizes[:2] ** 2).sum()) / whole


def _turned(points: Floats, like: Floats) -> Floats:
    """Turn or mirror points [n, 2] so that they lie as near to others as they can."""
    left, _, right = np.linalg.svd(points.T @ like)
    turned: Floats = points @ (left @ right)
    return turned


def show(maps: WordMaps, layer: int) -> str:
    """Return the map, the sentences and the table of distances of a layer, 0 the embeddings."""
    name = f"layer {layer}" if layer else "the embeddings"
    title = f"{maps.word!r} in {name}"
    parts = f'<div class="bs-beside">{_picture(maps, layer)}{_sentences(maps)}</div>'
    return section(title, parts) + section("Cosine distances", _table(maps, layer))


def _picture(maps: WordMaps, layer: int) -> str:
    points = maps.points[layer]
    middle = np.array([_WIDTH / 2, _HEIGHT / 2])
    # One scale for both directions: distances on paper are those of the points.
    spread = float((np.abs(points) / (middle - _MARGIN)).max()) or 1.0
    dots = []
    for number, (x, y) in enumerate(points / spread * (1, -1) + middle, 1):
        own = maps.places[number - 1]
        said = safe(f"{number}: {maps.texts[own.text]}")
        dots.append(
            f'<g class="bs-hue-{own.text % HUES}"><title>{said}</title>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="11"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{number}</text></g>'
        )
    label = safe(
        f"Map of {len(points)} places of {maps.word}; the table below has the same distances"
    )
    return (
        f'<figure><svg class="bs-map" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{label}"><line x1="0" x2="{_WIDTH}" y1="{_HEIGHT / 2}" y2="{_HEIGHT / 2}"/>'
        f'<line y1="0" y2="{_HEIGHT}" x1="{_WIDTH / 2}" x2="{_WIDTH / 2}"/>{"".join(dots)}</svg>'
        f"<figcaption>Two principal components, {100 * maps.kept[layer]:.0f} % of the variance"
        "</figcaption></figure>"
    )


def _sentences(maps: WordMaps) -> str:
    rows = [
        f"<li>{marked(maps.texts[own.text], [(own.start, own.end, '', own.text)])}</li>"
        for own in maps.places
    ]
    return f'<ol class="bs-places">{"".join(rows)}</ol>'


def _table(maps: WordMaps, layer: int) -> str:
    distances = maps.distances[layer]
    most = float(distances.max()) or 1.0
    heads = "".join(f'<th scope="col">{number}</th>' for number in range(1, len(distances) + 1))
    rows = []
    for number, row in enumerate(distances, 1):
        cells = "".join(
            f'<td style="--heat:{100 * value / most:.0f}%">{value:.2f}</td>' for value in row
        )
        rows.append(f'<tr><th scope="row">{number}</th>{cells}</tr>')
    return (
        '<div class="bs-scroll" tabindex="0" role="region" aria-label="Cosine distances">'
        f'<table class="bs-heat"><thead><tr><td></td>{heads}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
