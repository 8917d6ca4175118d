"""SmoothQuant for ONNX graphs: moves outliers from activations to weights before quantization."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.interop.onnx.graph import Graph, Node
from bertsmith.model.ops.smoothquant import smoothquant_scales


def apply_smoothquant(graph: Graph) -> None:
    """Apply SmoothQuant to each MatMul after a LayerNorm.

    Each column of the input is divided by a scale, and the row of the weight with the same index is
    multiplied by this scale, so that the product does not change. The range of the input becomes
    smaller, so that quantization with one scale for the whole tensor has a smaller error.
    """
    norm_weights = {
        node.outputs[0]: graph.initializers[node.inputs[1]]
        for node in graph.nodes
        if node.op_type == "LayerNormalization"
    }
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op_type != "MatMul" or node.inputs[0] not in norm_weights:
            nodes.append(node)
            continue
        activation, weight = node.inputs
        scales = _compute_scales(norm_weights[activation], graph.initializers[weight])
        smoothed_input = f"{node.outputs[0]} smoothed input"
        factors = f"{node.outputs[0]} factors"
        graph.initializers[factors] = (1 / scales).astype(np.float32)
        graph.initializers[weight] = graph.initializers[weight] * scales[:, None]
        nodes.append(Node("Mul", (activation, factors), (smoothed_input,), {}))
        nodes.append(replace(node, inputs=(smoothed_input, weight)))
    graph.nodes[:] = nodes


def _compute_scales(norm_weight: NDArray[Any], weight: NDArray[Any]) -> NDArray[np.float32]:
    """Return the SmoothQuant scale of each input column of a linear layer, float32 [in].

    Args:
        norm_weight: [in], weight of the LayerNorm that computes the input.
        weight: [in, out], weight of the linear layer.
    """
    scales = smoothquant_scales(torch.from_numpy(norm_weight), torch.from_numpy(weight).T)
    result: NDArray[np.float32] = scales.numpy()
    return result
