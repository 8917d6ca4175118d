"""Progress on the terminal."""

import io

import pytest
from rich.console import Console

from bertsmith.cli import console
from bertsmith.cli.console import TerminalProgress, _format_rate, log, print_line


@pytest.mark.parametrize(
    ("count", "seconds", "expected"),
    [(12345, 10, "1,234/s"), (5, 2, "2.5/s"), (2, 30, "15.0 s/step"), (0, 30, "0/s")],
)
def test_slow_progress_shows_the_time_of_a_unit(count: int, seconds: int, expected: str) -> None:
    """A rate below one per second is shown as seconds per unit."""
    assert _format_rate(count, seconds, "steps") == expected


def test_results_beside_a_bar_are_written_to_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If stdout is a file and stderr a terminal, the bar does not capture the results."""
    monkeypatch.setattr(console, "stderr", Console(file=io.StringIO(), force_terminal=True))
    progress = TerminalProgress()
    progress.start("scoring", None, "tokens")
    print_line("x")
    progress.finish()
    assert capsys.readouterr().out == "x\n"


def test_messages_are_printed_unchanged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """File names with colons are not converted to emojis, and brackets are not markup."""
    log("a:x:b.tsv :100: [red]c[/red]")
    assert capsys.readouterr().err == "a:x:b.tsv :100: [red]c[/red]\n"


def test_steps_of_an_earlier_run_do_not_count_for_the_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a resume at step 600, the rate and the remaining time depend on the new steps only."""
    seconds = 0.0
    monkeypatch.setattr("bertsmith.cli.console.time.monotonic", lambda: seconds)
    progress = TerminalProgress()
    progress.start("training", 1000, "steps", 600)
    seconds = 20.0
    progress.advance(10)
    assert "training: 610 of 1,000 steps, 2.0 s/step, 780 s left" in capsys.readouterr().err
