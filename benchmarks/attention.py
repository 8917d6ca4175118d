"""Attention on the CPU: sequences in groups of like lengths, and bf16 without PyTorch's kernel.

Groups: forward and backward of one layer's attention, as in fine-tuning (dropout on the
probabilities) and as it is used (none), for batches of 32 sequences whose lengths spread like those
of four tasks, against all of them padded together. bf16: two products and a softmax one by one,
against PyTorch's scaled_dot_product_attention, forward and backward, for 4,096 tokens in sequences
of one length. Two ways take turns in one process; a ratio is that of the medians.

    python benchmarks/attention.py [--threads N] [--json FILE]
"""

import argparse
import random
import time
from itertools import product
from pathlib import Path
from statistics import median

import torch
from reporting import report
from torch import Tensor

from bertsmith.model import attention
from bertsmith.model.attention import SelfAttention, build_layout, padded_attention
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import pack_sequences
from bertsmith.runtime.device import keep_freed_memory

#: Mean and deviation of the logarithm of a length, least and most: near the quartiles of the
#: training files under a vocabulary of 30,522 words.
TASKS = {
    "SQuAD": (5.1, 0.35, 60, 384),
    "RTE": (4.05, 0.55, 20, 256),
    "MRPC": (3.95, 0.25, 20, 100),
    "CoLA": (2.4, 0.35, 4, 47),
}
BATCH, TURNS = 32, 9
#: Heads and their width (the lab's, and a mini model's), and lengths.
HEADS, LENGTHS, TOKENS = ((4, 32), (4, 64)), (16, 64, 128, 256, 512), 4096


def lengths_of(task: str) -> list[int]:
    """Return the lengths of a batch, the same every time."""
    chance = random.Random(0)
    middle, spread, least, most = TASKS[task]
    return [min(most, max(least, round(chance.lognormvariate(middle, spread))))
            for _ in range(BATCH)]  # fmt: skip


def seconds(layer: SelfAttention, lengths: list[int], *, together: bool) -> float:
    """Return the time of forward and backward pass."""
    packed = pack_sequences([([0] * length, [0] * length) for length in lengths])
    hidden = torch.randn(sum(lengths), layer.output.in_features, requires_grad=True)
    bucket_sequences = attention.bucket_sequences
    if together:
        attention.bucket_sequences = lambda _: None
    try:
        began = time.perf_counter()
        where = build_layout(packed, "padded", causal=False, dtype=torch.float32)
        layer(hidden, where, DropoutSeed(torch.tensor(1))).sum().backward()
        return time.perf_counter() - began
    finally:
        attention.bucket_sequences = bucket_sequences


def seconds_in_bf16(qkv: Tensor, length: int, *, multiplied: bool) -> float:
    """Return the time of forward and backward pass for qkv [T, 3, N, H]."""
    count = qkv.shape[0] // length
    packed = pack_sequences([([0] * length, [0] * length)] * count)
    where = build_layout(packed, "padded", causal=False, dtype=torch.float32)
    before = attention.MATH_ATTENTION_MAX_SEQLEN
    attention.MATH_ATTENTION_MAX_SEQLEN = before if multiplied else 0
    try:
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            mixed = padded_attention(qkv, where, None, 0.0)
        mixed.backward(torch.ones_like(mixed))  # type: ignore[no-untyped-call]
        return time.perf_counter() - began
    finally:
        attention.MATH_ATTENTION_MAX_SEQLEN = before


def kernels(ratios: dict[str, float], figures: dict[str, float]) -> None:
    """Measure PyTorch's attention in bf16 beside two products and a softmax."""
    for (heads, width), length in product(HEADS, LENGTHS):
        tokens = TOKENS // length * length
        qkv = torch.randn(tokens, 3, heads, width).bfloat16().requires_grad_()
        found: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(TURNS):
            for multiplied, taken in found.items():
                taken.append(seconds_in_bf16(qkv, length, multiplied=multiplied))
        ours, theirs = median(found[True]), median(found[False])
        key = f"bf16, heads of {width}, {length} tokens"
        ratios[f"{key}: PyTorch's attention / multiplied out"] = theirs / ours
        figures[f"{key}: ms multiplied out"] = 1000 * ours
        print(f"{key}: {theirs / ours:.2f} x")


def main() -> None:
    """Measure each task both ways, and print how many times as long all together takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # As in training and in use: else large tensors are faulted in again page by page.
    keep_freed_memory()
    ratios: dict[str, float] = {}
    figures: dict[str, float] = {}
    kernels(ratios, figures)
    groups(ratios, figures)
    report("attention", ratios, figures, options.json)


def groups(ratios: dict[str, float], figures: dict[str, float]) -> None:
    """Measure padding in groups beside padding all together."""
    # all-MiniLM-L6-v2's width and heads.
    config = ModelConfig(vocab_size=10, width=384, heads=12, attention_dropout=0.1)
    layer = SelfAttention(config, dropout_index=0)
    for task in TASKS:
        for name, train in (("training", True), ("use", False)):
            layer.train(train)
            lengths = lengths_of(task)
            found: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(TURNS):
                for together in (True, False):
                    found[together].append(seconds(layer, lengths, together=together))
            whole, parts = median(found[True]), median(found[False])
            key = f"{task}, {name}"
            ratios[f"{key}: all together / in groups"] = whole / parts
            figures[f"{key}: ms in groups"] = 1000 * parts
            print(f"{key}: {whole / parts:.2f} x ({sum(lengths)} tokens, longest {max(lengths)})")


if __name__ == "__main__":
    main()
