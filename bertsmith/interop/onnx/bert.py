"""BERT as an ONNX graph over padded batches, equivalent to the packed PyTorch model.

Padding must follow the text and is masked. The package ``onnx`` is not needed.
"""

from typing import Final

import numpy as np

from bertsmith.interop.onnx.graph import Graph, Shape, ValueInfo
from bertsmith.model.config import ModelConfig

#: Inputs and dynamic axes, named as in Hugging Face Optimum.
_INPUT_IDS, _ATTENTION_MASK, _TOKEN_TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
BATCH_AXIS, CHOICES_AXIS, LENGTH_AXIS = "batch_size", "num_choices", "sequence_length"
#: Added to the attention scores of masked tokens. It is finite so that a row without any token
#: does not become NaN.
_MASKED_SCORE: Final = float(np.finfo(np.float32).min)
#: ONNX's TensorProto.BOOL.
_BOOL: Final = 9
#: The ONNX operator and attributes of each activation.
_ACTIVATIONS: Final[dict[str, tuple[str, dict[str, float | str]]]] = {
    "gelu": ("Gelu", {"approximate": "none"}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
    "relu": ("Relu", {}),
    "elu": ("Elu", {"alpha": 1.0}),
}


class BertGraph:
    """Adds the parts of a BERT to a graph; each method returns the name of its output value.

    Shapes in docstrings are those of the values, for B sequences of S tokens including padding.
    """

    def __init__(self, graph: Graph, config: ModelConfig, *, choices: bool = False) -> None:
        """Add the inputs, int64 [B, S].

        Args:
            graph: The graph to extend.
            config: The model's sizes.
            choices: Whether the inputs are [B, choices, S], flattened to [B * choices, S].
        """
        self.graph, self.config = graph, config
        shape: Shape = (BATCH_AXIS, CHOICES_AXIS, LENGTH_AXIS) if choices else (
            BATCH_AXIS, LENGTH_AXIS,
        )  # fmt: skip
        names = (_INPUT_IDS, _ATTENTION_MASK, _TOKEN_TYPE_IDS)
        graph.inputs.extend(ValueInfo(name, "int64", shape) for name in names)
        self.ids, self.mask, self.segments = names
        if choices:
            length = graph.add_node("Shape", "length of choices", _INPUT_IDS, start=2)
            flat_shape = graph.add_node("Concat", "rows", graph.int64_vector(-1), length, axis=0)
            self.ids, self.mask, self.segments = (
                graph.add_node("Reshape", f"{name} of all", name, flat_shape) for name in names
            )

    def hidden_states(self) -> str:
        """Return the last layer's hidden states, float32 [B, S, D]."""
        x, attention_bias = self._embeddings(), self._attention_bias()
        for layer in range(self.config.layers):
            x = self._layer(f"bert.encoder.layers.{layer}", x, attention_bias)
        return x if self.config.norm == "post" else self.norm("bert.encoder.norm", x)

    def mlm_logits(self, hidden: str, *, tied: bool) -> str:
        """Return masked-LM logits: float32 [B, S, D] -> [B, S, V].

        Args:
            hidden: The hidden states.
            tied: Whether the decoder shares the word embeddings, so that they are stored once.
                Quantization needs separate copies.
        """
        graph, width = self.graph, self.config.width
        x = self._activation("mlm.activation", self.linear("mlm.transform", hidden))
        x = self.norm("mlm.norm", x)
        if not tied:
            return self.linear("mlm.decoder", x)
        # Gemm takes 2-D inputs and multiplies by the transposed embeddings [V, D].
        rows = graph.add_node("Reshape", "mlm.rows", x, graph.int64_vector(-1, width))
        table = graph.weight("bert.embeddings.words.weight")
        bias = graph.weight("mlm.decoder.bias")
        logits = graph.add_node("Gemm", "mlm.decoder", rows, table, bias, transB=1)
        ids_shape = graph.add_node("Shape", "mlm.shape", self.ids)
        vocab_size = graph.int64_vector(self.config.vocab_size)
        logits_shape = graph.add_node(
            "Concat", "mlm.shape of logits", ids_shape, vocab_size, axis=0
        )
        return graph.add_node("Reshape", "mlm.logits", logits, logits_shape)

    def first_token(self, hidden: str) -> str:
        """Return the hidden states of the first tokens: float32 [B, S, D] -> [B, D]."""
        return self.graph.add_node("Gather", "first", hidden, self.graph.int64_scalar(0), axis=1)

    def last_token(self, hidden: str) -> str:
        """Return the hidden states of the last non-padding tokens: float32 [B, S, D] -> [B, D]."""
        graph = self.graph
        lengths = graph.add_node("ReduceSum", "lengths", self.mask, graph.int64_vector(1))
        indices = graph.add_node("Sub", "last places", lengths, graph.int64_scalar(1))
        return graph.add_node("GatherND", "last", hidden, indices, batch_dims=1)

    def pooler(self, tokens: str) -> str:
        """Return the pooler's output: float32 [B, D] -> [B, D]."""
        return self.graph.add_node("Tanh", "pooled", self.linear("pooler.dense", tokens))

    def linear(self, name: str, x: str) -> str:
        """Return the output of the Linear ``name``: float32 [..., in] -> [..., out]."""
        weight, bias = self.graph.transposed_weight(f"{name}.weight"), f"{name}.bias"
        product = self.graph.add_node("MatMul", f"{name}.product", x, weight)
        return self.graph.add_node("Add", f"{name}", product, self.graph.weight(bias))

    def norm(self, name: str, x: str) -> str:
        """Return the output of the LayerNorm ``name``: float32 [..., D] -> [..., D]."""
        scale, bias = self.graph.weight(f"{name}.weight"), self.graph.weight(f"{name}.bias")
        return self.graph.add_node(
            "LayerNormalization", name, x, scale, bias, axis=-1, epsilon=self.config.norm_eps
        )

    def _activation(self, name: str, x: str) -> str:
        op_type, attributes = _ACTIVATIONS[self.config.activation]
        return self.graph.add_node(op_type, name, x, **attributes)

    def _embeddings(self) -> str:
        """Return the sum of the three embeddings after LayerNorm, float32 [B, S, D]."""
        graph = self.graph
        table = graph.weight("bert.embeddings.words.weight")
        words = graph.add_node("Gather", "words", table, self.ids)
        length = graph.add_node("Shape", "length", self.ids, start=1)
        table = graph.weight("bert.embeddings.positions.weight")
        positions = graph.add_node("Slice", "positions", table, graph.int64_vector(0), length)
        table = graph.weight("bert.embeddings.segments.weight")
        segments = graph.add_node("Gather", "segments", table, self.segments)
        word_positions = graph.add_node("Add", "words and positions", words, positions)
        total = graph.add_node("Add", "embeddings", word_positions, segments)
        return self.norm("bert.embeddings.norm", total)

    def _attention_bias(self) -> str:
        """Return the additive attention mask, float32 [B, 1, 1, S] or, if causal, [B, 1, S, S]."""
        graph = self.graph
        is_token = graph.add_node("Cast", "is token", self.mask, to=_BOOL)
        visible = graph.add_node("Unsqueeze", "seen", is_token, graph.int64_vector(1, 2))
        if self.config.attention == "causal":
            length = graph.add_node("Squeeze", "size", "length")
            positions = graph.add_node(
                "Range", "places", graph.int64_scalar(0), length, graph.int64_scalar(1)
            )
            queries = graph.add_node("Unsqueeze", "queries", positions, graph.int64_vector(1))
            is_past = graph.add_node("GreaterOrEqual", "is past", queries, positions)
            visible = graph.add_node("And", "seen of past", visible, is_past)
        zero, masked = graph.float32_scalar(0.0), graph.float32_scalar(_MASKED_SCORE)
        return graph.add_node("Where", "unseen", visible, zero, masked)

    def _layer(self, name: str, x: str, attention_bias: str) -> str:
        """Return the output of a post-norm or pre-norm layer: float32 [B, S, D] -> [B, S, D]."""
        first_norm, second_norm = f"{name}.attention_norm", f"{name}.feed_forward_norm"
        if self.config.norm == "post":
            x = self.norm(first_norm, self._residual(x, self._attention(name, x, attention_bias)))
            return self.norm(second_norm, self._residual(x, self._feed_forward(name, x)))
        normalized = self.norm(first_norm, x)
        x = self._residual(x, self._attention(name, normalized, attention_bias))
        return self._residual(x, self._feed_forward(name, self.norm(second_norm, x)))

    def _residual(self, x: str, update: str) -> str:
        return self.graph.add_node("Add", f"{update} and residual", x, update)

    def _attention(self, layer: str, x: str, attention_bias: str) -> str:
        """Return scaled dot-product attention of all heads: float32 [B, S, D] -> [B, S, D]."""
        graph, config, name = self.graph, self.config, f"{layer}.attention"
        head_shape = graph.int64_vector(0, 0, config.heads, config.head_width)
        projected = self.linear(f"{name}.query_key_value", x)
        names = [f"{name}.{part}" for part in ("query", "key", "value")]
        parts = graph.add_multi_output_node("Split", names, projected, axis=-1, num_outputs=3)
        query, key, value = (
            graph.add_node("Reshape", f"{part}.heads", part, head_shape) for part in parts
        )
        query = graph.add_node("Transpose", f"{name}.q", query, perm=[0, 2, 1, 3])
        key = graph.add_node("Transpose", f"{name}.k", key, perm=[0, 2, 3, 1])
        value = graph.add_node("Transpose", f"{name}.v", value, perm=[0, 2, 1, 3])
        scale = graph.float32_scalar(config.head_width**-0.5)
        query = graph.add_node("Mul", f"{name}.q scaled", query, scale)
        scores = graph.add_node("MatMul", f"{name}.scores", query, key)
        scores = graph.add_node("Add", f"{name}.scores seen", scores, attention_bias)
        probabilities = graph.add_node("Softmax", f"{name}.probabilities", scores, axis=-1)
        context = graph.add_node("MatMul", f"{name}.mixed", probabilities, value)
        context = graph.add_node("Transpose", f"{name}.mixed heads", context, perm=[0, 2, 1, 3])
        full_width = graph.int64_vector(0, 0, config.width)
        context = graph.add_node("Reshape", f"{name}.all heads", context, full_width)
        return self.linear(f"{name}.output", context)

    def _feed_forward(self, layer: str, x: str) -> str:
        up = self._activation(f"{layer}.activation", self.linear(f"{layer}.up", x))
        return self.linear(f"{layer}.down", up)
