"""Progress on the terminal."""

import pytest

from bertsmith.cli.console import _format_rate


@pytest.mark.parametrize(
    ("count", "seconds", "expected"),
    [(12345, 10, "1,234/s"), (5, 2, "2.5/s"), (2, 30, "15.0 s/step"), (0, 30, "0/s")],
)
def test_slow_progress_shows_the_time_of_a_unit(count: int, seconds: int, expected: str) -> None:
    """A rate below one per second is shown as seconds per unit."""
    assert _format_rate(count, seconds, "steps") == expected
