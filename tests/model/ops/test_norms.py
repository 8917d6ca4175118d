"""What stands in LayerNorm's place: batch norm over the tokens of a packed batch, or nothing."""

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
from tests.model.examples import make_tokenizer, prime_config, random_batch, randomize_weights

#: Another choice than layer norm, as a config's field.
OTHERS = pytest.mark.parametrize("norm", ["batch", "none"])


def test_batch_norm_is_pytorchs() -> None:
    """Outputs, gradients and running statistics are those of nn.BatchNorm1d over the tokens."""
    torch.manual_seed(0)
    ours, theirs = BatchNorm(7, 1e-5), nn.BatchNorm1d(7, 1e-5)
    for own in (ours, theirs):
        own.weight.data.copy_(torch.arange(7.0))
        own.bias.data.fill_(0.3)
    for _ in range(3):
        x = torch.randn(31, 7, requires_grad=True)
        found, expected = ours(x), theirs(x)
        torch.testing.assert_close(found, expected)
        slopes = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
        torch.testing.assert_close(*slopes)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    x = torch.randn(5, 7)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    # A batch of a single token has no variance of its own, and is no error.
    assert torch.isfinite(ours.train()(x[:1])).all()
    ours.reset_parameters()
    assert ours.running_mean.eq(0).all()
    assert ours.weight.eq(1).all()


def test_none_has_no_norm_in_the_encoder() -> None:
    """Without norm, the only LayerNorm is the masked-LM head's; a residual sum stays as it is."""
    model = BertForPreTraining(prime_config(norm="none"))
    names = [name for name, own in model.named_modules() if isinstance(own, nn.LayerNorm)]
    assert names == ["mlm.norm"]
    assert not any(isinstance(own, BatchNorm) for own in model.modules())


@OTHERS
def test_what_is_not_asked_counts_all_the_same(norm: str) -> None:
    """Asked for some places, the last layer says what it says of them when asked for all."""
    config = prime_config(norm=norm, dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(1)
    model, batch = BertModel(config), random_batch(config)
    places = batch.masked_positions
    for train in (True, False):
        model.train(train)
        whole, some = model(batch.packed), model(batch.packed, None, places)
        torch.testing.assert_close(some, whole[places], rtol=0, atol=1e-5)


@OTHERS
def test_a_directory_holds_it(norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written and read again, a model says the same, running statistics included."""
    config = prime_config(norm=norm)
    model = randomize_weights(BertForPreTraining(config))
    batch = random_batch(config)
    with torch.no_grad():
        # Moves the running statistics away from where they begin.
        model.train()(*batch.arguments)
        expected = model.eval().bert(batch.packed)
    bundle.save(tmp_path / "model", model, make_tokenizer(config.vocab_size), {})
    found = bundle.load(tmp_path / "model")
    assert found.config.norm == norm
    assert not found.notes()
    with torch.no_grad():
        torch.testing.assert_close(found.model.bert(batch.packed), expected, rtol=0, atol=0)
    said = write_huggingface(tmp_path / "model", tmp_path / "hf")
    assert "transformers has no such BERT" in said[0]
    with pytest.raises(ModelError, match="only models with LayerNorm are written as ONNX"):
        write_onnx(tmp_path / "model", tmp_path / "onnx")
    # Where the CPU multiplies bf16 itself, the fast form is that, whatever the norm.
    monkeypatch.setattr("bertsmith.use.quantization.has_bf16", lambda: False)
    with pytest.raises(ModelError, match="the fast form needs LayerNorm"):
        Embedder.load(tmp_path / "model", fast=True)


@OTHERS
def test_it_learns(norm: str) -> None:
    """Every parameter has a gradient, and ten steps on one batch lower its loss."""
    config = prime_config(norm=norm, dropout=0.0, attention_dropout=0.0)
    torch.manual_seed(2)
    model, batch = BertForPreTraining(config).train(), random_batch(config)
    adam = torch.optim.Adam(model.parameters(), 1e-2)
    losses: list[Any] = []
    for _ in range(10):
        found = model(*batch.arguments)
        loss = found.masked + found.next_sentence
        loss.backward()
        assert all(own.grad is not None for own in model.parameters())
        adam.step()
        adam.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
