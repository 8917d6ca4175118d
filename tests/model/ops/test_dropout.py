"""Dropout has the right rate and mean, and its mask depends only on seed and index."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.ops.dropout import Dropout, DropoutSeed, random_bits
from tests.model.examples import draw_batch, make_prime_size_config

#: Number of elements for statistics: not a multiple of four, the elements per random number.
COUNT = 400_003


def drop_ones(seed: int, index: int, rate: float = 0.5, count: int = 64) -> Tensor:
    """Return the output of dropout for ``count`` ones."""
    output: Tensor = Dropout(rate, index).train()(
        torch.ones(count), DropoutSeed(torch.tensor(seed))
    )
    return output


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_rate_is_met_and_mean_is_preserved(rate: float) -> None:
    """The number of zeros is binomial, and scaling preserves the mean."""
    output = drop_ones(7, 3, rate, COUNT)
    num_zeros = int((output == 0).sum())
    std = math.sqrt(COUNT * rate * (1 - rate))
    # Four standard deviations, plus the rounding of the rate to 2^-16.
    assert abs(num_zeros - COUNT * rate) < 4 * std + COUNT * 2**-17
    scale = torch.tensor(1 / (1 - rate)).expand(COUNT - num_zeros)
    torch.testing.assert_close(output[output != 0], scale)
    assert abs(float(output.mean()) - 1) < 4 * std / COUNT / (1 - rate) + 2**-16


def test_adjacent_elements_are_independent() -> None:
    """Elements decided by the same 64-bit random number are dropped independently."""
    rate = 0.3
    num_groups = 100_000
    is_dropped = (drop_ones(1, 1, rate, 4 * num_groups) == 0).view(num_groups, 4)
    # The number of groups in which two given elements are dropped is binomial.
    probability = rate**2
    std = math.sqrt(num_groups * probability * (1 - probability))
    for first in range(4):
        for second in range(first):
            num_dropped_together = int((is_dropped[:, first] & is_dropped[:, second]).sum())
            assert abs(num_dropped_together - num_groups * probability) < 4.5 * std


def test_equal_seed_and_index_give_equal_masks() -> None:
    """Masks depend only on seed, index and position, and do not use the default generator."""
    state = torch.random.get_rng_state()
    assert torch.equal(drop_ones(5, 2), drop_ones(5, 2))
    assert torch.equal(drop_ones(5, 2, count=61), drop_ones(5, 2)[:61])
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("difference", [1, 2**31, 2**32, 2**33, 2**61])
def test_different_seeds_give_different_masks(difference: int) -> None:
    """Seeds that differ in any bit, high or low, give different masks."""
    assert not torch.equal(drop_ones(5, 2), drop_ones(5 + difference, 2))


def test_masks_of_different_indices_are_independent() -> None:
    """The masks of any two of 100 indices agree about half of the time."""
    masks = torch.stack([drop_ones(3, index, count=4096) > 0 for index in range(100)]).float()
    agreement = masks @ masks.T + (1 - masks) @ (1 - masks).T
    agreement.fill_diagonal_(2048)
    # There are 4,950 pairs, and the standard deviation of 4,096 coin flips is 32.
    assert (agreement - 2048).abs().max() < 5.5 * 32


def test_all_dropouts_of_a_model_have_different_indices() -> None:
    """No two dropouts of a model share an index."""
    model = BertForPreTraining(make_prime_size_config(layers=5))
    indices = [module.index for module in model.modules() if isinstance(module, Dropout)]
    assert len(indices) == len(set(indices)) == 1 + 3 * 5


def test_inactive_dropout_returns_its_input() -> None:
    """In eval mode, without a seed, or with rate 0, the input itself is returned."""
    x = torch.ones(5)
    dropout_seed = DropoutSeed(torch.tensor(0))
    assert Dropout(0.5, 0).eval()(x, dropout_seed) is x
    assert Dropout(0.5, 0).train()(x, None) is x
    assert Dropout(0.0, 0).train()(x, dropout_seed) is x


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_model_with_rate_zero_draws_no_random_bits(rate: float) -> None:
    """Training with all rates 0 runs no dropout operator; with other rates it does."""
    config = make_prime_size_config(dropout=rate, attention_dropout=rate)
    model = BertForPreTraining(config).train()
    batch = draw_batch(config)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        model(*batch.arguments, DropoutSeed(torch.tensor(1)))
    operators = {event.key for event in profiler.key_averages()}
    assert ("bertsmith::random_bits" in operators) == (rate > 0)
    assert not any("dropout" in operator for operator in operators)


def test_gradient_uses_the_same_mask() -> None:
    """The gradient is dropped and scaled like the value."""
    x = torch.ones(1000, requires_grad=True)
    output = Dropout(0.3, 1).train()(x, DropoutSeed(torch.tensor(9)))
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient, output.detach())


def test_random_seed_uses_the_default_generator() -> None:
    """``DropoutSeed.random`` follows ``torch.manual_seed`` and differs from call to call."""
    torch.manual_seed(0)
    first, second = DropoutSeed.random(), DropoutSeed.random()
    torch.manual_seed(0)
    assert int(first.seed) == int(DropoutSeed.random().seed) != int(second.seed)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 1001])
def test_random_bits_have_the_requested_size(count: int) -> None:
    """The number of elements need not be a multiple of four, the elements per random number."""
    bits = random_bits(torch.tensor(1), 0, count)
    assert bits.shape == (count,)
    assert bits.dtype == torch.int16


def test_custom_operator_passes_opcheck() -> None:
    """The operator passes PyTorch's checks for aliasing, mutation and fake tensors."""
    torch.library.opcheck(random_bits, (torch.tensor(3), 1, 10))


def test_compiled_dropout_equals_eager() -> None:
    """A compiled graph uses the same masks as eager code, for every seed."""
    torch._dynamo.reset()
    first, second = Dropout(0.3, 4).train(), Dropout(0.1, 5).train()

    def apply_two_dropouts(x: Tensor, dropout_seed: DropoutSeed) -> Tensor:
        output: Tensor = second(first(x, dropout_seed) + 1, dropout_seed)
        return output

    compiled: Any = torch.compile(apply_two_dropouts, fullgraph=True)
    x = torch.linspace(1, 2, 33).repeat(3, 1)
    outputs = []
    for seed in (3, 4):
        dropout_seed = DropoutSeed(torch.tensor(seed))
        outputs.append(compiled(x, dropout_seed))
        torch.testing.assert_close(
            outputs[-1], apply_two_dropouts(x, dropout_seed), rtol=1e-6, atol=0
        )
    assert not torch.equal(outputs[0], outputs[1])
