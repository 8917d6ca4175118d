"""The start time of the process."""

import os
import time
from pathlib import Path

import pytest

from bertsmith.runtime.process_start import find_process_start


def _write_status(path: Path, age: float) -> Path:
    """Write a status file of a process that was started ``age`` seconds ago."""
    ticks = (time.clock_gettime(time.CLOCK_BOOTTIME) - age) * os.sysconf("SC_CLK_TCK")
    path.write_text(f"7 (a (b) c) R {' '.join(['0'] * 18)} {round(ticks)} 0 0\n")
    return path


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_start_of_the_process_is_read_from_its_status(tmp_path: Path) -> None:
    """A command that starts 2 s after its process has used 2 s."""
    now = time.perf_counter()
    start = find_process_start(now, _write_status(tmp_path / "stat", 2.0))
    assert start == pytest.approx(now - 2.0, abs=0.5)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_implausible_start_is_ignored(tmp_path: Path) -> None:
    """A process that is older than 30 s runs another program; a younger one is impossible."""
    now = time.perf_counter()
    assert find_process_start(now, _write_status(tmp_path / "stat", 90.0)) == now
    assert find_process_start(now - 5.0, _write_status(tmp_path / "stat", 1.0)) == now - 5.0


def test_unknown_start_is_that_of_the_command(tmp_path: Path) -> None:
    """Without a status file, or with another format, the time starts with the command."""
    assert find_process_start(3.0, tmp_path / "missing") == 3.0
    (tmp_path / "stat").write_text("none")
    assert find_process_start(3.0, tmp_path / "stat") == 3.0
