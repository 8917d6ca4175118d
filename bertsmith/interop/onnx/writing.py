"""Export of a model as an ONNX file, with its config, its tokenizer and the modules after it.

This module needs the optional package ``onnx``, and ``onnxruntime`` for int8.
"""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from bertsmith.bundle import (
    CONFIG_FILE,
    EncoderBundle,
    FineTunedBundle,
    PretrainedBundle,
    load_encoder,
    load_model,
    locate_model,
)
from bertsmith.bundle.any_model import is_bare_encoder, read_cross_encoder_config
from bertsmith.bundle.config import read_json
from bertsmith.bundle.metadata import read_max_seqlen
from bertsmith.bundle.pretrained import describe_unused_rows
from bertsmith.bundle.weights import describe_names
from bertsmith.errors import require_extra
from bertsmith.files import atomic_directory, check_new_directory, write_json
from bertsmith.interop.onnx.graph import Graph, ValueInfo
from bertsmith.interop.onnx.heads import ExportableBundle, build_graph
from bertsmith.interop.onnx.smoothquant import apply_smoothquant
from bertsmith.interop.sentence_transformers import PoolingConfig, read_pooling
from bertsmith.interop.sentence_transformers.splade import read_splade
from bertsmith.interop.sentence_transformers.writing import (
    check_is_expressible,
    get_max_seqlen,
    write_metadata,
)
from bertsmith.text.segmenter import SEGMENTER_NOTE
from bertsmith.version import __version__

#: File names that Hugging Face Optimum expects.
MODEL_FILE, QUANTIZED_MODEL_FILE = "model.onnx", "model_quantized.onnx"
#: The newest opset that the tested release of onnxruntime supports, and the oldest IR version with
#: this opset.
OPSET, IR_VERSION = 26, 13
#: Maximum size of the weights in the ONNX file; larger weights are stored in a second file, because
#: protobuf files must be smaller than 2 GiB.
_MAX_FILE_BYTES: int = 2**31 - 2**24

#: Notes for users of an embedding model and of a sparse model.
_POOLING_NOTE: Final = (
    "the graph computes hidden states; pooling and the modules after it are in the format of "
    "sentence-transformers, which loads the folder with backend='onnx'"
)
_SPLADE_NOTE: Final = (
    "the graph computes masked-LM logits; compute the sparse vectors (SPLADE) from them"
)


def write_onnx(model: Path | str, out: Path | str, *, int8: bool = False) -> list[str]:
    """Write a model as an ONNX file.

    The inputs of the graph are input_ids, attention_mask and token_type_ids. All are int64 [B, S],
    or [B, choices, S] for multiple choice, with dynamic sizes. For an embedding model, the modules
    after the graph, such as pooling, are written in the format of sentence-transformers.

    Args:
        model: A model directory or run directory.
        out: A directory that is empty or does not exist.
        int8: Whether to quantize weights to 8 bits (onnxruntime's dynamic quantization, which
            quantizes activations at run time).

    Returns:
        Notes for the user.

    Raises:
        ModelError: The model cannot be exported, or ``out`` is not empty.
        MissingExtraError: A package is not installed.
    """
    directory = locate_model(model)
    out = Path(out)
    check_new_directory(out)
    pooling = read_pooling(directory)
    bundle = _load_bundle(directory, is_embedding_model=pooling is not None)
    splade = read_splade(directory)
    max_seqlen = _find_max_seqlen(bundle, pooling if splade is None else splade.text_config)
    graph = build_graph(bundle, is_tied=not int8)
    if int8:
        apply_smoothquant(graph)
    proto = _to_model_proto(graph, _build_metadata(bundle, max_seqlen))
    with atomic_directory(out) as folder:
        if int8:
            _save(_quantize(proto, folder / "work"), folder / QUANTIZED_MODEL_FILE)
        else:
            _save(proto, folder / MODEL_FILE)
        if pooling is not None:
            assert isinstance(bundle, EncoderBundle)
            # sentence-transformers passes the option for a missing pooler to PyTorch models only.
            write_metadata(folder, bundle, pooling, bundle.info, has_pooler=True)
        else:
            hf_config = read_json(directory / CONFIG_FILE) | read_cross_encoder_config(directory)
            write_json(folder / CONFIG_FILE, hf_config)
            bundle.tokenizer.save(folder, max_seqlen)
    if splade is not None:
        return [*_build_notes(bundle), _SPLADE_NOTE]
    return _build_notes(bundle) if pooling is None else [*_build_notes(bundle), _POOLING_NOTE]


def _load_bundle(directory: Path, *, is_embedding_model: bool) -> ExportableBundle:
    """Load a model with its heads, or only its encoder if no head is trained.

    Raises:
        ModelError: sentence-transformers cannot compute the vectors of an embedding model.
    """
    if is_embedding_model or is_bare_encoder(directory):
        encoder = load_encoder(directory)
        if is_embedding_model:
            check_is_expressible(encoder)
        return encoder
    bundle = load_model(directory)
    has_heads = isinstance(bundle, FineTunedBundle) or any(map(bundle.has_head, ("mlm.", "nsp.")))
    return bundle if has_heads else load_encoder(directory)


def _find_max_seqlen(bundle: ExportableBundle, text_config: PoolingConfig | None) -> int:
    """Return the number of tokens to which inputs are truncated.

    Args:
        bundle: The model.
        text_config: Has the maximum length of a sentence-transformers model; None for others.
    """
    if text_config is not None:
        return get_max_seqlen(text_config, bundle.config)
    return read_max_seqlen(bundle.path, bundle.config) or bundle.config.max_positions


