"""Attention on the CPU with sequences padded in groups of like lengths, against all together.

Forward and backward of one layer's attention, as in fine-tuning (dropout on the probabilities) and
as it is used (none), for batches of 32 sequences whose lengths spread like those of four tasks.
The two ways take turns in one process; a ratio is that of the medians.

    python benchmarks/attention.py [--json FILE]
"""

import argparse
import random
import time
from pathlib import Path
from statistics import median

import torch
from reporting import report

from bertsmith.model import attention
from bertsmith.model.attention import SelfAttention, layout
from bertsmith.model.config import ModelConfig
from bertsmith.model.dropout import Noise
from bertsmith.model.packed import pack

#: Mean and deviation of the logarithm of a length, least and most: near the quartiles of the
#: training files under a vocabulary of 30,522 words.
TASKS = {
    "SQuAD": (5.1, 0.35, 60, 384),
    "RTE": (4.05, 0.55, 20, 256),
    "MRPC": (3.95, 0.25, 20, 100),
    "CoLA": (2.4, 0.35, 4, 47),
}
BATCH, TURNS = 32, 9


def lengths_of(task: str) -> list[int]:
    """Return the lengths of a batch, the same every time."""
    chance = random.Random(0)
    middle, spread, least, most = TASKS[task]
    return [min(most, max(least, round(chance.lognormvariate(middle, spread))))
            for _ in range(BATCH)]  # fmt: skip


def seconds(layer: SelfAttention, lengths: list[int], *, together: bool) -> float:
    """Return the time of forward and backward pass."""
    packed = pack([([0] * length, [0] * length) for length in lengths])
    hidden = torch.randn(sum(lengths), layer.output.in_features, requires_grad=True)
    grouped = attention.grouped
    attention.grouped = (lambda _: None) if together else grouped
    try:
        began = time.perf_counter()
        where = layout(packed, "padded", causal=False, dtype=torch.float32)
        layer(hidden, where, Noise(torch.tensor(1))).sum().backward()
        return time.perf_counter() - began
    finally:
        attention.grouped = grouped


def main() -> None:
    """Measure each task both ways, and print how many times as long all together takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # all-MiniLM-L6-v2's width and heads.
    config = ModelConfig(vocab_size=10, width=384, heads=12, attention_dropout=0.1)
    layer = SelfAttention(config, site=0)
    ratios, figures = {}, {}
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
    report("attention in groups of like lengths", ratios, figures, options.json)


if __name__ == "__main__":
    main()
