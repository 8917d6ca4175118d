"""Complete ONNX graphs of each kind of model, with their heads and outputs.

Outputs have the names that Hugging Face Optimum expects. The package ``onnx`` is not needed.
"""

from torch import Tensor

from bertsmith.bundle import EncoderBundle, FineTunedBundle, PretrainedBundle
from bertsmith.errors import ModelError
from bertsmith.interop.onnx.bert import BATCH_AXIS, CHOICES_AXIS, LENGTH_AXIS, BertGraph
from bertsmith.interop.onnx.graph import Graph, ValueInfo
from bertsmith.model.feature_based import BertWithBiLSTM

AnyBundle = PretrainedBundle | FineTunedBundle | EncoderBundle


def build_graph(bundle: AnyBundle, *, tied: bool = True) -> Graph:
    """Return the graph of a model.

    Args:
        bundle: The model.
        tied: Whether the MLM decoder shares the word embeddings; see ``BertGraph.mlm_logits``.

    Raises:
        ModelError: The model has a BiLSTM, or other norms than LayerNorm.
    """
    if bundle.config.norm not in ("post", "pre"):
        raise ModelError(
            f"{bundle.path}: only models with LayerNorm can be exported to ONNX, but model.norm is "
            f"{bundle.config.norm!r}"
        )
    prefix = "bert." if isinstance(bundle, EncoderBundle) else ""
    state: dict[str, Tensor] = bundle.model.state_dict()
    graph = Graph({f"{prefix}{name}": value.numpy(force=True) for name, value in state.items()})
    if isinstance(bundle, EncoderBundle):
        hidden = BertGraph(graph, bundle.config).hidden_states()
        width = bundle.config.width
        _add_output(graph, "last_hidden_state", hidden, BATCH_AXIS, LENGTH_AXIS, width)
    elif isinstance(bundle, PretrainedBundle):
        _add_pretraining_heads(graph, bundle, tied=tied)
    else:
        _add_task_head(graph, bundle)
    return graph


def _add_output(graph: Graph, name: str, value: str, *shape: str | int) -> None:
    """Make a float32 value an output of the graph, called ``name``."""
    graph.add_node("Identity", name, value)
    graph.outputs.append(ValueInfo(name, "float32", shape))


def _add_pretraining_heads(graph: Graph, bundle: PretrainedBundle, *, tied: bool) -> None:
    """Add the pre-training model's heads, without an MLM head that is newly initialized."""
    config = bundle.config
    if not config.nsp:
        bundle.require_head("mlm.")
    bert = BertGraph(graph, config)
    hidden = bert.hidden_states()
    if not any(name.startswith("mlm.") for name in bundle.new_weights):
        logits = bert.mlm_logits(hidden, tied=tied)
        _add_output(graph, "logits", logits, BATCH_AXIS, LENGTH_AXIS, config.vocab_size)
    if config.nsp:
        nsp_logits = bert.linear("nsp.classifier", bert.pooler(bert.first_token(hidden)))
        _add_output(graph, "seq_relationship_logits", nsp_logits, BATCH_AXIS, 2)


def _add_task_head(graph: Graph, bundle: FineTunedBundle) -> None:
    """Add the fine-tuned model and its head."""
    config, head = bundle.config, bundle.head
    if isinstance(bundle.model, BertWithBiLSTM):
        raise ModelError(
            f"{bundle.path}: models with a BiLSTM (features) cannot be exported to ONNX; fine-tune "
            "the whole model without features and export that"
        )
    bert = BertGraph(graph, config, choices=head.kind == "choice")
    hidden = bert.hidden_states()
    if head.kind == "span":
        logits = bert.linear("spans", hidden)
        parts = graph.add_multi_output_node(
            "Split", ["starts", "ends"], logits, axis=-1, num_outputs=2
        )
        for part, name in zip(parts, ("start_logits", "end_logits"), strict=True):
            axis = graph.int64_vector(-1)
            squeezed = graph.add_node("Squeeze", f"{part} of tokens", part, axis)
            _add_output(graph, name, squeezed, BATCH_AXIS, LENGTH_AXIS)
    elif head.kind in ("entities", "tags"):
        logits = bert.linear("output", hidden)
        _add_output(graph, "logits", logits, BATCH_AXIS, LENGTH_AXIS, head.num_outputs)
    else:
        # With causal attention, only the last token attends to all tokens.
        is_causal = config.attention == "causal"
        token = bert.last_token(hidden) if is_causal else bert.first_token(hidden)
        logits = bert.linear("output", bert.pooler(token))
        if head.kind != "choice":
            _add_output(graph, "logits", logits, BATCH_AXIS, head.num_outputs)
            return
        input_name = graph.inputs[0].name
        shape = graph.add_node("Shape", "prompts and choices", input_name, start=0, end=2)
        scores = graph.add_node("Reshape", "scores", logits, shape)
        _add_output(graph, "logits", scores, BATCH_AXIS, CHOICES_AXIS)
