"""Devices, precision, attention kernel, determinism, and reuse of freed memory by glibc."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.errors import RunError, SettingsError
from bertsmith.runtime import device as runtime_device
from bertsmith.runtime.device import (
    Machine,
    configure_determinism,
    keep_freed_memory,
    resolve_device,
    resolve_machine,
    seed_dropout,
    trim_memory,
)


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
    with pytest.raises(
        SettingsError, match="--device cuda:2: PyTorch finds 2 CUDA devices here; the last"
    ):
        resolve_device("cuda:2", "--device")


@pytest.mark.parametrize("device", ["", "tpu", "cpu:0", "cuda:", "cuda:-1", "CUDA"])
def test_invalid_device_names_the_setting(device: str) -> None:
    """Training and inference reject the same device names, and the error names the setting."""
    with pytest.raises(SettingsError, match=f"run.device {device}: expected auto, cpu, cuda or"):
        resolve_machine(device, "auto", "auto", attention_dropout=0.0, head_dim=64, threads=None)


def resolve_on_gpu(
    monkeypatch: pytest.MonkeyPatch,
    *,
    capability: tuple[int, int] = (8, 0),
    precision: str = "auto",
    kernel: str = "auto",
    attention_dropout: float = 0.0,
    head_dim: int = 64,
) -> Machine:
    """Resolve the settings of a run on a GPU with this compute capability."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    # The settings of this process stay unchanged.
    monkeypatch.setattr(runtime_device, "configure_determinism", lambda **_: None)
    return resolve_machine(
        "cuda:0", precision, kernel,
        attention_dropout=attention_dropout, head_dim=head_dim, threads=None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "precision", "kernel"),
    [((7, 0), "fp32", "padded"), ((7, 5), "fp32", "padded"), ((8, 0), "bf16", "varlen"),
     ((8, 9), "bf16", "varlen"), ((9, 0), "bf16", "varlen"), ((12, 0), "bf16", "varlen")],
)  # fmt: skip
def test_auto_depends_on_the_compute_capability(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str, kernel: str
) -> None:
    """GPUs from compute capability 8.0 on use bf16 and `varlen`, older ones fp32 and `padded`."""
    machine = resolve_on_gpu(monkeypatch, capability=capability)
    assert (machine.precision, machine.kernel) == (precision, kernel)


@pytest.mark.parametrize(
    ("head_dim", "kernel"),
    [(8, "varlen"), (32, "varlen"), (60, "padded"), (64, "varlen"), (250, "padded"),
     (256, "varlen"), (264, "padded")],
)  # fmt: skip
def test_auto_kernel_depends_on_the_head_width(
    monkeypatch: pytest.MonkeyPatch, head_dim: int, kernel: str
) -> None:
    """`varlen` is selected for head widths that are multiples of 8 and at most 256."""
    assert resolve_on_gpu(monkeypatch, head_dim=head_dim).kernel == kernel


def test_auto_kernel_with_attention_dropout_or_fp32_is_padded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`varlen` is not selected with attention dropout or in fp32, which it does not support."""
    assert resolve_on_gpu(monkeypatch, attention_dropout=0.1).kernel == "padded"
    assert resolve_on_gpu(monkeypatch, precision="fp32").kernel == "padded"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"capability": (7, 5)}, "needs compute capability 8.0 or higher, and cuda:0 has 7.5"),
        ({"head_dim": 20}, "multiple of 8 and at most 256, and the head width is 20"),
        ({"precision": "fp32"}, "needs bf16, and run.precision is fp32"),
        ({"attention_dropout": 0.1}, "no attention dropout, and model.attention_dropout is 0.1"),
    ],
)
def test_error_says_why_varlen_cannot_run(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], reason: str
) -> None:
    """If `varlen` is set and cannot run, the error says why and names the alternative."""
    with pytest.raises(RunError, match=f"'varlen': .*{reason}; use 'padded' instead"):
        resolve_on_gpu(monkeypatch, kernel="varlen", **options)


def test_determinism_follows_the_device_of_the_last_run() -> None:
    """Runs on the CPU use deterministic algorithms and no TF32; runs on CUDA the opposite."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    precision = torch.get_float32_matmul_precision()
    try:
        for is_cuda, expected in ((False, "highest"), (True, "high"), (False, "highest")):
            configure_determinism(is_cuda=is_cuda)
            assert torch.are_deterministic_algorithms_enabled() is not is_cuda
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        torch.set_float32_matmul_precision(precision)


def test_dropout_seeds_the_generator_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the generator of the given CUDA device is seeded, or of the current one by default."""
    generators = tuple(torch.Generator() for _ in range(3))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    unseeded = generators[0].initial_seed()
    seed_dropout(torch.device("cuda:1"), 7)
    seed_dropout(torch.device("cuda"), 8)
    seed_dropout(torch.device("cpu"), 9)
    assert [generator.initial_seed() for generator in generators] == [unseeded, 7, 8]


def test_older_glibc_keeps_blocks_of_up_to_32_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions of glibc reject a larger threshold for blocks that are returned at once."""
    thresholds: list[int] = []

    def mallopt(parameter: int, value: int) -> int:
        is_accepted = parameter != runtime_device._M_MMAP_THRESHOLD or value <= 2**25
        if is_accepted and parameter == runtime_device._M_MMAP_THRESHOLD:
            thresholds.append(value)
        return int(is_accepted)

    monkeypatch.setattr(runtime_device, "_get_libc_function", lambda _: mallopt)
    keep_freed_memory()
    assert thresholds == [2**25]


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
