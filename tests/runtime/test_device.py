"""Keeping freed memory, and returning it to the OS."""

import re
import sys
from pathlib import Path

import pytest
import torch

from bertsmith.runtime.device import keep_freed_memory, trim_memory


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_kept_until_it_is_trimmed() -> None:
    """64 MB in 256 blocks stay resident after they are freed, until ``trim_memory``."""
    keep_freed_memory()
    trim_memory()
    before = resident_bytes()
    blocks = [torch.ones(2**16) for _ in range(256)]
    assert resident_bytes() - before > 60 * 2**20
    del blocks
    assert resident_bytes() - before > 60 * 2**20
    trim_memory()
    assert resident_bytes() - before < 10 * 2**20
