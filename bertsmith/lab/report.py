"""Reports of experiments: tables in Markdown and JSON, and a figure with plots."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from textwrap import fill
from typing import Any

from bertsmith.errors import require_extra
from bertsmith.lab.verdict import Claim, format_verdict, select_finite

#: Text of a table cell without a value.
EMPTY_CELL = "-"
#: A color palette that is safe for color-blind readers (Okabe and Ito 2008).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#000000")

#: Total length of tick labels, in characters, that fits below the x axis of a plot.
_TICK_LABEL_CHARACTERS = 84
_PANELS_PER_ROW = 2
#: Maximum points of a line that is drawn with a marker at each point.
_MAX_MARKED_POINTS = 40

#: A function that draws a plot into the given matplotlib axes.
DrawFunction = Callable[[Any], None]


@dataclass(frozen=True)
class Table:
    """A table of formatted cells.

    Attributes:
        title: The title above the table.
        columns: The column titles.
        rows: The cells of each row, one cell per column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        """Return the title and the table in Markdown."""
        header, *rows = (_format_row(row) for row in (self.columns, *self.rows))
        return "\n".join(
            [f"**{self.title}**", "", header, "| --- " * len(self.columns) + "|", *rows]
        )

    def to_json(self) -> dict[str, Any]:
        """Return the title and the rows; a row maps each column title to its cell."""
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"title": self.title, "rows": rows}


