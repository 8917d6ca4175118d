"""The encoder equals PyTorch's, and the pre-norm encoder equals transformers'."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.ops.attention_layout import Kernel
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.ops.linear import round_up_num_rows
from bertsmith.model.task_models import BertForSequenceClassification
from tests.model.examples import (
    RAGGED_LENGTHS,
    draw_batch,
    make_prime_size_config,
    randomize_weights,
)


def to_pytorch_encoder(model: BertModel) -> nn.TransformerEncoder:
    """Return PyTorch's encoder with the same weights."""
    config = model.config
    is_pre_norm = config.norm == "pre"
    layer = nn.TransformerEncoderLayer(
        config.width,
        config.heads,
        config.feed_forward,
        activation="relu",
        layer_norm_eps=config.norm_eps,
        batch_first=True,
        norm_first=is_pre_norm,
    )
    final_norm = nn.LayerNorm(config.width, config.norm_eps) if is_pre_norm else None
    encoder = nn.TransformerEncoder(layer, config.layers, final_norm, enable_nested_tensor=False)
    layers: Any = model.encoder.layers
    torch_layers: Any = encoder.layers
    for source, target in zip(layers, torch_layers, strict=True):
        target.self_attn.in_proj_weight.data = source.attention.query_key_value.weight.data
        target.self_attn.in_proj_bias.data = source.attention.query_key_value.bias.data
        target.self_attn.out_proj.load_state_dict(source.attention.output.state_dict())
        target.linear1.load_state_dict(source.up.state_dict())
        target.linear2.load_state_dict(source.down.state_dict())
        target.norm1.load_state_dict(source.attention_norm.state_dict())
        target.norm2.load_state_dict(source.feed_forward_norm.state_dict())
    if final_norm is not None:
        final_norm.load_state_dict(model.encoder.norm.state_dict())
    return encoder.eval()


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_encoder_equals_pytorch(norm: str, attention: str) -> None:
    """Hidden states equal those of nn.TransformerEncoder, for both norms and attention types."""
    config = make_prime_size_config(norm=norm, attention=attention, activation="relu", layers=3)
    model = randomize_weights(BertForPreTraining(config)).bert.eval()
    batch = draw_batch(config, (29,))
    mask = None
    if attention == "causal":
        mask = torch.ones(29, 29, dtype=torch.bool).triu(1)
    with torch.no_grad():
        embeddings, *_, hidden = model.iter_hidden_states(batch.packed)
        expected = to_pytorch_encoder(model)(embeddings[None], mask=mask)
    torch.testing.assert_close(hidden, expected[0], rtol=1e-5, atol=1e-5)


def to_roberta_prelayernorm(model: BertModel) -> Any:
    """Return transformers' RoBERTa-PreLayerNorm with the same weights."""
    config = model.config
    hf_config = transformers.RobertaPreLayerNormConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward,
        hidden_act="gelu",
        max_position_embeddings=config.max_positions,
        type_vocab_size=config.segments,
        layer_norm_eps=config.norm_eps,
    )
    hf_model: Any = transformers.RobertaPreLayerNormModel(hf_config, add_pooling_layer=False)
    hf_embedding_names = {
        "words": "word_embeddings",
        "positions": "position_embeddings",
        "segments": "token_type_embeddings",
        "norm": "LayerNorm",
    }
    module_pairs = [
        (getattr(model.embeddings, name), getattr(hf_model.embeddings, hf_name))
        for name, hf_name in hf_embedding_names.items()
    ]
    layers: Any = model.encoder.layers
    for layer, hf_layer in zip(layers, hf_model.encoder.layer, strict=True):
        query_key_value = layer.attention.query_key_value
        hf_attention = hf_layer.attention.self
        for index, linear in enumerate((hf_attention.query, hf_attention.key, hf_attention.value)):
            linear.weight.data = query_key_value.weight.data.chunk(3)[index]
            linear.bias.data = query_key_value.bias.data.chunk(3)[index]
        module_pairs += [
            (layer.attention_norm, hf_layer.attention.LayerNorm),
            (layer.attention.output, hf_layer.attention.output.dense),
            (layer.feed_forward_norm, hf_layer.intermediate.LayerNorm),
            (layer.up, hf_layer.intermediate.dense),
            (layer.down, hf_layer.output.dense),
        ]
    for source, target in (*module_pairs, (model.encoder.norm, hf_model.LayerNorm)):
        target.load_state_dict(source.state_dict())
    return hf_model.eval()


