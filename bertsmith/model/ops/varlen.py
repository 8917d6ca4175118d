"""PyTorch's variable-length flash attention on CUDA."""

import inspect
from typing import Any

from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

#: Whether this PyTorch release has the argument `window_size` (left, right; -1 for unlimited)
#: instead of `is_causal`.
_HAS_WINDOW_SIZE = "window_size" in inspect.signature(varlen_attn).parameters


def varlen_attention(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *, is_causal: bool
) -> Tensor:
    """Compute attention within each sequence: [T, 3, N, H] -> [T, N, H].

    Args:
        qkv: Queries, keys and values in 16 bits on CUDA, [T, 3, N, H].
        cu_seqlens: int32 [B + 1], cumulative sequence lengths.
        max_seqlen: S.
        is_causal: Whether a token attends only to itself and earlier tokens.

    Raises:
        ValueError: If the tensors are not on CUDA.
    """
    if not qkv.is_cuda:
        raise ValueError(
            f"the varlen kernel runs on CUDA only: the tensors are on {qkv.device}; use the padded "
            "kernel"
        )
    query, key, value = qkv.unbind(1)
    options: dict[str, Any] = {"is_causal": is_causal}
    if _HAS_WINDOW_SIZE:
        # With the window (-1, -1), PyTorch 2.14 selects cuDNN on some GPUs, which builds a plan for
        # each new shape. Flash attention treats a window of ``max_seqlen`` as unlimited.
        options = {"window_size": (-1, 0) if is_causal else (max_seqlen, max_seqlen)}
    output = varlen_attn(
        query, key, value, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options
    )
    assert isinstance(output, Tensor)
    return output
