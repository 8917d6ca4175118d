"""Padding and unpadding of packed rows, with fast gradients."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _Pad(torch.autograd.Function):
    """index_select with an index_select as its gradient; autograd would use a slow index_add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pad_indices: Tensor, unpad_indices: Tensor) -> Tensor:
        ctx.save_for_backward(unpad_indices)
        ctx.num_rows = rows.shape[0]
        return rows.index_select(0, pad_indices)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (unpad_indices,) = ctx.saved_tensors
        return _select_rows(grad_output, unpad_indices, ctx.num_rows), None, None


class _Unpad(torch.autograd.Function):
    """index_select with an index_copy as its gradient; autograd would use a slow index_add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, unpad_indices: Tensor, num_packed_rows: int) -> Tensor:
        ctx.save_for_backward(unpad_indices)
        ctx.num_rows = rows.shape[0]
        return _select_rows(rows, unpad_indices, num_packed_rows)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (unpad_indices,) = ctx.saved_tensors
        grad_input = grad_output.new_zeros(ctx.num_rows, *grad_output.shape[1:])
        grad_input.index_copy_(0, unpad_indices, grad_output[: len(unpad_indices)])
        return grad_input, None, None


def _select_rows(rows: Tensor, indices: Tensor, num_rows: int) -> Tensor:
    """Return the rows at ``indices``, followed by rows of zeros: [num_rows, ...]."""
    if torch.compiler.is_compiling() or len(indices) == num_rows:
        return rows.index_select(0, indices)
    selected = rows.new_empty(num_rows, *rows.shape[1:])
    torch.index_select(rows, 0, indices, out=selected[: len(indices)])
    selected[len(indices) :] = 0.0
    return selected


def pad(rows: Tensor, pad_indices: Tensor, unpad_indices: Tensor) -> Tensor:
    """Copy packed rows to padded rows: [T or more, ...] -> [padded rows, ...].

    Padding consists of copies of packed rows, which is faster than writing zeros. The gradient of
    padding is ignored, so results must not depend on padding.

    Args:
        rows: [T, ...], or more rows, of which the last ones belong to no sequence.
        pad_indices: int64 [padded rows], the packed row to copy to each padded row.
        unpad_indices: int64 [T], the index of each packed row among the padded rows, without
            duplicates.
    """
    # torch.autograd.Function.apply is untyped.
    padded: Tensor = _Pad.apply(rows, pad_indices, unpad_indices)  # type: ignore[no-untyped-call]
    return padded


def unpad(rows: Tensor, unpad_indices: Tensor, num_packed_rows: int) -> Tensor:
    """Select the packed rows from padded rows: [padded rows, ...] -> [num_packed_rows, ...].

    Args:
        rows: [padded rows, ...].
        unpad_indices: int64 [T], the index of each packed row among the padded rows, without
            duplicates.
        num_packed_rows: T, or more for rows of zeros at the end.
    """
    packed: Tensor = _Unpad.apply(rows, unpad_indices, num_packed_rows)  # type: ignore[no-untyped-call]
    return packed


def append_zero_rows(rows: Tensor, num_rows: int) -> Tensor:
    """Append rows of zeros up to ``num_rows`` rows: [T, N, H] -> [num_rows, N, H]."""
    num_zero_rows = num_rows - len(rows)
    return F.pad(rows, (0, 0, 0, 0, 0, num_zero_rows)) if num_zero_rows else rows
