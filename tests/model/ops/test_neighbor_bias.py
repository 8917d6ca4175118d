"""The bias of attention scores towards neighboring tokens."""

import pytest
import torch

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.encoder import EncoderLayer
from bertsmith.model.ops.attention_layout import Kernel, build_attention_layout
from bertsmith.model.ops.neighbor_bias import (
    add_neighbor_bias,
    build_neighbor_bias,
    find_widest_head,
)
from bertsmith.model.packed import pack_sequences
from tests.model.examples import EQUAL_LENGTHS, RAGGED_LENGTHS, draw_batch, make_prime_size_config

STRENGTH = torch.tensor(0.75)


@pytest.mark.parametrize("num_heads", [1, 3, 6])
def test_heads_prefer_neighbors_or_nearby_tokens(num_heads: int) -> None:
    """The score falls with the distance from the head's center, except for that of [CLS]."""
    bias = build_neighbor_bias(STRENGTH, num_heads, 11, torch.float64)
    assert bias.shape == (num_heads, 11, 11)
    slopes = [1, 1, 1 / 8, 1 / 64, 1, 1]
    offsets = [-1, 1, 0, 0, -1, 1]
    for head in range(num_heads):
        for query in range(11):
            for key in range(11):
                expected = -0.75 * slopes[head] * abs(key - query - offsets[head])
                if key == 0:
                    expected = 0.0
                assert bias[head, query, key] == expected, (head, query, key)


@pytest.mark.parametrize(("num_heads", "expected"), [(1, 0), (2, 1), (3, 2), (4, 3), (12, 3)])
def test_widest_head_has_the_smallest_slope(num_heads: int, expected: int) -> None:
    """It is the last such head of the first group of four."""
    bias = build_neighbor_bias(STRENGTH, num_heads, 11, torch.float64)
    assert find_widest_head(num_heads) == expected
    totals = bias.sum((1, 2))
    assert totals[expected] == pytest.approx(totals.max())


@pytest.mark.parametrize("lengths", [RAGGED_LENGTHS, EQUAL_LENGTHS], ids=["ragged", "equal"])
def test_kernels_agree_with_the_bias(lengths: tuple[int, ...]) -> None:
    """`padded` and `reference` have the same losses and gradients, which differ without the bias.

    `varlen` has no bias, so `padded` takes its place, on the CPU too.
    """
    torch.manual_seed(3)
    config = make_prime_size_config(nsp=False, attention_dropout=0.0, dropout=0.0)
    model = BertForPreTraining(config)
    weights = [
        model.get_parameter(f"bert.encoder.layers.{layer}.attention.query_key_value.weight")
        for layer in range(config.layers)
    ]
    for weight in weights:
        # Scores and outputs large enough to depend on attention.
        weight.data.mul_(20)
    batch = draw_batch(config, lengths)

    def compute(kernel: Kernel, strength: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        model.bert.kernel = kernel
        model.zero_grad()
        loss = model(
            batch.packed, batch.masked_positions, batch.masked_labels, None, neighbor_bias=strength
        ).mlm_loss
        loss.backward()
        gradient = weights[0].grad
        assert gradient is not None
        return loss.detach(), gradient.clone()

    expected, expected_gradient = compute("reference", STRENGTH)
    for kernel in ("padded", "varlen"):
        loss, gradient = compute(kernel, STRENGTH)
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    without_bias, _ = compute("reference", None)
    assert abs(without_bias - expected) > 1e-3


def test_bias_moves_attention_to_neighbors() -> None:
    """With a strong bias, the first heads attend to the previous, next and same token."""
    config = make_prime_size_config(nsp=False)
    model = BertForPreTraining(config).eval()
    batch = pack_sequences([(list(range(5, 14)), [0] * 9)])
    layout = build_attention_layout(batch, "reference", is_causal=False, dtype=torch.float32)
    layout = add_neighbor_bias(layout, torch.tensor(30.0), config.heads, torch.float32)
    hidden = model.bert.embeddings(batch, None)
    layer = model.bert.encoder.layers[0]
    assert isinstance(layer, EncoderLayer)
    probabilities = layer.compute_probabilities(hidden, layout)[0]
    # Without [CLS], which has no bias, and the last token, which has no next one.
    preferred_keys = probabilities[:, 2:-1, 1:].argmax(-1).tolist()
    previous, same, following = [0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6, 7]
    assert preferred_keys == [previous, following, same]


def test_first_layers_can_be_without_the_bias() -> None:
    """With all layers unbiased nothing changes; with one, only the outputs after it change."""
    torch.manual_seed(3)
    config = make_prime_size_config(nsp=False, attention_dropout=0.0, dropout=0.0)
    model = BertForPreTraining(config).eval()
    for layer in range(config.layers):
        name = f"bert.encoder.layers.{layer}.attention.query_key_value.weight"
        model.get_parameter(name).data.mul_(20)
    batch = draw_batch(config, RAGGED_LENGTHS).packed

    def compute(num_unbiased_layers: int, strength: torch.Tensor | None) -> list[torch.Tensor]:
        model.bert.num_unbiased_layers = num_unbiased_layers
        return list(model.bert.iter_hidden_states(batch, neighbor_bias=strength))

    without_bias = compute(0, None)
    for num_unbiased_layers in range(config.layers + 1):
        states = compute(num_unbiased_layers, STRENGTH)
        # The first state is the output of the embeddings.
        for index, (state, expected) in enumerate(zip(states, without_bias, strict=True)):
            is_equal = torch.equal(state, expected)
            assert is_equal == (index <= num_unbiased_layers), (num_unbiased_layers, index)
