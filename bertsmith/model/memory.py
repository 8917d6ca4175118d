"""Estimates of the memory a model needs, and the memory this machine has.

The estimates are lower bounds: what they refuse cannot fit, what they accept may still not.
"""

import os
from pathlib import Path
from typing import Final

from bertsmith.model.config import ModelConfig

#: The limit of a container (control group version 2, then 1).
_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_SWAP: Final = Path("/proc/meminfo")


def total_memory_bytes() -> int:
    """Return the memory of this machine or container in bytes, swap included."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _LIMITS:
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
        if text.isdecimal():
            total = min(total, int(text))
    return total + _swap_bytes()


def _swap_bytes() -> int:
    lines = _SWAP.read_text(encoding="utf-8").splitlines() if _SWAP.is_file() else []
    sizes = [line.split()[1] for line in lines if line.startswith("SwapTotal:")]
    return int(sizes[0]) * 1024 if sizes else 0


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights in the embeddings and the layers' linear maps."""
    rows = config.vocab_size + config.max_positions + config.segments
    layer = 4 * config.width * config.width + 2 * config.width * config.feed_forward
    return rows * config.width + config.layers * layer


def weight_bytes(config: ModelConfig) -> int:
    """Return the bytes of the weights in float32."""
    return 4 * num_parameters(config)


def training_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the bytes of a training step over ``num_tokens`` tokens at once.

    Weights, gradients and Adam's two moments in float32; and for the backward pass, in 16 bits,
    the inputs of each layer's linear maps and of the feed-forward network's activation.
    """
    per_token = 2 * config.layers * (5 * config.width + 2 * config.feed_forward)
    return 4 * weight_bytes(config) + num_tokens * per_token


def inference_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the bytes of a forward pass over ``num_tokens`` tokens at once, in 8 bits or more."""
    return num_parameters(config) + num_tokens * (4 * config.width + config.feed_forward)


def format_bytes(num_bytes: int) -> str:
    """Return a size for people, such as "23.5 GiB"."""
    return f"{num_bytes / 2**30:,.1f} GiB"
