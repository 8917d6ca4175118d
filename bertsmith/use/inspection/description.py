"""How what is found in files is told to people: nested values as lines, figures as a curve.

It never knows what it tells of.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bertsmith.errors import RunError
from bertsmith.files import parse_json

#: Columns of a curve drawn in characters, and the characters, low to high.
_COLUMNS, _HEIGHTS = 60, "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Description:
    """facts: everything, as plain values for JSON. lines: what people want to see of it."""

    facts: dict[str, Any]
    lines: list[str]


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file. Raises RunError where it is none."""
    try:
        value: dict[str, Any] = dict(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: not a readable JSON object: {error}") from None
    return value


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted name, value as text) of nested tables."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield prefix + key, f"{value:.6g}"
        elif isinstance(value, list | tuple):
            yield prefix + key, ", ".join(map(str, value))
        else:
            yield prefix + key, str(value)


def format_aligned(pairs: Iterator[tuple[str, str]]) -> list[str]:
    """Return a line a pair, the values below each other."""
    rows = list(pairs)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:{width}}  {value}" for name, value in rows]


def sparkline(values: list[float], name: str) -> list[str]:
    """Draw figures as one line of characters, the mean of neighbours where there are many."""
    if len(values) < 2:
        return []
    columns = min(len(values), _COLUMNS)
    edges = [round(column * len(values) / columns) for column in range(columns + 1)]
    means = [sum(values[first:last]) / (last - first) for first, last in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_HEIGHTS) - 1) / (high - low) if high > low else 0.0
    drawn = "".join(_HEIGHTS[round((mean - low) * scale)] for mean in means)
    return [f"  {drawn}  {name}, {high:.3f} to {low:.3f}"]
