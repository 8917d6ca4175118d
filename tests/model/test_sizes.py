"""Tests of model sizes, initial weights, position embeddings, losses and packing."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM
from transformers import BertForPreTraining as HFBertForPreTraining

from bertsmith.errors import SettingsError
from bertsmith.model.bert import BertForPreTraining, count_parameters
from bertsmith.model.config import SIZES, ModelConfig, get_size_preset
from bertsmith.model.embeddings import sinusoidal_positions
from bertsmith.model.packed import pack_sequences
from tests.model.examples import draw_batch, make_prime_size_config

#: Number of parameters of the pre-training model with a vocabulary of 30,522 tokens.
NUM_PARAMETERS = {
    "tiny": 4_433_468,
    "mini": 11_267_900,
    "small": 29_058_876,
    "medium": 41_668_412,
    "base": 110_106_428,
    "large": 336_226_108,
}


def compute_num_parameters(layers: int, width: int, feed_forward: int, vocab_size: int) -> int:
    """Compute the number of parameters of the pre-training model from its sizes.

    The model has 512 positions and 2 segments. A norm has 2 * width parameters.
    """
    embeddings = (vocab_size + 512 + 2) * width + 2 * width
    attention = 4 * (width * width + width) + 2 * width
    dense = 2 * width * feed_forward + feed_forward + width + 2 * width
    pooler = width * width + width
    mlm_head = width * width + width + 2 * width + vocab_size
    nsp_head = 2 * width + 2
    return embeddings + layers * (attention + dense) + pooler + mlm_head + nsp_head


def make_config_of_size(size: str) -> ModelConfig:
    """Return the config of a named size with a vocabulary of 30,522 tokens."""
    sizes: dict[str, Any] = get_size_preset(size)
    return ModelConfig(vocab_size=30522, **sizes)


@pytest.mark.parametrize("size", SIZES)
def test_named_sizes_have_the_expected_number_of_parameters(size: str) -> None:
    """The number of parameters equals the formula's result, with shared weights counted once."""
    config = make_config_of_size(size)
    with torch.device("meta"):
        model = BertForPreTraining(config)
    expected = compute_num_parameters(config.layers, config.width, config.feed_forward, 30522)
    assert count_parameters(model) == expected == NUM_PARAMETERS[size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("nsp", [True, False])
def test_named_sizes_have_as_many_parameters_as_transformers(size: str, nsp: bool) -> None:
    """The number of parameters equals transformers', with and without next-sentence head."""
    config = make_config_of_size(size).model_copy(update={"nsp": nsp})
    hf_config = BertConfig(
        vocab_size=30522,
        num_hidden_layers=config.layers,
        hidden_size=config.width,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward,
    )
    with torch.device("meta"):
        model = BertForPreTraining(config)
        hf_model: nn.Module = (HFBertForPreTraining if nsp else BertForMaskedLM)(hf_config)
    assert count_parameters(model) == count_parameters(hf_model)


def test_initial_weights_follow_a_truncated_normal() -> None:
    """Weights have the mean, standard deviation and bounds of a truncated normal distribution."""
    torch.manual_seed(0)
    std = 0.05
    model = BertForPreTraining(make_prime_size_config(width=3 * 31, vocab_size=499, init_range=std))
    # The standard deviation of a standard normal distribution truncated at 2 is
    # sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)), with its density phi and its distribution function Phi.
    expected_std = std * math.sqrt(1 - 4 * 0.05399097 / 0.95449974)
    num_large_weights = 0
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        weight = module.weight
        assert weight.abs().max() <= 2 * std
        if weight.numel() > 5000:
            num_large_weights += 1
            assert weight.abs().max() > 1.9 * std
            mean_tolerance = 5 * expected_std / math.sqrt(weight.numel())
            assert abs(float(weight.detach().mean())) < mean_tolerance
            assert float(weight.detach().std()) == pytest.approx(expected_std, rel=0.04)
    assert num_large_weights > 5


def test_initial_biases_are_zero_and_norm_weights_one() -> None:
    """``initialize`` sets biases to 0 and the weights of LayerNorm to 1."""
    model = BertForPreTraining(make_prime_size_config())
    for initialize_again in (False, True):
        if initialize_again:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.fill_(0.5)
            model.initialize()
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                assert not weight.any(), name
            elif weight.dim() == 1:
                assert (weight == 1).all(), name
            else:
                assert weight.std() > 0, name


def test_equal_seeds_give_equal_weights() -> None:
    """``torch.manual_seed`` determines all initial weights."""
    state_dicts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        state_dicts.append(BertForPreTraining(make_prime_size_config()).state_dict())
    first, same_seed, other_seed = state_dicts
    assert all(torch.equal(first[name], same_seed[name]) for name in first)
    assert not torch.equal(first["mlm.transform.weight"], other_seed["mlm.transform.weight"])


def test_mlm_decoder_shares_the_word_embeddings() -> None:
    """The MLM decoder's weight is the word embedding table; its bias has a value per token."""
    model = BertForPreTraining(make_prime_size_config())
    assert model.mlm.decoder.weight is model.bert.embeddings.words.weight
    assert model.mlm.decoder.bias.shape == (model.config.vocab_size,)


@pytest.mark.parametrize("width", [2, 6, 21, 64])
def test_sinusoidal_positions_follow_the_formula(width: int) -> None:
    """Sinusoidal positions follow section 3.5 of Vaswani et al. to 1e-6, for odd widths too."""
    table = sinusoidal_positions(512, width)
    assert table.dtype == torch.float32
    expected = np.zeros((512, width))
    for position in range(512):
        for column in range(width):
            angle = position / 10000 ** (2 * (column // 2) / width)
            expected[position, column] = math.cos(angle) if column % 2 else math.sin(angle)
    np.testing.assert_allclose(table.numpy(), expected, rtol=0, atol=1e-6)


def test_sinusoidal_positions_are_not_trained() -> None:
    """Sinusoidal position embeddings get no gradient."""
    model = BertForPreTraining(make_prime_size_config(positions="sinusoidal"))
    table = model.bert.embeddings.positions.weight
    std = model.config.init_range
    torch.testing.assert_close(table, sinusoidal_positions(*table.shape) * std * 2**0.5)
    losses = model(*draw_batch(model.config).arguments)
    losses.mlm_loss.backward()
    assert table.grad is None


def test_evaluate_returns_the_losses_and_correct_predictions() -> None:
    """``evaluate`` returns the losses of ``forward`` and the number of correct predictions."""
    model = BertForPreTraining(make_prime_size_config(init_range=0.3)).eval()
    batch = draw_batch(model.config)
    packed, positions, labels, nsp_labels = batch.arguments
    losses, evaluated = model(*batch.arguments), model.evaluate(*batch.arguments)
    torch.testing.assert_close(losses.mlm_loss, evaluated.mlm_loss)
    torch.testing.assert_close(losses.nsp_loss, evaluated.nsp_loss)
    with torch.no_grad():
        hidden = model.bert(packed)
        predictions = model.mlm(hidden[positions]).argmax(-1)
        nsp_predictions = model.compute_nsp_logits(hidden, packed).argmax(-1)
    all_correct = model.evaluate(packed, positions, predictions, nsp_predictions)
    assert int(all_correct.mlm_correct) == len(labels)  # type: ignore[arg-type]
    assert int(all_correct.nsp_correct) == len(nsp_labels)  # type: ignore[arg-type]
    other_labels = (predictions + 1) % model.config.vocab_size
    none_correct = model.evaluate(packed, positions, other_labels, 1 - nsp_predictions)
    assert int(none_correct.mlm_correct) == int(none_correct.nsp_correct) == 0  # type: ignore[arg-type]
    repeated = model.evaluate(packed, positions.repeat(2), labels.repeat(2), None)
    torch.testing.assert_close(repeated.mlm_loss, 2 * evaluated.mlm_loss)
    assert repeated.nsp_loss is None


def test_evaluate_computes_logits_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """``evaluate`` with chunks of four predictions returns the same sums as without chunks."""
    model = BertForPreTraining(make_prime_size_config(init_range=0.3)).eval()
    packed, positions, labels, nsp_labels = draw_batch(model.config).arguments
    expected = model.evaluate(packed, positions, labels, nsp_labels)
    chunk_sizes: list[int] = []
    model.mlm.register_forward_hook(lambda _, __, logits: chunk_sizes.append(len(logits)))
    monkeypatch.setattr("bertsmith.model.bert.MAX_CHUNK_LOGITS", 4 * model.config.vocab_size)
    losses = model.evaluate(packed, positions, labels, nsp_labels)
    torch.testing.assert_close(losses.mlm_loss, expected.mlm_loss)
    assert losses.mlm_correct == expected.mlm_correct
    assert len(labels) % 4 != 0
    assert (max(chunk_sizes), sum(chunk_sizes)) == (4, len(labels))
    empty = model.evaluate(packed, positions[:0], labels[:0], nsp_labels)
    assert empty.mlm_correct is not None
    assert (float(empty.mlm_loss), int(empty.mlm_correct)) == (0.0, 0)


def test_model_without_nsp_rejects_nsp_labels() -> None:
    """Next-sentence labels are an error for a model without a next-sentence head."""
    model = BertForPreTraining(make_prime_size_config(nsp=False))
    batch = draw_batch(model.config)
    assert model(batch.packed, batch.masked_positions, batch.masked_labels, None).mlm_loss > 0
    with pytest.raises(ValueError, match="no next-sentence head"):
        model(*batch.arguments)


@pytest.mark.parametrize(
    "sequences", [[], [([], [])], [([1, 2], [0, 0]), ([], [])], [([1, 2], [0])]]
)
def test_pack_sequences_rejects_invalid_input(sequences: Any) -> None:
    """An empty batch, an empty sequence and missing segment ids are errors."""
    with pytest.raises(
        ValueError, match=r"pass at least one|is empty; remove|one segment id for each"
    ):
        pack_sequences(sequences)


def test_pack_sequences_concatenates_sequences() -> None:
    """Packed ids and segments are concatenated, and the positions of each sequence start at 0."""
    packed = pack_sequences([([5, 6, 7], [0, 0, 1]), ([8], [0]), ([9, 10], [0, 1])])
    assert packed.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert packed.segments.tolist() == [0, 0, 1, 0, 0, 1]
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.first_token_indices.tolist() == [0, 3, 4]
    assert packed.max_seqlen == 3


def test_width_must_be_a_multiple_of_heads() -> None:
    """A width that is not a multiple of the number of heads is a settings error naming both."""
    with pytest.raises(SettingsError, match="width 22 is not a multiple of heads 3"):
        ModelConfig.parse({"vocab_size": 10, "width": 22, "heads": 3}, "here")
