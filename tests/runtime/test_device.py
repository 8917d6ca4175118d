"""Device names, and reuse of freed memory by glibc."""

import re
import sys
from pathlib import Path

import pytest
import torch

from bertsmith.errors import SettingsError
from bertsmith.runtime.device import keep_freed_memory, resolve_device, resolve_machine, trim_memory


def get_resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    match = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert match is not None
    return int(match[1]) * 1024


def test_auto_is_cuda_if_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "auto" is CUDA where PyTorch finds a device, and the CPU elsewhere."""
    for num_devices, expected in ((0, "cpu"), (2, "cuda")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=num_devices: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=num_devices: count > 0)
        assert resolve_device("auto", "--device") == torch.device(expected)
    assert resolve_device("cuda:1", "--device") == torch.device("cuda", 1)
    with pytest.raises(SettingsError, match="--device cuda:2: PyTorch finds 2 CUDA devices here"):
        resolve_device("cuda:2", "--device")


@pytest.mark.parametrize("device", ["", "tpu", "cpu:0", "cuda:", "cuda:-1", "CUDA"])
def test_invalid_device_names_the_setting(device: str) -> None:
    """Training and inference reject the same device names, and the error names the setting."""
    with pytest.raises(SettingsError, match=f"run.device {device}: expected auto, cpu, cuda or"):
        resolve_machine(device, "auto", "auto", attention_dropout=0.0, threads=None)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_kept_until_it_is_trimmed() -> None:
    """Freed blocks of 64 MB in total remain in resident memory until ``trim_memory`` is called."""
    keep_freed_memory()
    trim_memory()
    before = get_resident_bytes()
    # 256 blocks of 2^16 float32 numbers, 256 KiB each.
    blocks = [torch.ones(2**16) for _ in range(256)]
    assert get_resident_bytes() - before > 60 * 2**20
    del blocks
    assert get_resident_bytes() - before > 60 * 2**20
    trim_memory()
    assert get_resident_bytes() - before < 10 * 2**20
