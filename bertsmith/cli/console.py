"""What people see on a terminal: notes, tables, progress on stderr; the product on stdout.

It never knows what is computed.
"""

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

#: Seconds between two plain progress lines where there is no terminal.
PLAIN_LINE_INTERVAL = 15.0

stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def log(text: str) -> None:
    """Say a line of the narrative on stderr."""
    stderr.print(text, markup=False)


def print_line(text: str) -> None:
    """Put a line of the product on stdout."""
    with add_error_filename(Path("standard output")):
        sys.stdout.write(text + "\n")


def print_json(value: Any) -> None:
    """Put ``value`` on stdout as one line of JSON."""
    print_line(dump_json(value))


def print_counts(counts: Mapping[str, Any], name: str = "") -> None:
    """Put what became of the examples of a file on stdout.

    counts: those of ``tasks.inputs.Counts`` as values for JSON. name: what the line begins with.
    """
    skipped = counts["skipped"]
    # Results of version 0.1 have no such share.
    share = counts.get("unknown_share")
    unknown = "" if share is None else f", {share:.1%} of the tokens [UNK]"
    print_line(f"{name}{counts['read']:,} read, {counts['used']:,} used, "
        f"{sum(skipped.values()):,} skipped, {counts['cut_off']:,} cut off{unknown}")  # fmt: skip


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Put rows on stdout: a table on a terminal, elsewhere a line each, its cells parted by tabs.

    Nothing where there is no row.
    """
    found = list(rows)
    console = Console(highlight=False)
    if not console.is_terminal:
        for row in found:
            print_line("  " + "\t".join(row).rstrip())
    elif found:
        table = Table(box=SIMPLE_HEAD)
        for name in columns:
            # A name is never cut off, rather folded.
            table.add_column(name, overflow="fold")
        for row in found:
            table.add_row(*map(Text, row))
        console.print(table)


class TerminalProgress:
    """The progress protocol on a terminal: a live bar; elsewhere: a plain line now and then."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._what, self._unit = "", ""
        self._total: float | None = None
        self._done = 0.0
        self._began = self._last_line = 0.0

    def start(self, description: str, total: float | None, unit: str) -> None:
        """Begin a bar; one that stands is ended first."""
        self.finish()
        self._what, self._unit, self._total, self._done = description, unit, total, 0.0
        self._began = self._last_line = time.monotonic()
        if not stderr.is_terminal:
            return
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}  {task.fields[shown]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=stderr,
            transient=False,
        )
        self._task = self._bar.add_task(description, total=total, unit=unit, shown="")
        self._bar.start()

    def advance(self, amount: float, **fields: str) -> None:
        """Move on by ``amount`` units and show ``fields``."""
        self._done += amount
        shown = "  ".join(f"{name} {value}" for name, value in fields.items())
        seconds = time.monotonic() - self._began
        if self._bar is not None and self._task is not None:
            rate = f"{self._done / max(seconds, 1e-9):,.0f}/s"
            self._bar.update(self._task, completed=int(self._done), shown=shown or rate)
        elif time.monotonic() - self._last_line >= PLAIN_LINE_INTERVAL:
            self._last_line = time.monotonic()
            log(self._plain(shown, seconds))

    def log(self, text: str) -> None:
        """Say one line above the bar."""
        log(text)

    def finish(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def _plain(self, shown: str, seconds: float) -> str:
        share, left = "", ""
        if self._total:
            share = f" of {self._total:,.0f}"
            remaining = seconds * (self._total / max(self._done, 1e-9) - 1)
            left = f", {remaining:,.0f} s left"
        rate = self._done / max(seconds, 1e-9)
        return f"{self._what}: {self._done:,.0f}{share} {self._unit}, {rate:,.0f}/s{left}  {shown}"
