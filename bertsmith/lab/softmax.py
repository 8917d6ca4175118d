"""Measures time and memory of the output softmax in a separate process.

The operating system reports peak memory per process, so each measurement needs a new process, which
runs this module as a program.
"""

import json
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from torch.nn import functional

from bertsmith.errors import BertsmithError
from bertsmith.files import write_json
from bertsmith.model.ops.cross_entropy import linear_cross_entropy

#: Implementations and their labels. "full" computes all P x V logits (P predictions, V vocabulary
#: entries) at once; "chunked" computes parts of them, as the pre-training loss does.
IMPLEMENTATIONS = {"full": "all logits at once", "chunked": "in chunks, as in Bertsmith"}


def measure_in_subprocess(
    implementation: str, vocab_size: int, width: int, num_predictions: int, num_repeats: int
) -> dict[str, float]:
    """Measure a forward and backward pass of the output softmax on the CPU.

    Args:
        implementation: A key of ``IMPLEMENTATIONS``.
        vocab_size: The vocabulary size V.
        width: The width D of the hidden states.
        num_predictions: The number of predictions P.
        num_repeats: The number of timed passes.

    Returns:
        ``seconds``, the median time, and ``bytes``, the peak memory without weights [V, D], hidden
        states [P, D] and labels [P].

    Raises:
        BertsmithError: The process failed.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cost.json"
        sizes = map(str, (vocab_size, width, num_predictions, num_repeats))
        command = [sys.executable, "-m", "bertsmith.lab.softmax", str(file), implementation, *sizes]
        process = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 - fixed command
        if process.returncode:
            error_lines = process.stderr.strip().splitlines()
            reason = error_lines[-1] if error_lines else "the process was killed"
            raise BertsmithError(
                f"measuring the softmax failed at a vocabulary of {vocab_size:,}: {reason}"
            )
        cost: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return cost


def _measure(
    implementation: str, vocab_size: int, width: int, num_predictions: int, num_repeats: int
) -> dict[str, float]:
    """Return time and memory; see ``measure_in_subprocess``."""
    # A small first pass loads libraries, whose memory must not be counted.
    _time_pass(implementation, *_random_inputs(16, width, 16))
    inputs = _random_inputs(vocab_size, width, num_predictions)
    initial_bytes = _read_peak_memory_bytes()
    _time_pass(implementation, *inputs)
    # Memory is measured after a single pass, because further passes fragment the heap.
    num_bytes = _read_peak_memory_bytes() - initial_bytes
    seconds = median(_time_pass(implementation, *inputs) for _ in range(num_repeats))
    return {"seconds": seconds, "bytes": num_bytes}


def _random_inputs(
    vocab_size: int, width: int, num_predictions: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return random weights [V, D], biases [V], hidden states [P, D] and labels [P]."""
    # The standard deviation of BERT's initialization.
    weight = torch.randn(vocab_size, width).mul_(0.02).requires_grad_()
    bias = torch.zeros(vocab_size, requires_grad=True)
    hidden = torch.randn(num_predictions, width, requires_grad=True)
    labels = torch.randint(vocab_size, (num_predictions,))
    return weight, bias, hidden, labels


def _time_pass(
    implementation: str, weight: Tensor, bias: Tensor, hidden: Tensor, labels: Tensor
) -> float:
    """Return the duration of one forward and backward pass, in seconds."""
    weight.grad = bias.grad = hidden.grad = None
    start = time.perf_counter()
    if implementation == "full":
        logits = functional.linear(hidden, weight, bias)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
    else:
        loss = linear_cross_entropy(hidden, weight, bias, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - start


def _read_peak_memory_bytes() -> int:
    """Return the peak resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists():
        match = re.search(r"VmHWM:\s*(\d+) kB", status.read_text())
        if match is not None:
            return int(match[1]) * 1024
    # On macOS, ru_maxrss is in bytes. On Linux it would include the peak of the parent process.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), _measure(sys.argv[2], *map(int, sys.argv[3:])))
