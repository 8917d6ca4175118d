"""The left-to-right objective: each token is predicted from the tokens before it only."""

import numpy as np
import pytest
import torch

from bertsmith.data.causal_lm import build_causal_lm_labels
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.data.stream import ExampleStream
from bertsmith.errors import SettingsError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.packed import PackedBatch
from bertsmith.train.pretraining.evaluation import _count_unmasked_tokens
from tests.model.examples import make_prime_size_config

SETTINGS = DataSettings(nsp=False, objective="left-to-right")


def test_every_token_is_predicted_at_the_previous_position(
    split: Split, vocabulary: VocabularyInfo
) -> None:
    """Each token that is not special is the label of the position before it; no id is replaced."""
    batch = ExampleStream(split, vocabulary, SETTINGS, 48, seed=0, epoch=0).batch(0, 40)
    assert not (batch.ids == vocabulary.mask_id).any()
    expected = [
        (position - 1, batch.ids[position])
        for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        for position in range(first + 1, last)
        if not vocabulary.is_special[batch.ids[position]]
    ]
    assert list(zip(batch.masked_positions, batch.masked_labels, strict=True)) == expected
    # The labels of a slice are those computed from its ids.
    part = batch.slice(3, 9)
    positions, labels = build_causal_lm_labels(part.ids, part.cu_seqlens, vocabulary)
    np.testing.assert_array_equal(part.masked_positions, positions)
    np.testing.assert_array_equal(part.masked_labels, labels)


def test_token_counts_do_not_depend_on_the_objective(
    split: Split, vocabulary: VocabularyInfo
) -> None:
    """Both objectives count the original tokens, so they have the same unigram entropy."""

    def count_tokens(settings: DataSettings) -> np.ndarray:
        stream = ExampleStream(split, vocabulary, settings, 48, seed=0, epoch=0)
        return _count_unmasked_tokens(stream.batch(0, len(stream)), stream, vocabulary.vocab_size)

    np.testing.assert_array_equal(count_tokens(SETTINGS), count_tokens(DataSettings(nsp=False)))


def test_prediction_does_not_depend_on_later_tokens(
    split: Split, vocabulary: VocabularyInfo
) -> None:
    """With causal attention, changing tokens does not change the hidden state before them."""
    config = make_prime_size_config(attention="causal", nsp=False, max_positions=48)
    torch.manual_seed(0)
    model = BertForPreTraining(config).eval()
    batch = ExampleStream(split, vocabulary, SETTINGS, 48, seed=0, epoch=0).batch(0, 1)
    position = 20

    def compute_hidden_states(ids: np.ndarray) -> torch.Tensor:
        packed = PackedBatch(
            ids=torch.from_numpy(ids),
            segments=torch.from_numpy(batch.segments),
            positions=torch.from_numpy(batch.positions),
            cu_seqlens=torch.from_numpy(batch.cu_seqlens),
            max_seqlen=batch.max_seqlen,
        )
        with torch.no_grad():
            hidden: torch.Tensor = model.bert(packed, None, torch.tensor([position - 1, position]))
        return hidden

    # From ``position`` on, each token except the final [SEP] becomes another ordinary token.
    changed_ids = batch.ids.copy()
    changed_ids[position:-1] = 5 + (changed_ids[position:-1] - 4) % (vocabulary.vocab_size - 5)
    before, after = compute_hidden_states(batch.ids), compute_hidden_states(changed_ids)
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    assert not torch.allclose(before[1], after[1], atol=1e-4)


def test_masked_stream_has_left_to_right_batches(split: Split, vocabulary: VocabularyInfo) -> None:
    """A stream for masked LM returns the same examples as left-to-right batches on demand."""
    masked = ExampleStream(split, vocabulary, DataSettings(nsp=False), 48, seed=0, epoch=0)
    expected = ExampleStream(split, vocabulary, SETTINGS, 48, seed=0, epoch=0).batch(3, 40)
    batch = masked.batch(3, 40, is_causal=True)
    for name in ("ids", "cu_seqlens", "masked_positions", "masked_labels"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(expected, name))
    assert batch.is_causal
    assert batch.slice(0, 2).is_causal
    assert not masked.batch(3, 40).is_causal
    pairs = ExampleStream(split, vocabulary, DataSettings(), 48, seed=0, epoch=0)
    pair_batch = pairs.batch(3, 40, 0.4, is_causal=True)
    assert pair_batch.nsp_labels is None
    positions, labels = build_causal_lm_labels(pair_batch.ids, pair_batch.cu_seqlens, vocabulary)
    np.testing.assert_array_equal(pair_batch.masked_positions, positions)
    np.testing.assert_array_equal(pair_batch.masked_labels, labels)
    assert not (pair_batch.ids == vocabulary.mask_id).any()


def test_left_to_right_with_nsp_is_rejected() -> None:
    """The left-to-right objective with NSP is an error that says which setting to change."""
    with pytest.raises(SettingsError, match=r"set data\.nsp to false"):
        DataSettings.parse({"objective": "left-to-right"}, "the test")
