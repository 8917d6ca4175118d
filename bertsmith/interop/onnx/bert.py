"""BERT as a graph: the one dense, padded forward of the project, equal to the packed one.

It never knows files, nor needs the package ``onnx``. What is padded is masked; the padding stands
after the text.
"""

from typing import Final

import numpy as np

from bertsmith.interop.onnx.graph import Graph, Shape, ValueInfo
from bertsmith.model.config import ModelConfig

#: As Hugging Face's tools name inputs and axes.
IDS, MASK, SEGMENTS = "input_ids", "attention_mask", "token_type_ids"
BATCH_AXIS, CHOICES_AXIS, LENGTH_AXIS = "batch_size", "num_choices", "sequence_length"
#: Added to the score of what must not be seen. Not -inf: a row of padding only is no NaN then.
_UNSEEN: Final = float(np.finfo(np.float32).min)
#: TensorProto.BOOL of the format.
_BOOL: Final = 9
#: Each activation's operator and its attributes.
_ACTIVATIONS: Final[dict[str, tuple[str, dict[str, float | str]]]] = {
    "gelu": ("Gelu", {"approximate": "none"}),
    "gelu_tanh": ("Gelu", {"approximate": "tanh"}),
    "relu": ("Relu", {}),
    "elu": ("Elu", {"alpha": 1.0}),
}


