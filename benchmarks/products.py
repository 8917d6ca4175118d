"""Float32 products by oneDNN beside MKL's, as a Linear and in a whole step of pre-training.

A Linear is timed forward, and with both gradients; with a number of tokens that came before, and
with one that did not, for which oneDNN may have to write its code first. The two libraries take
turns in one process, whatever this CPU's own choice is; a ratio is that of the medians.

    python benchmarks/products.py [--threads N] [--json FILE]
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median

import torch
from pretrain import batch_of, ours
from reporting import report

from bertsmith.model.ops import linear
from bertsmith.model.ops.cpu import has_slow_mkl
from bertsmith.model.ops.linear import Linear
from bertsmith.runtime import device
from bertsmith.train.pretraining.micro_batches import to_device

#: Inputs and outputs: of a tiny model's layer, all-MiniLM-L6-v2's, BERT-base's.
WIDTHS = ((128, 512), (384, 384), (384, 1536), (1536, 384), (768, 3072))
TOKENS = (12, 100, 560, 4096)
TURNS = 15


@contextmanager
def library(*, onednn: bool) -> Iterator[None]:
    """Have one of the two multiply, small products as well."""
    before, least = linear.has_slow_mkl, linear.ONEDNN_MIN_MACS
    linear.ONEDNN_MIN_MACS = 1
    linear.has_slow_mkl = lambda: onednn  # type: ignore[assignment]
    try:
        yield
    finally:
        linear.has_slow_mkl, linear.ONEDNN_MIN_MACS = before, least


def medians(work: Callable[[], object], turns: int = TURNS) -> tuple[float, float]:
    """Return the seconds by MKL and by oneDNN, in turns, the first of each left out."""
    found: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(turns + 1):
        for onednn, taken in found.items():
            with library(onednn=onednn):
                began = time.perf_counter()
                work()
                if turn:
                    taken.append(time.perf_counter() - began)
    return median(found[False]), median(found[True])


def linears(ratios: dict[str, float], figures: dict[str, float]) -> None:
    """Measure single products."""
    for inputs, outputs in WIDTHS:
        own = Linear(inputs, outputs)
        for tokens in TOKENS:
            fresh = count(tokens + 1)
            many = torch.randn(tokens + 2 * TURNS + 3, inputs)
            x = torch.randn(tokens, inputs, requires_grad=True)
            cases: dict[str, Callable[[], object]] = {
                "forward": lambda x=x, own=own: own(x.detach()),  # type: ignore[misc]
                "forward, a number of tokens that is new": (
                    lambda fresh=fresh, own=own, many=many: own(many[: next(fresh)])
                ),  # type: ignore[misc]
                "forward and backward": lambda x=x, own=own: own(x).sum().backward(),  # type: ignore[misc]
            }
            for name, work in cases.items():
                mkl, onednn = medians(work)
                key = f"{tokens} x {inputs} -> {outputs}, {name}"
                ratios[f"{key}: MKL / oneDNN"] = mkl / onednn
                figures[f"{key}: ms by oneDNN"] = 1000 * onednn
                print(f"{key}: {mkl / onednn:.2f}", flush=True)


def steps(ratios: dict[str, float], figures: dict[str, float], threads: int | None) -> None:
    """Measure whole steps, of 32 sequences of 128 tokens, and the same in bf16."""
    draw = torch.Generator().manual_seed(0)
    for size in ("tiny", "mini", "small"):
        for precision in ("fp32", "bf16"):
            machine = device.resolve_machine(
                "cpu", precision, "padded", attention_dropout=0.1, threads=threads
            )
            piece = to_device(batch_of(32, 128, draw), machine.device)
            mkl, onednn = medians(ours(machine, size, piece, compiled=False), turns=7)
            figures[f"step of {size}, {precision}: ms"] = 1000 * onednn
            if precision == "fp32":
                ratios[f"step of {size}: MKL / oneDNN"] = mkl / onednn
            print(f"{size} {precision}: {mkl / onednn:.2f}, {1000 * onednn:.0f} ms", flush=True)


def main() -> None:
    """Measure both, and say which of the two this CPU has by itself."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {"oneDNN is this CPU's choice": float(has_slow_mkl())}
    figures["threads"] = float(torch.get_num_threads())
    linears(ratios, figures)
    steps(ratios, figures, options.threads)
    report("float32 products, MKL's and oneDNN's", ratios, figures, options.json)


if __name__ == "__main__":
    main()
