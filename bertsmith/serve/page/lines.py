"""One attention head as lines between two columns of words. It never asks a model."""

import numpy as np

from bertsmith.serve.page.markup import percent, safe
from bertsmith.use.explain import Attention

#: Sides in units of the picture: its width, where the columns stand, a row's height.
_WIDTH, _LEFT, _RIGHT, _ROW, _FINE_ROW = 400, 130, 270, 22, 17
#: Above so many tokens a word shows fewer lines, and rows are lower.
_MANY = 40
#: The weakest line that is drawn.
_LEAST = 0.02


def picture(found: Attention, layer: int, head: int) -> str:
    """Return what each word looks at, its strongest lines only.

    A word that is pointed at, or focused, shows its own lines alone, with their shares.
    """
    shares = found.probabilities[layer - 1, head - 1]
    size = len(shares)
    row, most = (_FINE_ROW, 3) if size > _MANY else (_ROW, 6)
    strongest = np.argsort(-shares, axis=1, kind="stable")[:, :most]
    words = [safe(_short(token)) for token in found.tokens]
    groups = []
    for number, word in enumerate(words):
        ends = [int(end) for end in strongest[number] if shares[number, end] >= _LEAST]
        told = ", ".join(f"{words[end]} {percent(shares[number, end])}" for end in ends)
        drawn = "".join(_line(number, end, float(shares[number, end]), row) for end in ends)
        groups.append(
            f'<g class="bs-from" tabindex="0" role="img" aria-label="{word} looks at {told}">'
            f'<rect x="0" y="{number * row}" width="{_LEFT + 4}" height="{row}"/>'
            f'<text x="{_LEFT}" y="{(number + 0.5) * row}" dy="0.35em" text-anchor="end">{word}'
            f"</text>{drawn}</g>"
        )
    to = "".join(
        f'<text x="{_RIGHT}" y="{(number + 0.5) * row}" dy="0.35em">{word}</text>'
        for number, word in enumerate(words)
    )
    label = f"Attention of layer {layer}, head {head}: {size} words"
    return (
        f'<div class="bs-lines"><svg viewBox="0 0 {_WIDTH} {size * row}" role="group" '
        f'aria-label="{label}" style="font-size:{0.62 * row:.1f}px">'
        f'<g aria-hidden="true">{to}</g>{"".join(groups)}</svg></div>'
    )


def _line(start: int, end: int, share: float, row: int) -> str:
    y, z = (start + 0.5) * row, (end + 0.5) * row
    return (
        f'<g class="bs-line"><line x1="{_LEFT + 5}" y1="{y}" x2="{_RIGHT - 5}" y2="{z}" '
        f'stroke-width="{0.8 + 2.6 * share:.2f}" stroke-opacity="{max(share, 0.08):.2f}"/>'
        f'<text x="{_WIDTH - 2}" y="{z}" dy="0.35em" text-anchor="end">{percent(share)}</text></g>'
    )


def _short(token: str) -> str:
    return token if len(token) <= 15 else f"{token[:14]}…"
