"""A residual stream in bf16: dtypes, norms in float32, and the error of losses and gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.ops.norms import LayerNorm
from tests.model.examples import draw_batch, make_prime_size_config


def compute_loss_and_gradient(
    model: BertForPreTraining, residual_dtype: torch.dtype | None, *, is_mixed: bool
) -> tuple[float, Tensor]:
    """Return the mean loss and the gradient of all weights, float64 [n]."""
    batch = draw_batch(model.config)
    model.bert.residual_dtype = residual_dtype
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
        losses = model(*batch.arguments, DropoutSeed(torch.tensor(3)))
    loss = losses.mlm_loss / len(batch.masked_labels) + losses.nsp_loss / len(batch.nsp_labels)
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients).double()


@pytest.mark.parametrize("norm", ["post", "pre", "batch", "none"])
def test_losses_and_gradients_are_close_to_float32(norm: str) -> None:
    """The loss differs by less than 1e-3, and the cosine of the gradients exceeds 0.999."""
    torch.manual_seed(0)
    model = BertForPreTraining(make_prime_size_config(norm=norm, layers=5)).train()
    loss, gradient = compute_loss_and_gradient(model, None, is_mixed=False)
    bf16_loss, bf16_gradient = compute_loss_and_gradient(model, torch.bfloat16, is_mixed=True)
    assert bf16_loss == pytest.approx(loss, rel=1e-3)
    assert float(F.cosine_similarity(bf16_gradient, gradient, dim=0)) > 0.999
    assert not torch.equal(
        bf16_gradient, compute_loss_and_gradient(model, None, is_mixed=True)[1]
    )  # The residual stream is not float32, as it is without the setting.


@pytest.mark.parametrize("norm", ["post", "pre", "batch", "none"])
def test_all_hidden_states_are_bf16(norm: str) -> None:
    """In mixed precision, embeddings and outputs of all layers have the dtype of the stream."""
    config: Any = make_prime_size_config(norm=norm)
    model = BertForPreTraining(config).bert
    for residual_dtype in (torch.bfloat16, torch.float32):
        model.residual_dtype = residual_dtype
        with torch.autocast("cpu", torch.bfloat16):
            states = list(model.iter_hidden_states(draw_batch(config).packed))
        assert [state.dtype for state in states] == [residual_dtype] * (config.layers + 1)


def test_layer_norm_of_bf16_computes_in_float32() -> None:
    """The output for bf16 inputs with a large mean is the float32 output, rounded once.

    With bf16 weights, all is bf16, and float64 stays float64.
    """
    torch.manual_seed(0)
    x = (torch.randn(7, 53) + 100.0).bfloat16()
    norm = LayerNorm(53)
    torch.nn.init.normal_(norm.weight)
    expected = F.layer_norm(x.float(), (53,), norm.weight, norm.bias)
    assert torch.equal(norm(x), expected.bfloat16())
    assert norm.bfloat16()(x).dtype == torch.bfloat16
    assert norm.double()(x.double()).dtype == torch.float64
