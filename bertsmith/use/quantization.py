"""Convert a model to 8-bit or 16-bit arithmetic, whichever is faster, for inference."""

import copy
import warnings
from dataclasses import replace
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from bertsmith.bundle import FineTunedBundle, PretrainedBundle
from bertsmith.errors import ModelError
from bertsmith.model.bert import BertModel
from bertsmith.model.encoder import EncoderLayer
from bertsmith.model.ops.cpu import has_bf16, has_onednn_bf16, has_vnni
from bertsmith.model.ops.cuda import has_cuda_bf16
from bertsmith.model.ops.linear import onednn_linear, pad_rows, round_up_num_rows
from bertsmith.model.ops.smoothquant import smoothquant_scales

#: Largest absolute values of 7-bit and 8-bit weights. CPUs without VNNI add two products of weights
#: and inputs in 16 bits. The sum can be up to 2 * 255 * 127, which does not fit in 16 bits. It fits
#: with 7-bit weights (2 * 255 * 63) or 7-bit inputs (2 * 127 * 127).
_MAX_7_BIT, _MAX_8_BIT = 63, 127

#: Activation functions that oneDNN computes together with a product, and their names there.
_FUSED_ACTIVATIONS: Final[dict[str, Any]] = {
    "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", ""),
}  # fmt: skip

Bundle = TypeVar("Bundle", bound=PretrainedBundle | FineTunedBundle)


class Int8Linear(nn.Module):
    """A Linear layer with 8-bit weights and inputs: one scale per weight row and per token.

    PyTorch's quantized operator uses one scale for all tokens of a batch. Therefore each token's
    input is first divided by its largest absolute value.
    """

    def __init__(self, weight: Tensor, bias: Tensor, input_scales: Tensor | None) -> None:
        """Quantize a Linear layer.

        Args:
            weight: float32 [out, in].
            bias: float32 [out].
            input_scales: SmoothQuant scales by which the input columns are divided, float32 [in],
                or None. On CPUs without VNNI, the weights use 7 bits if there are scales; otherwise
                the inputs use 7 bits.
        """
        super().__init__()
        needs_spare_bit = not has_vnni() and _choose_quantization_engine() != "qnnpack"
        self.inverse_scales = None if input_scales is None else 1.0 / input_scales
        self.bias = bias.detach()
        # Tells PyTorch's operator to use 7-bit inputs.
        self.reduce_range = needs_spare_bit and input_scales is None
        weight = weight.detach() * (1.0 if input_scales is None else input_scales)
        row_scales = weight.abs().amax(1).clamp(min=1e-12).double()
        has_7_bit_weights = needs_spare_bit and input_scales is not None
        row_scales = row_scales / (_MAX_7_BIT if has_7_bit_weights else _MAX_8_BIT)
        previous_engine = torch.backends.quantized.engine
        with warnings.catch_warnings():
            # PyTorch warns that quantized tensors are deprecated, but linear_dynamic needs them.
            warnings.simplefilter("ignore")
            zero_points = torch.zeros(len(weight), dtype=torch.int64)
            quantized = torch.quantize_per_channel(weight, row_scales, zero_points, 0, torch.qint8)
        try:
            # With AVX2, the oneDNN engine is at least 10 % faster than the others.
            torch.backends.quantized.engine = _choose_quantization_engine()
            self.packed = torch.ops.quantized.linear_prepack(quantized, None)
        finally:
            torch.backends.quantized.engine = previous_engine

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Apply the layer: [T, in] -> [T, out]. The result is written to ``out``, if given."""
        if self.inverse_scales is not None:
            x = x * self.inverse_scales
        # Computing x.abs() would take longer, because it writes a tensor of the size of x.
        token_scales = torch.maximum(x.amax(-1, keepdim=True), -x.amin(-1, keepdim=True))
        token_scales.clamp_(min=1e-12)
        num_tokens = x.shape[0]
        # Row counts are rounded up because oneDNN compiles and caches code for each shape.
        padded = x.new_empty(round_up_num_rows(num_tokens), x.shape[1])
        torch.div(x, token_scales, out=padded[:num_tokens])
        padded[num_tokens:].zero_()
        padded_product = torch.ops.quantized.linear_dynamic(padded, self.packed, self.reduce_range)
        product = padded_product[:num_tokens]
        return torch.addcmul(self.bias, product, token_scales, out=product if out is None else out)


class _Int8QueryKeyValue(nn.Module):
    """The projection to queries, keys and values: 8-bit queries and keys, float32 values."""

    def __init__(self, linear: nn.Linear, input_magnitudes: Tensor) -> None:
        """Convert the projection.

        Args:
            linear: The projection to queries, keys and values.
            input_magnitudes: Relative magnitude of each input channel, float32 [D].
        """
        super().__init__()
        self.query_key_width = 2 * linear.in_features
        weight = linear.weight.detach()
        bias = linear.bias.detach()
        query_key_weight = weight[: self.query_key_width]
        self.query_key = Int8Linear(
            query_key_weight,
            bias[: self.query_key_width],
            smoothquant_scales(input_magnitudes, query_key_weight),
        )
        self.value_weight = weight[self.query_key_width :].clone().T
        self.value_bias = bias[self.query_key_width :]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the queries, keys and values: [T, D] -> [T, 3 D]."""
        out = x.new_empty(x.shape[0], self.query_key_width + self.value_bias.shape[0])
        self.query_key(x, out[:, : self.query_key_width])
        torch.addmm(self.value_bias, x, self.value_weight, out=out[:, self.query_key_width :])
        return out


