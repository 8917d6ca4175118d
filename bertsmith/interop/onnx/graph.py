"""An ONNX graph while it grows: nodes, constants, inputs and outputs, each by its name.

It never knows of BERT, nor needs the package ``onnx``.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

#: Names of axes that are known only when the graph runs, and sizes of the others.
Shape = tuple[str | int, ...]
Attribute = int | float | str | list[int]


@dataclass(frozen=True)
class Node:
    """One operator. inputs, outputs: names of values."""

    op_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True)
class ValueInfo:
    """An input or output of the whole graph."""

    name: str
    dtype: Literal["int64", "float32"]
    shape: Shape


@dataclass
class Graph:
    """Nodes stand in an order in which each finds its inputs made.

    weights: what ``weight`` may take; constants: those that the graph uses, by name.
    """

    weights: Mapping[str, NDArray[np.float32]]
    nodes: list[Node] = field(default_factory=list)
    initializers: dict[str, NDArray[Any]] = field(default_factory=dict)
    inputs: list[ValueInfo] = field(default_factory=list)
    outputs: list[ValueInfo] = field(default_factory=list)

    def add_node(self, operator: str, name: str, *inputs: str, **attributes: Attribute) -> str:
        """Add an operator of one output; return the name of that output, which is ``name``."""
        self.add_multi_output_node(operator, [name], *inputs, **attributes)
        return name

    def add_multi_output_node(
        self, operator: str, names: Iterable[str], *inputs: str, **attributes: Attribute
    ) -> tuple[str, ...]:
        """Add an operator of several outputs, named ``names``; return the names."""
        outputs = tuple(names)
        self.nodes.append(Node(operator, inputs, outputs, attributes))
        return outputs

    def weight(self, name: str) -> str:
        """Use a weight as it is; one that is used twice is stored once."""
        self.initializers[name] = self.weights[name]
        return name

    def transposed_weight(self, name: str) -> str:
        """Use a weight [out, in] of a Linear as [in, out], as MatMul takes it."""
        self.initializers[name] = np.ascontiguousarray(self.weights[name].T)
        return name

    def int64_vector(self, *values: int) -> str:
        """Return the name of an int64 constant [n]."""
        return self._constant(np.array(values, np.int64))

    def int64_scalar(self, value: int) -> str:
        """Return the name of an int64 constant without axes."""
        return self._constant(np.array(value, np.int64))

    def float32_scalar(self, value: float) -> str:
        """Return the name of a float32 constant without axes."""
        return self._constant(np.array(value, np.float32))

    def _constant(self, value: NDArray[Any]) -> str:
        # Equal constants share a name, which tells the value.
        name = f"constant {value.tolist()}"
        self.initializers[name] = value
        return name
