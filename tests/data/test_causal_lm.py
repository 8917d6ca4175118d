"""Left to right: each word is predicted from those before it, and from nothing else."""

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
from tests.model.examples import prime_config

SETTINGS = DataSettings(nsp=False, objective="left-to-right")


def test_every_word_is_predicted_at_the_token_before(split: Split, facts: VocabularyInfo) -> None:
    """The ids stay whole; each ordinary token is a label once, at the place before its own."""
    batch = ExampleStream(split, facts, SETTINGS, 48, 0, 0).batch(0, 40)
    assert not (batch.ids == facts.mask_id).any()
    wanted = [
        (place - 1, batch.ids[place])
        for first, last in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)
        for place in range(first + 1, last)
        if not facts.is_special[batch.ids[place]]
    ]
    assert list(zip(batch.masked_positions, batch.masked_labels, strict=True)) == wanted
    # A slice and a sum of the words say the same as the whole.
    part = batch.slice(3, 9)
    own = build_causal_lm_labels(part.ids, part.cu_seqlens, facts)
    np.testing.assert_array_equal(part.masked_positions, own[0])
    np.testing.assert_array_equal(part.masked_labels, own[1])


def test_held_out_words_are_counted_as_they_stand(split: Split, facts: VocabularyInfo) -> None:
    """The unigram entropy is that of the text, whether its words are masked or come next."""

    def counted(settings: DataSettings) -> np.ndarray:
        stream = ExampleStream(split, facts, settings, 48, 0, 0)
        return _count_unmasked_tokens(stream.batch(0, len(stream)), stream, facts.vocab_size)

    np.testing.assert_array_equal(counted(SETTINGS), counted(DataSettings(nsp=False)))


def test_no_prediction_sees_its_word(split: Split, facts: VocabularyInfo) -> None:
    """With causal attention, another word there and after leaves the prediction as it was."""
    config = prime_config(attention="causal", nsp=False, max_positions=48)
    torch.manual_seed(0)
    model = BertForPreTraining(config).eval()
    batch = ExampleStream(split, facts, SETTINGS, 48, 0, 0).batch(0, 1)
    place = 20

    def hidden(ids: np.ndarray) -> torch.Tensor:
        packed = PackedBatch(
            ids=torch.from_numpy(ids), segments=torch.from_numpy(batch.segments),
            positions=torch.from_numpy(batch.positions),
            cu_seqlens=torch.from_numpy(batch.cu_seqlens), max_seqlen=batch.max_seqlen,
        )  # fmt: skip
        with torch.no_grad():
            found: torch.Tensor = model.bert(packed, None, torch.tensor([place - 1, place]))
        return found

    other = batch.ids.copy()
    other[place:-1] = 5 + (other[place:-1] - 4) % (facts.vocab_size - 5)
    before, after = hidden(batch.ids), hidden(other)
    torch.testing.assert_close(before[0], after[0], rtol=0, atol=0)
    assert not torch.allclose(before[1], after[1], atol=1e-4)


def test_it_stands_alone() -> None:
    """Next sentence beside it is refused, with what to set."""
    with pytest.raises(SettingsError, match=r"set data\.nsp to false"):
        DataSettings.parse({"objective": "left-to-right"}, "the test")
