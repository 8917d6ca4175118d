"""Render an attention head as lines between two columns of tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import east_asian_width

import numpy as np

from bertsmith.serve.page.markup import escape_html, percent
from bertsmith.use.explain import AttentionMaps

#: Row heights in pixels, with few and with many tokens.
_ROW_HEIGHT = 22
_SMALL_ROW_HEIGHT = 17
#: Pixels between the columns.
_GAP = 110
#: Width of a percentage in pixels.
_PERCENT_WIDTH = 54
#: Font size as a fraction of the row height.
_FONT_SIZE = 0.62
#: Character width as a fraction of the font size; East Asian characters are twice as wide.
_CHARACTER_WIDTH = 0.62
#: With more tokens, rows are lower and have fewer lines.
_MANY_TOKENS = 40
#: Smallest probability that is drawn as a line.
_MIN_PROBABILITY = 0.02


def picture(maps: AttentionMaps, layer: int, head: int) -> str:
    """Return the strongest attention weights of each token as lines; layers and heads count from 1.

    Hovering or focusing a token hides the lines of other tokens and shows percentages.
    """
    probabilities = maps.probabilities[layer - 1, head - 1]
    size = len(probabilities)
    is_large = size > _MANY_TOKENS
    row_height, max_lines = (_SMALL_ROW_HEIGHT, 3) if is_large else (_ROW_HEIGHT, 6)
    columns = _layout_columns(maps.tokens, row_height)
    strongest = np.argsort(-probabilities, axis=1, kind="stable")[:, :max_lines]
    tokens = [escape_html(_shorten(token)) for token in maps.tokens]
    groups = []
    for query, token in enumerate(tokens):
        keys = [
            int(key) for key in strongest[query] if probabilities[query, key] >= _MIN_PROBABILITY
        ]
        summary = ", ".join(f"{tokens[key]} {percent(probabilities[query, key])}" for key in keys)
        lines = "".join(
            _line(query, key, float(probabilities[query, key]), row_height, columns) for key in keys
        )
        groups.append(
            f'<g class="bs-from" tabindex="0" role="img" aria-label="{token} attends to {summary}">'
            f'<rect x="0" y="{query * row_height}" width="{columns.left + 4}" '
            f'height="{row_height}"/>'
            f'<text x="{columns.left}" y="{(query + 0.5) * row_height}" dy="0.35em" '
            f'text-anchor="end">{token}</text>{lines}</g>'
        )
    right_column = "".join(
        f'<text x="{columns.right}" y="{(key + 0.5) * row_height}" dy="0.35em">{token}</text>'
        for key, token in enumerate(tokens)
    )
    label = f"Attention of layer {layer}, head {head}: {size} tokens"
    style = f"font-size:{_FONT_SIZE * row_height:.1f}px;max-width:{1.4 * columns.width:.0f}px"
    return (
        f'<div class="bs-lines"><svg viewBox="0 0 {columns.width} {size * row_height}" '
        f'role="group" aria-label="{label}" style="{style}">'
        f'<g aria-hidden="true">{right_column}</g>{"".join(groups)}</svg></div>'
    )


@dataclass(frozen=True)
class _Columns:
    """Horizontal layout in pixels.

    Attributes:
        left: right edge of the left column.
        right: left edge of the right column.
        width: total width.
    """

    left: int
    right: int
    width: int


def _layout_columns(tokens: Sequence[str], row_height: int) -> _Columns:
    max_characters = max(
        sum(2 if east_asian_width(character) in "FW" else 1 for character in _shorten(token))
        for token in tokens
    )
    column = 8 + int(max_characters * row_height * _FONT_SIZE * _CHARACTER_WIDTH)
    return _Columns(column, column + _GAP, 2 * column + _GAP + _PERCENT_WIDTH)


def _line(query: int, key: int, probability: float, row_height: int, columns: _Columns) -> str:
    y1, y2 = (query + 0.5) * row_height, (key + 0.5) * row_height
    return (
        f'<g class="bs-line"><line x1="{columns.left + 5}" y1="{y1}" x2="{columns.right - 5}" '
        f'y2="{y2}" stroke-width="{0.8 + 2.6 * probability:.2f}" '
        f'stroke-opacity="{max(probability, 0.08):.2f}"/>'
        f'<text x="{columns.width - 2}" y="{y2}" dy="0.35em" text-anchor="end">'
        f"{percent(probability)}</text></g>"
    )


def _shorten(token: str) -> str:
    return token if len(token) <= 15 else f"{token[:14]}…"
