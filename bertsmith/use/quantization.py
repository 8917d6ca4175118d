"""The same encoder in the numbers that this machine multiplies fastest: 8 or 16 bits.

It never trains: what comes of it has no gradient.
"""

import copy
import warnings

import torch
from torch import Tensor, nn

from bertsmith.errors import ModelError
from bertsmith.model.bert import BertModel
from bertsmith.model.encoder import EncoderLayer
from bertsmith.model.ops.cpu import has_bf16, has_vnni
from bertsmith.model.ops.linear import bucket_rows
from bertsmith.model.ops.smoothquant import smoothquant_scales

#: The largest weights. CPUs without VNNI add two products up in 16 bits, which hold 2 * 255 * 63 or
#: 2 * 127 * 127: there either the weights or the inputs give a bit up.
_SEVEN, _EIGHT = 63, 127


class _Eight(nn.Module):
    """A Linear with weights of 8 bits, a scale a row; the input gets 8 bits, a scale a token.

    PyTorch has one scale for all tokens of a batch, so each token is first divided by its own
    largest number. ``columns``: by what the input's columns are divided before that, float32 [in];
    where a bit is to be given up, it is the weights' then, and else the input's.
    """

    def __init__(self, weight: Tensor, bias: Tensor, columns: Tensor | None) -> None:
        super().__init__()
        narrow = not has_vnni() and _engine() != "qnnpack"
        self.inverse, self.bias = None if columns is None else 1.0 / columns, bias.detach()
        self.narrow_input = narrow and columns is None
        weight = weight.detach() * (1.0 if columns is None else columns)
        scales = weight.abs().amax(1).clamp(min=1e-12).double()
        scales = scales / (_SEVEN if narrow and columns is not None else _EIGHT)
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

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, in] -> [T, out], written to ``out`` if given."""
        if self.inverse is not None:
            x = x * self.inverse
        # Twice read: abs() would write as well, which takes longer.
        largest = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
        largest.clamp_(min=1e-12)
        tokens = x.shape[0]
        even = x.new_empty(bucket_rows(tokens), x.shape[1])
        torch.div(x, largest, out=even[:tokens])
        even[tokens:].zero_()
        whole = torch.ops.quantized.linear_dynamic(even, self.packed, self.narrow_input)
        product = whole[:tokens]
        return torch.addcmul(self.bias, product, largest, out=product if out is None else out)


class _Projections(nn.Module):
    """The Linear of queries, keys and values: queries and keys in 8 bits, values in float32."""

    def __init__(self, linear: nn.Linear, size: Tensor) -> None:
        """``size``: how large the input's columns are, float32 [D]."""
        super().__init__()
        self.border = 2 * linear.in_features
        weight, bias = linear.weight.detach(), linear.bias.detach()
        looking = weight[: self.border]
        self.looking = _Eight(looking, bias[: self.border], smoothquant_scales(size, looking))
        self.values, self.bias = weight[self.border :].clone().T, bias[self.border :]

    def forward(self, x: Tensor) -> Tensor:
        """[T, D] -> [T, 3 D]."""
        found = x.new_empty(x.shape[0], self.border + self.bias.shape[0])
        self.looking(x, found[:, : self.border])
        torch.addmm(self.bias, x, self.values, out=found[:, self.border :])
        return found


def quantize(encoder: BertModel) -> BertModel:
    """Return a copy of an encoder for quick vectors: a cosine of 0.995 or more to its own.

    bfloat16 on CUDA and on CPUs that multiply it. Elsewhere all Linears get 8 bits but those of the
    values, of which the vectors are made: they are a twelfth of all products, and in 8 bits cost
    more precision than all the others together (docs/measurements.md).
    """
    device = next(encoder.parameters()).device
    own = copy.deepcopy(encoder).eval().requires_grad_(False)
    if device.type == "cuda" or has_bf16():
        return own.bfloat16()
    if encoder.config.norm not in ("post", "pre"):
        raise ModelError(
            f"the fast form needs LayerNorm, and model.norm is {encoder.config.norm!r}; ask for "
            "the plain one"
        )
    post, before = encoder.config.norm == "post", own.embeddings.norm
    for layer in own.encoder.layers:
        assert isinstance(layer, EncoderLayer)
        first, second = layer.attention_norm, layer.feed_forward_norm
        _quicken(layer, *((before, first) if post else (first, second)))
        before = second
    return own


def _quicken(layer: EncoderLayer, attention: nn.Module, feed_forward: nn.Module) -> None:
    """Give a layer 8 bits, by the LayerNorms that make what its two halves read."""
    assert isinstance(attention, nn.LayerNorm)
    assert isinstance(feed_forward, nn.LayerNorm)
    looking = layer.attention
    up = smoothquant_scales(_size(feed_forward), layer.up.weight)
    looking.add_module("query_key_value", _Projections(looking.query_key_value, _size(attention)))
    for parent, name, of in ((looking, "output", None), (layer, "up", up), (layer, "down", None)):
        linear = getattr(parent, name)
        parent.add_module(name, _Eight(linear.weight, linear.bias, of))


def _size(norm: nn.LayerNorm) -> Tensor:
    """Return how large a LayerNorm makes its columns, float32 [D], to a factor.

    Before weight and bias most of its numbers lie within four of 0, so four weights or a bias.
    """
    return norm.weight.detach().abs() + norm.bias.detach().abs() / 4


def _engine() -> str:
    known = torch.backends.quantized.supported_engines
    return "onednn" if "onednn" in known else torch.backends.quantized.engine
