"""A mutable ONNX graph: nodes, initializers, inputs and outputs, connected by value names.

It does not need the package ``onnx``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

#: Sizes of static axes and names of dynamic ones.
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
    """An input or output of the graph."""

    name: str
    dtype: Literal["int64", "float32"]
    shape: Shape


@dataclass
class Graph:
    """An ONNX graph.

    Attributes:
        weights: The model's weights by name, of which the graph stores those it uses.
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
        """Add an operator with one output, called ``name``; return ``name``."""
        self.add_multi_output_node(op_type, [name], *inputs, **attributes)
        return name

    def add_multi_output_node(
        self, op_type: str, names: Iterable[str], *inputs: str, **attributes: Attribute
    ) -> tuple[str, ...]:
        """Add an operator with several outputs; return their names."""
        outputs = tuple(names)
        self.nodes.append(Node(op_type, inputs, outputs, attributes))
        return outputs

    def weight(self, name: str) -> str:
        """Store a weight in the graph, once however often it is used; return its name."""
        self.initializers[name] = self.weights[name]
        return name

    def transposed_weight(self, name: str) -> str:
        """Store a Linear's weight [out, in] as [in, out] for MatMul; return its name."""
        self.initializers[name] = np.ascontiguousarray(self.weights[name].T)
        return name

    def int64_vector(self, *values: int) -> str:
        """Store an int64 constant [n]; return its name."""
        return self._constant(np.array(values, np.int64))

    def int64_scalar(self, value: int) -> str:
        """Store an int64 scalar; return its name."""
        return self._constant(np.array(value, np.int64))

    def float32_scalar(self, value: float) -> str:
        """Store a float32 scalar; return its name."""
        return self._constant(np.array(value, np.float32))

    def _constant(self, value: NDArray[Any]) -> str:
        # Equal constants share one initializer, because the name is derived from the value.
        name = f"constant {value.tolist()}"
        self.initializers[name] = value
        return name
