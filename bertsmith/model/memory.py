"""Lower bounds for the memory that a model needs, and the memory of this machine.

A model whose estimate exceeds the available memory cannot run; one below it may still not fit.
"""

import os
from pathlib import Path
from typing import Final

from bertsmith.model.config import ModelConfig

#: Memory limit of a container: cgroup v2, then v1.
_CGROUP_LIMITS: Final = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_MEMINFO: Final = Path("/proc/meminfo")


def total_memory_bytes() -> int:
    """Return the memory of this machine or container in bytes, including swap."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in _CGROUP_LIMITS:
        text = path.read_text(encoding="ascii").strip() if path.is_file() else ""
        if text.isdecimal():
            total = min(total, int(text))
    return total + _swap_bytes()


def _swap_bytes() -> int:
    lines = _MEMINFO.read_text(encoding="utf-8").splitlines() if _MEMINFO.is_file() else []
    sizes = [line.split()[1] for line in lines if line.startswith("SwapTotal:")]
    return int(sizes[0]) * 1024 if sizes else 0


def num_parameters(config: ModelConfig) -> int:
    """Return the number of weights in the embeddings and the layers' linear layers."""
    num_embeddings = config.vocab_size + config.max_positions + config.segments
    layer = 4 * config.width * config.width + 2 * config.width * config.feed_forward
    return num_embeddings * config.width + config.layers * layer


def weight_bytes(config: ModelConfig) -> int:
    """Return the size of the weights in float32, in bytes."""
    return 4 * num_parameters(config)


def training_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the memory of a training step on ``num_tokens`` tokens at once, in bytes.

    Counts weights, gradients and Adam's two moments in float32, and the activations saved for the
    backward pass in 16 bits: the inputs of each layer's linear layers and of its activation
    function.
    """
    per_token = 2 * config.layers * (5 * config.width + 2 * config.feed_forward)
    return 4 * weight_bytes(config) + num_tokens * per_token


def inference_bytes(config: ModelConfig, num_tokens: int) -> int:
    """Return the memory of a forward pass on ``num_tokens`` tokens at once, in bytes.

    Assumes 8-bit weights, so that it is a lower bound for every precision.
    """
    return num_parameters(config) + num_tokens * (4 * config.width + config.feed_forward)


def format_bytes(num_bytes: int) -> str:
    """Format a size in GiB, such as "23.5 GiB"."""
    return f"{num_bytes / 2**30:,.1f} GiB"
