"""Dropout: its rate, its mean, and its decisions as a pure function of seed and site."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.ops.dropout import Dropout, DropoutSeed, random_bits
from tests.model.examples import prime_config

COUNT = 400_003


def drawn(seed: int, site: int, rate: float = 0.5, count: int = 64) -> Tensor:
    """Drop ones."""
    found: Tensor = Dropout(rate, site).train()(torch.ones(count), DropoutSeed(torch.tensor(seed)))
    return found


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5, 0.9])
def test_rate_and_mean(rate: float) -> None:
    """The share of zeros is binomial, the rest is scaled so that the mean stays."""
    found = drawn(7, 3, rate, COUNT)
    zeros = int((found == 0).sum())
    spread = math.sqrt(COUNT * rate * (1 - rate))
    # Four deviations, and the rounding of the rate to 2^-16.
    assert abs(zeros - COUNT * rate) < 4 * spread + COUNT * 2**-17
    scale = torch.tensor(1 / (1 - rate)).expand(COUNT - zeros)
    torch.testing.assert_close(found[found != 0], scale)
    assert abs(float(found.mean()) - 1) < 4 * spread / COUNT / (1 - rate) + 2**-16


def test_neighbours_are_independent() -> None:
    """Elements that come from one 64-bit draw are dropped no more often together than others."""
    dropped = (drawn(1, 1, 0.3, 400_000) == 0).view(-1, 4)
    for first in range(4):
        for second in range(first):
            both = int((dropped[:, first] & dropped[:, second]).sum())
            assert abs(both - 100_000 * 0.09) < 4.5 * math.sqrt(100_000 * 0.09 * 0.91)


def test_the_same_seed_and_site_give_the_same_mask() -> None:
    """Decisions are a pure function of seed, site and place, untouched by the default generator."""
    before = torch.random.get_rng_state()
    assert torch.equal(drawn(5, 2), drawn(5, 2))
    assert torch.equal(drawn(5, 2, count=61), drawn(5, 2)[:61])
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("step", [1, 2**31, 2**32, 2**33, 2**61])
def test_each_seed_has_a_mask_of_its_own(step: int) -> None:
    """Seeds that differ in any bit differ in their masks; a run's seed may stand in high bits."""
    assert not torch.equal(drawn(5, 2), drawn(5 + step, 2))


def test_sites_do_not_share_decisions() -> None:
    """Any two of a hundred sites agree about as often as coins do."""
    masks = torch.stack([drawn(3, site, count=4096) > 0 for site in range(100)]).float()
    agreement = masks @ masks.T + (1 - masks) @ (1 - masks).T
    agreement.fill_diagonal_(2048)
    # 4,950 pairs: the farthest of them stays within five deviations of 32.
    assert (agreement - 2048).abs().max() < 5.5 * 32


def test_every_place_in_the_model_has_a_site_of_its_own() -> None:
    """No two dropouts of a model carry the same number."""
    sites = [
        m.site
        for m in BertForPreTraining(prime_config(layers=5)).modules()
        if isinstance(m, Dropout)
    ]
    assert len(sites) == len(set(sites)) == 1 + 3 * 5


def test_nothing_is_dropped_outside_training() -> None:
    """In eval mode, without noise, or at rate 0 the input itself comes back."""
    x, noise = torch.ones(5), DropoutSeed(torch.tensor(0))
    assert Dropout(0.5, 0).eval()(x, noise) is x
    assert Dropout(0.5, 0).train()(x, None) is x
    assert Dropout(0.0, 0).train()(x, noise) is x


def test_the_gradient_is_dropped_alike() -> None:
    """The gradient passes where the value did, scaled alike."""
    x = torch.ones(1000, requires_grad=True)
    found = Dropout(0.3, 1).train()(x, DropoutSeed(torch.tensor(9)))
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert torch.equal(slope, found.detach())


def test_fresh_noise_comes_from_the_default_generator() -> None:
    """``Noise.fresh`` follows ``torch.manual_seed`` and differs from call to call."""
    torch.manual_seed(0)
    first, second = DropoutSeed.random(), DropoutSeed.random()
    torch.manual_seed(0)
    assert int(first.seed) == int(DropoutSeed.random().seed) != int(second.seed)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8, 1001])
def test_bits_have_the_size_asked_for(count: int) -> None:
    """Any number of elements can be had, though four come from one draw."""
    bits = random_bits(torch.tensor(1), 0, count)
    assert bits.shape == (count,)
    assert bits.dtype == torch.int16


def test_the_operator_is_sound() -> None:
    """PyTorch's own check of operators finds no alias, no mutation and a fitting shape."""
    torch.library.opcheck(random_bits, (torch.tensor(3), 1, 10))


def test_compiled_equals_eager() -> None:
    """A compiled graph drops by the same masks as eager code, whatever the seed."""
    torch._dynamo.reset()
    first, second = Dropout(0.3, 4).train(), Dropout(0.1, 5).train()

    def both(x: Tensor, noise: DropoutSeed) -> Tensor:
        dropped: Tensor = second(first(x, noise) + 1, noise)
        return dropped

    compiled: Any = torch.compile(both, fullgraph=True)
    x = torch.linspace(1, 2, 33).repeat(3, 1)
    results = []
    for seed in (3, 4):
        noise = DropoutSeed(torch.tensor(seed))
        results.append(compiled(x, noise))
        torch.testing.assert_close(results[-1], both(x, noise), rtol=1e-6, atol=0)
    assert not torch.equal(results[0], results[1])
