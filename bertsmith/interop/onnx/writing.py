"""From a model directory to an ONNX file, with the tokenizer beside it.

It never runs the model. The packages ``onnx`` and, for int8, ``onnxruntime`` are an extra.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from bertsmith.bundle import (
    CONFIG_FILE,
    FineTunedBundle,
    PretrainedBundle,
    load_encoder,
    load_model,
    locate_model,
)
from bertsmith.bundle.any_model import is_bare_encoder
from bertsmith.errors import MissingExtraError
from bertsmith.files import atomic_directory, check_new_directory
from bertsmith.interop.onnx.graph import Graph, ValueInfo
from bertsmith.interop.onnx.heads import AnyBundle, build_graph
from bertsmith.interop.onnx.smoothquant import apply_smoothquant
from bertsmith.version import __version__

#: The names that Optimum looks for.
MODEL_FILE, QUANTIZED_MODEL_FILE = "model.onnx", "model_quantized.onnx"
#: The newest set of operators that the pinned onnxruntime runs, and the oldest form of file that
#: may name it.
OPSET, IR_VERSION = 26, 13
#: A file of the format (protobuf) holds less than 2 GiB; weights beyond go into a file beside it.
_LARGEST: int = 2**31 - 2**24


def write_onnx(model: Path | str, out: Path | str, *, int8: bool = False) -> list[str]:
    """Write a model directory or RUN as ONNX; return what a user should know.

    ``out`` must not be there, or be empty. Inputs are input_ids, attention_mask and
    token_type_ids, int64 [B, S] (of a choice [B, endings, S]), of any B and S. ``int8``: weights in
    8 bits, activations quantized as they come (onnxruntime's dynamic form).
    Raises ModelError for a model that it cannot be, MissingExtraError without the packages.
    """
    directory, out = locate_model(model), Path(out)
    check_new_directory(out)
    bundle = load_encoder(directory) if is_bare_encoder(directory) else load_model(directory)
    graph = build_graph(bundle, tied=not int8)
    if int8:
        apply_smoothquant(graph)
    proto = _proto(graph, _metadata(bundle))
    with atomic_directory(out) as new:
        if int8:
            _save(_quantized(proto, new / "work"), new / QUANTIZED_MODEL_FILE)
        else:
            _save(proto, new / MODEL_FILE)
        shutil.copyfile(directory / CONFIG_FILE, new / CONFIG_FILE)
        bundle.tokenizer.save(new, bundle.config.max_positions)
    return _notes(bundle)


def _metadata(bundle: AnyBundle) -> dict[str, str]:
    """Return what one must know beside the graph to ask the model, as text."""
    config, tokenizer = bundle.config, bundle.tokenizer
    kind = "encoder"
    told: dict[str, Any] = {"max_length": config.max_positions, "lowercase": tokenizer.lowercase}
    if isinstance(bundle, FineTunedBundle):
        kind = bundle.head.kind
        told["labels"] = list(bundle.head.labels)
    elif isinstance(bundle, PretrainedBundle):
        kind = "pretrained"
    return {"kind": kind, **{name: json.dumps(value) for name, value in told.items()}}


def _notes(bundle: AnyBundle) -> list[str]:
    notes = []
    if bundle.tokenizer.segmenter is not None:
        notes.append(
            "the model's text is segmented before WordPiece; tokenizer.json does not do it"
        )
    if bundle.config.attention == "causal":
        notes.append("attention is causal: put the padding after the text")
    return notes


def _onnx() -> Any:
    try:
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
    except ModuleNotFoundError:
        raise MissingExtraError("onnx", "onnx", "writing ONNX") from None
    return onnx


def _proto(graph: Graph, metadata: dict[str, str]) -> Any:
    """Return the graph as the package's ModelProto."""
    onnx = _onnx()
    helper, types = onnx.helper, onnx.TensorProto

    def port(own: ValueInfo) -> Any:
        dtype = types.INT64 if own.dtype == "int64" else types.FLOAT
        return helper.make_tensor_value_info(own.name, dtype, own.shape)

    nodes = [
        helper.make_node(
            node.op_type, node.inputs, node.outputs, name=node.outputs[0], **node.attributes
        )
        for node in graph.nodes
    ]
    constants = [
        onnx.numpy_helper.from_array(own, name) for name, own in graph.initializers.items()
    ]
    body = helper.make_graph(
        nodes, "bert", [*map(port, graph.inputs)], [*map(port, graph.outputs)], constants
    )
    proto = helper.make_model(
        body,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="bertsmith",
        producer_version=__version__,
    )
    helper.set_model_props(proto, metadata)
    return proto


def _save(proto: Any, path: Path) -> None:
    """Write and check a model; what does not fit into the file goes into one beside it."""
    onnx = _onnx()
    beside: dict[str, Any] = {}
    if _size(proto) > _LARGEST:
        beside = {"save_as_external_data": True, "location": f"{path.name}.data"}
    onnx.save_model(proto, path, **beside)
    onnx.checker.check_model(path, full_check=True)


def _size(proto: Any) -> int:
    return sum(len(constant.raw_data) for constant in proto.graph.initializer)


def _quantized(proto: Any, folder: Path) -> Any:
    """Return a model in 8 bits, by files in ``folder``, which is removed."""
    try:
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ModuleNotFoundError:
        raise MissingExtraError("onnxruntime", "onnx", "quantizing to int8") from None
    onnx = _onnx()
    folder.mkdir()
    told = {own.key: own.value for own in proto.metadata_props}
    # Else it warns that the graph was not simplified first: it has nothing to simplify.
    onnx.helper.set_model_props(proto, {"onnx.quant.pre_process": "onnxruntime.quant"})
    _save(proto, folder / MODEL_FILE)
    quantize_dynamic(
        folder / MODEL_FILE,
        folder / QUANTIZED_MODEL_FILE,
        op_types_to_quantize=["MatMul", "Gather"],
        nodes_to_quantize=[node.name for node in proto.graph.node if _in_8_bits(node.name)],
        # A scale for each output. Unsigned: on processors without instructions for 8 bits (VNNI)
        # products of signed weights overflow.
        per_channel=True,
        weight_type=QuantType.QUInt8,
        use_external_data_format=_size(proto) > _LARGEST,
    )
    result = onnx.load(folder / QUANTIZED_MODEL_FILE)
    shutil.rmtree(folder)
    onnx.helper.set_model_props(result, told)
    result.producer_name, result.producer_version = proto.producer_name, proto.producer_version
    return result


def _in_8_bits(node: str) -> bool:
    """Tell whether a node is to have its weights in 8 bits: a Linear, or the table of words.

    What the feed-forward network's activation gives has a few large values, which one scale for
    all cannot hold, so the Linear that takes it stays float32.
    """
    return node == "words" or (node.endswith(".product") and ".down." not in node)
