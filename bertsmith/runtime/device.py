"""Device, precision and attention kernel of a run, and measurements of the hardware.

Only this module changes PyTorch's process-wide settings.
"""

import ctypes
import os
import platform
import re
import resource
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import torch.utils.deterministic

from bertsmith.errors import RunError, SettingsError
from bertsmith.memory import format_bytes, get_total_memory_bytes
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.attention_layout import Kernel
from bertsmith.model.ops.cpu import has_bf16
from bertsmith.model.ops.linear import onednn_linear, uses_onednn
from bertsmith.runtime.device_name import check_device_name
from bertsmith.runtime.memory_estimates import estimate_num_parameters, estimate_training_bytes

Precision = Literal["fp32", "bf16"]

#: Size n of the n x n matrix product that measures peak speed, large enough to be compute-bound.
_PEAK_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
#: Constants of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Machine:
    """Where and how a run computes: device, precision and attention kernel."""

    device: torch.device
    precision: Precision
    kernel: Kernel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> torch.autocast:
        """Return the autocast context for forward passes."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


def resolve_device(device: str, option: str) -> torch.device:
    """Return the device with a name; "auto" is CUDA if available.

    Args:
        device: "auto", "cpu", "cuda" or "cuda:N".
        option: The option or setting that has this value, for error messages.

    Raises:
        SettingsError: If the device is invalid or not available.
    """
    check_device_name(device, option)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved, num_devices = torch.device(device), torch.cuda.device_count()
    if resolved.type == "cuda" and (resolved.index or 0) >= num_devices:
        raise SettingsError(
            f"{option} {device}: PyTorch finds {num_devices} CUDA devices here; use auto, or "
            "install a PyTorch build with CUDA"
        )
    return resolved


def resolve_machine(
    device: str, precision: str, kernel: str, *, attention_dropout: float, threads: int | None
) -> Machine:
    """Resolve "auto" settings, and configure PyTorch's threads, determinism and allocation.

    Args:
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "auto", "fp32" or "bf16".
        kernel: "auto" or an attention kernel.
        attention_dropout: Dropout rate of the attention probabilities; `varlen` needs 0.
        threads: Number of threads; None for PyTorch's default.

    Raises:
        SettingsError: If the device is invalid or not available.
        RunError: If the kernel is not available.
    """
    torch_device = resolve_device(device, "run.device")
    cuda = torch_device.type == "cuda"
    if precision == "auto":
        precision = _resolve_precision(cuda=cuda)
    supports_varlen = cuda and precision == "bf16" and attention_dropout == 0.0
    if kernel == "auto":
        kernel = "varlen" if supports_varlen else "padded"
    if kernel == "varlen" and not supports_varlen:
        raise RunError(
            "run.kernel 'varlen' needs CUDA, bf16 and attention_dropout = 0; use 'padded' instead"
        )
    # Set even if it is the default: an explicit number stops MKL from using fewer threads for small
    # products. Otherwise a resumed run, which always sets the number, would sum in another order.
    torch.set_num_threads(threads or torch.get_num_threads())
    configure_determinism(cuda=cuda)
    if not cuda:
        keep_freed_memory()
    return Machine(torch_device, precision, kernel)  # type: ignore[arg-type]


def configure_determinism(*, cuda: bool) -> None:
    """Make CPU runs bit-for-bit reproducible; on CUDA, prefer speed and allow TF32."""
    if cuda:
        torch.set_float32_matmul_precision("high")
        return
    torch.use_deterministic_algorithms(True)
    # By default PyTorch then fills every new tensor with NaN, which only costs time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_memory(
    machine: Machine, config: ModelConfig, batch_tokens: int, micro_batch_tokens: int
) -> None:
    """Check that a training step can fit in memory.

    Args:
        machine: Where the run computes.
        config: Sizes of the model.
        batch_tokens: Tokens per step.
        micro_batch_tokens: Tokens per micro-batch.

    Raises:
        RunError: If even the lower bound exceeds the memory.
    """
    available = get_total_memory_bytes()
    if machine.device.type == "cuda":
        available = torch.cuda.get_device_properties(machine.device).total_memory
    tokens_at_once = min(batch_tokens, micro_batch_tokens)
    weight_bytes = estimate_training_bytes(config, 0)
    # The whole batch is drawn before it is split: ids, segments and positions, 8 bytes each.
    needed = estimate_training_bytes(config, tokens_at_once) + 24 * batch_tokens
    if needed > available:
        raise RunError(
            f"not enough memory: this run needs at least {format_bytes(needed)} "
            f"({format_bytes(weight_bytes)} for {estimate_num_parameters(config):,} weights and "
            f"their optimizer state, the rest for batches of {batch_tokens:,} tokens in "
            f"micro-batches of {tokens_at_once:,}), but {machine.device} has "
            f"{format_bytes(available)}; use a smaller model, batch or run.micro_batch_tokens"
        )


def resolves_to_cpu(device: str) -> bool:
    """Return whether a device setting, such as "auto", means the CPU on this machine."""
    return resolve_device(device, "run.device").type == "cpu"


def describe_auto_device() -> str:
    """Return the device and precision that "auto" stands for here, such as "cpu, bf16"."""
    device = resolve_device("auto", "run.device").type
    return f"{device}, {_resolve_precision(cuda=device == 'cuda')}"


def _resolve_precision(*, cuda: bool) -> Literal["bf16", "fp32"]:
    return "bf16" if cuda or has_bf16() else "fp32"


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for later allocations, for the rest of the process (mallopt).

    By default glibc returns large blocks, such as the gradient of the word embeddings, to the OS,
    and each step pays for page faults. Does nothing without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 2**30)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def trim_memory() -> None:
    """Return freed memory to the OS (malloc_trim); does nothing without glibc.

    Call it when memory of another size is needed next: freed blocks of many sizes can take more
    memory than was ever in use at once.
    """
    malloc_trim = (
        getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    )
    if malloc_trim is not None:
        malloc_trim(0)


def measure_peak_macs(machine: Machine, seconds: float = 0.1) -> float:
    """Measure the machine's peak speed in a square matrix product, in multiply-adds per second.

    Args:
        machine: Where to measure; products run in its dtype.
        seconds: How long to measure.
    """
    size = _PEAK_MATMUL_SIZE[machine.device.type]
    a = torch.randn(size, size, device=machine.device, dtype=machine.dtype)
    multiply = partial(onednn_linear if uses_onednn(a, a) else torch.matmul, a, a)
    multiply()
    peak, end = 0.0, time.perf_counter() + seconds
    # At least once: on a busy machine one product may take longer than ``seconds``.
    while peak == 0.0 or time.perf_counter() < end:
        start = time.perf_counter()
        multiply()
        synchronize(machine)
        peak = max(peak, size**3 / (time.perf_counter() - start))
    return peak


def synchronize(machine: Machine) -> None:
    """Wait until the device has finished all queued work."""
    if machine.device.type == "cuda":
        torch.cuda.synchronize(machine.device)


def get_peak_memory_bytes(machine: Machine) -> int:
    """Return the peak memory of this process in bytes: allocated on CUDA, or resident."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device)
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux reports KiB, macOS bytes (getrusage(2)).
    return max_rss if sys.platform == "darwin" else max_rss * 1024


