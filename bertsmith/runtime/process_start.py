"""Finds the time at which this process was started."""

import os
import time
from pathlib import Path
from typing import Final

#: Maximum seconds between the start of the process and that of its command. A longer time means
#: that the command is not the first one of the process, or that /proc is not reliable.
_MAX_SECONDS: Final = 30.0


def find_process_start(command_start: float, stat_file: Path = Path("/proc/self/stat")) -> float:
    """Return the value of ``time.perf_counter()`` at the start of this process.

    Args:
        command_start: Its value at the start of the command, which is returned if the start of the
            process is unknown, as on systems without /proc.
        stat_file: Status of the process, as described in proc_pid_stat(5).
    """
    try:
        # The program's name, in parentheses, may contain spaces. Field 22 is the start time.
        fields = stat_file.read_text(encoding="utf-8").rpartition(")")[2].split()
        start_after_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - start_after_boot
    except (OSError, ValueError, IndexError, AttributeError):
        return command_start
    process_start = time.perf_counter() - age
    if 0.0 <= command_start - process_start <= _MAX_SECONDS:
        return process_start
    return command_start
