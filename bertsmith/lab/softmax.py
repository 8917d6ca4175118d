"""Measures time and memory of the output softmax, in a process of its own.

A separate process is needed because peak memory is measured per process. Run as a program, this
module measures one implementation at one size.
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

#: "full" computes all P x V logits at once, "chunked" as this package does.
IMPLEMENTATIONS = {"full": "all logits at once", "chunked": "in chunks, as in Bertsmith"}


def measure_in_subprocess(
    implementation: str, vocab_size: int, width: int, num_predictions: int, num_repeats: int
) -> dict[str, float]:
    """Measure a forward and backward pass of the output softmax on the CPU.

    Args:
        implementation: A key of ``IMPLEMENTATIONS``.
        vocab_size: V.
        width: D.
        num_predictions: P.
        num_repeats: Number of timed passes.

    Returns:
        ``seconds``, the median time, and ``bytes``, the peak memory in addition to the weights,
        the hidden states [P, D] and the labels.

    Raises:
        BertsmithError: The process failed.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cost.json"
        sizes = map(str, (vocab_size, width, num_predictions, num_repeats))
        command = [sys.executable, "-m", "bertsmith.lab.softmax", str(file), implementation, *sizes]
        process = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 - fixed command
        if process.returncode:
            last_line = (process.stderr.strip().splitlines() or ["killed"])[-1]
            raise BertsmithError(
                f"measuring the softmax failed at a vocabulary of {vocab_size:,}: {last_line}"
            )
        cost: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return cost


def _measure(
    implementation: str, vocab_size: int, width: int, num_predictions: int, num_repeats: int
) -> dict[str, float]:
    # The first small pass initializes libraries, whose memory is not counted.
    _time_pass(implementation, *_random_inputs(16, width, 16))
    inputs = _random_inputs(vocab_size, width, num_predictions)
    before = _read_peak_memory_bytes()
    _time_pass(implementation, *inputs)
    # Measured before the timed passes, which fragment the heap.
    num_bytes = _read_peak_memory_bytes() - before
    seconds = median(_time_pass(implementation, *inputs) for _ in range(num_repeats))
    return {"seconds": seconds, "bytes": num_bytes}


def _random_inputs(
    vocab_size: int, width: int, num_predictions: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights [V, D], biases [V], hidden states [P, D], and labels [P]."""
    return (torch.randn(vocab_size, width).mul_(0.02).requires_grad_(),
            torch.zeros(vocab_size, requires_grad=True),
            torch.randn(num_predictions, width, requires_grad=True),
            torch.randint(vocab_size, (num_predictions,)))  # fmt: skip


def _time_pass(
    implementation: str, weight: Tensor, bias: Tensor, hidden: Tensor, labels: Tensor
) -> float:
    """Return the seconds of one forward and backward pass."""
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
    if status.exists() and (match := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(match[1]) * 1024
    # On Linux, ru_maxrss would include the parent's peak before exec; on macOS its unit is bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), _measure(sys.argv[2], *map(int, sys.argv[3:])))
