"""One attention head as lines between two columns of words. It never asks a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import east_asian_width

import numpy as np

from bertsmith.serve.page.markup import percent, safe
from bertsmith.use.explain import AttentionMaps

#: In units of the picture: a row's height; the room between the columns, and that of a share.
_ROW, _FINE_ROW, _BETWEEN, _SHARE = 22, 17, 110, 54
#: Of a letter: its size in rows, and its width in sizes; one of East Asia takes two.
_SIZE, _LETTER = 0.62, 0.62
#: Above so many tokens a word shows fewer lines, and rows are lower.
_MANY = 40
#: The weakest line that is drawn.
_LEAST = 0.02


def picture(found: AttentionMaps, layer: int, head: int) -> str:
    """Return what each word looks at, its strongest lines only.

    A word that is pointed at, or focused, shows its own lines alone, with their shares.
    """
    shares = found.probabilities[layer - 1, head - 1]
    size = len(shares)
    row, most = (_FINE_ROW, 3) if size > _MANY else (_ROW, 6)
    places = _places(found.tokens, row)
    strongest = np.argsort(-shares, axis=1, kind="stable")[:, :most]
    words = [safe(_short(token)) for token in found.tokens]
    groups = []
    for number, word in enumerate(words):
        ends = [int(end) for end in strongest[number] if shares[number, end] >= _LEAST]
        told = ", ".join(f"{words[end]} {percent(shares[number, end])}" for end in ends)
        drawn = "".join(_line(number, end, float(shares[number, end]), row, places) for end in ends)
        groups.append(
            f'<g class="bs-from" tabindex="0" role="img" aria-label="{word} looks at {told}">'
            f'<rect x="0" y="{number * row}" width="{places.left + 4}" height="{row}"/>'
            f'<text x="{places.left}" y="{(number + 0.5) * row}" dy="0.35em" text-anchor="end">'
            f"{word}</text>{drawn}</g>"
        )
    to = "".join(
        f'<text x="{places.right}" y="{(number + 0.5) * row}" dy="0.35em">{word}</text>'
        for number, word in enumerate(words)
    )
    label = f"Attention of layer {layer}, head {head}: {size} words"
    style = f"font-size:{_SIZE * row:.1f}px;max-width:{1.4 * places.width:.0f}px"
    return (
        f'<div class="bs-lines"><svg viewBox="0 0 {places.width} {size * row}" role="group" '
        f'aria-label="{label}" style="{style}">'
        f'<g aria-hidden="true">{to}</g>{"".join(groups)}</svg></div>'
    )


@dataclass(frozen=True)
class _Places:
    """Where the columns stand: the end of the left one, the start of the right one, the width."""

    left: int
    right: int
    width: int


def _places(tokens: Sequence[str], row: int) -> _Places:
    letters = max(
        sum(2 if east_asian_width(one) in "FW" else 1 for one in _short(token)) for token in tokens
    )
    column = 8 + int(letters * row * _SIZE * _LETTER)
    return _Places(column, column + _BETWEEN, 2 * column + _BETWEEN + _SHARE)


def _line(start: int, end: int, share: float, row: int, places: _Places) -> str:
    y, z = (start + 0.5) * row, (end + 0.5) * row
    return (
        f'<g class="bs-line"><line x1="{places.left + 5}" y1="{y}" x2="{places.right - 5}" '
        f'y2="{z}" stroke-width="{0.8 + 2.6 * share:.2f}" stroke-opacity="{max(share, 0.08):.2f}"/>'
        f'<text x="{places.width - 2}" y="{z}" dy="0.35em" text-anchor="end">'
        f"{percent(share)}</text></g>"
    )


def _short(token: str) -> str:
    return token if len(token) <= 15 else f"{token[:14]}…"
