"""Terminal output: results on stdout; messages and progress on stderr."""

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from bertsmith.files import add_error_filename, dump_json

#: Seconds between progress lines if stderr is not a terminal.
PLAIN_LINE_INTERVAL = 15.0

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def log(text: str) -> None:
    """Print a message on stderr."""
    stderr.print(text, markup=False, emoji=False)


def print_line(text: str) -> None:
    """Print a line of the result on stdout."""
    with add_error_filename(Path("standard output")):
        sys.stdout.write(text + "\n")


def print_json(value: Any) -> None:
    """Print ``value`` on stdout as one line of JSON."""
    print_line(dump_json(value))


def print_example_counts(counts: Mapping[str, Any], prefix: str = "") -> None:
    """Print how many examples of a file were read, used, skipped and truncated.

    Args:
        counts: The fields of a ``tasks.inputs.ExampleCounts`` as JSON values.
        prefix: Text before the counts, such as the name of the file.
    """
    skipped = counts["skipped"]
    # Results of version 0.1 have no unknown_share.
    unknown_share = counts.get("unknown_share")
    unknown = "" if unknown_share is None else f", {unknown_share:.1%} of the tokens [UNK]"
    print_line(
        f"{prefix}{counts['num_read']:,} read, {counts['num_used']:,} used, "
        f"{sum(skipped.values()):,} skipped, {counts['num_truncated']:,} truncated{unknown}"
    )


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with a header on a terminal, or tab-separated rows without one elsewhere.

    If there are no rows, nothing is printed.
    """
    rows = list(rows)
    console = Console(highlight=False)
    if not console.is_terminal:
        for row in rows:
            print_line("  " + "\t".join(row).rstrip())
    elif rows:
        table = Table(box=SIMPLE_HEAD)
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)


class TerminalProgress:
    """A ``Progress`` that shows a bar on a terminal, or logs a line every 15 seconds elsewhere."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task_id: TaskID | None = None
        self._description = ""
        self._unit = ""
        self._total: float | None = None
        self._completed = 0.0
        self._initial = 0.0
        self._start_time = 0.0
        self._last_line_time = 0.0

    def start(self, description: str, total: float | None, unit: str, initial: float = 0) -> None:
        """Finish the previous bar and start a new one."""
        self.finish()
        self._description = description
        self._unit = unit
        self._total = total
        self._completed = self._initial = initial
        self._start_time = self._last_line_time = time.monotonic()
        if not stderr.is_terminal:
            return
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}  {task.fields[details]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=stderr,
            transient=False,
            # Otherwise results that are printed while a bar runs would go to stderr, which is wrong
            # if stdout is a file.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task_id = self._bar.add_task(
            description, total=total, completed=int(initial), unit=unit, details=""
        )
        self._bar.start()

    def advance(self, amount: float, **fields: str) -> None:
        """Advance the progress by ``amount`` units.

        Args:
            amount: Number of units completed since the last call.
            **fields: Values to show, such as the loss. A bar without fields shows the rate.
        """
        self._completed += amount
        details = "  ".join(f"{name} {value}" for name, value in fields.items())
        now = time.monotonic()
        elapsed_seconds = now - self._start_time
        if self._bar is not None and self._task_id is not None:
            rate = _format_rate(self._completed - self._initial, elapsed_seconds, self._unit)
            self._bar.update(self._task_id, completed=int(self._completed), details=details or rate)
        elif now - self._last_line_time >= PLAIN_LINE_INTERVAL:
            self._last_line_time = now
            log(self._format_line(details, elapsed_seconds))

    def log(self, text: str) -> None:
        """Print a message above the bar."""
        log(text)

    def finish(self) -> None:
        """Finish the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task_id = None

    def _format_line(self, details: str, elapsed_seconds: float) -> str:
        """Return the progress as one line of text, for output that is not a terminal."""
        num_new = self._completed - self._initial
        total = remaining = ""
        if self._total:
            total = f" of {self._total:,.0f}"
        if self._total and num_new:
            seconds_per_unit = elapsed_seconds / num_new
            remaining_seconds = seconds_per_unit * (self._total - self._completed)
            remaining = f", {remaining_seconds:,.0f} s left"
        rate = ""
        if self._unit != "seconds":
            rate = f", {_format_rate(num_new, elapsed_seconds, self._unit)}"
        return (
            f"{self._description}: {self._completed:,.0f}{total} {self._unit}"
            f"{rate}{remaining}  {details}"
        )


def _format_rate(count: float, seconds: float, unit: str) -> str:
    """Return a rate, such as "1,234/s" or "2.5/s", or "12.3 s/step" below one unit per second.

    Args:
        count: Number of completed units.
        seconds: Time that they took.
        unit: The plural noun for the units.
    """
    rate = count / max(seconds, 1e-9)
    if 0 < rate < 1:
        return f"{1 / rate:,.1f} s/{unit.removesuffix('s')}"
    return f"{rate:,.0f}/s" if rate >= 10 or not rate else f"{rate:.1f}/s"
