"""Compare float32 matrix products of oneDNN and MKL, in linear layers and in training steps.

A linear layer is timed in the forward pass alone, and in the forward and backward pass. oneDNN
generates code for each new shape, so the forward pass is also timed with a new number of tokens in
each run. Both libraries alternate in one process. Ratios are ratios of median times.

    python benchmarks/matmul.py [--threads N] [--json FILE]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from pretrain import build_bertsmith_step, make_batch
from reporting import report

from bertsmith.model.ops import linear
from bertsmith.model.ops.cpu import has_slow_mkl
from bertsmith.model.ops.linear import Linear
from bertsmith.runtime import device
from bertsmith.train.pretraining.micro_batches import to_device

#: Input and output widths of layers in a tiny model, all-MiniLM-L6-v2 and BERT-base.
WIDTHS = ((128, 512), (384, 384), (384, 1536), (1536, 384), (768, 3072))
TOKEN_COUNTS = (12, 100, 560, 4096)
NUM_RUNS = 15


@contextmanager
def force_library(*, use_onednn: bool) -> Iterator[None]:
    """Compute all float32 matrix products with oneDNN or with MKL, including small ones."""
    with (
        mock.patch.object(linear, "ONEDNN_MIN_MACS", 1),
        mock.patch.object(linear, "has_slow_mkl", return_value=use_onednn),
    ):
        yield


def time_libraries(function: Callable[[], object], num_runs: int = NUM_RUNS) -> tuple[float, float]:
    """Return the median seconds with MKL and with oneDNN; the first run of each is a warm-up."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for run in range(num_runs + 1):
        for use_onednn, times in seconds.items():
            with force_library(use_onednn=use_onednn):
                start = time.perf_counter()
                function()
                if run:
                    times.append(time.perf_counter() - start)
    return median(seconds[False]), median(seconds[True])


def build_cases(layer: Linear, num_tokens: int) -> dict[str, Callable[[], object]]:
    """Return functions to time by name; they apply ``layer`` to ``num_tokens`` random rows."""
    new_counts = count(num_tokens + 1)
    rows = torch.randn(num_tokens + 2 * NUM_RUNS + 3, layer.in_features)
    x = torch.randn(num_tokens, layer.in_features, requires_grad=True)
    return {
        "forward": lambda: layer(x.detach()),
        "forward, new number of tokens in each run": lambda: layer(rows[: next(new_counts)]),
        "forward and backward": lambda: layer(x).sum().backward(),
    }


def compare_layers(ratios: dict[str, float], measurements: dict[str, float]) -> None:
    """Compare the libraries in linear layers of several sizes."""
    for in_features, out_features in WIDTHS:
        layer = Linear(in_features, out_features)
        for num_tokens in TOKEN_COUNTS:
            for case, function in build_cases(layer, num_tokens).items():
                mkl_seconds, onednn_seconds = time_libraries(function)
                key = f"{num_tokens} x {in_features} -> {out_features}, {case}"
                ratios[f"{key}: MKL / oneDNN"] = mkl_seconds / onednn_seconds
                measurements[f"{key}: ms by oneDNN"] = 1000 * onednn_seconds
                print(f"{key}: {mkl_seconds / onednn_seconds:.2f}", flush=True)


def compare_steps(
    ratios: dict[str, float], measurements: dict[str, float], threads: int | None
) -> None:
    """Compare the libraries in fp32 training steps, and time the same steps in bf16.

    A step has 32 sequences of 128 tokens.
    """
    generator = torch.Generator().manual_seed(0)
    for size in ("tiny", "mini", "small"):
        for precision in ("fp32", "bf16"):
            machine = device.resolve_machine(
                "cpu", precision, "padded", attention_dropout=0.1, head_dim=64, threads=threads
            )
            batch = to_device(make_batch(32, 128, generator), machine.device)
            mkl_seconds, onednn_seconds = time_libraries(
                build_bertsmith_step(machine, size, batch, is_compiled=False), num_runs=7
            )
            measurements[f"step of {size}, {precision}: ms"] = 1000 * onednn_seconds
            if precision == "fp32":
                ratios[f"step of {size}: MKL / oneDNN"] = mkl_seconds / onednn_seconds
            speedup = mkl_seconds / onednn_seconds
            print(f"{size} {precision}: {speedup:.2f}, {1000 * onednn_seconds:.0f} ms", flush=True)


def main() -> None:
    """Run both comparisons, and report which library Bertsmith selects on this CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    ratios: dict[str, float] = {}
    measurements: dict[str, float] = {"oneDNN is the default on this CPU": float(has_slow_mkl())}
    measurements["threads"] = float(torch.get_num_threads())
    compare_layers(ratios, measurements)
    compare_steps(ratios, measurements, options.threads)
    report("matmul", ratios, measurements, options.json)


if __name__ == "__main__":
    main()
