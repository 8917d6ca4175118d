"""Safe HTML of words and shares: bars, marked words, notices. It never knows what is asked."""

from collections.abc import Iterable, Sequence
from html import escape

#: Colours of labels, by turns; see style.css.
HUES = 8


def safe(text: str) -> str:
    """Return text that shows as it is, in HTML and in the value of an attribute."""
    return escape(text, quote=True)


def percent(share: float) -> str:
    """Return a share as people read it; what is little but not nothing does not read 0.0 %."""
    return "< 0.1 %" if 0 < share < 0.0005 else f"{100 * share:.1f} %"


def notice(message: str, kind: str = "fault") -> str:
    """Return a message: a "fault", which is announced at once, or a "note"."""
    role = "alert" if kind == "fault" else "note"
    return f'<p class="bs-{kind}" role="{role}">{safe(message)}</p>'


def cut_note(cut_off: bool) -> str:
    """Say that a text was cut, if it was."""
    words = "The text was longer than the model takes; what was beyond is left out."
    return notice(words, "note") if cut_off else ""


def bars(shares: Sequence[tuple[str, float]], *, whole: float = 1.0, best: int | None = 0) -> str:
    """Return a list of words, each with a bar and its share; ``whole``: what fills a bar.

    ``best``: which one stands out.
    """
    rows = []
    for number, (word, share) in enumerate(shares):
        width = min(share / whole, 1.0) if whole > 0 else 0.0
        mark = ' class="bs-best"' if number == best else ""
        rows.append(
            f'<li{mark}><span class="bs-word">{safe(word)}</span>'
            f'<span class="bs-bar"><span style="width:{100 * width:.2f}%"></span></span>'
            f'<span class="bs-share">{percent(share)}</span></li>'
        )
    return f'<ol class="bs-bars">{"".join(rows)}</ol>'


def marked(text: str, spans: Iterable[tuple[int, int, str, int]]) -> str:
    """Return a text with spans marked: characters [start, end), what is said of it, its hue.

    Spans stand in their order and do not overlap.
    """
    parts, done = [], 0
    for start, end, label, hue in spans:
        said = f"<small>{safe(label)}</small>" if label else ""
        parts.append(safe(text[done:start]))
        parts.append(f'<mark class="bs-hue-{hue % HUES}">{safe(text[start:end])}{said}</mark>')
        done = end
    return f'<p class="bs-marked">{"".join(parts)}{safe(text[done:])}</p>'


def section(title: str, content: str) -> str:
    """Return content under a heading of its own; no title: the content alone."""
    heading = f"<h3>{safe(title)}</h3>" if title else ""
    return f'<section class="bs-result">{heading}{content}</section>'
