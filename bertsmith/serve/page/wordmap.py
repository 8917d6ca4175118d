"""Compare the vectors of one word in several sentences, layer by layer: distances and 2D maps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bertsmith.errors import InputError
from bertsmith.serve.page.markup import NUM_HUES, escape_html, highlight, section
from bertsmith.use.embed import Floats, WordVector
from bertsmith.use.similar import cosine_distances

#: Size of the map and its margin in pixels.
_WIDTH, _HEIGHT, _MARGIN = 360, 260, 26


@dataclass(frozen=True)
class WordMaps:
    """Vectors of a word's n occurrences, compared in each of the L + 1 hidden states.

    Attributes:
        word: the word.
        texts: the sentences.
        occurrences: the word's occurrences with their vectors.
        distances: float32 [L + 1, n, n], cosine distances.
        points: float32 [L + 1, n, 2], first two principal components of the unit vectors; each
            layer is rotated to resemble the next one.
        explained_variance: float32 [L + 1], share of the variance in the two components.
    """

    word: str
    texts: tuple[str, ...]
    occurrences: list[WordVector]
    distances: Floats
    points: Floats
    explained_variance: Floats


def word_maps(
    word: str, texts: Sequence[str], occurrences: list[WordVector], num_states: int
) -> WordMaps:
    """Compute the maps of all layers.

    Args:
        word: the word.
        texts: the sentences.
        occurrences: occurrences whose vectors are those of all hidden states, concatenated.
        num_states: number of hidden states.

    Raises:
        InputError: there is only one occurrence.
    """
    if len(occurrences) < 2:
        raise InputError(
            f"the word {word!r} occurs only once; enter at least two sentences with the word"
        )
    vectors = np.stack([occurrence.vector for occurrence in occurrences])
    layers = vectors.reshape(len(occurrences), num_states, -1).swapaxes(0, 1)
    distances = np.stack([cosine_distances(layer) for layer in layers])
    # From the last layer down; each is rotated to the layer above it.
    maps: list[tuple[Floats, float]] = []
    for layer in layers[::-1]:
        points, share = _principal_components(layer)
        maps.append((_rotate_to(points, maps[-1][0]) if maps else points, share))
    maps.reverse()
    all_points = np.stack([points for points, _ in maps])
    explained_variance = np.array([share for _, share in maps], np.float32)
    return WordMaps(word, tuple(texts), occurrences, distances, all_points, explained_variance)


def _principal_components(vectors: Floats) -> tuple[Floats, float]:
    """Return the first two components [n, 2] of vectors [n, W], and their share of the variance."""
    units = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True).clip(1e-12)
    left, singular_values, _ = np.linalg.svd(units - units.mean(0), full_matrices=False)
    points = np.zeros((len(vectors), 2), np.float32)
    points[:, : len(singular_values[:2])] = left[:, :2] * singular_values[:2]
    total = float((singular_values**2).sum())
    # Identical vectors have no directions; for example, embeddings without positions.
    if total < 1e-9:
        return np.zeros_like(points), 1.0
    return points, float((singular_values[:2] ** 2).sum()) / total


def _rotate_to(points: Floats, target: Floats) -> Floats:
    """Rotate or mirror points [n, 2] to be closest to a target (orthogonal Procrustes problem)."""
    left, _, right = np.linalg.svd(points.T @ target)
    rotated: Floats = points @ (left @ right)
    return rotated


def show(maps: WordMaps, layer: int) -> str:
    """Return the map, sentences and distances of a layer (0: embeddings) as HTML."""
    name = f"layer {layer}" if layer else "the embeddings"
    title = f"{maps.word!r} in {name}"
    content = f'<div class="bs-beside">{_map(maps, layer)}{_sentences(maps)}</div>'
    return section(title, content) + section("Cosine distances", _table(maps, layer))


def _map(maps: WordMaps, layer: int) -> str:
    points = maps.points[layer]
    center = np.array([_WIDTH / 2, _HEIGHT / 2])
    # One scale for both axes, to keep distances comparable.
    scale = float((np.abs(points) / (center - _MARGIN)).max()) or 1.0
    dots = []
    for number, (x, y) in enumerate(points / scale * (1, -1) + center, 1):
        occurrence = maps.occurrences[number - 1]
        tooltip = escape_html(f"{number}: {maps.texts[occurrence.text_index]}")
        dots.append(
            f'<g class="bs-hue-{occurrence.text_index % NUM_HUES}"><title>{tooltip}</title>'
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="11"/>'
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{number}</text></g>'
        )
    label = escape_html(
        f"Map of {len(points)} occurrences of {maps.word}; the table below has their distances"
    )
    return (
        f'<figure><svg class="bs-map" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{label}"><line x1="0" x2="{_WIDTH}" y1="{_HEIGHT / 2}" y2="{_HEIGHT / 2}"/>'
        f'<line y1="0" y2="{_HEIGHT}" x1="{_WIDTH / 2}" x2="{_WIDTH / 2}"/>{"".join(dots)}</svg>'
        "<figcaption>Two principal components, "
        f"{100 * maps.explained_variance[layer]:.0f} % of the variance</figcaption></figure>"
    )


def _sentences(maps: WordMaps) -> str:
    rows = []
    for occurrence in maps.occurrences:
        span = (occurrence.start, occurrence.end, "", occurrence.text_index)
        rows.append(f"<li>{highlight(maps.texts[occurrence.text_index], [span])}</li>")
    return f'<ol class="bs-places">{"".join(rows)}</ol>'


def _table(maps: WordMaps, layer: int) -> str:
    distances = maps.distances[layer]
    maximum = float(distances.max()) or 1.0
    header = "".join(f'<th scope="col">{number}</th>' for number in range(1, len(distances) + 1))
    rows = []
    for number, row in enumerate(distances, 1):
        cells = "".join(
            f'<td style="--heat:{100 * value / maximum:.0f}%">{value:.2f}</td>' for value in row
        )
        rows.append(f'<tr><th scope="row">{number}</th>{cells}</tr>')
    return (
        '<div class="bs-scroll" tabindex="0" role="region" aria-label="Cosine distances">'
        f'<table class="bs-heat"><thead><tr><td></td>{header}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )
