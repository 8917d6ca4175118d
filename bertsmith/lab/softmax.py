"""What the output softmax costs, in time and memory: measured in a process of its own.

It never knows an experiment. Run as a program it measures one form of one size; it needs nothing of
its caller's, whose own memory would hide what it takes.
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

#: As it is written down, all P x V logits at once; and as this package computes it.
IMPLEMENTATIONS = {"whole": "all logits at once", "parts": "in parts, as here"}


def measure_in_subprocess(
    form: str, words: int, width: int, predictions: int, times: int
) -> dict[str, float]:
    """Return the median seconds of forward and backward on the CPU, and the bytes that they take.

    bytes: the most at any moment beside weights, hidden states [P, D] and labels. Raises
    BertsmithError where the process ends badly.
    """
    with TemporaryDirectory() as folder:
        file = Path(folder) / "cost.json"
        own = [sys.executable, "-m", "bertsmith.lab.softmax", str(file), form,
               *map(str, (words, width, predictions, times))]  # fmt: skip
        done = subprocess.run(own, capture_output=True, check=False, text=True)  # noqa: S603 - our own
        if done.returncode:
            told = (done.stderr.strip().splitlines() or ["killed"])[-1]
            raise BertsmithError(f"the softmax of {words:,} words could not be measured: {told}")
        found: dict[str, float] = json.loads(file.read_text(encoding="utf-8"))
    return found


def _cost(form: str, words: int, width: int, predictions: int, times: int) -> dict[str, float]:
    # What libraries take for themselves at their first use is none of it.
    _once(form, *_drawn(16, width, 16))
    drawn = _drawn(words, width, predictions)
    before = _peak()
    _once(form, *drawn)
    # Of the first time alone: later ones meet a heap in pieces.
    taken = _peak() - before
    return {"seconds": median(_once(form, *drawn) for _ in range(times)), "bytes": taken}


def _drawn(words: int, width: int, predictions: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return weights [V, D], biases [V], hidden states [P, D], and labels [P]."""
    return (torch.randn(words, width).mul_(0.02).requires_grad_(),
            torch.zeros(words, requires_grad=True),
            torch.randn(predictions, width, requires_grad=True),
            torch.randint(words, (predictions,)))  # fmt: skip


def _once(form: str, weight: Tensor, bias: Tensor, hidden: Tensor, labels: Tensor) -> float:
    """Return the seconds of one forward and backward pass."""
    weight.grad = bias.grad = hidden.grad = None
    began = time.perf_counter()
    if form == "whole":
        logits = functional.linear(hidden, weight, bias)
        loss = functional.cross_entropy(logits, labels, reduction="sum")
    else:
        loss = linear_cross_entropy(hidden, weight, bias, labels)
    loss.backward()  # type: ignore[no-untyped-call]
    return time.perf_counter() - began


def _peak() -> int:
    """Return the most bytes that this process has had so far."""
    status = Path("/proc/self/status")
    if status.exists() and (found := re.search(r"VmHWM:\s*(\d+) kB", status.read_text())):
        return int(found[1]) * 1024
    # Linux hands a parent's on; others do not, and macOS counts in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    write_json(Path(sys.argv[1]), _cost(sys.argv[2], *map(int, sys.argv[3:])))
