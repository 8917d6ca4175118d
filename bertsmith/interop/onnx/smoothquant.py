"""Evens out what the Linears of a graph read, so that 8 bits hold it better; no sum changes.

It never knows a model: it finds each product whose input a LayerNorm made.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.interop.onnx.graph import Graph, Node
from bertsmith.model.ops.smoothquant import smoothquant_scales


def apply_smoothquant(graph: Graph) -> None:
    """Divide the columns of such inputs, and multiply the weights that read them, by the same.

    One scale for all of an input then costs the small ones less; see ``smoothquant_scales``.
    """
    scales = {
        node.outputs[0]: graph.initializers[node.inputs[1]]
        for node in graph.nodes if node.op_type == "LayerNormalization"
    }  # fmt: skip
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op_type != "MatMul" or node.inputs[0] not in scales:
            nodes.append(node)
            continue
        read, weight = node.inputs
        columns = _columns(scales[read], graph.initializers[weight])
        evened, name = f"{node.outputs[0]} evened", f"{node.outputs[0]} columns"
        graph.initializers[name] = (1 / columns).astype(np.float32)
        graph.initializers[weight] = graph.initializers[weight] * columns[:, None]
        nodes += [Node("Mul", (read, name), (evened,), {}), replace(node, inputs=(evened, weight))]
    graph.nodes[:] = nodes


def _columns(scale: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float32]:
    """Return float32 [in] from a LayerNorm's weight [in] and a Linear's [in, out]."""
    found = smoothquant_scales(torch.from_numpy(scale), torch.from_numpy(weight).T)
    columns: NDArray[np.float32] = found.numpy()
    return columns
