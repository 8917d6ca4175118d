"""CUDA features that determine the precision and the attention kernel."""

import torch

#: Compute capability of Ampere (A100), the first GPUs with bf16 matrix products. Flash attention
#: needs it, too.
_AMPERE = (8, 0)
#: Flash attention needs head widths that are multiples of this number, and at most the maximum.
_HEAD_DIM_MULTIPLE, _MAX_HEAD_DIM = 8, 256


def has_cuda_bf16(device: torch.device) -> bool:
    """Return whether a device is a CUDA GPU with fast bf16 matrix products (Ampere or later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _AMPERE


def find_varlen_obstacle(device: torch.device, head_dim: int) -> str | None:
    """Return why the `varlen` kernel cannot run; None if it can run in 16 bits.

    Args:
        device: The device of the model.
        head_dim: H.
    """
    if device.type != "cuda":
        return f"it runs on CUDA only, and the device is {device}"
    if not has_cuda_bf16(device):
        major, minor = torch.cuda.get_device_capability(device)
        return f"it needs compute capability 8.0 or higher, and {device} has {major}.{minor}"
    if head_dim % _HEAD_DIM_MULTIPLE or head_dim > _MAX_HEAD_DIM:
        return (
            f"it needs a head width that is a multiple of {_HEAD_DIM_MULTIPLE} and at most "
            f"{_MAX_HEAD_DIM}, and the head width is {head_dim}"
        )
    return None
