"""Padding and unpadding of packed rows, with fast gradients."""

from typing import Any

import torch
from torch import Tensor


class _Pad(torch.autograd.Function):
    """index_select with an index_select as its gradient; autograd would use a slow index_add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pad_indices: Tensor, unpad_indices: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_indices)
        return rows.index_select(0, pad_indices)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (unpad_indices,) = ctx.saved_tensors
        return grad_output.index_select(0, unpad_indices), None, None


class _Unpad(torch.autograd.Function):
    """index_select with an index_copy as its gradient; autograd would use a slow index_add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, unpad_indices: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_indices)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, unpad_indices)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (unpad_indices,) = ctx.saved_tensors
        grad_input = grad_output.new_zeros(ctx.num_rows, *grad_output.shape[1:])
        return grad_input.index_copy_(0, unpad_indices, grad_output), None


def pad(rows: Tensor, pad_indices: Tensor, unpad_indices: Tensor) -> Tensor:
    """Copy packed rows to padded rows: [T, ...] -> [padded rows, ...].

    Padding consists of copies of packed rows, which is faster than writing zeros. The gradient of
    padding is ignored, so results must not depend on padding.

    Args:
        rows: [T, ...].
        pad_indices: int64 [padded rows], the packed row to copy to each padded row.
        unpad_indices: int64 [T], the index of each packed row among the padded rows, without
            duplicates.
    """
    # torch.autograd.Function.apply is untyped.
    padded: Tensor = _Pad.apply(rows, pad_indices, unpad_indices)  # type: ignore[no-untyped-call]
    return padded


def unpad(rows: Tensor, unpad_indices: Tensor) -> Tensor:
    """Select the packed rows from padded rows: [padded rows, ...] -> [T, ...].

    Args:
        rows: [padded rows, ...].
        unpad_indices: int64 [T], the index of each packed row among the padded rows, without
            duplicates.
    """
    packed: Tensor = _Unpad.apply(rows, unpad_indices)  # type: ignore[no-untyped-call]
    return packed