@dataclass(frozen=True)
class CpuLoad:
    """Number of cores that other processes use: now, and on average over the last minute."""

    current: float
    last_minute: float


def measure_cpu_load(seconds: float = 0.3) -> CpuLoad:
    """Measure for ``seconds`` how many of this process's cores other processes use.

    Without /proc/stat (outside Linux), the one-minute load average is used for both values.
    """
    last_minute = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    before = _busy_core_seconds()
    if before is None:
        return CpuLoad(last_minute, last_minute)
    start, process_seconds = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    after = _busy_core_seconds()
    elapsed, process_seconds = time.perf_counter() - start, time.process_time() - process_seconds
    return CpuLoad(max(0.0, ((after or before) - before - process_seconds) / elapsed), last_minute)


def _busy_core_seconds() -> float | None:
    """Return the time that this process's cores have been busy since boot, summed over cores."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        cores = {f"cpu{index}" for index in os.sched_getaffinity(0)}
        rows = [line.split() for line in lines if line.split(maxsplit=1)[0] in cores]
        # user, nice, system, idle, iowait, irq, softirq, steal (proc(5)).
        busy = [sum(int(row[i]) for i in (1, 2, 3, 6, 7, 8)) for row in rows]
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return sum(busy) / os.sysconf("SC_CLK_TCK") if busy else None


def get_processor_name() -> str:
    """Return the name of the GPU if there is one, otherwise of the CPU."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    # On Linux, ``platform`` knows only the architecture.
    path = Path("/proc/cpuinfo")
    cpu_info = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", cpu_info, re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


def describe_machine(machine: Machine) -> str:
    """Return a one-line description, such as "2 of 4 CPU cores, bf16, padded attention"."""
    if machine.device.type == "cuda":
        name = torch.cuda.get_device_name(machine.device)
    else:
        name = f"{torch.get_num_threads()} of {os.cpu_count()} CPU cores"
    return f"{name}, {machine.precision}, {machine.kernel} attention"
