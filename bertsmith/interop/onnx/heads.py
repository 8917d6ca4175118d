"""What a model says, as the end of its graph: an output or two for each kind of model.

It never knows files, nor needs the package ``onnx``. Outputs are named as Hugging Face's Optimum
names them, so that its runtime classes take the graph.
"""

from torch import Tensor

from bertsmith.bundle import EncoderBundle, FineTunedBundle, PretrainedBundle
from bertsmith.errors import ModelError
from bertsmith.interop.onnx.bert import BATCH_AXIS, CHOICES_AXIS, LENGTH_AXIS, BertGraph
from bertsmith.interop.onnx.graph import Graph, ValueInfo
from bertsmith.model.feature_based import BertWithBiLSTM

AnyBundle = PretrainedBundle | FineTunedBundle | EncoderBundle


def build_graph(bundle: AnyBundle, *, tied: bool = True) -> Graph:
    """Return the graph of a model; ModelError for one that has a BiLSTM, or no LayerNorm.

    ``tied``: as for ``Bert.words``.
    """
    if bundle.config.norm not in ("post", "pre"):
        raise ModelError(
            f"{bundle.path}: model.norm is {bundle.config.norm!r}; only models with LayerNorm are "
            "written as ONNX"
        )
    prefix = "bert." if isinstance(bundle, EncoderBundle) else ""
    state: dict[str, Tensor] = bundle.model.state_dict()
    graph = Graph({f"{prefix}{name}": value.numpy(force=True) for name, value in state.items()})
    if isinstance(bundle, EncoderBundle):
        hidden = BertGraph(graph, bundle.config).hidden_states()
        _output(graph, "last_hidden_state", hidden, BATCH_AXIS, LENGTH_AXIS, bundle.config.width)
    elif isinstance(bundle, PretrainedBundle):
        _pretrained(graph, bundle, tied=tied)
    else:
        _task(graph, bundle)
    return graph


def _output(graph: Graph, name: str, value: str, *shape: str | int) -> None:
    """Give out a value, float32, under a name of its own."""
    graph.add_node("Identity", name, value)
    graph.outputs.append(ValueInfo(name, "float32", shape))


def _pretrained(graph: Graph, bundle: PretrainedBundle, *, tied: bool) -> None:
    """Add the heads that the files have; one that was drawn anew knows nothing."""
    config = bundle.config
    if not config.nsp:
        bundle.require_head("mlm.")
    bert = BertGraph(graph, config)
    hidden = bert.hidden_states()
    if not any(name.startswith("mlm.") for name in bundle.new_weights):
        logits = bert.mlm_logits(hidden, tied=tied)
        _output(graph, "logits", logits, BATCH_AXIS, LENGTH_AXIS, config.vocab_size)
    if config.nsp:
        pairs = bert.linear("nsp.classifier", bert.pooler(bert.first_token(hidden)))
        _output(graph, "seq_relationship_logits", pairs, BATCH_AXIS, 2)


def _task(graph: Graph, bundle: FineTunedBundle) -> None:
    config, head = bundle.config, bundle.head
    if isinstance(bundle.model, BertWithBiLSTM):
        raise ModelError(
            f"{bundle.path}: this model is a BiLSTM on an encoder (features), which is not "
            "written as ONNX; fine-tune the whole model (without features) and export that"
        )
    bert = BertGraph(graph, config, choices=head.kind == "choice")
    hidden = bert.hidden_states()
    if head.kind == "span":
        logits = bert.linear("spans", hidden)
        parts = graph.add_multi_output_node(
            "Split", ["starts", "ends"], logits, axis=-1, num_outputs=2
        )
        for part, name in zip(parts, ("start_logits", "end_logits"), strict=True):
            flat = graph.add_node("Squeeze", f"{part} of tokens", part, graph.int64_vector(-1))
            _output(graph, name, flat, BATCH_AXIS, LENGTH_AXIS)
    elif head.kind in ("entities", "tags"):
        _output(
            graph,
            "logits",
            bert.linear("output", hidden),
            BATCH_AXIS,
            LENGTH_AXIS,
            head.num_outputs,
        )
    else:
        # Under a causal mask [CLS] sees itself only, and the last token sees all.
        token = (
            bert.last_token(hidden) if config.attention == "causal" else bert.first_token(hidden)
        )
        logits = bert.linear("output", bert.pooler(token))
        if head.kind != "choice":
            _output(graph, "logits", logits, BATCH_AXIS, head.num_outputs)
            return
        shape = graph.add_node("Shape", "prompts and choices", graph.inputs[0].name, start=0, end=2)
        scores = graph.add_node("Reshape", "scores", logits, shape)
        _output(graph, "logits", scores, BATCH_AXIS, CHOICES_AXIS)
