"""Render attention as heat maps: a grid of all heads, and one large head."""

import struct
import zlib
from base64 import b64encode

import numpy as np

from bertsmith.serve.page.markup import escape_html
from bertsmith.use.embed import Floats
from bertsmith.use.explain import AttentionMaps

#: RGB of a probability of 1, visible on white and black; a probability of 0 is transparent.
_COLOR = (59, 130, 246)
_LEVELS = 32
#: Maximum cells per side of a small heat map.
_MAX_SMALL_CELLS = 40
#: Cell size of the large heat map in pixels; above ``_MAX_NORMAL_TOKENS``, cells are small.
_CELL = 16
_SMALL_CELL = 9
_MAX_NORMAL_TOKENS = 48
#: Pixels for the tokens beside and above the large heat map.
_LABEL_SIZE = 92


def png(probabilities: Floats) -> str:
    """Return probabilities [height, width] as a PNG image in a data: URI."""
    # The square root makes small probabilities visible.
    levels = (np.sqrt(probabilities.clip(0, 1)) * (_LEVELS - 1)).round().astype(np.uint8)
    height, width = levels.shape
    rows = np.hstack([np.zeros((height, 1), np.uint8), levels]).tobytes()
    parts = [
        # 8 bits per pixel, color type 3 (palette).
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(_COLOR) * _LEVELS),
        (b"tRNS", bytes(255 * level // (_LEVELS - 1) for level in range(_LEVELS))),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    ]
    content = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return f"data:image/png;base64,{b64encode(content).decode()}"


def _downsample(probabilities: Floats) -> Floats:
    """Max-pool a square matrix to at most ``_MAX_SMALL_CELLS`` cells per side."""
    size = len(probabilities)
    if size <= _MAX_SMALL_CELLS:
        return probabilities
    starts = np.arange(_MAX_SMALL_CELLS) * size // _MAX_SMALL_CELLS
    rows: Floats = np.maximum.reduceat(probabilities, starts, axis=0)
    pooled: Floats = np.maximum.reduceat(rows, starts, axis=1)
    return pooled


def grid(maps: AttentionMaps) -> str:
    """Return small heat maps of all heads of all layers as buttons."""
    layers, heads = maps.probabilities.shape[:2]
    header = "".join(f'<span aria-hidden="true">{head}</span>' for head in range(1, heads + 1))
    cells = [f'<span aria-hidden="true"></span>{header}']
    for layer in range(1, layers + 1):
        cells.append(f'<span aria-hidden="true">{layer}</span>')
        for head in range(1, heads + 1):
            image = png(_downsample(maps.probabilities[layer - 1, head - 1]))
            # Only the first button is a tab stop; arrow keys move within the grid.
            tab_index = 0 if layer == head == 1 else -1
            cells.append(
                f'<button type="button" data-layer="{layer}" data-head="{head}" '
                f'tabindex="{tab_index}" aria-label="layer {layer}, head {head}">'
                f'<img alt="" src="{image}"></button>'
            )
    return (
        f'<h3>All heads</h3><p class="bs-says">One row per layer, one column per head. Arrow keys '
        "move, Enter selects.</p>"
        f'<div class="bs-scroll"><div class="bs-grid" role="group" aria-label="All heads" '
        f'style="--heads:{heads}">{"".join(cells)}</div></div>'
    )


def large(maps: AttentionMaps, layer: int, head: int) -> str:
    """Return the heat map of one head with its tokens; layers and heads count from 1."""
    probabilities = maps.probabilities[layer - 1, head - 1]
    size = len(probabilities)
    cell = _SMALL_CELL if size > _MAX_NORMAL_TOKENS else _CELL
    side = _LABEL_SIZE + size * cell
    labels = []
    for index, token in enumerate(maps.tokens):
        center = _LABEL_SIZE + (index + 0.5) * cell
        text = escape_html(token if len(token) <= 14 else f"{token[:13]}…")
        labels.append(
            f'<text x="{_LABEL_SIZE - 4}" y="{center:.1f}" dy="0.35em" text-anchor="end">{text}'
            f'</text><text transform="translate({center:.1f} {_LABEL_SIZE - 4}) rotate(-90)" '
            f'dy="0.35em">{text}</text>'
        )
    description = f"Heat map of layer {layer}, head {head}: one row per attending token"
    return (
        f'<div class="bs-scroll" tabindex="0" role="region" aria-label="{description}">'
        f'<svg class="bs-large" width="{side}" height="{side}" viewBox="0 0 {side} {side}" '
        f'role="img" aria-label="{description}" style="font-size:{0.7 * cell:.1f}px">'
        f'<image x="{_LABEL_SIZE}" y="{_LABEL_SIZE}" width="{size * cell}" height="{size * cell}" '
        f'preserveAspectRatio="none" href="{png(probabilities)}"/>{"".join(labels)}</svg></div>'
    )
