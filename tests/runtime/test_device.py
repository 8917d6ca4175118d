"""What a training keeps of the machine's memory, and what it gives back."""

import re
import sys
from pathlib import Path

import pytest
import torch

from bertsmith.runtime.device import keep_freed_memory, trim_memory


def resident() -> int:
    """Return the bytes of this process that are in memory."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="this is about glibc")
def test_what_is_freed_is_kept_until_it_is_given_back() -> None:
    """64 MB in 256 blocks: between two steps they stay, after the last one they go."""
    keep_freed_memory()
    trim_memory()
    before = resident()
    blocks = [torch.ones(2**16) for _ in range(256)]
    assert resident() - before > 60 * 2**20
    del blocks
    assert resident() - before > 60 * 2**20
    trim_memory()
    assert resident() - before < 10 * 2**20
