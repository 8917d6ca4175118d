"""Bertsmith and transformers are the same BERT: losses, logits and every gradient.

In training, both drop by the same masks, keyed on (site, sequence, position), at their own rates.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.model.attention import Kernel
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import Activation, ModelConfig, size_preset
from tests.model.examples import (
    EQUAL,
    RAGGED,
    PreTrainingBatch,
    prime_config,
    random_batch,
    randomize_weights,
)
from tests.model.peer import (
    SMALL,
    Masks,
    Outcome,
    key_ours,
    key_theirs,
    run_ours,
    run_theirs,
    transferred,
)

#: Of the largest entry of each quantity.
TOLERANCE = 1e-5
#: What a difference must come to for a fault to count as seen.
SEEN = 1000 * TOLERANCE
KERNELS: tuple[Kernel, ...] = ("reference", "padded")


def outcomes(
    model: BertForPreTraining,
    theirs: Any,
    batch: PreTrainingBatch,
    train: bool,
    fault: Callable[[BertForPreTraining], None] | None = None,
) -> tuple[Outcome, Outcome]:
    """Run both models on a batch, in train mode with dropout by the same masks.

    ``fault`` breaks our model after its places of dropout have been noted.
    """
    config = model.config
    masks = Masks(batch, config.heads, config.width)
    model.train(train)
    theirs.train(train)
    with pytest.MonkeyPatch.context() as patch:
        key_ours(model, masks, patch)
        if fault is not None:
            fault(model)
        ours = run_ours(model, batch)
        asked, masks.asked = masks.asked, set()
        key_theirs(theirs, masks, patch)
        found = ours, run_theirs(theirs, batch)
    if fault is None:
        assert len(asked) == (1 + 3 * config.layers if train else 0)
        assert asked == masks.asked
    return found


def assert_same(ours: Outcome, theirs: Outcome, case: str, least: float) -> None:
    """Hold every difference under the tolerance, as a share of the largest entry; so is NaN out."""
    differences = ours.differences(theirs, least)
    far = {name: value for name, value in differences.items() if not value <= TOLERANCE}
    assert not far, f"{case}: {far}"


def assert_all_same(
    model: BertForPreTraining, theirs: Any, batch: PreTrainingBatch, least: float = SMALL
) -> None:
    """Compare in eval and in train mode, for both kernels that the CPU has."""
    for kernel in KERNELS:
        model.bert.kernel = kernel
        for train in (False, True):
            case = f"{kernel}, train={train}"
            assert_same(*outcomes(model, theirs, batch, train), case, least)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_primes(activation: Activation, tmp_path: Path) -> None:
    """With distinct prime sizes and random weights, all agrees to 1e-5, ragged lengths or equal."""
    config = prime_config(activation=activation)
    model = randomize_weights(BertForPreTraining(config))
    theirs = transferred(model, tmp_path / "model")
    for lengths in (RAGGED, EQUAL):
        assert_all_same(model, theirs, random_batch(config, lengths))


def test_mini(tmp_path: Path) -> None:
    """At the named size mini with 30,522 words, as it is drawn, all agrees to 1e-5."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = size_preset("mini")
    config = ModelConfig(vocab_size=30522, **sizes)
    model = BertForPreTraining(config)
    theirs = transferred(model, tmp_path / "model")
    assert_all_same(model, theirs, random_batch(config, (47, 13)))


@pytest.mark.parametrize("seed", range(3))
def test_random_sizes(seed: int, tmp_path: Path) -> None:
    """Other sizes, rates and lengths, drawn by chance from primes, agree too."""
    chance = torch.Generator().manual_seed(seed)

    def draw(*choices: float) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=chance))]

    heads = draw(1, 2, 5)
    config = prime_config(
        heads=heads,
        width=heads * draw(3, 11),
        layers=draw(1, 3),
        feed_forward=draw(13, 29),
        vocab_size=draw(53, 89),
        max_positions=draw(31, 47),
        dropout=draw(0.07, 0.19),
        attention_dropout=draw(0.13, 0.23),
        norm_eps=draw(1e-12, 1e-5),
    )
    lengths = tuple(draw(2, 3, 7, 17, 31) for _ in range(draw(2, 3, 7)))
    model = randomize_weights(BertForPreTraining(config))
    theirs = transferred(model, tmp_path / "model")
    # Some of these functions are sharp, and rounding grows in them.
    assert_all_same(model, theirs, random_batch(config, lengths, seed + 1), least=1.0)


def _before_norm(model: BertForPreTraining) -> None:
    """Move the dropout of the embeddings from behind their LayerNorm to before it."""
    embeddings: Any = model.bert.embeddings
    drop, normalize = embeddings.dropout.forward, embeddings.norm.forward
    embeddings.norm.forward = lambda x: x
    embeddings.dropout.forward = lambda x, noise: normalize(drop(x, noise))


def _other_rate(model: BertForPreTraining) -> None:
    layer: Any = model.bert.encoder.layers[1]
    layer.feed_forward_dropout.rate = model.config.attention_dropout


def _left_out(model: BertForPreTraining) -> None:
    layer: Any = model.bert.encoder.layers[1]
    layer.attention.dropout.rate = 0.0


def _swapped(model: BertForPreTraining) -> None:
    """Let two places of one layer, of one rate, exchange their masks."""
    layer: Any = model.bert.encoder.layers[0]
    first, second = layer.attention_dropout, layer.feed_forward_dropout
    layer.attention_dropout, layer.feed_forward_dropout = second, first


@pytest.mark.parametrize("fault", [_before_norm, _other_rate, _left_out, _swapped])
def test_a_wrong_dropout_is_seen(
    fault: Callable[[BertForPreTraining], None], tmp_path: Path
) -> None:
    """Dropout at another place, at another rate, left out or swapped fails the comparison."""
    config = prime_config()
    model = randomize_weights(BertForPreTraining(config))
    theirs = transferred(model, tmp_path / "model")
    ours, peer = outcomes(model, theirs, random_batch(config), True, fault)
    assert max(ours.differences(peer).values()) > SEEN


def test_dropout_is_no_small_thing(tmp_path: Path) -> None:
    """With and without dropout the losses differ, so train mode tests what eval mode does not."""
    config = prime_config()
    model = randomize_weights(BertForPreTraining(config))
    theirs = transferred(model, tmp_path / "model")
    batch = random_batch(config)
    (still, _), (moved, _) = (outcomes(model, theirs, batch, train) for train in (False, True))
    assert abs(still.masked - moved.masked) > SEEN
