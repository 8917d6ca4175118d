"""A mutable ONNX graph: nodes, initializers, inputs and outputs, connected by value names.

This module does not need the package ``onnx``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

#: For each axis, the size if it is static, or the name if it is dynamic.
Shape = tuple[str | int, ...]
Attribute = int | float | str | list[int]


@dataclass(frozen=True)
class Node:
    """An operator with the names of its input and output values."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True)
class ValueInfo:
    """Name, dtype and shape of an input or output of an ONNX graph."""

    name: str
    dtype: Literal["int64", "float32"]
    shape: Shape


@dataclass
class Graph:
    """An ONNX graph.

    Attributes:
        weights: All weights of the model by name. ``initializers`` contains only the used ones.
        nodes: Topologically sorted operators.
        initializers: Weights and constants of the graph, by name.
        inputs: Inputs of the graph.
        outputs: Outputs of the graph.
    """

    weights: Mapping[str, NDArray[np.float32]]
    nodes: list[Node] = field(default_factory=list)
    initializers: dict[str, NDArray[Any]] = field(default_factory=dict)
    inputs: list[ValueInfo] = field(default_factory=list)
    outputs: list[ValueInfo] = field(default_factory=list)

    def add_node(self, op_type: str, name: str, *inputs: str, **attributes: Attribute) -> str:
        """Add an operator whose only output has the name ``name``; return the name."""
        self.add_multi_output_node(op_type, [name], *inputs, **attributes)
        return name

    def add_multi_output_node(
        self, op_type: str, names: Iterable[str], *inputs: str, **attributes: Attribute
    ) -> tuple[str, ...]:
        """Add an operator with several outputs; return the names of the outputs."""
        outputs = tuple(names)
        self.nodes.append(Node(op_type, inputs, outputs, attributes))
        return outputs

    def add_weight(self, name: str) -> str:
        """Store a weight in the graph, if it is not stored yet; return its name."""
        self.initializers[name] = self.weights[name]
        return name

    def add_transposed_weight(self, name: str) -> str:
        """Store the weight [out, in] of a linear layer as [in, out] for MatMul; return its name."""
        self.initializers[name] = np.ascontiguousarray(self.weights[name].T)
        return name

    def add_int64_vector(self, *values: int) -> str:
        """Store an int64 constant [n]; return its name."""
        return self._add_constant(np.array(values, np.int64))

    def add_int64_scalar(self, value: int) -> str:
        """Store an int64 scalar; return its name."""
        return self._add_constant(np.array(value, np.int64))

    def add_float32_scalar(self, value: float) -> str:
        """Store a float32 scalar; return its name."""
        return self._add_constant(np.array(value, np.float32))

    def _add_constant(self, value: NDArray[Any]) -> str:
        """Store a constant; return its name."""
        # Equal constants share one initializer, because the name is derived from the value.
        name = f"constant {value.tolist()}"
        self.initializers[name] = value
        return name
