"""BERT as an ONNX graph for padded batches, with the same outputs as the PyTorch model.

Padding must follow the text. This module does not need the package ``onnx``.
"""

from typing import Final

import numpy as np

from bertsmith.interop.onnx.graph import Graph, Shape, ValueInfo
from bertsmith.model.config import ModelConfig

#: Names of the inputs, as in Hugging Face Optimum.
_INPUT_IDS, _ATTENTION_MASK, _TOKEN_TYPE_IDS = "input_ids", "attention_mask", "token_type_ids"
#: Names of the dynamic axes, as in Hugging Face Optimum.
BATCH_AXIS, CHOICES_AXIS, LENGTH_AXIS = "batch_size", "num_choices", "sequence_length"
#: Added to the attention scores of padding. The value is finite, because softmax of a row of
#: infinities, as in a sequence of padding only, would be NaN.
_MASKED_SCORE: Final = float(np.finfo(np.float32).min)
#: The value of TensorProto.BOOL in ONNX.
_BOOL: Final = 9
#: The ONNX operator and attributes of each activation.
_ACTIVATIONS: Final[dict[str, tuple[str, dict[str, float | str]]]] = {
    "gelu": ("Gelu", {"approximate": "none"}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
    "relu": ("Relu", {}),
    "elu": ("Elu", {"alpha": 1.0}),
}


class BertGraph:
    """Adds the layers of a BERT to an ONNX graph.

    Each method adds the nodes of a layer and returns the name of its output value. Docstrings give
    the shapes of the values, for B sequences of S tokens including padding.
    """

    def __init__(self, graph: Graph, config: ModelConfig, *, has_choices: bool = False) -> None:
        """Add the inputs: token ids, attention mask and segment ids, each int64 [B, S].

        Args:
            graph: The graph to extend.
            config: Sizes and architecture of the model.
            has_choices: Whether the inputs are [B, choices, S], as in multiple choice. They are
                then reshaped to [B * choices, S].
        """
        self.graph, self.config = graph, config
        shape: Shape = (BATCH_AXIS, LENGTH_AXIS)
        if has_choices:
            shape = (BATCH_AXIS, CHOICES_AXIS, LENGTH_AXIS)
        names = (_INPUT_IDS, _ATTENTION_MASK, _TOKEN_TYPE_IDS)
        graph.inputs.extend(ValueInfo(name, "int64", shape) for name in names)
        self.ids, self.mask, self.segments = names
        if has_choices:
            length = graph.add_node("Shape", "length of choices", _INPUT_IDS, start=2)
            flat_shape = graph.add_node(
                "Concat", "rows", graph.add_int64_vector(-1), length, axis=0
            )
            self.ids, self.mask, self.segments = (
                graph.add_node("Reshape", f"{name} of all", name, flat_shape) for name in names
            )

    def add_encoder(self) -> str:
        """Add embeddings and encoder; return the last hidden states, float32 [B, S, D]."""
        x = self._add_embeddings()
        attention_bias = self._add_attention_bias()
        for layer in range(self.config.layers):
            x = self._add_layer(f"bert.encoder.layers.{layer}", x, attention_bias)
        return x if self.config.norm == "post" else self.add_layer_norm("bert.encoder.norm", x)

    def add_mlm_head(self, hidden: str, *, is_tied: bool) -> str:
        """Add the masked-LM head; return its logits: float32 [B, S, D] -> [B, S, V].

        Args:
            hidden: Name of the hidden states.
            is_tied: Whether the decoder uses the same stored weight as the word embeddings.
                Quantization needs two copies of the weight.
        """
        graph, width = self.graph, self.config.width
        x = self._add_activation("mlm.activation", self.add_linear("mlm.transform", hidden))
        x = self.add_layer_norm("mlm.norm", x)
        if not is_tied:
            return self.add_linear("mlm.decoder", x)
        # Gemm can multiply by the transposed embeddings [V, D], but needs two-dimensional inputs.
        rows = graph.add_node("Reshape", "mlm.rows", x, graph.add_int64_vector(-1, width))
        table = graph.add_weight("bert.embeddings.words.weight")
        bias = graph.add_weight("mlm.decoder.bias")
        logits = graph.add_node("Gemm", "mlm.decoder", rows, table, bias, transB=1)
        ids_shape = graph.add_node("Shape", "mlm.shape", self.ids)
        vocab_size = graph.add_int64_vector(self.config.vocab_size)
        logits_shape = graph.add_node(
            "Concat", "mlm.shape of logits", ids_shape, vocab_size, axis=0
        )
        return graph.add_node("Reshape", "mlm.logits", logits, logits_shape)

    def select_first_token(self, hidden: str) -> str:
        """Return the hidden state of the first token: float32 [B, S, D] -> [B, D]."""
        return self.graph.add_node(
            "Gather", "first", hidden, self.graph.add_int64_scalar(0), axis=1
        )

    def select_last_token(self, hidden: str) -> str:
        """Return the hidden state of the last token before padding: float32 [B, S, D] -> [B, D]."""
        graph = self.graph
        lengths = graph.add_node("ReduceSum", "lengths", self.mask, graph.add_int64_vector(1))
        indices = graph.add_node("Sub", "last positions", lengths, graph.add_int64_scalar(1))
        return graph.add_node("GatherND", "last", hidden, indices, batch_dims=1)

    def add_pooler(self, token_state: str) -> str:
        """Pool one token's hidden state per sequence: float32 [B, D] -> [B, D]."""
        return self.graph.add_node("Tanh", "pooled", self.add_linear("pooler.dense", token_state))

    def add_linear(self, name: str, x: str) -> str:
        """Add the linear layer ``name``; return its output: float32 [..., in] -> [..., out]."""
        weight = self.graph.add_transposed_weight(f"{name}.weight")
        bias = self.graph.add_weight(f"{name}.bias")
        product = self.graph.add_node("MatMul", f"{name}.product", x, weight)
        return self.graph.add_node("Add", name, product, bias)

    def add_layer_norm(self, name: str, x: str) -> str:
        """Add the LayerNorm ``name``; return its output: float32 [..., D] -> [..., D]."""
        scale = self.graph.add_weight(f"{name}.weight")
        bias = self.graph.add_weight(f"{name}.bias")
        return self.graph.add_node(
            "LayerNormalization", name, x, scale, bias, axis=-1, epsilon=self.config.norm_eps
        )

    def _add_activation(self, name: str, x: str) -> str:
        """Add the activation function; return its output, with the shape of ``x``."""
        op_type, attributes = _ACTIVATIONS[self.config.activation]
        return self.graph.add_node(op_type, name, x, **attributes)

    def _add_embeddings(self) -> str:
        """Add the three embeddings and LayerNorm; return the output, float32 [B, S, D]."""
        graph = self.graph
        word_table = graph.add_weight("bert.embeddings.words.weight")
        words = graph.add_node("Gather", "words", word_table, self.ids)
        length = graph.add_node("Shape", "length", self.ids, start=1)
        position_table = graph.add_weight("bert.embeddings.positions.weight")
        start = graph.add_int64_vector(0)
        positions = graph.add_node("Slice", "positions", position_table, start, length)
        segment_table = graph.add_weight("bert.embeddings.segments.weight")
        segments = graph.add_node("Gather", "segments", segment_table, self.segments)
        words_and_positions = graph.add_node("Add", "words and positions", words, positions)
        total = graph.add_node("Add", "embeddings", words_and_positions, segments)
        return self.add_layer_norm("bert.embeddings.norm", total)

    def _add_attention_bias(self) -> str:
        """Add the attention mask that is added to the scores.

        Its shape is float32 [B, 1, 1, S], or [B, 1, S, S] if attention is causal.
        """
        graph = self.graph
        is_token = graph.add_node("Cast", "is token", self.mask, to=_BOOL)
        visible = graph.add_node("Unsqueeze", "visible", is_token, graph.add_int64_vector(1, 2))
        if self.config.attention == "causal":
            # The value "length" is added with the embeddings.
            length = graph.add_node("Squeeze", "size", "length")
            positions = graph.add_node(
                "Range",
                "token positions",
                graph.add_int64_scalar(0),
                length,
                graph.add_int64_scalar(1),
            )
            queries = graph.add_node("Unsqueeze", "queries", positions, graph.add_int64_vector(1))
            is_past = graph.add_node("GreaterOrEqual", "is past", queries, positions)
            visible = graph.add_node("And", "visible and past", visible, is_past)
        zero, masked = graph.add_float32_scalar(0.0), graph.add_float32_scalar(_MASKED_SCORE)
        return graph.add_node("Where", "attention bias", visible, zero, masked)

    def _add_layer(self, name: str, x: str, attention_bias: str) -> str:
        """Add a post-norm or pre-norm layer; return its output: float32 [B, S, D] -> [B, S, D]."""
        first_norm, second_norm = f"{name}.attention_norm", f"{name}.feed_forward_norm"
        if self.config.norm == "post":
            attended = self._add_attention(name, x, attention_bias)
            x = self.add_layer_norm(first_norm, self._add_residual(x, attended))
            return self.add_layer_norm(
                second_norm, self._add_residual(x, self._add_feed_forward(name, x))
            )
        attended = self._add_attention(name, self.add_layer_norm(first_norm, x), attention_bias)
        x = self._add_residual(x, attended)
        return self._add_residual(
            x, self._add_feed_forward(name, self.add_layer_norm(second_norm, x))
        )

    def _add_residual(self, x: str, update: str) -> str:
        """Add a residual connection; return the sum of ``x`` and ``update``."""
        return self.graph.add_node("Add", f"{update} and residual", x, update)

    def _add_attention(self, layer: str, x: str, attention_bias: str) -> str:
        """Add multi-head attention; return its output: float32 [B, S, D] -> [B, S, D]."""
        graph, config, name = self.graph, self.config, f"{layer}.attention"
        # In a shape for Reshape, 0 leaves the size of an axis unchanged.
        head_shape = graph.add_int64_vector(0, 0, config.heads, config.head_dim)
        projected = self.add_linear(f"{name}.query_key_value", x)
        names = [f"{name}.{part}" for part in ("query", "key", "value")]
        parts = graph.add_multi_output_node("Split", names, projected, axis=-1, num_outputs=3)
        query, key, value = (
            graph.add_node("Reshape", f"{part}.heads", part, head_shape) for part in parts
        )
        query = graph.add_node("Transpose", f"{name}.q", query, perm=[0, 2, 1, 3])
        key = graph.add_node("Transpose", f"{name}.k", key, perm=[0, 2, 3, 1])
        value = graph.add_node("Transpose", f"{name}.v", value, perm=[0, 2, 1, 3])
        scale = graph.add_float32_scalar(config.head_dim**-0.5)
        query = graph.add_node("Mul", f"{name}.q scaled", query, scale)
        scores = graph.add_node("MatMul", f"{name}.scores", query, key)
        scores = graph.add_node("Add", f"{name}.masked scores", scores, attention_bias)
        probabilities = graph.add_node("Softmax", f"{name}.probabilities", scores, axis=-1)
        context = graph.add_node("MatMul", f"{name}.context", probabilities, value)
        context = graph.add_node(
            "Transpose", f"{name}.context of heads", context, perm=[0, 2, 1, 3]
        )
        full_width = graph.add_int64_vector(0, 0, config.width)
        context = graph.add_node("Reshape", f"{name}.all heads", context, full_width)
        return self.add_linear(f"{name}.output", context)

    def _add_feed_forward(self, layer: str, x: str) -> str:
        """Add the feed-forward network; return its output: float32 [B, S, D] -> [B, S, D]."""
        up = self._add_activation(f"{layer}.activation", self.add_linear(f"{layer}.up", x))
        return self.add_linear(f"{layer}.down", up)
