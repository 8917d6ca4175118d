"""PyTorch's variable-length flash attention on CUDA, whose signature differs between releases.

It never knows of layers, and nothing else knows of those signatures.
"""

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

#: Releases that take `window_size`, (left, right) keys with -1 for no limit; others `is_causal`.
_TAKES_WINDOW = "window_size" in inspect.signature(varlen_attn).parameters


def varlen_attention(qkv: Tensor, boundaries: Tensor, longest: int, *, causal: bool) -> Tensor:
    """Attend inside each sequence: [T, 3, N, H] in 16 bits on CUDA -> [T, N, H].

    boundaries: int32 [B + 1]. Raises ValueError on another device.
    """
    if not qkv.is_cuda:
        raise ValueError("the varlen kernel runs on CUDA only; use the padded kernel here")
    query, key, value = qkv.unbind(1)
    options: dict[str, Any] = {"is_causal": causal}
    if _TAKES_WINDOW:
        options = {"window_size": (-1, 0) if causal else (-1, -1)}
    mixed = varlen_attn(query, key, value, boundaries, boundaries, longest, longest, **options)
    assert isinstance(mixed, Tensor)
    return mixed
