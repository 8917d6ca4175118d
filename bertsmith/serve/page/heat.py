"""Attention as heat: a small picture a head, a grid of them, one of them large.

It never asks a model.
"""

import struct
import zlib
from base64 import b64encode

import numpy as np

from bertsmith.serve.page.markup import safe
from bertsmith.use.embed import Floats
from bertsmith.use.explain import AttentionMaps

#: The colour of full heat, readable on white and on black; none is transparent.
_COLOUR = (59, 130, 246)
_LEVELS = 32
#: The most cells on a side of a small picture.
_SMALL = 40
#: Of the large picture: a cell's side, room for the words, the size of letters.
_CELL, _FINE_CELL, _FINE_FROM = 16, 9, 48
_WORDS = 92


def png(shares: Floats) -> str:
    """Return shares [height, width] of 0 to 1 as the address of a picture, a data: URI."""
    # The root shows what is weak, too.
    levels = (np.sqrt(shares.clip(0, 1)) * (_LEVELS - 1)).round().astype(np.uint8)
    height, width = levels.shape
    rows = np.hstack([np.zeros((height, 1), np.uint8), levels]).tobytes()
    parts = [
        # 8 bits a pixel, numbers of colours.
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", bytes(_COLOUR) * _LEVELS),
        (b"tRNS", bytes(255 * level // (_LEVELS - 1) for level in range(_LEVELS))),
        (b"IDAT", zlib.compress(rows, 9)),
        (b"IEND", b""),
    ]
    whole = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return f"data:image/png;base64,{b64encode(whole).decode()}"


def _smaller(shares: Floats) -> Floats:
    """Return at most _SMALL cells a side, each the strongest of those that it stands for."""
    size = len(shares)
    if size <= _SMALL:
        return shares
    starts = np.arange(_SMALL) * size // _SMALL
    rows: Floats = np.maximum.reduceat(shares, starts, axis=0)
    found: Floats = np.maximum.reduceat(rows, starts, axis=1)
    return found


def grid(found: AttentionMaps) -> str:
    """Return small pictures of all heads of all layers, each a button; one of them is tabbed to."""
    layers, heads = found.probabilities.shape[:2]
    top = "".join(f'<span aria-hidden="true">{head}</span>' for head in range(1, heads + 1))
    cells = [f'<span aria-hidden="true"></span>{top}']
    for layer in range(1, layers + 1):
        cells.append(f'<span aria-hidden="true">{layer}</span>')
        for head in range(1, heads + 1):
            picture = png(_smaller(found.probabilities[layer - 1, head - 1]))
            tabbed = 0 if layer == head == 1 else -1
            cells.append(
                f'<button type="button" data-layer="{layer}" data-head="{head}" '
                f'tabindex="{tabbed}" aria-label="layer {layer}, head {head}">'
                f'<img alt="" src="{picture}"></button>'
            )
    return (
        f'<h3>All heads</h3><p class="bs-says">A row a layer, a column a head; arrow keys walk, '
        "Enter shows a head large.</p>"
        f'<div class="bs-scroll"><div class="bs-grid" role="group" aria-label="All heads" '
        f'style="--heads:{heads}">{"".join(cells)}</div></div>'
    )


def large(found: AttentionMaps, layer: int, head: int) -> str:
    """Return one head's heat with its words."""
    shares = found.probabilities[layer - 1, head - 1]
    size = len(shares)
    cell = _FINE_CELL if size > _FINE_FROM else _CELL
    side = _WORDS + size * cell
    words = []
    for number, token in enumerate(found.tokens):
        middle = _WORDS + (number + 0.5) * cell
        word = safe(token if len(token) <= 14 else f"{token[:13]}…")
        words.append(
            f'<text x="{_WORDS - 4}" y="{middle:.1f}" dy="0.35em" text-anchor="end">{word}</text>'
            f'<text transform="translate({middle:.1f} {_WORDS - 4}) rotate(-90)" dy="0.35em">'
            f"{word}</text>"
        )
    label = f"Heat of layer {layer}, head {head}: a row for each word that looks"
    return (
        f'<div class="bs-scroll" tabindex="0" role="region" aria-label="{label}">'
        f'<svg class="bs-large" width="{side}" height="{side}" viewBox="0 0 {side} {side}" '
        f'role="img" aria-label="{label}" style="font-size:{0.7 * cell:.1f}px">'
        f'<image x="{_WORDS}" y="{_WORDS}" width="{size * cell}" height="{size * cell}" '
        f'preserveAspectRatio="none" href="{png(shares)}"/>{"".join(words)}</svg></div>'
    )