def test_pre_norm_equals_transformers() -> None:
    """A pre-norm model equals transformers' RoBERTa-PreLayerNorm."""
    config = make_prime_size_config(norm="pre", activation="gelu", layers=3)
    model = randomize_weights(BertForPreTraining(config)).bert.eval()
    batch = draw_batch(config, (29,))
    packed = batch.packed
    with torch.no_grad():
        hidden = model(packed)
        expected = to_roberta_prelayernorm(model)(
            input_ids=packed.ids[None],
            token_type_ids=packed.segments[None],
            position_ids=packed.positions[None],
        )
    torch.testing.assert_close(hidden, expected.last_hidden_state[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("attention", ["bidirectional", "causal"])
def test_classifier_computes_the_last_layer_for_one_token_per_sequence(
    norm: str, attention: str
) -> None:
    """The last feed-forward network gets B rows instead of T, with the same logits."""
    config = make_prime_size_config(norm=norm, attention=attention, layers=3)
    torch.manual_seed(0)
    model = BertForSequenceClassification(config, 5).eval()
    batch = draw_batch(config, RAGGED_LENGTHS)
    row_counts = []
    layers: Any = model.bert.encoder.layers
    for layer in layers:
        layer.up.register_forward_hook(lambda _, inputs, __: row_counts.append(len(inputs[0])))
    with torch.no_grad():
        logits = model(batch.packed)
        num_tokens = sum(RAGGED_LENGTHS)
        assert row_counts == [num_tokens, num_tokens, len(RAGGED_LENGTHS)]
        hidden = model.bert(batch.packed)
    is_causal = attention == "causal"
    token_indices = (
        batch.packed.cu_seqlens[1:].long() - 1 if is_causal else batch.packed.first_token_indices
    )
    expected = model.output(model.pooler(hidden[token_indices]))
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


def test_pre_training_computes_the_last_layer_only_where_losses_need_it() -> None:
    """The last layer runs for masked tokens and [CLS] only, with the same losses and gradients."""
    torch.manual_seed(0)
    model = BertForPreTraining(make_prime_size_config(layers=2)).eval()
    batch = draw_batch(model.config, RAGGED_LENGTHS)
    row_counts = []
    layers: Any = model.bert.encoder.layers
    layers[-1].down.register_forward_hook(lambda _, inputs, __: row_counts.append(len(inputs[0])))
    losses = model(*batch.arguments)
    assert losses.nsp_loss is not None
    torch.autograd.backward(losses.mlm_loss + losses.nsp_loss)
    gradients = {
        name: weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.grad is not None
    }
    assert row_counts == [len(batch.masked_labels) + len(RAGGED_LENGTHS)]
    model.zero_grad()
    hidden = model.bert(batch.packed)
    mlm_logits = model.mlm(hidden[batch.masked_positions])
    nsp_logits = model.compute_nsp_logits(hidden, batch.packed)
    mlm_loss = F.cross_entropy(mlm_logits, batch.masked_labels, reduction="sum")
    nsp_loss = F.cross_entropy(nsp_logits, batch.nsp_labels, reduction="sum")
    torch.autograd.backward(mlm_loss + nsp_loss)
    torch.testing.assert_close(losses.mlm_loss, mlm_loss)
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("lengths", [RAGGED_LENGTHS, (13, 13, 13)], ids=["ragged", "equal"])
def test_filler_rows_of_bf16_inference_do_not_change_the_output(
    monkeypatch: pytest.MonkeyPatch, norm: str, lengths: tuple[int, ...]
) -> None:
    """Layers get a row count that oneDNN caches; all outputs are those without filler rows."""
    config = make_prime_size_config(norm=norm)
    model = randomize_weights(BertForPreTraining(config)).bert.eval().bfloat16()
    batch = draw_batch(config, lengths).packed
    indices = torch.tensor([0, len(batch.ids) - 1])
    row_counts = set()
    layers: Any = model.encoder.layers
    for layer in layers:
        layer.up.register_forward_hook(lambda _, args, __: row_counts.add(len(args[0])))

    def compute() -> list[torch.Tensor]:
        with torch.no_grad():
            return [*model.iter_hidden_states(batch), model(batch, token_indices=indices)]

    padded = compute()
    num_tokens = len(batch.ids)
    assert num_tokens % 16
    assert row_counts == {round_up_num_rows(num_tokens), len(indices)}
    monkeypatch.setattr("bertsmith.model.encoder.append_filler_rows", lambda x: x)
    for state, expected in zip(padded, compute(), strict=True):
        assert state.shape == expected.shape
        torch.testing.assert_close(state, expected, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kernel", ["padded", "reference"])
@pytest.mark.parametrize("lengths", [(19, 3, 40), (7, 7, 7)], ids=["ragged", "equal"])
def test_filler_rows_do_not_change_gradients(
    kernel: Kernel, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bf16 training, losses and gradients are those without filler rows, with dropout too."""
    config = make_prime_size_config(dropout=0.1, attention_dropout=0.1)
    model = randomize_weights(BertForPreTraining(config, kernel)).train()
    batch = draw_batch(config, lengths)
    parameters = list(model.parameters())
    row_counts = set()
    layers: Any = model.bert.encoder.layers
    layers[0].up.register_forward_hook(lambda _, args, __: row_counts.add(len(args[0])))

    def compute_losses_and_gradients() -> list[torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            losses = model(*batch.arguments, dropout_seed=DropoutSeed(torch.tensor(5)))
        loss = losses.mlm_loss + losses.nsp_loss
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    padded = compute_losses_and_gradients()
    monkeypatch.setattr("bertsmith.model.encoder.append_filler_rows", lambda x: x)
    expected = compute_losses_and_gradients()
    assert row_counts == {round_up_num_rows(sum(lengths)), sum(lengths)}
    for value, expected_value in zip(padded, expected, strict=True):
        scale = float(expected_value.abs().max())
        torch.testing.assert_close(value, expected_value, atol=0.02 * scale + 1e-6, rtol=0.02)