def save_encoder_graph(bundle: EncoderBundle, path: Path) -> None:
    """Write the graph of an encoder in float32 as an ONNX file.

    Raises:
        ModelError: The model cannot be exported.
        MissingExtraError: The package ``onnx`` is not installed.
    """
    metadata = _build_metadata(bundle, bundle.config.max_positions)
    _save(_to_model_proto(build_graph(bundle), metadata), path)


def _build_metadata(bundle: ExportableBundle, max_seqlen: int) -> dict[str, str]:
    """Return the kind of a model, and the values that inference needs besides the graph as JSON."""
    kind = "encoder"
    values: dict[str, Any] = {"max_length": max_seqlen, "lowercase": bundle.tokenizer.lowercase}
    if isinstance(bundle, FineTunedBundle):
        kind = bundle.head.kind
        values["labels"] = list(bundle.head.labels)
    elif isinstance(bundle, PretrainedBundle):
        kind = "pretrained"
    return {"kind": kind, **{name: json.dumps(value) for name, value in values.items()}}


def _build_notes(bundle: ExportableBundle) -> list[str]:
    """Return notes about weights, and about what users of the ONNX file have to do themselves."""
    # Newly initialized heads are not exported.
    unused_weights = () if isinstance(bundle, EncoderBundle) else bundle.unused_weights
    notes = describe_names(bundle.path, "unused weights", unused_weights)
    notes += describe_unused_rows(bundle.path, bundle.config, bundle.tokenizer)
    if bundle.tokenizer.segmenter is not None:
        notes.append(SEGMENTER_NOTE)
    if bundle.config.attention == "causal":
        notes.append("pad after the text, not before it: the attention of this model is causal")
    return notes


def _import_onnx() -> Any:
    """Return the package ``onnx`` with the subpackages that this module uses."""
    with require_extra("onnx", "writing ONNX", package="onnx"):
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
    return onnx


def _to_model_proto(graph: Graph, metadata: dict[str, str]) -> Any:
    """Return the graph as an ``onnx.ModelProto``."""
    onnx = _import_onnx()
    helper, types = onnx.helper, onnx.TensorProto

    def to_value_info(info: ValueInfo) -> Any:
        dtype = types.INT64 if info.dtype == "int64" else types.FLOAT
        return helper.make_tensor_value_info(info.name, dtype, info.shape)

    nodes = [
        helper.make_node(
            node.op_type, node.inputs, node.outputs, name=node.outputs[0], **node.attributes
        )
        for node in graph.nodes
    ]
    initializers = [
        onnx.numpy_helper.from_array(array, name) for name, array in graph.initializers.items()
    ]
    inputs = [to_value_info(info) for info in graph.inputs]
    outputs = [to_value_info(info) for info in graph.outputs]
    graph_proto = helper.make_graph(nodes, "bert", inputs, outputs, initializers)
    proto = helper.make_model(
        graph_proto,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="bertsmith",
        producer_version=__version__,
    )
    helper.set_model_props(proto, metadata)
    return proto


def _save(proto: Any, path: Path) -> None:
    """Write and check a model; large weights are stored in a second file."""
    onnx = _import_onnx()
    options: dict[str, Any] = {}
    if _count_weight_bytes(proto) > _MAX_FILE_BYTES:
        options = {"save_as_external_data": True, "location": f"{path.name}.data"}
    onnx.save_model(proto, path, **options)
    onnx.checker.check_model(path, full_check=True)


def _count_weight_bytes(proto: Any) -> int:
    """Return the size of all weights in an ``onnx.ModelProto``, in bytes."""
    return sum(len(initializer.raw_data) for initializer in proto.graph.initializer)


def _quantize(proto: Any, folder: Path) -> Any:
    """Return the model with 8-bit weights; ``folder`` is used for temporary files."""
    with require_extra("onnx", "quantizing to int8", package="onnxruntime"):
        from onnxruntime.quantization import QuantType, quantize_dynamic
    onnx = _import_onnx()
    folder.mkdir()
    metadata = {entry.key: entry.value for entry in proto.metadata_props}
    # This entry suppresses the warning that the graph should be simplified first.
    onnx.helper.set_model_props(proto, {"onnx.quant.pre_process": "onnxruntime.quant"})
    _save(proto, folder / MODEL_FILE)
    quantize_dynamic(
        folder / MODEL_FILE,
        folder / QUANTIZED_MODEL_FILE,
        op_types_to_quantize=["MatMul", "Gather"],
        nodes_to_quantize=[node.name for node in proto.graph.node if _is_quantized(node.name)],
        # Each output channel has its own scale. Weights are unsigned, because products with signed
        # weights overflow on CPUs without 8-bit dot products (VNNI).
        per_channel=True,
        weight_type=QuantType.QUInt8,
        use_external_data_format=_count_weight_bytes(proto) > _MAX_FILE_BYTES,
    )
    result = onnx.load(folder / QUANTIZED_MODEL_FILE)
    shutil.rmtree(folder)
    onnx.helper.set_model_props(result, metadata)
    result.producer_name = proto.producer_name
    result.producer_version = proto.producer_version
    return result


def _is_quantized(node_name: str) -> bool:
    """Return whether the weight of the node with this name is quantized.

    The word embeddings and all linear layers are quantized, except the second linear layer of the
    feed-forward network. The input of this layer has a few large values that a single scale cannot
    represent.
    """
    return node_name == "words" or (node_name.endswith(".product") and ".down." not in node_name)
