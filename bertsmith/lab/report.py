"""Tables and pictures of an experiment: Markdown, JSON, and a picture drawn from the same figures.

It never knows how a figure came about.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

from bertsmith.errors import MissingExtraError

#: What stands in a cell whose run failed, or was not asked for.
EMPTY_CELL = "-"
#: Colours of a picture, told apart by people who see few of them (Okabe and Ito 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")

#: Letters of the names under a plot.
_LETTERS = 84
#: Panels beside each other.
_BESIDE = 2
#: Points of a line beyond which they are not marked.
_MARKED = 40

#: Draws into the axes of a picture.
DrawFunction = Callable[[Any], None]


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; a row is as long as ``columns``."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        """Return the table in Markdown, under its title."""
        lines = [f"**{self.title}**", "", f"| {' | '.join(self.columns)} |"]
        lines.append("| --- " * len(self.columns) + "|")
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows}


@dataclass(frozen=True)
class Panel:
    """One plot of a picture: its title and what draws it; ``wide``: in a row of its own."""

    title: str
    draw: DrawFunction
    full_width: bool = False


@dataclass(frozen=True)
class Report:
    """What an experiment found. ``figures``: the numbers behind it, by name."""

    tables: Sequence[Table]
    panels: Sequence[Panel]
    data: dict[str, Any]

    def to_markdown(self) -> str:
        """Return all tables in Markdown."""
        return "\n\n".join(table.to_markdown() for table in self.tables) + "\n"


def format_mean_std(
    values: Sequence[float | None],
    format_spec: str = ".3f",
    *,
    nonfinite_label: str = "diverged or constant",
) -> str:
    """Return mean ± standard deviation over the seeds, and how many they are if some lack.

    None: not run, or failed. NaN: diverged, or a correlation with a constant; ``nonfinite_label`` says which
    of them there can be.
    """
    known = _finite(values)
    count = sum(value is not None and not math.isfinite(value) for value in values)
    ended = f"{count} {nonfinite_label}" if count else ""
    if not known:
        return ended or EMPTY_CELL
    told = format(mean(known), format_spec)
    told = f"{told} ± {format(stdev(known), format_spec)}" if len(known) > 1 else told
    if len(known) == len(values):
        return told
    return f"{told} ({len(known)} of {len(values)}{'; ' + ended if ended else ''})"


def save_figure(report: Report, path: Path, title: str) -> None:
    """Draw the panels of a report, one or more, as PNG; MissingExtraError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing an experiment") from None
    rows = list(_rows(report.panels))
    columns = _BESIDE if any(panel.full_width for panel in report.panels) else max(map(len, rows))
    figure = Figure(figsize=(6.4 * columns, 4.4 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    # As many letters as a plot is wide, at this size.
    figure.suptitle(fill(title, 75 * columns), fontsize=12, x=0.01, ha="left")
    grid = figure.add_gridspec(len(rows), columns)
    for line, row in enumerate(rows):
        for place, panel in enumerate(row):
            axes = figure.add_subplot(grid[line, :] if panel.full_width else grid[line, place])
            panel.draw(axes)
            axes.set_title(panel.title, loc="left", fontsize=10)
    figure.savefig(path)


def _rows(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Lay panels out, two in a row, or one that is wide."""
    row: list[Panel] = []
    for panel in panels:
        if row and (panel.full_width or row[0].full_width or len(row) == _BESIDE):
            yield row
            row = []
        row.append(panel)
    yield row


def style_axes(axes: Any, x: str, y: str) -> None:
    """Name the axes, and take away what nobody reads."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def line_plot(
    series: Mapping[str, Sequence[Sequence[float]]], x: str, y: str, **marks: float
) -> DrawFunction:
    """Return what draws a line for each series of [x, y]; ``marks``: level lines by name."""

    def drawn(axes: Any) -> None:
        for number, (name, points) in enumerate(series.items()):
            if points:
                colour = COLORS[number % len(COLORS)]
                # So that a line is seen under another one, and none is like the one of its colour.
                style = "--" if (number + number // len(COLORS)) % 2 else "-"
                marker = "o" if len(points) <= _MARKED else ""
                axes.plot(*zip(*points, strict=True), color=colour, linestyle=style, label=name,
                          linewidth=1.5, marker=marker, markersize=2.5)  # fmt: skip
        for name, level in marks.items():
            axes.axhline(level, color="#444444", linestyle=":", linewidth=1,
                         label=name.replace("_", " "))  # fmt: skip
        style_axes(axes, x, y)
        # Steps, layers and distances are whole numbers.
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)

    return drawn


def mean_plot(
    courses: Mapping[str, Mapping[int, Sequence[float | None]]], x: str, y: str, **marks: float
) -> DrawFunction:
    """Return what draws a line through the means of each course, and a dot for each seed.

    courses: by name, the seeds' values at each x. marks: level lines by name.
    """
    series = {name: [(place, mean(_finite(own))) for place, own in course.items() if _finite(own)]
              for name, course in courses.items()}  # fmt: skip

    def drawn(axes: Any) -> None:
        line_plot(series, x, y, **marks)(axes)
        for number, course in enumerate(courses.values()):
            points = [(place, value) for place, own in course.items() for value in _finite(own)]
            if points:
                axes.plot(*zip(*points, strict=True), ".", color=COLORS[number % len(COLORS)],
                          markersize=7, alpha=0.6)  # fmt: skip

    return drawn


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def dot_plot(groups: Mapping[str, Mapping[str, Sequence[float | None]]], y: str) -> DrawFunction:
    """Return what draws, in groups by name, a line at each series' mean and a dot for each seed.

    A single series needs no name: the groups have theirs. No bars: these would have to begin at 0,
    and what is compared lies close together.
    """

    def drawn(axes: Any) -> None:
        names = list(groups)
        series = list(dict.fromkeys(name for own in groups.values() for name in own))
        width = 0.8 / max(len(series), 1)
        for number, name in enumerate(series):
            colour = COLORS[number % len(COLORS)]
            # What the legend shows, which must not look like a value.
            axes.plot([], [], "s", color=colour, label=name)
            for place, group in enumerate(names):
                known = _finite(groups[group].get(name, ()))
                where = place - 0.4 + (number + 0.5) * width
                if known:
                    ends = (where - 0.42 * width, where + 0.42 * width)
                    axes.hlines(mean(known), *ends, color=colour, linewidth=3)
                    axes.plot([where] * len(known), known, ".", color=colour, markersize=7)
        axes.set_axisbelow(True)
        across = max(5, _LETTERS // max(len(names), 1))
        axes.set_xticks(range(len(names)), [fill(name, across) for name in names], fontsize=8)
        # Where a group has nothing yet, its place stays.
        axes.set_xlim(-0.5, len(names) - 0.5)
        style_axes(axes, "", y)
        axes.grid(axis="x", visible=False)
        if len(series) > 1:
            axes.legend(frameon=False, fontsize=8, ncols=min(len(series), 4),
                        loc="lower left", bbox_to_anchor=(0, -0.25))  # fmt: skip

    return drawn


def heatmap(values: Sequence[Sequence[float]], rows: Sequence[str], columns: Sequence[str],
         form: str = ".2f") -> DrawFunction:  # fmt: skip
    """Return what draws a table of numbers as colours, each written in its place."""

    def drawn(axes: Any) -> None:
        axes.imshow(values, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(columns)), columns, fontsize=8)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        known = [v for row in values for v in row if math.isfinite(v)]
        middle = (max(known) + min(known)) / 2 if known else 0.0
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                known_value = math.isfinite(value)
                colour = "white" if known_value and value < middle else "black"
                told = format(value, form) if known_value else EMPTY_CELL
                axes.text(x, y, told, ha="center", va="center", color=colour, size=7)

    return drawn
