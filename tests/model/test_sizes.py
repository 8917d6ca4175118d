"""Sizes, initial weights and fixed positions of the model."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertForPreTraining

from bertsmith.errors import SettingsError
from bertsmith.model.bert import BertForPreTraining as PreTrainingModel
from bertsmith.model.bert import count_parameters
from bertsmith.model.config import SIZES, ModelConfig, size_preset
from bertsmith.model.embeddings import sinusoidal_positions
from bertsmith.model.packed import pack_sequences
from tests.model.examples import prime_config, random_batch

#: Parameters of the pre-training model with 30,522 words. Base and large: as others count them.
COUNTS = {
    "tiny": 4_433_468,
    "mini": 11_267_900,
    "small": 29_058_876,
    "medium": 41_668_412,
    "base": 110_106_428,
    "large": 336_226_108,
}


def formula(layers: int, width: int, feed_forward: int, words: int) -> int:
    """Count the parameters by hand."""
    embeddings = (words + 512 + 2) * width + 2 * width
    attention = 4 * (width * width + width) + 2 * width
    dense = 2 * width * feed_forward + feed_forward + width + 2 * width
    pooler = width * width + width
    masked = width * width + width + 2 * width + words
    return embeddings + layers * (attention + dense) + pooler + masked + 2 * width + 2


def config_of(size: str) -> ModelConfig:
    """Return the config of a named size with 30,522 words."""
    sizes: dict[str, Any] = size_preset(size)
    return ModelConfig(vocab_size=30522, **sizes)


@pytest.mark.parametrize("size", SIZES)
def test_parameters_of_the_named_sizes(size: str) -> None:
    """Each named size counts what a formula says, shared weights once."""
    config = config_of(size)
    with torch.device("meta"):
        model = PreTrainingModel(config)
    expected = formula(config.layers, config.width, config.feed_forward, 30522)
    assert count_parameters(model) == expected == COUNTS[size]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("nsp", [True, False])
def test_parameters_equal_those_of_transformers(size: str, nsp: bool) -> None:
    """Transformers counts as many, with the next sentence and without."""
    config = config_of(size).model_copy(update={"nsp": nsp})
    theirs = BertConfig(
        vocab_size=30522,
        num_hidden_layers=config.layers,
        hidden_size=config.width,
        num_attention_heads=config.heads,
        intermediate_size=config.feed_forward,
    )
    with torch.device("meta"):
        ours = PreTrainingModel(config)
        peer: nn.Module = (BertForPreTraining if nsp else BertForMaskedLM)(theirs)
    assert count_parameters(ours) == count_parameters(peer)


def test_weights_are_a_normal_cut_off_at_two_deviations() -> None:
    """Every matrix and table is drawn anew: mean 0, cut off at 2, the deviation that leaves."""
    torch.manual_seed(0)
    model = PreTrainingModel(prime_config(width=3 * 31, vocab_size=499, init_range=0.05))
    # The deviation of a standard normal cut off at two: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)).
    expected = 0.05 * math.sqrt(1 - 4 * 0.05399097 / 0.95449974)
    seen = 0
    for module in model.modules():
        if not isinstance(module, nn.Linear | nn.Embedding):
            continue
        weight = module.weight
        assert weight.abs().max() <= 0.1
        if weight.numel() > 5000:
            seen += 1
            assert weight.abs().max() > 0.095
            assert abs(float(weight.detach().mean())) < 5 * expected / math.sqrt(weight.numel())
            assert float(weight.detach().std()) == pytest.approx(expected, rel=0.04)
    assert seen > 5


def test_biases_and_norms_begin_at_rest() -> None:
    """Biases are 0, LayerNorm multiplies by 1 and adds 0; also when a model is drawn anew."""
    model = PreTrainingModel(prime_config())
    for anew in (False, True):
        if anew:
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


def test_equal_seeds_draw_equal_weights() -> None:
    """``torch.manual_seed`` decides all initial weights."""
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(PreTrainingModel(prime_config()).state_dict())
    first, again, other = states
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["mlm.transform.weight"], other["mlm.transform.weight"])


def test_the_decoder_is_the_table_of_words() -> None:
    """The masked-LM head multiplies with the word embeddings themselves, and adds its own bias."""
    model = PreTrainingModel(prime_config())
    assert model.mlm.decoder.weight is model.bert.embeddings.words.weight
    assert model.mlm.decoder.bias.shape == (101,)


@pytest.mark.parametrize("width", [2, 6, 21, 64])
def test_sinusoids(width: int) -> None:
    """The table is that of section 3.5 of Vaswani et al., for odd widths too, to 1e-6."""
    found = sinusoidal_positions(512, width)
    assert found.dtype == torch.float32
    expected = np.zeros((512, width))
    for place in range(512):
        for column in range(width):
            angle = place / 10000 ** (2 * (column // 2) / width)
            expected[place, column] = math.cos(angle) if column % 2 else math.sin(angle)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-6)


def test_sinusoids_are_not_trained() -> None:
    """With sinusoidal positions the table is fixed, and gets no gradient."""
    model = PreTrainingModel(prime_config(positions="sinusoidal"))
    table = model.bert.embeddings.positions.weight
    size = model.config.init_range
    torch.testing.assert_close(table, sinusoidal_positions(43, 21) * size * 2**0.5)
    losses = model(*random_batch(model.config).arguments)
    losses.masked.backward()
    assert table.grad is None


def test_losses_are_sums_and_hits_are_counted() -> None:
    """``evaluate`` gives the losses of ``forward``, and how many were right; both are sums."""
    model = PreTrainingModel(prime_config(init_range=0.3)).eval()
    batch = random_batch(model.config)
    packed, positions, labels, not_next = batch.arguments
    losses, found = model(*batch.arguments), model.evaluate(*batch.arguments)
    torch.testing.assert_close(losses.masked, found.mlm_loss)
    torch.testing.assert_close(losses.next_sentence, found.nsp_loss)
    with torch.no_grad():
        hidden = model.bert(packed)
        words = model.mlm(hidden[positions]).argmax(-1)
        pairs = model.next_sentence_logits(hidden, packed).argmax(-1)
    # Labels that are what the model says are all hits.
    best = model.evaluate(packed, positions, words, pairs)
    assert int(best.mlm_correct) == len(labels)  # type: ignore[arg-type]
    assert int(best.nsp_correct) == len(not_next)  # type: ignore[arg-type]
    worst = model.evaluate(packed, positions, (words + 1) % 101, 1 - pairs)
    assert int(worst.mlm_correct) == int(worst.nsp_correct) == 0  # type: ignore[arg-type]
    twice = model.evaluate(packed, positions.repeat(2), labels.repeat(2), None)
    torch.testing.assert_close(twice.mlm_loss, 2 * found.mlm_loss)
    assert twice.nsp_loss is None


def test_an_evaluation_holds_some_rows_of_logits_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows of a batch can be gigabytes; in parts they have the same sums, and none is lost."""
    model = PreTrainingModel(prime_config(init_range=0.3)).eval()
    packed, positions, labels, not_next = random_batch(model.config).arguments
    whole = model.evaluate(packed, positions, labels, not_next)
    held: list[int] = []
    model.mlm.register_forward_hook(lambda *passed: held.append(len(passed[-1])))
    monkeypatch.setattr("bertsmith.model.bert.CHUNK_LOGITS", 4 * model.config.vocab_size)
    found = model.evaluate(packed, positions, labels, not_next)
    torch.testing.assert_close(found.mlm_loss, whole.mlm_loss)
    assert found.mlm_correct == whole.mlm_correct
    assert len(labels) % 4 != 0
    assert (max(held), sum(held)) == (4, len(labels))
    none = model.evaluate(packed, positions[:0], labels[:0], not_next)
    assert none.mlm_correct is not None
    assert (float(none.mlm_loss), int(none.mlm_correct)) == (0.0, 0)