class _FusedLinear(nn.Module):
    """A bfloat16 Linear layer and its activation function, as one operation of oneDNN."""

    def __init__(self, linear: nn.Linear, activation: str) -> None:
        """Convert a Linear layer; ``activation`` is a key of ``_FUSED_ACTIVATIONS``."""
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.activation = _FUSED_ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer and the activation function: [T, in] -> [T, out]."""
        return onednn_linear(pad_rows(x), self.weight, self.bias, *self.activation)[: x.shape[0]]


def quantize_model(bundle: Bundle) -> Bundle:
    """Return a copy of a loaded model that computes in 8 or 16 bits, whichever is faster.

    Only the encoder is converted; the heads stay in float32. A model that is already converted is
    returned unchanged.

    Args:
        bundle: A model loaded by ``bertsmith.load`` or ``bertsmith.bundle.load_fine_tuned``.

    Raises:
        ModelError: The copy needs 8 bits, but the model does not use LayerNorm.
    """
    encoder = bundle.model.bert
    fast_encoder = quantize(encoder)
    if fast_encoder is encoder:
        return bundle
    # deepcopy takes the copy of the encoder from the memo and copies the heads, including the
    # decoder weight that the masked-LM head shares with the original encoder.
    model: Any = copy.deepcopy(bundle.model, {id(encoder): fast_encoder})
    return replace(bundle, model=model.eval().requires_grad_(False))


def quantize(encoder: BertModel) -> BertModel:
    """Return a copy of an encoder in 16 or 8 bits; task heads get its outputs in float32.

    In the benchmarks, its pooled vectors have a cosine similarity of at least 0.995 to those of the
    original; vectors of single tokens differ more. GPUs use bfloat16, or float16 before compute
    capability 8.0. CPUs with bfloat16 instructions use bfloat16. Other CPUs use 8 bits for all
    Linear layers except the value projections. In 8 bits, the value projections would lose more
    precision than all other layers together, and they are only a twelfth of the multiplications
    (docs/benchmarks.md).

    An encoder that is already converted is returned unchanged.

    Raises:
        ModelError: The copy needs 8 bits, but the model does not use LayerNorm.
    """
    if encoder.output_dtype is not None:
        return encoder
    device = next(encoder.parameters()).device
    quantized = copy.deepcopy(encoder).eval().requires_grad_(False)
    quantized.output_dtype = torch.float32
    dtype = choose_16_bit_dtype(device)
    if dtype is not None:
        quantized.to(dtype)
        if device.type == "cpu":
            _fuse_activations(quantized)
        return quantized
    if encoder.config.norm not in ("post", "pre"):
        raise ModelError(
            f"the fast mode needs LayerNorm, and model.norm is {encoder.config.norm!r}; omit "
            "--fast (in Python, fast=True)"
        )
    is_post_norm = encoder.config.norm == "post"
    previous_norm = quantized.embeddings.norm
    for layer in quantized.encoder.layers:
        assert isinstance(layer, EncoderLayer)
        attention_norm, feed_forward_norm = layer.attention_norm, layer.feed_forward_norm
        if is_post_norm:
            _quantize_layer(layer, previous_norm, attention_norm)
        else:
            _quantize_layer(layer, attention_norm, feed_forward_norm)
        previous_norm = feed_forward_norm
    return quantized


def _fuse_activations(encoder: BertModel) -> None:
    """Let oneDNN compute the activation functions of a bfloat16 encoder, in place."""
    name = encoder.config.activation
    if name not in _FUSED_ACTIVATIONS or not has_onednn_bf16():
        return
    for layer in encoder.encoder.layers:
        assert isinstance(layer, EncoderLayer)
        layer.add_module("up", _FusedLinear(layer.up, name))
        layer.activation = _return_unchanged


def _return_unchanged(x: Tensor) -> Tensor:
    return x


def choose_16_bit_dtype(device: torch.device) -> torch.dtype | None:
    """Return the 16-bit dtype that is fastest on a device; None if 8 bits are faster."""
    if device.type == "cuda":
        return torch.bfloat16 if has_cuda_bf16(device) else torch.float16
    return torch.bfloat16 if has_bf16() else None


def _quantize_layer(
    layer: EncoderLayer, attention_input_norm: nn.Module, feed_forward_input_norm: nn.Module
) -> None:
    """Replace the Linear layers of an encoder layer by 8-bit layers, in place.

    Args:
        layer: The encoder layer.
        attention_input_norm: The LayerNorm whose output is the input of the attention.
        feed_forward_input_norm: The LayerNorm whose output is the input of the feed-forward
            network.
    """
    assert isinstance(attention_input_norm, nn.LayerNorm)
    assert isinstance(feed_forward_input_norm, nn.LayerNorm)
    attention = layer.attention
    up_scales = smoothquant_scales(_estimate_magnitudes(feed_forward_input_norm), layer.up.weight)
    query_key_value = _Int8QueryKeyValue(
        attention.query_key_value, _estimate_magnitudes(attention_input_norm)
    )
    # The attributes are declared as Linear. add_module can replace them by another type of module.
    attention.add_module("query_key_value", query_key_value)
    attention.add_module("output", _to_int8(attention.output, None))
    layer.add_module("up", _to_int8(layer.up, up_scales))
    layer.add_module("down", _to_int8(layer.down, None))


def _to_int8(linear: nn.Linear, input_scales: Tensor | None) -> Int8Linear:
    """Return an 8-bit copy of a Linear layer."""
    return Int8Linear(linear.weight, linear.bias, input_scales)


def _estimate_magnitudes(norm: nn.LayerNorm) -> Tensor:
    """Return the relative magnitude of each output channel of a LayerNorm, float32 [D].

    Normalized values are mostly between -4 and 4, so the outputs are mostly smaller than 4 times
    the weight plus the bias. The result is a quarter of this.
    """
    return norm.weight.detach().abs() + norm.bias.detach().abs() / 4


def _choose_quantization_engine() -> str:
    """Return PyTorch's engine for quantized operators: oneDNN if available, else the default."""
    engines = torch.backends.quantized.supported_engines
    return "onednn" if "onednn" in engines else torch.backends.quantized.engine
