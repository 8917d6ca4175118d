"""The layers against PyTorch's own encoder, which knows pre-norm and causal attention too."""

from typing import Any

import pytest
import torch
from torch import nn

from bertsmith.model.bert import BertModel, PreTrainingModel
from bertsmith.model.task import SequenceModel
from tests.model.examples import RAGGED, example, primes, shaken


def peer_of(model: BertModel) -> nn.TransformerEncoder:
    """Return PyTorch's encoder with the same weights."""
    config = model.config
    pre = config.norm == "pre"
    layer = nn.TransformerEncoderLayer(
        config.width,
        config.heads,
        config.feed_forward,
        activation="relu",
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=pre,
    )
    last = nn.LayerNorm(config.width, config.norm_eps) if pre else None
    peer = nn.TransformerEncoder(layer, config.layers, last, enable_nested_tensor=False)
    layers: Any = model.encoder.layers
    theirs: Any = peer.layers
    for ours, other in zip(layers, theirs, strict=True):
        other.self_attn.in_proj_weight.data = ours.attention.query_key_value.weight.data
        other.self_attn.in_proj_bias.data = ours.attention.query_key_value.bias.data
        other.self_attn.out_proj.load_state_dict(ours.attention.output.state_dict())
        other.linear1.load_state_dict(ours.up.state_dict())
        other.linear2.load_state_dict(ours.down.state_dict())
        other.norm1.load_state_dict(ours.attention_norm.state_dict())
        other.norm2.load_state_dict(ours.feed_forward_norm.state_dict())
    if last is not None:
        last.load_state_dict(model.encoder.norm.state_dict())
    return peer.eval()


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_equals_the_encoder_of_pytorch(norm: str, attention: str) -> None:
    """Pre- and post-norm, causal or not: the hidden states are those of nn.TransformerEncoder."""
    config = primes(norm=norm, attention=attention, activation="relu", layers=3)
    model = shaken(PreTrainingModel(config)).bert.eval()
    batch = example(config, (29,))
    future = None
    if attention == "causal":
        future = torch.ones(29, 29, dtype=torch.bool).triu(1)
    with torch.no_grad():
        first, *_, last = model.hidden_states(batch.packed)
        expected = peer_of(model)(first[None], mask=future)
    torch.testing.assert_close(last, expected[0], rtol=1e-5, atol=1e-5)


def test_pre_norm_leaves_the_embeddings_as_they_are() -> None:
    """Pre-norm layers normalize their own input: the plain sum enters the first layer."""
    model = shaken(PreTrainingModel(primes(norm="pre"))).bert.eval()
    packed = example(model.config).packed
    table = model.embeddings
    expected = table.words.weight[packed.ids] + table.positions.weight[packed.positions]
    first = next(model.hidden_states(packed))
    torch.testing.assert_close(first, expected + table.segments.weight[packed.segments])


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_the_last_feed_forward_sees_only_what_is_asked(norm: str, attention: str) -> None:
    """One row a sequence instead of T, and the same answer as from all hidden states."""
    config = primes(norm=norm, attention=attention, layers=3)
    torch.manual_seed(0)
    model = SequenceModel(config, 5).eval()
    batch = example(config, RAGGED)
    rows = []
    layers: Any = model.bert.encoder.layers
    for layer in layers:
        layer.up.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    with torch.no_grad():
        found = model(batch.packed)
        tokens = sum(RAGGED)
        assert rows == [tokens, tokens, len(RAGGED)]
        hidden = model.bert(batch.packed)
    causal = attention == "causal"
    places = batch.packed.boundaries[1:].long() - 1 if causal else batch.packed.starts
    wanted = model.output(model.pooler(hidden[places]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_pre_training_computes_the_last_layer_where_a_loss_is_asked_for() -> None:
    """At the masks and [CLS] alone, with the losses and gradients of all hidden states."""
    torch.manual_seed(0)
    model = PreTrainingModel(primes(layers=2)).eval()
    batch = example(model.config, RAGGED)
    rows = []
    layers: Any = model.bert.encoder.layers
    layers[-1].down.register_forward_hook(lambda _, given, __: rows.append(len(given[0])))
    losses = model(*batch.arguments)
    assert losses.next_sentence is not None
    torch.autograd.backward(losses.masked + losses.next_sentence)
    found = {name: weight.grad.clone() for name, weight in model.named_parameters()
             if weight.grad is not None}  # fmt: skip
    assert rows == [len(batch.masked_labels) + len(RAGGED)]
    model.zero_grad()
    hidden = model.bert(batch.packed)
    words = model.mlm(hidden[batch.masked_positions])
    pairs = model.next_sentence_logits(hidden, batch.packed)
    f = torch.nn.functional
    masked = f.cross_entropy(words, batch.masked_labels, reduction="sum")
    torch.autograd.backward(masked + f.cross_entropy(pairs, batch.not_next, reduction="sum"))
    torch.testing.assert_close(losses.masked, masked)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-6)