def test_a_model_without_next_sentence_says_so() -> None:
    """Asking for next-sentence logits of a model without that head is a clear error."""
    model = PreTrainingModel(prime_config(nsp=False))
    batch = random_batch(model.config)
    assert model(batch.packed, batch.masked_positions, batch.masked_labels, None).masked > 0
    with pytest.raises(ValueError, match="no next-sentence head"):
        model(*batch.arguments)


@pytest.mark.parametrize(
    "sequences", [[], [([], [])], [([1, 2], [0, 0]), ([], [])], [([1, 2], [0])]]
)
def test_a_batch_of_nothing_is_refused(sequences: Any) -> None:
    """No sequence, an empty one, and one with too few segment ids are errors."""
    with pytest.raises(ValueError, match=r"at least one|one segment id for each"):
        pack_sequences(sequences)


def test_pack() -> None:
    """Packing lays sequences end to end; positions begin anew, boundaries tell where."""
    packed = pack_sequences([([5, 6, 7], [0, 0, 1]), ([8], [0]), ([9, 10], [0, 1])])
    assert packed.ids.tolist() == [5, 6, 7, 8, 9, 10]
    assert packed.segments.tolist() == [0, 0, 1, 0, 0, 1]
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 6]
    assert packed.cu_seqlens.dtype == torch.int32
    assert packed.first_token_indices.tolist() == [0, 3, 4]
    assert packed.max_seqlen == 3


def test_heads_must_divide_the_width() -> None:
    """A width that the heads do not divide is a setting's error that names both."""
    with pytest.raises(SettingsError, match="width 22 is not a multiple of heads 3"):
        ModelConfig.parse({"vocab_size": 10, "width": 22, "heads": 3}, "here")
