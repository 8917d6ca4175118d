"""The layers against PyTorch's own encoder, and pre-norm against that of transformers."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.task_models import BertForSequenceClassification
from tests.model.examples import RAGGED, prime_config, random_batch, randomize_weights


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
    config = prime_config(norm=norm, attention=attention, activation="relu", layers=3)
    model = randomize_weights(BertForPreTraining(config)).bert.eval()
    batch = random_batch(config, (29,))
    future = None
    if attention == "causal":
        future = torch.ones(29, 29, dtype=torch.bool).triu(1)
    with torch.no_grad():
        first, *_, last = model.hidden_states(batch.packed)
        expected = peer_of(model)(first[None], mask=future)
    torch.testing.assert_close(last, expected[0], rtol=1e-5, atol=1e-5)


def prelayernorm_of(model: BertModel) -> Any:
    """Return the RoBERTa-PreLayerNorm of transformers with the same weights."""
    config = model.config
    made = transformers.RobertaPreLayerNormConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, num_hidden_layers=config.layers,
        num_attention_heads=config.heads, intermediate_size=config.feed_forward,
        hidden_act="gelu", max_position_embeddings=config.max_positions,
        type_vocab_size=config.segments, layer_norm_eps=config.norm_eps,
    )  # fmt: skip
    peer: Any = transformers.RobertaPreLayerNormModel(made, add_pooling_layer=False)
    tables = ("words", "word_embeddings"), ("positions", "position_embeddings"), (
        "segments", "token_type_embeddings")  # fmt: skip
    pairs = [(getattr(model.embeddings, own), getattr(peer.embeddings, other))
             for own, other in (*tables, ("norm", "LayerNorm"))]  # fmt: skip
    layers: Any = model.encoder.layers
    for ours, theirs in zip(layers, peer.encoder.layer, strict=True):
        three = ours.attention.query_key_value
        heads = theirs.attention.self
        for number, one in enumerate((heads.query, heads.key, heads.value)):
            one.weight.data, one.bias.data = (
                part.data.chunk(3)[number] for part in (three.weight, three.bias)
            )
        pairs += [
            (ours.attention_norm, theirs.attention.LayerNorm),
            (ours.attention.output, theirs.attention.output.dense),
            (ours.feed_forward_norm, theirs.intermediate.LayerNorm),
            (ours.up, theirs.intermediate.dense),
            (ours.down, theirs.output.dense),
        ]
    for own, other in (*pairs, (model.encoder.norm, peer.LayerNorm)):
        other.load_state_dict(own.state_dict())
    return peer.eval()


def test_pre_norm_is_that_of_transformers() -> None:
    """RoBERTa-PreLayerNorm: a LayerNorm after the embeddings, before each part, and at the end."""
    config = prime_config(norm="pre", activation="gelu", layers=3)
    model = randomize_weights(BertForPreTraining(config)).bert.eval()
    batch = random_batch(config, (29,))
    packed = batch.packed
    with torch.no_grad():
        found = model(packed)
        expected = prelayernorm_of(model)(
            input_ids=packed.ids[None], token_type_ids=packed.segments[None],
            position_ids=packed.positions[None],
        )  # fmt: skip
    torch.testing.assert_close(found, expected.last_hidden_state[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_the_last_feed_forward_sees_only_what_is_asked(norm: str, attention: str) -> None:
    """One row a sequence instead of T, and the same answer as from all hidden states."""
    config = prime_config(norm=norm, attention=attention, layers=3)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config, 5).eval()
    batch = random_batch(config, RAGGED)
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
    places = batch.packed.cu_seqlens[1:].long() - 1 if causal else batch.packed.first_token_indices
    wanted = model.output(model.pooler(hidden[places]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)


def test_pre_training_computes_the_last_layer_where_a_loss_is_asked_for() -> None:
    """At the masks and [CLS] alone, with the losses and gradients of all hidden states."""
    torch.manual_seed(0)
    model = BertForPreTraining(prime_config(layers=2)).eval()
    batch = random_batch(model.config, RAGGED)
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
    torch.autograd.backward(masked + f.cross_entropy(pairs, batch.nsp_labels, reduction="sum"))
    torch.testing.assert_close(losses.masked, masked)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-6)
