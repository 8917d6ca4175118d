"""What the machine offers: device, precision, threads, attention kernel, and its matrix ceiling.

It never knows what is trained; it alone asks the hardware and sets PyTorch's process-wide switches.
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

from bertsmith.errors import RunError
from bertsmith.model.attention import Kernel
from bertsmith.model.config import ModelConfig
from bertsmith.model.memory import format_bytes, num_parameters, total_memory_bytes, training_bytes
from bertsmith.model.ops.cpu import has_bf16
from bertsmith.model.ops.linear import onednn_linear, uses_onednn

Precision = Literal["fp32", "bf16"]

#: Edge of the square product that measures the ceiling: large enough that memory does not matter.
_CEILING_EDGE = {"cpu": 1024, "cuda": 8192}
#: Names of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Machine:
    """A device with the choices made for it."""

    device: torch.device
    precision: Precision
    kernel: Kernel

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that matrix products run in."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> torch.autocast:
        """Return the context in which a forward pass runs."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


def resolve_machine(
    device: str, precision: str, kernel: str, *, attention_dropout: float, threads: int | None
) -> Machine:
    """Resolve ``auto`` in each choice; RunError if something asked for is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise RunError(f"run.device is {device!r}; known here: auto, cpu, cuda, cuda:0, cuda:1 …")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise RunError(
            "run.device is 'cuda', but PyTorch finds no CUDA device here; "
            "leave it at 'auto', or install a PyTorch build with CUDA"
        )
    cuda = device.startswith("cuda")
    if precision == "auto":
        precision = _precision(cuda=cuda)
    varlen = cuda and precision == "bf16" and attention_dropout == 0.0
    if kernel == "auto":
        kernel = "varlen" if varlen else "padded"
    if kernel == "varlen" and not varlen:
        raise RunError(
            "run.kernel 'varlen' needs CUDA, bf16 and attention_dropout = 0; use 'padded' here"
        )
    # Said even where nobody chose: a number that was set keeps MKL from taking fewer threads for
    # small products, and a resume, which sets the number of the first start, would else compute
    # in another order.
    torch.set_num_threads(threads or torch.get_num_threads())
    make_deterministic(cuda=cuda)
    if not cuda:
        keep_freed_memory()
    return Machine(torch.device(device), precision, kernel)  # type: ignore[arg-type]


def make_deterministic(*, cuda: bool) -> None:
    """Make runs repeat byte for byte on the CPU; on CUDA, trade order for speed and allow TF32."""
    if cuda:
        torch.set_float32_matmul_precision("high")
        return
    torch.use_deterministic_algorithms(True)
    # Otherwise every fresh tensor is filled with NaN first, which costs time and changes nothing.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def check_memory(
    machine: Machine, config: ModelConfig, batch_tokens: int, micro_batch_tokens: int
) -> None:
    """Raise RunError where a step over ``batch_tokens``, so many at once, cannot fit in memory."""
    total = total_memory_bytes()
    if machine.device.type == "cuda":
        total = torch.cuda.get_device_properties(machine.device).total_memory
    at_once = min(batch_tokens, micro_batch_tokens)
    weights = training_bytes(config, 0)
    # The whole batch is drawn before it is cut: ids, segments and positions, 8 bytes each.
    needed = training_bytes(config, at_once) + 24 * batch_tokens
    if needed > total:
        raise RunError(
            f"this run needs at least {format_bytes(needed)} of memory ({format_bytes(weights)} for "
            f"{num_parameters(config):,} weights and their optimizer, the rest for a batch of "
            f"{batch_tokens:,} tokens, {at_once:,} at once), and {machine.device} has "
            f"{format_bytes(total)}; take a smaller model, batch or run.micro_batch_tokens"
        )


def is_cpu(device: str) -> bool:
    """Tell whether a setting of the device, "auto" included, means the CPU here."""
    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())


def describe_auto_device() -> str:
    """Return the device and the precision that "auto" comes to here: "cpu, bf16" and so on."""
    cuda = torch.cuda.is_available()
    return f"{'cuda' if cuda else 'cpu'}, {_precision(cuda=cuda)}"


def _precision(*, cuda: bool) -> Literal["bf16", "fp32"]:
    return "bf16" if cuda or has_bf16() else "fp32"


def keep_freed_memory() -> None:
    """Have glibc keep what is freed: the next step or batch asks for the same large blocks.

    Left to itself it gives large ones, such as the gradient of the word embeddings, back to the
    system, and the next step faults them in again page by page (mallopt(3)). It holds for the whole
    process, and for good. Elsewhere than on glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 2**30)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def trim_memory() -> None:
    """Give what is free back to the system after all, where nothing of its size is asked for soon.

    Kept blocks of many sizes come to more than the work ever had at once (malloc_trim(3)).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def measure_peak_macs(machine: Machine, seconds: float = 0.1) -> float:
    """Measure the best square matrix product of the machine, in multiply-adds a second."""
    edge = _CEILING_EDGE[machine.device.type]
    a = torch.randn(edge, edge, device=machine.device, dtype=machine.dtype)
    square = partial(onednn_linear if uses_onednn(a, a) else torch.matmul, a, a)
    square()
    best, end = 0.0, time.perf_counter() + seconds
    # Once at least: on a busy or slow machine a single product takes longer than the budget.
    while best == 0.0 or time.perf_counter() < end:
        began = time.perf_counter()
        square()
        synchronize(machine)
        best = max(best, edge**3 / (time.perf_counter() - began))
    return best


def synchronize(machine: Machine) -> None:
    """Wait until the device has done what it was given."""
    if machine.device.type == "cuda":
        torch.cuda.synchronize(machine.device)


def peak_memory_bytes(machine: Machine) -> int:
    """Return the most memory taken so far, in bytes: the device's on CUDA, else resident."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts kibibytes, macOS bytes (getrusage(2)).
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class CpuLoad:
    """How many cores other processes use: now, and on average over the last minute."""

    current: float
    last_minute: float


def measure_load(seconds: float = 0.3) -> CpuLoad:
    """Watch for so long how busy other processes keep the cores that this one may run on.

    Without /proc/stat (elsewhere than on Linux) the load of the last minute is that of now.
    """
    last_minute = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    before = _busy_seconds()
    if before is None:
        return CpuLoad(last_minute, last_minute)
    started, own = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    after = _busy_seconds()
    elapsed, own = time.perf_counter() - started, time.process_time() - own
    return CpuLoad(max(0.0, ((after or before) - before - own) / elapsed), last_minute)


def _busy_seconds() -> float | None:
    """Return how long the cores of this process have been at work since the system started."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        fields = [line.split() for line in lines if line.split(maxsplit=1)[0] in cores]
        # user, nice, system, idle, iowait, irq, softirq, steal (proc(5)).
        busy = [sum(int(own[i]) for i in (1, 2, 3, 6, 7, 8)) for own in fields]
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return sum(busy) / os.sysconf("SC_CLK_TCK") if busy else None


def processor_name() -> str:
    """Return the name of what computes: the GPU where there is one, else the CPU."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    # Linux's own name for it; platform has the architecture at the most.
    facts = Path("/proc/cpuinfo")
    told = facts.read_text(encoding="utf-8", errors="replace") if facts.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", told, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def describe_machine(machine: Machine) -> str:
    """Return one line for people about the machine."""
    if machine.device.type == "cuda":
        name = torch.cuda.get_device_name(machine.device)
    else:
        name = f"{torch.get_num_threads()} of {os.cpu_count()} CPU cores"
    return f"{name}, {machine.precision}, {machine.kernel} attention"
