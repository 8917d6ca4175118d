"""SmoothQuant scales, which move outliers from activations to weights before quantization."""

from typing import Final

from torch import Tensor

#: Migration strength alpha of Xiao et al. 2023 (arXiv:2211.10438, equation 4): 0 leaves the
#: activations unchanged, 1 makes all their columns equally large. The paper uses 0.5 or more; of
#: 0.5, 0.6 and 0.7, 0.7 changed the outputs of all-MiniLM-L6-v2 least.
_ALPHA: Final = 0.7


def smoothquant_scales(norm_weight: Tensor, linear_weight: Tensor) -> Tensor:
    """Return the divisors of a linear layer's input columns, float [in].

    The LayerNorm's weight estimates the size of each input column, so no calibration data is
    needed.

    Args:
        norm_weight: [in], weight of the LayerNorm that computes the input.
        linear_weight: [out, in], weight of the linear layer.
    """
    weight_max = linear_weight.detach().abs().amax(0).clamp(min=1e-12)
    return (norm_weight.detach().abs() ** _ALPHA / weight_max ** (1 - _ALPHA)).clamp(min=1e-6)
