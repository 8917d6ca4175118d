"""Device, precision and attention kernel of a run, and measurements of the hardware.

Only this module changes settings of PyTorch that affect the whole process.
"""

import ctypes
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.utils.deterministic

from bertsmith.errors import RunError, SettingsError
from bertsmith.memory import format_bytes, get_total_memory_bytes
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.attention_layout import Kernel
from bertsmith.model.ops.cpu import has_bf16
from bertsmith.model.ops.cuda import find_varlen_obstacle, has_cuda_bf16
from bertsmith.model.ops.linear import onednn_linear, uses_onednn
from bertsmith.plurals import count_noun
from bertsmith.runtime.device_name import check_device_name
from bertsmith.runtime.memory_estimates import estimate_num_parameters, estimate_training_bytes
from bertsmith.runtime.process_group import SINGLE_PROCESS, ProcessGroup, check_process_device

Precision = Literal["fp32", "bf16"]

#: Size n of the n x n matrices whose product measures the peak speed of a device. They are so large
#: that the product is compute-bound.
_PEAK_MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
#: Maximum default number of tokens of a micro-batch.
_MAX_MICRO_BATCH_TOKENS = 131072
#: Share of a GPU's memory for a training step, and the expected memory of activations divided by
#: their lower bound in ``estimate_training_bytes``.
_MAX_MEMORY_SHARE, _ACTIVATION_FACTOR = 0.8, 2.5
#: Memory for each logit of the output layer on a GPU: 16 bits, and float32 twice for the softmax.
_BYTES_PER_LOGIT = 10
#: Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Machine:
    """The device, the precision, the attention kernel and the processes that a run uses."""

    device: torch.device
    precision: Precision
    kernel: Kernel
    processes: ProcessGroup = SINGLE_PROCESS

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of matrix products."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32

    def autocast(self) -> torch.autocast:
        """Return the autocast context for forward passes; with fp32 it has no effect."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16")


def resolve_device(device: str, option: str) -> torch.device:
    """Return the torch device with this name; "auto" selects CUDA if available.

    Args:
        device: "auto", "cpu", "cuda" or "cuda:N".
        option: The option or setting that has this value, for error messages.

    Raises:
        SettingsError: If the device is invalid or not available.
    """
    check_device_name(device, option)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    resolved = torch.device(device)
    num_devices = torch.cuda.device_count()
    if resolved.type == "cuda" and (resolved.index or 0) >= num_devices:
        advice = "use auto, or install a PyTorch build with CUDA"
        if num_devices:
            advice = f"the last one is cuda:{num_devices - 1}"
        raise SettingsError(
            f"{option} {device}: PyTorch finds {count_noun(num_devices, 'CUDA device')} here; "
            f"{advice}"
        )
    return resolved


def is_device_available(device: str) -> bool:
    """Return whether this machine has a device, such as "cuda:1"."""
    try:
        resolve_device(device, "run.device")
    except SettingsError:
        return False
    return True


def resolve_machine(
    device: str,
    precision: str,
    kernel: str,
    *,
    attention_dropout: float,
    head_dim: int,
    threads: int | None,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> Machine:
    """Resolve "auto" settings, and configure PyTorch's threads, determinism and allocation.

    Args:
        device: "auto", "cpu", "cuda" or "cuda:N".
        precision: "auto", "fp32" or "bf16".
        kernel: "auto", "reference", "padded" or "varlen".
        attention_dropout: Dropout rate of the attention probabilities; `varlen` supports only 0.
        head_dim: H; `varlen` supports multiples of 8 up to 256.
        threads: Number of threads; None for PyTorch's default.
        processes: The processes of the run.

    Raises:
        SettingsError: If the device is invalid or not available.
        RunError: If the kernel is not available.
    """
    torch_device = resolve_device(device, "run.device")
    check_process_device(torch_device, processes)
    is_cuda = torch_device.type == "cuda"
    if precision == "auto":
        precision = _resolve_precision(torch_device)
    obstacle = find_varlen_obstacle(torch_device, head_dim)
    if obstacle is None and precision != "bf16":
        obstacle = f"it needs bf16, and run.precision is {precision}"
    if obstacle is None and attention_dropout > 0.0:
        obstacle = (
            f"it has no attention dropout, and model.attention_dropout is {attention_dropout:g}"
        )
    if kernel == "auto":
        kernel = "padded" if obstacle else "varlen"
    if kernel == "varlen" and obstacle:
        raise RunError(f"run.attention_kernel is 'varlen': {obstacle}; use 'padded' instead")
    # The number of threads is set even if it is PyTorch's default. Otherwise MKL would use fewer
    # threads for small products. A resumed run always sets the number of threads, so its rounding
    # errors would then differ from those of the original run.
    torch.set_num_threads(threads or torch.get_num_threads())
    configure_determinism(is_cuda=is_cuda)
    if not is_cuda:
        keep_freed_memory()
    return Machine(torch_device, precision, kernel, processes)  # type: ignore[arg-type]


def configure_determinism(*, is_cuda: bool) -> None:
    """Make runs on the CPU bit-for-bit reproducible, or make CUDA runs fast by allowing TF32.

    A process can use both devices one after the other. Deterministic algorithms would fail on CUDA,
    where cuBLAS needs an environment variable for them.
    """
    torch.set_float32_matmul_precision("high" if is_cuda else "highest")
    torch.use_deterministic_algorithms(not is_cuda)
    # With deterministic algorithms PyTorch also fills new tensors with NaN, which takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_dropout(device: torch.device, seed: int) -> None:
    """Seed the dropout of a CUDA device with the generator of this device.

    Without an index, the device is the current CUDA device. On the CPU, ``DropoutSeed`` determines
    the dropout masks.
    """
    if device.type == "cuda":
        has_index = device.index is not None
        index = device.index if has_index else torch.cuda.current_device()
        torch.cuda.default_generators[index].manual_seed(seed)


def check_memory(
    machine: Machine,
    config: ModelConfig,
    batch_tokens: int,
    micro_batch_tokens: int,
    optimizer: str = "adamw",
) -> None:
    """Check that the lower bound for a training step's memory fits in the available memory.

    Args:
        machine: Device, precision and kernel of the run.
        config: Sizes of the model.
        batch_tokens: Number of tokens per step of all processes.
        micro_batch_tokens: Maximum number of tokens per micro-batch.
        optimizer: "adamw" or "muon", which stores fewer moments.

    Raises:
        RunError: If the lower bound exceeds the available memory.
    """
    processes = machine.processes
    available = get_total_memory_bytes() // processes.local_world_size
    if machine.device.type == "cuda":
        available = torch.cuda.get_device_properties(machine.device).total_memory
    tokens_at_once = min(-(-batch_tokens // processes.world_size), micro_batch_tokens)
    weight_bytes = estimate_training_bytes(config, 0, optimizer)
    # Token ids, segment ids and positions of the whole batch take 8 bytes each.
    needed = estimate_training_bytes(config, tokens_at_once, optimizer) + 24 * batch_tokens
    if needed > available:
        raise RunError(
            f"not enough memory: this run needs at least {format_bytes(needed)} "
            f"({format_bytes(weight_bytes)} for {estimate_num_parameters(config):,} weights and "
            f"their optimizer state, the rest for batches of {batch_tokens:,} tokens in "
            f"micro-batches of {tokens_at_once:,}), but {machine.device} has "
            f"{format_bytes(available)}; use a smaller model, batch or run.micro_batch_tokens"
        )


def can_compile_fast(machine: Machine) -> bool:
    """Return whether torch.compile makes training faster: on a GPU with Triton installed."""
    return machine.device.type == "cuda" and find_spec("triton") is not None


def choose_micro_batch_tokens(
    machine: Machine, config: ModelConfig, min_tokens: int, predictions_per_token: float
) -> int:
    """Return the default number of tokens of a micro-batch.

    On the CPU, this is ``min_tokens``. On a GPU, it is doubled as long as a training step is
    expected to use at most a share of the memory.

    Args:
        machine: Device of the run.
        config: Sizes of the model.
        min_tokens: The smallest result.
        predictions_per_token: Share of the tokens for which the logits of all words are computed.
    """
    num_tokens = min_tokens
    if machine.device.type != "cuda":
        return num_tokens
    memory = _MAX_MEMORY_SHARE * torch.cuda.get_device_properties(machine.device).total_memory
    weight_bytes = estimate_training_bytes(config, 0)
    bytes_per_token = _ACTIVATION_FACTOR * (estimate_training_bytes(config, 1) - weight_bytes)
    bytes_per_token += predictions_per_token * config.vocab_size * _BYTES_PER_LOGIT
    max_tokens = (memory - weight_bytes) / bytes_per_token
    while 2 * num_tokens <= min(max_tokens, _MAX_MICRO_BATCH_TOKENS):
        num_tokens *= 2
    return num_tokens


def resolves_to_cpu(device: str) -> bool:
    """Return whether a device setting, such as "auto", selects the CPU on this machine."""
    return resolve_device(device, "run.device").type == "cpu"


def describe_auto_device() -> str:
    """Return the device and precision that "auto" selects on this machine, such as "cpu, bf16"."""
    device = resolve_device("auto", "run.device")
    return f"{device.type}, {_resolve_precision(device)}"


def _resolve_precision(device: torch.device) -> Literal["bf16", "fp32"]:
    """Return the precision that "auto" selects: bf16 on GPUs and CPUs with bf16 instructions."""
    is_fast = has_cuda_bf16(device) if device.type == "cuda" else has_bf16()
    return "bf16" if is_fast else "fp32"


def keep_freed_memory() -> None:
    """Make glibc reuse freed memory instead of returning it to the OS (mallopt).

    By default glibc returns large blocks to the OS, such as the gradient of the word embeddings,
    and each training step spends time on page faults. The setting stays in effect until the process
    ends. Without glibc this function does nothing.
    """
    mallopt = _get_libc_function("mallopt")
    if mallopt is not None:
        # Blocks up to 1 GiB come from the heap. Larger blocks are returned when they are freed.
        if not mallopt(_M_MMAP_THRESHOLD, 2**30):
            # Older versions of glibc accept at most 32 MiB.
            mallopt(_M_MMAP_THRESHOLD, 2**25)
        # The largest value of a C int: memory at the end of the heap is never returned.
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def trim_memory() -> None:
    """Return freed memory to the OS (malloc_trim); does nothing without glibc.

    Call this before allocating blocks of other sizes. If these do not fit in the freed blocks, the
    process needs memory for both the freed and the new blocks.
    """
    malloc_trim = _get_libc_function("malloc_trim")
    if malloc_trim is not None:
        malloc_trim(0)


def _get_libc_function(name: str) -> Callable[..., Any] | None:
    """Return a function of the C library; None outside Linux or if the library does not have it."""
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), name, None)


def measure_peak_macs_per_second(machine: Machine, seconds: float = 0.1) -> float:
    """Measure the peak speed of a device in multiply-adds per second, with a square matrix product.

    Args:
        machine: The device, and the precision of the product.
        seconds: Duration of the measurement.
    """
    size = _PEAK_MATMUL_SIZE[machine.device.type]
    matrix = torch.randn(size, size, device=machine.device, dtype=machine.dtype)
    function = onednn_linear if uses_onednn(matrix, matrix) else torch.matmul
    multiply = partial(function, matrix, matrix)
    # The first product is not measured, because it includes initialization.
    multiply()
    peak = 0.0
    end = time.perf_counter() + seconds
    # The product runs at least once: on a busy machine it may take longer than ``seconds``.
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
    """Return the peak memory of this process in bytes: on CUDA GPU memory, otherwise RAM."""
    if machine.device.type == "cuda":
        return torch.cuda.max_memory_allocated(machine.device)
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The unit is KiB on Linux and bytes on macOS (getrusage(2)).
    return max_rss if sys.platform == "darwin" else max_rss * 1024


@dataclass(frozen=True)
class CpuLoad:
    """CPU load of the machine, as a number of cores.

    Attributes:
        current: Number of cores that other processes used during the measurement.
        last_minute: The one-minute load average, which includes this process.
    """

    current: float
    last_minute: float


def measure_cpu_load(seconds: float = 0.3) -> CpuLoad:
    """Measure for ``seconds`` how many cores other processes use.

    Only the cores that this process may use are counted. Without /proc/stat (outside Linux), both
    values are the one-minute load average.
    """
    last_minute = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy_start = _get_busy_core_seconds()
    if busy_start is None:
        return CpuLoad(last_minute, last_minute)
    start, process_start = time.perf_counter(), time.process_time()
    time.sleep(seconds)
    busy_end = _get_busy_core_seconds() or busy_start
    elapsed_seconds = time.perf_counter() - start
    process_seconds = time.process_time() - process_start
    other_seconds = max(0.0, busy_end - busy_start - process_seconds)
    return CpuLoad(other_seconds / elapsed_seconds, last_minute)


def _get_busy_core_seconds() -> float | None:
    """Return the busy time since boot, in seconds, summed over the cores that this process may use.

    Returns None without /proc/stat.
    """
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        core_names = {f"cpu{index}" for index in os.sched_getaffinity(0)}
        rows = [line.split() for line in lines if line.split(maxsplit=1)[0] in core_names]
        # The columns are name, user, nice, system, idle, iowait, irq, softirq and steal (proc(5)).
        busy_columns = (1, 2, 3, 6, 7, 8)
        busy_ticks = [int(row[column]) for row in rows for column in busy_columns]
    except (OSError, AttributeError, ValueError, IndexError):
        return None
    return sum(busy_ticks) / os.sysconf("SC_CLK_TCK") if busy_ticks else None


def get_processor_name() -> str:
    """Return the name of the GPU if there is one, otherwise of the CPU."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    # On Linux, ``platform`` returns only the architecture.
    path = Path("/proc/cpuinfo")
    cpu_info = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", cpu_info, re.MULTILINE)
    if match:
        return match[1]
    return platform.processor() or platform.machine()


def describe_machine(machine: Machine) -> str:
    """Return a one-line description, such as "2 of 4 CPU cores, bf16, padded attention"."""
    if machine.device.type == "cuda":
        name = torch.cuda.get_device_name(machine.device)
    else:
        name = f"{torch.get_num_threads()} of {count_noun(os.cpu_count() or 1, 'CPU core')}"
    if machine.processes.world_size > 1:
        name = f"{machine.processes.world_size} processes with {name} each"
    return f"{name}, {machine.precision}, {machine.kernel} attention"