class BertGraph:
    """The parts of a BERT, each of which adds its nodes to a graph and returns a value's name.

    Shapes are those of the values: B sequences of S tokens, the padding counted.
    """

    def __init__(self, graph: Graph, config: ModelConfig, *, choices: bool = False) -> None:
        """Add the inputs, int64 [B, S]; with ``choices`` [B, endings, S], made one of [B, S]."""
        self.graph, self.config = graph, config
        shape: Shape = (
            (BATCH_AXIS, CHOICES_AXIS, LENGTH_AXIS) if choices else (BATCH_AXIS, LENGTH_AXIS)
        )
        names = (IDS, MASK, SEGMENTS)
        graph.inputs.extend(ValueInfo(name, "int64", shape) for name in names)
        self.ids, self.mask, self.segments = names
        if choices:
            length = graph.add_node("Shape", "length of choices", IDS, start=2)
            rows = graph.add_node("Concat", "rows", graph.int64_vector(-1), length, axis=0)
            self.ids, self.mask, self.segments = (
                graph.add_node("Reshape", f"{name} of all", name, rows) for name in names
            )

    def hidden_states(self) -> str:
        """float32 [B, S, D]: the last layer's."""
        x, unseen = self._embeddings(), self._unseen()
        for layer in range(self.config.layers):
            x = self._layer(f"bert.encoder.layers.{layer}", x, unseen)
        return x if self.config.norm == "post" else self.norm("bert.encoder.norm", x)

    def mlm_logits(self, hidden: str, *, tied: bool) -> str:
        """float32 [B, S, D] -> [B, S, V], the masked-LM logits.

        ``tied``: the word table is stored once, for both ends. Quantizing needs one for each.
        """
        graph, width = self.graph, self.config.width
        x = self._activation("mlm.activation", self.linear("mlm.transform", hidden))
        x = self.norm("mlm.norm", x)
        if not tied:
            return self.linear("mlm.decoder", x)
        # Gemm, which knows two axes only, takes the table as it is stored.
        rows = graph.add_node("Reshape", "mlm.rows", x, graph.int64_vector(-1, width))
        table = graph.weight("bert.embeddings.words.weight")
        bias = graph.weight("mlm.decoder.bias")
        logits = graph.add_node("Gemm", "mlm.decoder", rows, table, bias, transB=1)
        shape = graph.add_node("Shape", "mlm.shape", self.ids)
        shape = graph.add_node(
            "Concat",
            "mlm.shape of logits",
            shape,
            graph.int64_vector(self.config.vocab_size),
            axis=0,
        )
        return graph.add_node("Reshape", "mlm.logits", logits, shape)

    def first_token(self, hidden: str) -> str:
        """float32 [B, S, D] -> [B, D] of the first tokens."""
        return self.graph.add_node("Gather", "first", hidden, self.graph.int64_scalar(0), axis=1)

    def last_token(self, hidden: str) -> str:
        """float32 [B, S, D] -> [B, D] of the last tokens that are no padding."""
        graph = self.graph
        lengths = graph.add_node("ReduceSum", "lengths", self.mask, graph.int64_vector(1))
        places = graph.add_node("Sub", "last places", lengths, graph.int64_scalar(1))
        return graph.add_node("GatherND", "last", hidden, places, batch_dims=1)

    def pooler(self, tokens: str) -> str:
        """float32 [B, D] -> [B, D]."""
        return self.graph.add_node("Tanh", "pooled", self.linear("pooler.dense", tokens))

    def linear(self, name: str, x: str) -> str:
        """float32 [..., in] -> [..., out], by weight and bias of a Linear."""
        product = self.graph.add_node(
            "MatMul", f"{name}.product", x, self.graph.transposed_weight(f"{name}.weight")
        )
        return self.graph.add_node("Add", f"{name}", product, self.graph.weight(f"{name}.bias"))

    def norm(self, name: str, x: str) -> str:
        """float32 [..., D] -> [..., D], by weight and bias of a LayerNorm."""
        scale, bias = self.graph.weight(f"{name}.weight"), self.graph.weight(f"{name}.bias")
        return self.graph.add_node(
            "LayerNormalization", name, x, scale, bias, axis=-1, epsilon=self.config.norm_eps
        )

    def _activation(self, name: str, x: str) -> str:
        operator, attributes = _ACTIVATIONS[self.config.activation]
        return self.graph.add_node(operator, name, x, **attributes)

    def _embeddings(self) -> str:
        graph = self.graph
        words = graph.add_node(
            "Gather", "words", graph.weight("bert.embeddings.words.weight"), self.ids
        )
        length = graph.add_node("Shape", "length", self.ids, start=1)
        table = graph.weight("bert.embeddings.positions.weight")
        positions = graph.add_node("Slice", "positions", table, graph.int64_vector(0), length)
        table = graph.weight("bert.embeddings.segments.weight")
        segments = graph.add_node("Gather", "segments", table, self.segments)
        placed = graph.add_node("Add", "words and positions", words, positions)
        total = graph.add_node("Add", "embeddings", placed, segments)
        return self.norm("bert.embeddings.norm", total)

    def _unseen(self) -> str:
        """float32 [B, 1, 1, S] or, causal, [B, 1, S, S]: 0 for what is seen, else _UNSEEN."""
        graph = self.graph
        real = graph.add_node("Cast", "is token", self.mask, to=_BOOL)
        seen = graph.add_node("Unsqueeze", "seen", real, graph.int64_vector(1, 2))
        if self.config.attention == "causal":
            length = graph.add_node("Squeeze", "size", "length")
            places = graph.add_node(
                "Range", "places", graph.int64_scalar(0), length, graph.int64_scalar(1)
            )
            queries = graph.add_node("Unsqueeze", "queries", places, graph.int64_vector(1))
            past = graph.add_node("GreaterOrEqual", "is past", queries, places)
            seen = graph.add_node("And", "seen of past", seen, past)
        return graph.add_node(
            "Where", "unseen", seen, graph.float32_scalar(0.0), graph.float32_scalar(_UNSEEN)
        )

    def _layer(self, name: str, x: str, unseen: str) -> str:
        first, second = f"{name}.attention_norm", f"{name}.feed_forward_norm"
        if self.config.norm == "post":
            x = self.norm(first, self._sum(x, self._attention(name, x, unseen)))
            return self.norm(second, self._sum(x, self._feed_forward(name, x)))
        x = self._sum(x, self._attention(name, self.norm(first, x), unseen))
        return self._sum(x, self._feed_forward(name, self.norm(second, x)))

    def _sum(self, x: str, part: str) -> str:
        return self.graph.add_node("Add", f"{part} and residual", x, part)

    def _attention(self, layer: str, x: str, unseen: str) -> str:
        """Equation 1 of Vaswani et al. 2017, with all heads side by side: [B, N, S, S]."""
        graph, config, name = self.graph, self.config, f"{layer}.attention"
        heads = graph.int64_vector(0, 0, config.heads, config.head_width)
        together = self.linear(f"{name}.query_key_value", x)
        names = [f"{name}.{part}" for part in ("query", "key", "value")]
        parts = graph.add_multi_output_node("Split", names, together, axis=-1, num_outputs=3)
        query, key, value = (
            graph.add_node("Reshape", f"{part}.heads", part, heads) for part in parts
        )
        query = graph.add_node("Transpose", f"{name}.q", query, perm=[0, 2, 1, 3])
        key = graph.add_node("Transpose", f"{name}.k", key, perm=[0, 2, 3, 1])
        value = graph.add_node("Transpose", f"{name}.v", value, perm=[0, 2, 1, 3])
        scale = graph.float32_scalar(config.head_width**-0.5)
        query = graph.add_node("Mul", f"{name}.q scaled", query, scale)
        scores = graph.add_node("MatMul", f"{name}.scores", query, key)
        scores = graph.add_node("Add", f"{name}.scores seen", scores, unseen)
        shares = graph.add_node("Softmax", f"{name}.probabilities", scores, axis=-1)
        mixed = graph.add_node("MatMul", f"{name}.mixed", shares, value)
        mixed = graph.add_node("Transpose", f"{name}.mixed heads", mixed, perm=[0, 2, 1, 3])
        mixed = graph.add_node(
            "Reshape", f"{name}.all heads", mixed, graph.int64_vector(0, 0, config.width)
        )
        return self.linear(f"{name}.output", mixed)

    def _feed_forward(self, layer: str, x: str) -> str:
        up = self._activation(f"{layer}.activation", self.linear(f"{layer}.up", x))
        return self.linear(f"{layer}.down", up)
