"""How a Linear's input and weights share their large columns, so that 8 bits hold both.

It never quantizes anything.
"""

from typing import Final

from torch import Tensor

#: How far: 0 leaves the input as it is, 1 makes all its columns alike (Xiao et al. 2023,
#: arXiv:2211.10438, equation 4; theirs is 0.5, or more where columns differ much). Of 0.5, 0.6 and
#: 0.7 the last leaves all-MiniLM-L6-v2's vectors nearest to what they were, and changes the
#: probabilities of a fine-tuned one least; see docs/measurements.md.
_SHARE: Final = 0.7


def smoothquant_scales(scale: Tensor, weight: Tensor) -> Tensor:
    """Return by what to divide the columns of an input that a LayerNorm made, float [in].

    scale: the LayerNorm's weight [in]. weight: that of the Linear which reads them, [out, in].
    As large as the LayerNorm makes a column, and as small as the weights are that read it, so that
    both have even columns: no text is needed to find out.
    """
    read = weight.detach().abs().amax(0).clamp(min=1e-12)
    return (scale.detach().abs() ** _SHARE / read ** (1 - _SHARE)).clamp(min=1e-6)
