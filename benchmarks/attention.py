"""Time attention on the CPU: length buckets, and explicit matrix products in bf16.

Length buckets: forward and backward pass of an attention layer on batches of 32 sequences, in
training mode (with attention dropout) and in inference mode (without). The sequence lengths are
distributed as in four fine-tuning tasks. The baseline pads all sequences to the longest one.

bf16: forward and backward pass of attention as two matrix products and a softmax, on 4,096 tokens
in sequences of equal length. The baseline is PyTorch's scaled_dot_product_attention.

Both variants alternate in one process. Ratios are ratios of median times.

    python benchmarks/attention.py [--threads N] [--json FILE]
"""

import argparse
import random
import time
from itertools import product
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from reporting import report
from torch import Tensor

from bertsmith.model.attention import SelfAttention
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops import attention_layout, padded_attention
from bertsmith.model.ops.attention_layout import build_attention_layout
from bertsmith.model.ops.bucketing import bucket_sequences
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import pack_sequences
from bertsmith.runtime.device import keep_freed_memory

#: Mean and standard deviation of the logarithm of the sequence length, minimum and maximum length.
#: They match the quartiles of the training files with BERT's vocabulary of 30,522 tokens.
LENGTH_DISTRIBUTIONS = {
    "SQuAD": (5.1, 0.35, 60, 384),
    "RTE": (4.05, 0.55, 20, 256),
    "MRPC": (3.95, 0.25, 20, 100),
    "CoLA": (2.4, 0.35, 4, 47),
}
BATCH_SIZE = 32
NUM_RUNS = 9
#: (number of heads, head dimension) of the lab's models and of a mini model.
HEAD_SHAPES = ((4, 32), (4, 64))
LENGTHS = (16, 64, 128, 256, 512)
NUM_TOKENS = 4096


def draw_lengths(task: str) -> list[int]:
    """Return random sequence lengths for a batch; each call returns the same lengths."""
    generator = random.Random(0)
    log_mean, log_std, minimum, maximum = LENGTH_DISTRIBUTIONS[task]
    return [
        min(maximum, max(minimum, round(generator.lognormvariate(log_mean, log_std))))
        for _ in range(BATCH_SIZE)
    ]


def time_attention_layer(layer: SelfAttention, lengths: list[int], *, one_bucket: bool) -> float:
    """Return the seconds of a forward and backward pass, in one bucket or in several buckets."""
    batch = pack_sequences([([0] * length, [0] * length) for length in lengths])
    hidden = torch.randn(sum(lengths), layer.output.in_features, requires_grad=True)
    bucketing = bucket_into_one if one_bucket else bucket_sequences
    with mock.patch.object(attention_layout, "bucket_sequences", bucketing):
        start = time.perf_counter()
        layout = build_attention_layout(batch, "padded", is_causal=False, dtype=torch.float32)
        layer(hidden, layout, DropoutSeed(torch.tensor(1))).sum().backward()
        return time.perf_counter() - start


def bucket_into_one(lengths: list[int]) -> None:
    """Return None, which means one bucket for all sequences; replaces ``bucket_sequences``."""


def time_bf16_attention(qkv: Tensor, length: int, *, is_unfused: bool) -> float:
    """Return the seconds of a bf16 forward and backward pass for qkv [T, 3, N, H]."""
    num_sequences = qkv.shape[0] // length
    batch = pack_sequences([([0] * length, [0] * length)] * num_sequences)
    layout = build_attention_layout(batch, "padded", is_causal=False, dtype=torch.float32)
    max_seqlen = padded_attention.UNFUSED_ATTENTION_MAX_SEQLEN if is_unfused else 0
    with mock.patch.object(padded_attention, "UNFUSED_ATTENTION_MAX_SEQLEN", max_seqlen):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16):
            output = padded_attention.padded_attention(qkv, layout, None, 0.0)
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
        return time.perf_counter() - start


def compare_bf16_kernels(ratios: dict[str, float], measurements: dict[str, float]) -> None:
    """Compare two matrix products and a softmax with PyTorch's attention in bf16."""
    for (num_heads, head_dim), length in product(HEAD_SHAPES, LENGTHS):
        num_tokens = NUM_TOKENS // length * length
        qkv = torch.randn(num_tokens, 3, num_heads, head_dim).bfloat16().requires_grad_()
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(NUM_RUNS):
            for is_unfused, times in seconds.items():
                times.append(time_bf16_attention(qkv, length, is_unfused=is_unfused))
        unfused_seconds, fused_seconds = median(seconds[True]), median(seconds[False])
        key = f"bf16, heads of {head_dim}, {length} tokens"
        ratios[f"{key}: PyTorch's attention / math attention"] = fused_seconds / unfused_seconds
        measurements[f"{key}: ms of math attention"] = 1000 * unfused_seconds
        print(f"{key}: {fused_seconds / unfused_seconds:.2f} x")


def main() -> None:
    """Run both comparisons, and print and write the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # Training and inference keep freed memory too. Without it, page faults dominate the times.
    keep_freed_memory()
    ratios: dict[str, float] = {}
    measurements: dict[str, float] = {}
    compare_bf16_kernels(ratios, measurements)
    compare_bucketing(ratios, measurements)
    report("attention", ratios, measurements, options.json)


def compare_bucketing(ratios: dict[str, float], measurements: dict[str, float]) -> None:
    """Compare padding within length buckets with padding all sequences to the longest one."""
    # Width and heads of all-MiniLM-L6-v2.
    config = ModelConfig(vocab_size=10, width=384, heads=12, attention_dropout=0.1)
    layer = SelfAttention(config, dropout_index=0)
    for task in LENGTH_DISTRIBUTIONS:
        for mode, is_training in (("training", True), ("inference", False)):
            layer.train(is_training)
            lengths = draw_lengths(task)
            seconds: dict[bool, list[float]] = {True: [], False: []}
            for _ in range(NUM_RUNS):
                for one_bucket in (True, False):
                    seconds[one_bucket].append(
                        time_attention_layer(layer, lengths, one_bucket=one_bucket)
                    )
            one_bucket_seconds, bucketed_seconds = median(seconds[True]), median(seconds[False])
            key = f"{task}, {mode}"
            ratios[f"{key}: one bucket / several buckets"] = one_bucket_seconds / bucketed_seconds
            measurements[f"{key}: ms in several buckets"] = 1000 * bucketed_seconds
            print(
                f"{key}: {one_bucket_seconds / bucketed_seconds:.2f} x "
                f"({sum(lengths)} tokens, longest sequence {max(lengths)})"
            )


if __name__ == "__main__":
    main()
