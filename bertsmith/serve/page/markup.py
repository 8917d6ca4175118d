"""Render text and probabilities as HTML: bars, highlighted spans, notices."""

import html
from collections.abc import Iterable, Sequence

#: Number of label colors in style.css; labels cycle through them.
NUM_HUES = 8


def escape_html(text: str) -> str:
    """Escape text for HTML and attribute values."""
    return html.escape(text, quote=True)


def percent(probability: float) -> str:
    """Format a probability with one decimal; small positive ones as "< 0.1 %"."""
    return "< 0.1 %" if 0 < probability < 0.0005 else f"{100 * probability:.1f} %"


def notice(message: str, kind: str = "error") -> str:
    """Return a message of a kind: "error" (read out by screen readers at once) or "note"."""
    role = "alert" if kind == "error" else "note"
    return f'<p class="bs-{kind}" role="{role}">{escape_html(message)}</p>'


def truncation_note(is_truncated: bool) -> str:
    """Return a note that a text was truncated; empty if it was not."""
    message = "The text was truncated to the model's maximum length."
    return notice(message, "note") if is_truncated else ""


def bars(
    probabilities: Sequence[tuple[str, float]], *, maximum: float = 1.0, best: int | None = 0
) -> str:
    """Return a bar chart of (text, probability).

    Args:
        probabilities: texts with their probabilities.
        maximum: probability of a full bar.
        best: index of the highlighted row; None for no highlight.
    """
    rows = []
    for index, (text, probability) in enumerate(probabilities):
        width = min(probability / maximum, 1.0) if maximum > 0 else 0.0
        mark = ' class="bs-best"' if index == best else ""
        rows.append(
            f'<li{mark}><span class="bs-word">{escape_html(text)}</span>'
            f'<span class="bs-bar"><span style="width:{100 * width:.2f}%"></span></span>'
            f'<span class="bs-share">{percent(probability)}</span></li>'
        )
    return f'<ol class="bs-bars">{"".join(rows)}</ol>'


def highlight(text: str, spans: Iterable[tuple[int, int, str, int]]) -> str:
    """Return a text with highlighted spans (start, end, label, hue).

    Offsets are characters; the spans are sorted and do not overlap.
    """
    parts, position = [], 0
    for start, end, label, hue in spans:
        small = f"<small>{escape_html(label)}</small>" if label else ""
        parts.append(escape_html(text[position:start]))
        parts.append(
            f'<mark class="bs-hue-{hue % NUM_HUES}">{escape_html(text[start:end])}{small}</mark>'
        )
        position = end
    return f'<p class="bs-marked">{"".join(parts)}{escape_html(text[position:])}</p>'


def section(title: str, content: str) -> str:
    """Return content below a heading; without a heading if the title is empty."""
    heading = f"<h3>{escape_html(title)}</h3>" if title else ""
    return f'<section class="bs-result">{heading}{content}</section>'
