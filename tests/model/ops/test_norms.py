"""Models with batch norm or without normalization."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bertsmith import bundle
from bertsmith.errors import ModelError
from bertsmith.interop.huggingface import write_huggingface
from bertsmith.interop.onnx import write_onnx
from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.ops.norms import BatchNorm
from bertsmith.use.embed import Embedder
from tests.model.examples import (
    draw_batch,
    make_prime_size_config,
    make_tokenizer,
    randomize_weights,
)

#: The alternatives to LayerNorm.
NORMS = pytest.mark.parametrize("norm", ["batch", "none"])


def test_batch_norm_equals_pytorch() -> None:
    """Outputs, gradients and running statistics equal nn.BatchNorm1d's over the tokens."""
    torch.manual_seed(0)
    norm, torch_norm = BatchNorm(7, 1e-5), nn.BatchNorm1d(7, 1e-5)
    for module in (norm, torch_norm):
        module.weight.data.copy_(torch.arange(7.0))
        module.bias.data.fill_(0.3)
    for _ in range(3):
        x = torch.randn(31, 7, requires_grad=True)
        output, expected = norm(x), torch_norm(x)
        torch.testing.assert_close(output, expected)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (output, expected)]
        torch.testing.assert_close(*gradients)
    torch.testing.assert_close(norm.running_var, torch_norm.running_var)
    x = torch.randn(5, 7)
    torch.testing.assert_close(norm.eval()(x), torch_norm.eval()(x))
    # A batch of one token uses the running statistics.
    assert torch.isfinite(norm.train()(x[:1])).all()
    norm.reset_parameters()
    assert norm.running_mean.eq(0).all()
    assert norm.weight.eq(1).all()


def test_encoder_without_norm_has_no_layer_norm() -> None:
    """With ``norm = "none"`` only the masked-LM head has a LayerNorm."""
    model = BertForPreTraining(make_prime_size_config(norm="none"))
    names = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    assert names == ["mlm.norm"]
    assert not any(isinstance(module, BatchNorm) for module in model.modules())


@NORMS
def test_hidden_states_of_some_tokens_equal_those_of_all(norm: str) -> None:
    """Hidden states computed only for some tokens equal those computed for all tokens."""
    config = make_prime_size_config(norm=norm, dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(1)
    model = BertModel(config)
    batch = draw_batch(config)
    token_indices = batch.masked_positions
    for train in (True, False):
        model.train(train)
        hidden = model(batch.packed)
        selected = model(batch.packed, token_indices=token_indices)
        torch.testing.assert_close(selected, hidden[token_indices], rtol=0, atol=1e-5)


@NORMS
def test_saved_model_can_be_loaded_but_not_exported(
    norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved model has the same outputs when loaded; ONNX and int8 need LayerNorm."""
    config = make_prime_size_config(norm=norm)
    model = randomize_weights(BertForPreTraining(config))
    batch = draw_batch(config)
    with torch.no_grad():
        # A forward pass in train mode changes the running statistics from their initial values.
        model.train()(*batch.arguments)
        expected = model.eval().bert(batch.packed)
    bundle.save(tmp_path / "model", model, make_tokenizer(config.vocab_size), {})
    loaded = bundle.load(tmp_path / "model")
    assert loaded.config.norm == norm
    assert not loaded.notes()
    with torch.no_grad():
        torch.testing.assert_close(loaded.model.bert(batch.packed), expected, rtol=0, atol=0)
    notes = write_huggingface(tmp_path / "model", tmp_path / "hf")
    assert "transformers cannot load this model" in notes[0]
    with pytest.raises(ModelError, match="only models with LayerNorm can be exported to ONNX"):
        write_onnx(tmp_path / "model", tmp_path / "onnx")
    # With bf16 support, ``fast`` would select bf16, which supports every norm.
    monkeypatch.setattr("bertsmith.use.quantization.has_bf16", lambda: False)
    with pytest.raises(ModelError, match="needs LayerNorm"):
        Embedder.load(tmp_path / "model", fast=True)


@NORMS
def test_model_can_be_trained(norm: str) -> None:
    """All parameters get gradients, and ten steps on one batch reduce its loss."""
    config = make_prime_size_config(norm=norm, dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(2)
    model = BertForPreTraining(config).train()
    batch = draw_batch(config)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loss_history: list[Any] = []
    for _ in range(10):
        losses = model(*batch.arguments)
        loss = losses.mlm_loss + losses.nsp_loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        loss_history.append(float(loss.detach()))
    assert loss_history[-1] < 0.8 * loss_history[0]
