"""The same encoder in the numbers that this machine multiplies fastest: 8 or 16 bits.

It never trains: what comes of it has no gradient.
"""

import copy
import warnings

import torch
from torch import Tensor, nn

from bertsmith.errors import ModelError
from bertsmith.model.bert import BertModel
from bertsmith.model.encoder import Layer
from bertsmith.model.smoothing import even_columns
from bertsmith.train.device import has_bf16

#: The largest numbers of weights and inputs, where the weights give a bit up and where the inputs
#: do: CPUs without VNNI add two products up in 16 bits, which hold 2 * 255 * 63 or 2 * 127 * 127.
_SEVEN, _EIGHT = 63, 127


class _Eight(nn.Module):
    """A Linear with weights of 8 bits, a scale a row; the input gets 8 bits as it comes.

    All tokens of a batch share one scale, so one large number would cost all others their
    precision. ``columns``: by what the input's columns are divided first, float32 [in]; weights
    have 7 bits then. Without them each token is first divided by its own largest number, and it is
    the input that has 7 bits.
    """

    def __init__(self, linear: nn.Linear, columns: Tensor | None) -> None:
        super().__init__()
        weight = linear.weight.detach() * (1.0 if columns is None else columns)
        self.inverse = None if columns is None else 1.0 / columns
        self.bias = linear.bias.detach()
        scales = weight.abs().amax(1).clamp(min=1e-12).double()
        scales = scales / (_EIGHT if columns is None else _SEVEN)
        before = torch.backends.quantized.engine
        with warnings.catch_warnings():
            # Quantized tensors are to go; the operators that read them are not.
            warnings.simplefilter("ignore")
            zeros = torch.zeros(len(weight), dtype=torch.int64)
            held = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        try:
            # The quickest of PyTorch's engines on AVX2, by a tenth and more.
            torch.backends.quantized.engine = _engine()
            self.packed = torch.ops.quantized.linear_prepack(held, None)
        finally:
            torch.backends.quantized.engine = before

    def forward(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out]."""
        product = torch.ops.quantized.linear_dynamic
        if self.inverse is not None:
            summed: Tensor = self.bias + product(x * self.inverse, self.packed, False)
            return summed
        largest = x.abs().amax(-1, keepdim=True).clamp_(min=1e-12)
        return torch.addcmul(self.bias, product(x / largest, self.packed, True), largest)


def quickened(encoder: BertModel) -> BertModel:
    """Return a copy of an encoder for quick vectors: a cosine of 0.995 or more to its own.

    bfloat16 on CUDA and on CPUs that multiply it. Elsewhere the feed-forward networks, two thirds
    of all products, get 8 bits; the products of attention stay in float32: in 8 bits they cost the
    vectors more than they save.
    """
    device = next(encoder.parameters()).device
    own = copy.deepcopy(encoder).eval()
    if device.type == "cuda" or has_bf16():
        return own.bfloat16()
    if encoder.config.norm not in ("post", "pre"):
        raise ModelError(
            f"the fast form needs LayerNorm, and model.norm is {encoder.config.norm!r}; ask for "
            "the plain one"
        )
    post = encoder.config.norm == "post"
    for layer in own.encoder.layers:
        assert isinstance(layer, Layer)
        norm = layer.attention_norm if post else layer.feed_forward_norm
        assert isinstance(norm, nn.LayerNorm)
        layer.add_module("up", _Eight(layer.up, even_columns(norm.weight, layer.up.weight)))
        layer.add_module("down", _Eight(layer.down, None))
    return own


def _engine() -> str:
    known = torch.backends.quantized.supported_engines
    return "onednn" if "onednn" in known else torch.backends.quantized.engine
