"""Progress on the terminal."""

import pytest

from bertsmith.cli.console import TerminalProgress, _format_rate


@pytest.mark.parametrize(
    ("count", "seconds", "expected"),
    [(12345, 10, "1,234/s"), (5, 2, "2.5/s"), (2, 30, "15.0 s/step"), (0, 30, "0/s")],
)
def test_slow_progress_shows_the_time_of_a_unit(count: int, seconds: int, expected: str) -> None:
    """A rate below one per second is shown as seconds per unit."""
    assert _format_rate(count, seconds, "steps") == expected


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
