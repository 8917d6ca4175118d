"""Bertsmith computes the same losses, logits and gradients as transformers.

In train mode both models use the same dropout masks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import Activation, ModelConfig, get_size_preset
from bertsmith.model.ops.attention_layout import Kernel
from tests.model.examples import (
    EQUAL_LENGTHS,
    RAGGED_LENGTHS,
    PreTrainingBatch,
    draw_batch,
    make_prime_size_config,
    randomize_weights,
)
from tests.model.transformers_comparison import (
    MIN_SCALE,
    DropoutMasks,
    ModelOutputs,
    patch_bertsmith_dropout,
    patch_transformers_dropout,
    run_bertsmith,
    run_transformers,
    to_transformers,
)

#: Maximum relative difference between Bertsmith and transformers.
TOLERANCE = 1e-5
#: Minimum relative difference that a deliberate error must cause.
MIN_DETECTED_DIFFERENCE = 1000 * TOLERANCE
KERNELS: tuple[Kernel, ...] = ("reference", "padded")


def run_both_models(
    model: BertForPreTraining,
    hf_model: Any,
    batch: PreTrainingBatch,
    *,
    train: bool,
    add_fault: Callable[[BertForPreTraining], None] | None = None,
) -> tuple[ModelOutputs, ModelOutputs]:
    """Run a Bertsmith and a transformers model on a batch, with the same dropout masks.

    Args:
        model: Bertsmith's model.
        hf_model: The same model in transformers.
        batch: The batch.
        train: Whether the models are in train mode, with dropout.
        add_fault: Function that introduces an error into Bertsmith's model after the masks have
            been assigned to its dropout layers; None for no error.
    """
    config = model.config
    masks = DropoutMasks(batch, config.heads, config.width)
    model.train(train)
    hf_model.train(train)
    with pytest.MonkeyPatch.context() as patch:
        patch_bertsmith_dropout(model, masks, patch)
        if add_fault is not None:
            add_fault(model)
        outputs = run_bertsmith(model, batch)
        used_locations = masks.used_locations
        masks.used_locations = set()
        patch_transformers_dropout(hf_model, masks, patch)
        results = outputs, run_transformers(hf_model, batch)
    if add_fault is None:
        # There is one dropout after the embeddings, and three in each layer.
        assert len(used_locations) == (1 + 3 * config.layers if train else 0)
        assert used_locations == masks.used_locations
    return results


def assert_equal_outputs(
    outputs: ModelOutputs, expected: ModelOutputs, case: str, min_scale: float
) -> None:
    """Assert that all relative differences are at most ``TOLERANCE``, and none is NaN.

    Args:
        outputs: Outputs of Bertsmith's model.
        expected: Outputs of transformers' model.
        case: Name of the comparison, for the error message.
        min_scale: Lower bound for the divisor of relative differences.
    """
    differences = outputs.compute_differences(expected, min_scale)
    too_large = {name: value for name, value in differences.items() if not value <= TOLERANCE}
    assert not too_large, f"{case}: {too_large}"


def assert_equal_in_all_modes(
    model: BertForPreTraining,
    hf_model: Any,
    batch: PreTrainingBatch,
    min_scale: float = MIN_SCALE,
) -> None:
    """Assert that two models have equal outputs in eval and train mode, for both CPU kernels."""
    for kernel in KERNELS:
        model.bert.kernel = kernel
        for train in (False, True):
            case = f"{kernel}, train={train}"
            outputs, expected = run_both_models(model, hf_model, batch, train=train)
            assert_equal_outputs(outputs, expected, case, min_scale)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_model_with_prime_sizes_equals_transformers(activation: Activation, tmp_path: Path) -> None:
    """Losses, logits and gradients of a model with distinct prime sizes agree within 1e-5."""
    config = make_prime_size_config(activation=activation)
    model = randomize_weights(BertForPreTraining(config))
    hf_model = to_transformers(model, tmp_path / "model")
    for lengths in (RAGGED_LENGTHS, EQUAL_LENGTHS):
        assert_equal_in_all_modes(model, hf_model, draw_batch(config, lengths))


def test_mini_equals_transformers(tmp_path: Path) -> None:
    """Losses, logits and gradients of a new model of size mini agree within 1e-5."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = get_size_preset("mini")
    config = ModelConfig(vocab_size=30522, **sizes)
    model = BertForPreTraining(config)
    hf_model = to_transformers(model, tmp_path / "model")
    assert_equal_in_all_modes(model, hf_model, draw_batch(config, (47, 13)))


@pytest.mark.parametrize("seed", range(3))
def test_models_with_random_sizes_equal_transformers(seed: int, tmp_path: Path) -> None:
    """Models with random sizes, dropout rates and sequence lengths agree within 1e-5."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*choices: float) -> Any:
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    heads = draw(1, 2, 5)
    config = make_prime_size_config(
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
    hf_model = to_transformers(model, tmp_path / "model")
    # Some of these models are ill-conditioned and amplify rounding errors.
    assert_equal_in_all_modes(model, hf_model, draw_batch(config, lengths, seed + 1), min_scale=1.0)


def _move_embedding_dropout(model: BertForPreTraining) -> None:
    """Apply the dropout of the embeddings before their LayerNorm instead of after it."""
    embeddings: Any = model.bert.embeddings
    drop, normalize = embeddings.dropout.forward, embeddings.norm.forward
    embeddings.norm.forward = lambda x: x
    embeddings.dropout.forward = lambda x, dropout_seed: normalize(drop(x, dropout_seed))


def _change_rate(model: BertForPreTraining) -> None:
    """Change the rate of one dropout."""
    layer: Any = model.bert.encoder.layers[1]
    layer.feed_forward_dropout.rate = model.config.attention_dropout


def _remove_dropout(model: BertForPreTraining) -> None:
    """Remove the dropout of the attention probabilities in one layer."""
    layer: Any = model.bert.encoder.layers[1]
    layer.attention.dropout.rate = 0.0


def _swap_dropouts(model: BertForPreTraining) -> None:
    """Swap two dropouts of a layer that have the same rate but different masks."""
    layer: Any = model.bert.encoder.layers[0]
    first, second = layer.attention_output_dropout, layer.feed_forward_dropout
    layer.attention_output_dropout, layer.feed_forward_dropout = second, first


@pytest.mark.parametrize(
    "add_fault", [_move_embedding_dropout, _change_rate, _remove_dropout, _swap_dropouts]
)
def test_wrong_dropout_is_detected(
    add_fault: Callable[[BertForPreTraining], None], tmp_path: Path
) -> None:
    """The outputs differ if a dropout is moved, swapped, removed or has another rate."""
    config = make_prime_size_config()
    model = randomize_weights(BertForPreTraining(config))
    hf_model = to_transformers(model, tmp_path / "model")
    batch = draw_batch(config)
    outputs, expected = run_both_models(model, hf_model, batch, train=True, add_fault=add_fault)
    assert max(outputs.compute_differences(expected).values()) > MIN_DETECTED_DIFFERENCE


def test_dropout_changes_the_loss(tmp_path: Path) -> None:
    """Losses with and without dropout differ, so that the comparison in train mode is useful."""
    config = make_prime_size_config()
    model = randomize_weights(BertForPreTraining(config))
    hf_model = to_transformers(model, tmp_path / "model")
    batch = draw_batch(config)
    eval_outputs, _ = run_both_models(model, hf_model, batch, train=False)
    train_outputs, _ = run_both_models(model, hf_model, batch, train=True)
    assert abs(eval_outputs.mlm_loss - train_outputs.mlm_loss) > MIN_DETECTED_DIFFERENCE
