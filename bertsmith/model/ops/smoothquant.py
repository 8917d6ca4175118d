"""SmoothQuant scales, which move outliers from activations to weights before quantization."""

from typing import Final

from torch import Tensor

#: Migration strength alpha of Xiao et al. 2023 (arXiv:2211.10438, equation 4). With 0 the
#: activations are unchanged; with 1 all columns of the activations have the same magnitude. The
#: paper uses 0.5 or more. Among 0.5, 0.6 and 0.7, the value 0.7 changed the outputs of
#: all-MiniLM-L6-v2 least.
_ALPHA: Final = 0.7


def smoothquant_scales(input_magnitudes: Tensor, linear_weight: Tensor) -> Tensor:
    """Return the scale of each input channel of a linear layer, float [in].

    Activations are divided by the scales, and the columns of the weight are multiplied by them. The
    weight of the LayerNorm that computes the input is an estimate of the input magnitudes, which
    needs no calibration data.

    Args:
        input_magnitudes: [in], relative magnitude of each input channel; signs are ignored.
        linear_weight: [out, in], weight of the linear layer.
    """
    # The lower bounds prevent divisions by zero.
    weight_max = linear_weight.detach().abs().amax(0).clamp(min=1e-12)
    return (input_magnitudes.detach().abs() ** _ALPHA / weight_max ** (1 - _ALPHA)).clamp(min=1e-6)
