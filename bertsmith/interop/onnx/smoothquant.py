"""SmoothQuant for ONNX graphs: moves the scale of outlier activations into the weights."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.interop.onnx.graph import Graph, Node
from bertsmith.model.ops.smoothquant import smoothquant_scales


def apply_smoothquant(graph: Graph) -> None:
    """Divide the input of each MatMul after a LayerNorm by scales, and multiply its weight by them.

    The products do not change, but inputs with a smaller range lose less when they are quantized
    with a single scale; see ``smoothquant_scales``.
    """
    norm_weights = {
        node.outputs[0]: graph.initializers[node.inputs[1]]
        for node in graph.nodes if node.op_type == "LayerNormalization"
    }  # fmt: skip
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op_type != "MatMul" or node.inputs[0] not in norm_weights:
            nodes.append(node)
            continue
        activation, weight = node.inputs
        scales = _smoothing_scales(norm_weights[activation], graph.initializers[weight])
        smoothed, factors = f"{node.outputs[0]} evened", f"{node.outputs[0]} columns"
        graph.initializers[factors] = (1 / scales).astype(np.float32)
        graph.initializers[weight] = graph.initializers[weight] * scales[:, None]
        nodes += [Node("Mul", (activation, factors), (smoothed,), {}),
                  replace(node, inputs=(smoothed, weight))]  # fmt: skip
    graph.nodes[:] = nodes


def _smoothing_scales(norm_weight: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float32]:
    """Return float32 [in] from a LayerNorm's weight [in] and a Linear's weight [in, out]."""
    scales = smoothquant_scales(torch.from_numpy(norm_weight), torch.from_numpy(weight).T)
    result: NDArray[np.float32] = scales.numpy()
    return result
