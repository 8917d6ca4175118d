"""From the packed row to a padded one and back, with gradients that only copy.

It never knows what the rows hold.
"""

from typing import Any

import torch
from torch import Tensor


def _spread(rows: Tensor, slots: Tensor, size: int) -> Tensor:
    return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, slots, rows)


class _Pad(torch.autograd.Function):
    """Written out because autograd's gradient of a gather adds, which is slow and unordered."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(slots)
        return _spread(rows, slots, size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return gradient.index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.size = rows.shape[0]
        return rows.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        return _spread(gradient, slots, ctx.size), None


def pad(rows: Tensor, slots: Tensor, size: int) -> Tensor:
    """Put rows [T, ...] at ``slots`` (int64 [T], all different) of a zeroed [size, ...]."""
    padded: Tensor = _Pad.apply(rows, slots, size)  # type: ignore[no-untyped-call]
    return padded


def unpad(rows: Tensor, slots: Tensor) -> Tensor:
    """Take the rows at ``slots`` (int64 [T], all different): [size, ...] -> [T, ...]."""
    taken: Tensor = _Unpad.apply(rows, slots)  # type: ignore[no-untyped-call]
    return taken
