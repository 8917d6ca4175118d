"""Format descriptions of artifacts: nested values as aligned lines, and sparklines."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from bertsmith.errors import RunError
from bertsmith.files import parse_json
from bertsmith.plurals import shorten_list

#: Maximum number of characters in a sparkline.
_SPARKLINE_WIDTH = 60
#: Characters of a sparkline, from low to high values.
_SPARKLINE_LEVELS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Description:
    """A description of an artifact.

    Attributes:
        facts: Properties of the artifact, as JSON values.
        lines: The properties as lines to print.
    """

    facts: dict[str, Any]
    lines: list[str]


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        RunError: The file cannot be read or is not a JSON object.
    """
    try:
        value: dict[str, Any] = dict(parse_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: not a readable JSON object: {error}") from None
    return value


def flatten_mapping(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of nested mappings as pairs (dotted name, value as text).

    Long lists are shortened.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten_mapping(value, f"{prefix}{key}.")
        elif isinstance(value, float):
            yield prefix + key, f"{value:.6g}"
        elif isinstance(value, list | tuple):
            yield prefix + key, ", ".join(shorten_list([str(item) for item in value]))
        else:
            yield prefix + key, str(value)


def format_aligned(pairs: Iterator[tuple[str, str]]) -> list[str]:
    """Format pairs (name, value) as indented lines with aligned values."""
    rows = list(pairs)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:{width}}  {value}" for name, value in rows]


def draw_sparkline(values: list[float], name: str) -> list[str]:
    """Draw a series of values as a line of block characters, labeled with its name and range.

    Args:
        values: The values. If they do not fit in the line, each character is the mean of several.
        name: Name of the values.

    Returns:
        The line, or no line if there are fewer than two values.
    """
    if len(values) < 2:
        return []
    columns = min(len(values), _SPARKLINE_WIDTH)
    edges = [round(column * len(values) / columns) for column in range(columns + 1)]
    means = [sum(values[start:end]) / (end - start) for start, end in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(_SPARKLINE_LEVELS) - 1) / (high - low) if high > low else 0.0
    line = "".join(_SPARKLINE_LEVELS[round((mean - low) * scale)] for mean in means)
    return [f"  {line}  {name}, {high:.3f} to {low:.3f}"]
