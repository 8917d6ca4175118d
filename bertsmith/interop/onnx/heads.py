"""ONNX graphs of encoders, pre-trained models and fine-tuned models, with their outputs.

Outputs have the names that Hugging Face Optimum expects. This module does not need the package
``onnx``.
"""

from torch import Tensor

from bertsmith.bundle import EncoderBundle, FineTunedBundle, PretrainedBundle
from bertsmith.errors import ModelError
from bertsmith.interop.onnx.bert import BATCH_AXIS, CHOICES_AXIS, LENGTH_AXIS, BertGraph
from bertsmith.interop.onnx.graph import Graph, ValueInfo
from bertsmith.model.feature_based import BertWithBiLSTM

ExportableBundle = PretrainedBundle | FineTunedBundle | EncoderBundle


def build_graph(bundle: ExportableBundle, *, is_tied: bool = True) -> Graph:
    """Return the graph of a model.

    Args:
        bundle: The model.
        is_tied: Whether the MLM decoder uses the same stored weight as the word embeddings.

    Raises:
        ModelError: The model has a BiLSTM, or norms other than LayerNorm.
    """
    if bundle.config.norm not in ("post", "pre"):
        raise ModelError(
            f"{bundle.path}: model.norm is {bundle.config.norm!r}, but only models with LayerNorm "
            "can be exported to ONNX; export a model with norm 'post' or 'pre'"
        )
    prefix = "bert." if isinstance(bundle, EncoderBundle) else ""
    state: dict[str, Tensor] = bundle.model.state_dict()
    graph = Graph({f"{prefix}{name}": value.numpy(force=True) for name, value in state.items()})
    if isinstance(bundle, EncoderBundle):
        hidden = BertGraph(graph, bundle.config).add_encoder()
        width = bundle.config.width
        _add_output(graph, "last_hidden_state", hidden, BATCH_AXIS, LENGTH_AXIS, width)
    elif isinstance(bundle, PretrainedBundle):
        _add_pretraining_heads(graph, bundle, is_tied=is_tied)
    else:
        _add_task_head(graph, bundle)
    return graph


def _add_output(graph: Graph, name: str, value: str, *shape: str | int) -> None:
    """Make a float32 value an output of the graph with the given name and shape."""
    graph.add_node("Identity", name, value)
    graph.outputs.append(ValueInfo(name, "float32", shape))


def _add_pretraining_heads(graph: Graph, bundle: PretrainedBundle, *, is_tied: bool) -> None:
    """Add the heads of a pre-trained model that are trained."""
    config = bundle.config
    bert = BertGraph(graph, config)
    hidden = bert.add_encoder()
    if bundle.has_head("mlm."):
        logits = bert.add_mlm_head(hidden, is_tied=is_tied)
        _add_output(graph, "logits", logits, BATCH_AXIS, LENGTH_AXIS, config.vocab_size)
    if bundle.has_head("nsp."):
        nsp_logits = bert.add_linear(
            "nsp.classifier", bert.add_pooler(bert.select_first_token(hidden))
        )
        _add_output(graph, "seq_relationship_logits", nsp_logits, BATCH_AXIS, 2)


def _add_task_head(graph: Graph, bundle: FineTunedBundle) -> None:
    """Add the encoder and the head of a fine-tuned model."""
    config, head = bundle.config, bundle.head
    if isinstance(bundle.model, BertWithBiLSTM):
        raise ModelError(
            f"{bundle.path}: models with a BiLSTM (features) cannot be exported to ONNX; fine-tune "
            "a model without features and export it"
        )
    bert = BertGraph(graph, config, has_choices=head.kind == "choice")
    hidden = bert.add_encoder()
    if head.kind == "span":
        logits = bert.add_linear("spans", hidden)
        parts = graph.add_multi_output_node(
            "Split", ["starts", "ends"], logits, axis=-1, num_outputs=2
        )
        for part, name in zip(parts, ("start_logits", "end_logits"), strict=True):
            axis = graph.add_int64_vector(-1)
            squeezed = graph.add_node("Squeeze", f"{part} of tokens", part, axis)
            _add_output(graph, name, squeezed, BATCH_AXIS, LENGTH_AXIS)
    elif head.kind in ("entities", "tags"):
        logits = bert.add_linear("output", hidden)
        _add_output(graph, "logits", logits, BATCH_AXIS, LENGTH_AXIS, head.num_outputs)
    else:
        _add_sequence_head(graph, bert, hidden, bundle)


def _add_sequence_head(graph: Graph, bert: BertGraph, hidden: str, bundle: FineTunedBundle) -> None:
    """Add the pooler and the head of a model with outputs for each sequence.

    Args:
        graph: The graph to extend.
        bert: The encoder, which has been added to the graph.
        hidden: Name of the encoder's output.
        bundle: The model.
    """
    if bundle.config.attention == "causal":
        # Only the last token attends to all tokens.
        token = bert.select_last_token(hidden)
    else:
        token = bert.select_first_token(hidden)
    logits = bert.add_linear("output", bert.add_pooler(token))
    if bundle.head.kind == "choice":
        # Reshape [B * choices, 1] to the first two axes of the inputs, [B, choices].
        input_name = graph.inputs[0].name
        shape = graph.add_node("Shape", "prompts and choices", input_name, start=0, end=2)
        scores = graph.add_node("Reshape", "scores", logits, shape)
        _add_output(graph, "logits", scores, BATCH_AXIS, CHOICES_AXIS)
    else:
        _add_output(graph, "logits", logits, BATCH_AXIS, bundle.head.num_outputs)
