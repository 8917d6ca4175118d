"""Reports of experiments: Markdown tables, JSON, and a figure drawn from the same numbers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

from bertsmith.errors import MissingExtraError

#: A table cell whose run failed or is missing.
EMPTY_CELL = "-"
#: A colorblind-safe palette (Okabe and Ito 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")

#: Characters that fit below the x axis of a plot.
_TICK_LABEL_CHARACTERS = 84
_PANELS_PER_ROW = 2
#: Lines with more points than this have no markers.
_MAX_MARKED_POINTS = 40

#: Draws into matplotlib axes.
DrawFunction = Callable[[Any], None]


@dataclass(frozen=True)
class Table:
    """A table of formatted cells; each row has one cell per column."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        """Return the title and the table in Markdown."""
        lines = [f"**{self.title}**", "", f"| {' | '.join(self.columns)} |"]
        lines.append("| --- " * len(self.columns) + "|")
        lines += [f"| {' | '.join(row)} |" for row in self.rows]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the title, and each row as a dictionary of its cells."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows}


@dataclass(frozen=True)
class Panel:
    """One plot of a figure.

    Attributes:
        title: The plot's title.
        draw: Draws the plot.
        full_width: Whether the plot takes a row of its own.
    """

    title: str
    draw: DrawFunction
    full_width: bool = False


@dataclass(frozen=True)
class Report:
    """The tables and plots of an experiment, and the numbers behind them by name."""

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
    """Format mean ± standard deviation over seeds, with the number of seeds if some are missing.

    Args:
        values: One value per seed; None for a missing or failed run, NaN for a run that diverged
            or a correlation with a constant.
        format_spec: The format of mean and standard deviation.
        nonfinite_label: The reason for NaN values that the cell names.
    """
    finite = _finite(values)
    num_nonfinite = sum(value is not None and not math.isfinite(value) for value in values)
    nonfinite = f"{num_nonfinite} {nonfinite_label}" if num_nonfinite else ""
    if not finite:
        return nonfinite or EMPTY_CELL
    cell = format(mean(finite), format_spec)
    cell = f"{cell} ± {format(stdev(finite), format_spec)}" if len(finite) > 1 else cell
    if len(finite) == len(values):
        return cell
    return f"{cell} ({len(finite)} of {len(values)}{'; ' + nonfinite if nonfinite else ''})"


def save_figure(report: Report, path: Path, title: str) -> None:
    """Draw a report's panels, at least one, into a PNG file.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise MissingExtraError("matplotlib", "plot", "drawing an experiment") from None
    rows = list(_arrange_panels(report.panels))
    has_full_width = any(panel.full_width for panel in report.panels)
    num_columns = _PANELS_PER_ROW if has_full_width else max(map(len, rows))
    figure = Figure(figsize=(6.4 * num_columns, 4.4 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    # 75 characters of this font size fit above one plot.
    figure.suptitle(fill(title, 75 * num_columns), fontsize=12, x=0.01, ha="left")
    grid = figure.add_gridspec(len(rows), num_columns)
    for row_index, row in enumerate(rows):
        for column_index, panel in enumerate(row):
            column = slice(None) if panel.full_width else column_index
            axes = figure.add_subplot(grid[row_index, column])
            panel.draw(axes)
            axes.set_title(panel.title, loc="left", fontsize=10)
    figure.savefig(path)


def _arrange_panels(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Yield rows of two panels; a full-width panel is alone in its row."""
    row: list[Panel] = []
    for panel in panels:
        if row and (panel.full_width or row[0].full_width or len(row) == _PANELS_PER_ROW):
            yield row
            row = []
        row.append(panel)
    yield row


def style_axes(axes: Any, x_label: str, y_label: str) -> None:
    """Label the axes, add a light grid and remove the top and right borders."""
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def line_plot(
    series: Mapping[str, Sequence[Sequence[float]]],
    x_label: str,
    y_label: str,
    **reference_lines: float,
) -> DrawFunction:
    """Return a function that draws one line per series.

    Args:
        series: The [x, y] points of each series, by name.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        reference_lines: Heights of horizontal lines, by name; underscores become spaces.
    """

    def draw_lines(axes: Any) -> None:
        for number, (name, points) in enumerate(series.items()):
            if points:
                color = COLORS[number % len(COLORS)]
                # Alternating styles show overlapping lines, and tell repeated colors apart.
                style = "--" if (number + number // len(COLORS)) % 2 else "-"
                marker = "o" if len(points) <= _MAX_MARKED_POINTS else ""
                axes.plot(*zip(*points, strict=True), color=color, linestyle=style, label=name,
                          linewidth=1.5, marker=marker, markersize=2.5)  # fmt: skip
        for name, height in reference_lines.items():
            axes.axhline(height, color="#444444", linestyle=":", linewidth=1,
                         label=name.replace("_", " "))  # fmt: skip
        style_axes(axes, x_label, y_label)
        # Steps, layers and distances are integers.
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)

    return draw_lines


def mean_plot(
    curves: Mapping[str, Mapping[int, Sequence[float | None]]],
    x_label: str,
    y_label: str,
    **reference_lines: float,
) -> DrawFunction:
    """Return a function that draws a line through the means over seeds, and a dot per seed.

    Args:
        curves: For each curve, by name, the values of all seeds at each x.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        reference_lines: Heights of horizontal lines, by name.
    """
    series = {
        name: [(x, mean(_finite(values))) for x, values in curve.items() if _finite(values)]
        for name, curve in curves.items()
    }

    def draw_means(axes: Any) -> None:
        line_plot(series, x_label, y_label, **reference_lines)(axes)
        for number, curve in enumerate(curves.values()):
            points = [(x, value) for x, values in curve.items() for value in _finite(values)]
            if points:
                axes.plot(*zip(*points, strict=True), ".", color=COLORS[number % len(COLORS)],
                          markersize=7, alpha=0.6)  # fmt: skip

    return draw_means


def _finite(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def dot_plot(
    groups: Mapping[str, Mapping[str, Sequence[float | None]]], y_label: str
) -> DrawFunction:
    """Return a function that draws groups of series: a bar at each mean, and a dot per seed.

    There are no full bars because they would have to start at 0, far below the compared values. A
    legend is drawn only if there is more than one series.

    Args:
        groups: For each group, by name, the values of all seeds of each series.
        y_label: Label of the y axis.
    """

    def draw_dots(axes: Any) -> None:
        names = list(groups)
        all_series = list(dict.fromkeys(name for group in groups.values() for name in group))
        width = 0.8 / max(len(all_series), 1)
        for number, name in enumerate(all_series):
            color = COLORS[number % len(COLORS)]
            # An empty plot adds a square to the legend, which no data point looks like.
            axes.plot([], [], "s", color=color, label=name)
            for group_index, group in enumerate(names):
                values = _finite(groups[group].get(name, ()))
                x = group_index - 0.4 + (number + 0.5) * width
                if values:
                    ends = (x - 0.42 * width, x + 0.42 * width)
                    axes.hlines(mean(values), *ends, color=color, linewidth=3)
                    axes.plot([x] * len(values), values, ".", color=color, markersize=7)
        axes.set_axisbelow(True)
        label_width = max(5, _TICK_LABEL_CHARACTERS // max(len(names), 1))
        labels = [fill(name, label_width) for name in names]
        axes.set_xticks(range(len(names)), labels, fontsize=8)
        # Groups without values keep their place.
        axes.set_xlim(-0.5, len(names) - 0.5)
        style_axes(axes, "", y_label)
        axes.grid(axis="x", visible=False)
        if len(all_series) > 1:
            axes.legend(frameon=False, fontsize=8, ncols=min(len(all_series), 4),
                        loc="lower left", bbox_to_anchor=(0, -0.25))  # fmt: skip

    return draw_dots


def heatmap(
    values: Sequence[Sequence[float]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    format_spec: str = ".2f",
) -> DrawFunction:
    """Return a function that draws a matrix as colors, with each value written in its cell."""

    def draw_heatmap(axes: Any) -> None:
        axes.imshow(values, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(column_labels)), column_labels, fontsize=8)
        axes.set_yticks(range(len(row_labels)), row_labels, fontsize=8)
        finite = [value for row in values for value in row if math.isfinite(value)]
        middle = (max(finite) + min(finite)) / 2 if finite else 0.0
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                is_finite = math.isfinite(value)
                color = "white" if is_finite and value < middle else "black"
                text = format(value, format_spec) if is_finite else EMPTY_CELL
                axes.text(x, y, text, ha="center", va="center", color=color, size=7)

    return draw_heatmap
