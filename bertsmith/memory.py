"""Determines the memory size of this machine, and formats memory sizes."""

import os
from pathlib import Path
from typing import Final

#: Files that contain the memory limit of a container in bytes: for cgroup v2, and for cgroup v1.
_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
#: File that contains the swap limit of a container in bytes, for cgroup v2.
_CGROUP_SWAP_LIMIT: Final = Path("/sys/fs/cgroup/memory.swap.max")
_MEMINFO: Final = Path("/proc/meminfo")


def get_total_memory_bytes() -> int:
    """Return the memory of this machine or container in bytes, including swap."""
    total_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        total_bytes = _apply_limit(total_bytes, path)
    return total_bytes + _apply_limit(_get_swap_bytes(), _CGROUP_SWAP_LIMIT)


def _apply_limit(num_bytes: int, path: Path) -> int:
    """Return a size, or the limit in a file if the file exists and the limit is lower."""
    limit = path.read_text(encoding="ascii").strip() if path.is_file() else ""
    # If there is no limit, the files of cgroup v2 contain the word "max".
    return min(num_bytes, int(limit)) if limit.isdecimal() else num_bytes


def _get_swap_bytes() -> int:
    """Return the size of the swap space in bytes; 0 if it is unknown."""
    if not _MEMINFO.is_file():
        return 0
    for line in _MEMINFO.read_text(encoding="utf-8").splitlines():
        if line.startswith("SwapTotal:"):
            # The unit is KiB (proc(5)).
            return int(line.split()[1]) * 1024
    return 0


def format_bytes(num_bytes: int) -> str:
    """Format a size in GiB, such as "23.5 GiB"."""
    return f"{num_bytes / 2**30:,.1f} GiB"