def _format_row(cells: Sequence[str]) -> str:
    """Return a row of a Markdown table."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


@dataclass(frozen=True)
class Panel:
    """One plot of a figure.

    Attributes:
        title: The title of the plot.
        draw: The function that draws the plot.
        is_full_width: Whether the plot is as wide as the figure.
    """

    title: str
    draw: DrawFunction
    is_full_width: bool = False


@dataclass(frozen=True)
class Report:
    """The report of an experiment.

    Attributes:
        tables: The tables.
        panels: The plots of the figure.
        data: The unrounded numbers of tables and plots, for the JSON file.
        claims: The published claims that the experiment tests; none if it tests no claim.
    """

    tables: Sequence[Table]
    panels: Sequence[Panel]
    data: dict[str, Any]
    claims: Sequence[Claim] = ()

    def to_markdown(self) -> str:
        """Return the verdict and all tables in Markdown."""
        tables = [table.to_markdown() for table in self.tables]
        return "\n\n".join([format_verdict(self.claims), *tables]) + "\n"


def format_mean_std(
    values: Sequence[float | None],
    format_spec: str = ".3f",
    *,
    nonfinite_label: str = "diverged or constant",
) -> str:
    """Return a table cell with the mean and standard deviation over seeds.

    If some seeds have no finite value, the cell also says how many seeds have one, such as
    "0.700 ± 0.010 (2 of 3; 1 diverged)". If no seed has one, the cell is ``nonfinite_label``.

    Args:
        values: One value per seed. None means that the run is missing or failed. NaN means that
            the run diverged, or that a correlation is undefined because one side is constant.
        format_spec: The format of mean and standard deviation.
        nonfinite_label: The cell's explanation of NaN values.
    """
    finite = select_finite(values)
    num_nonfinite = sum(value is not None and not math.isfinite(value) for value in values)
    notes = [f"{num_nonfinite} {nonfinite_label}"] if num_nonfinite else []
    if num_nonfinite == len(values) > 0:
        return nonfinite_label
    if not finite:
        return notes[0] if notes else EMPTY_CELL
    cell = format(mean(finite), format_spec)
    if len(finite) > 1:
        cell = f"{cell} ± {format(stdev(finite), format_spec)}"
    if len(finite) == len(values):
        return cell
    notes.insert(0, f"{len(finite)} of {len(values)}")
    return f"{cell} ({'; '.join(notes)})"


def save_figure(report: Report, path: Path, title: str) -> None:
    """Draw the plots of a report into a PNG file.

    Args:
        report: A report with at least one plot.
        path: The PNG file to write.
        title: The title above all plots.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with require_extra("plot", "drawing an experiment", package="matplotlib"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    rows = list(_arrange_panels(report.panels))
    if any(panel.is_full_width for panel in report.panels):
        num_columns = _PANELS_PER_ROW
    else:
        num_columns = max(len(row) for row in rows)
    figure = Figure(figsize=(6.4 * num_columns, 4.4 * len(rows)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    # A title line of 75 characters in this font size is as wide as one plot.
    figure.suptitle(fill(title, 75 * num_columns), fontsize=12, x=0.01, ha="left")
    grid = figure.add_gridspec(len(rows), num_columns)
    for row_index, row in enumerate(rows):
        for column_index, panel in enumerate(row):
            columns = slice(None) if panel.is_full_width else column_index
            axes = figure.add_subplot(grid[row_index, columns])
            panel.draw(axes)
            axes.set_title(panel.title, loc="left", fontsize=10)
    figure.savefig(path)


def _arrange_panels(panels: Sequence[Panel]) -> Iterator[list[Panel]]:
    """Yield the panels of each row: two of them, or a single one of full width."""
    row: list[Panel] = []
    for panel in panels:
        is_row_full = len(row) == _PANELS_PER_ROW or any(other.is_full_width for other in row)
        if row and (is_row_full or panel.is_full_width):
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


def make_line_plot(
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
                # Styles alternate so that overlapping lines stay visible. The second cycle of
                # colors starts with the other style, so that no two lines look the same.
                style = "--" if (number + number // len(COLORS)) % 2 else "-"
                marker = "o" if len(points) <= _MAX_MARKED_POINTS else ""
                axes.plot(
                    *zip(*points, strict=True),
                    color=color,
                    linestyle=style,
                    label=name,
                    linewidth=1.5,
                    marker=marker,
                    markersize=2.5,
                )
        for name, height in reference_lines.items():
            axes.axhline(
                height, color="#444444", linestyle=":", linewidth=1, label=name.replace("_", " ")
            )
        style_axes(axes, x_label, y_label)
        # Steps, layers and distances are integers.
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)

    return draw_lines


def make_mean_plot(
    curves: Mapping[str, Mapping[int, Sequence[float | None]]],
    x_label: str,
    y_label: str,
    **reference_lines: float,
) -> DrawFunction:
    """Return a function that draws a line through the means over seeds, and a dot for each seed.

    Args:
        curves: The curves by name. A curve maps each x to one value per seed.
        x_label: Label of the x axis.
        y_label: Label of the y axis.
        reference_lines: Heights of horizontal lines, by name.
    """
    mean_points: dict[str, list[tuple[float, float]]] = {name: [] for name in curves}
    seed_points: dict[str, list[tuple[float, float]]] = {name: [] for name in curves}
    for name, curve in curves.items():
        for x, values in curve.items():
            finite = select_finite(values)
            seed_points[name] += [(x, value) for value in finite]
            if finite:
                mean_points[name].append((x, mean(finite)))

    def draw_means(axes: Any) -> None:
        make_line_plot(mean_points, x_label, y_label, **reference_lines)(axes)
        for number, points in enumerate(seed_points.values()):
            if points:
                axes.plot(
                    *zip(*points, strict=True),
                    ".",
                    color=COLORS[number % len(COLORS)],
                    markersize=7,
                    alpha=0.6,
                )

    return draw_means


def make_dot_plot(
    groups: Mapping[str, Mapping[str, Sequence[float | None]]], y_label: str
) -> DrawFunction:
    """Return a function that draws groups of series, with a dot for each seed.

    A short horizontal line marks the mean over seeds. Bars would have to start at 0, far below the
    compared values.

    Args:
        groups: The groups by name. A group maps the name of each series to one value per seed. The
            series have a legend if there are several.
        y_label: Label of the y axis.
    """

    def draw_dots(axes: Any) -> None:
        group_names = list(groups)
        series_names = list(dict.fromkeys(name for group in groups.values() for name in group))
        # Groups are 1 apart on the x axis, with a gap of 0.2 between them.
        series_width = 0.8 / max(len(series_names), 1)
        for number, series_name in enumerate(series_names):
            color = COLORS[number % len(COLORS)]
            # The legend has a square for each series; this empty plot adds it.
            axes.plot([], [], "s", color=color, label=series_name)
            for group_index, group_name in enumerate(group_names):
                values = select_finite(groups[group_name].get(series_name, ()))
                x = group_index - 0.4 + (number + 0.5) * series_width
                if values:
                    left, right = x - 0.42 * series_width, x + 0.42 * series_width
                    axes.hlines(mean(values), left, right, color=color, linewidth=3)
                    axes.plot([x] * len(values), values, ".", color=color, markersize=7)
        axes.set_axisbelow(True)
        label_width = max(5, _TICK_LABEL_CHARACTERS // max(len(group_names), 1))
        labels = [fill(name, label_width) for name in group_names]
        axes.set_xticks(range(len(group_names)), labels, fontsize=8)
        # Fixed limits leave space for groups without values.
        axes.set_xlim(-0.5, len(group_names) - 0.5)
        style_axes(axes, "", y_label)
        axes.grid(axis="x", visible=False)
        if len(series_names) > 1:
            axes.legend(
                frameon=False,
                fontsize=8,
                ncols=min(len(series_names), 4),
                loc="lower left",
                bbox_to_anchor=(0, -0.25),
            )

    return draw_dots


def make_heatmap(
    values: Sequence[Sequence[float]],
    row_labels: Sequence[str],
    column_labels: Sequence[str],
) -> DrawFunction:
    """Return a function that draws a matrix as colored cells that contain their values."""

    def draw_heatmap(axes: Any) -> None:
        axes.imshow(values, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(column_labels)), column_labels, fontsize=8)
        axes.set_yticks(range(len(row_labels)), row_labels, fontsize=8)
        finite = [value for row in values for value in row if math.isfinite(value)]
        # Cells below the middle of the color scale are dark and need white text.
        middle = (max(finite) + min(finite)) / 2 if finite else 0.0
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                is_finite = math.isfinite(value)
                color = "white" if is_finite and value < middle else "black"
                text = f"{value:.2f}" if is_finite else EMPTY_CELL
                axes.text(x, y, text, ha="center", va="center", color=color, size=7)

    return draw_heatmap
