"""The share of [UNK] is counted while a tokenizer encodes, and every warning has the same words."""

import pickle

import pytest

from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.unknown import TokenCounts, unknown_warning
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece

ENGLISH = [
    "The ferry crossed the river twice a day, in the morning and in the evening.",
    "Nobody remembered a winter in which the ice had held the ferry fast.",
]
#: Korean: "The ferry crossed the river in the morning.", "It is cold in winter."
KOREAN = ["나룻배는 아침에 강을 건넜다.", "겨울에는 날씨가 춥습니다."]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A vocabulary learned from English."""
    return train_wordpiece(ENGLISH * 3, 200)


def test_korean_with_an_english_vocabulary_is_mostly_unknown(tokenizer: Tokenizer) -> None:
    """Each Korean word is one [UNK]; only the full stops are known."""
    counts = TokenCounts()
    tokenizer.with_counter(counts).encode_batch(KOREAN)
    assert (counts.num_tokens, counts.num_unknown) == (9, 7)
    assert counts.unknown_share == 7 / 9
    warning = counts.warning()
    assert warning is not None
    assert warning.startswith("warning: 77.8% of the tokens are [UNK]: the vocabulary does not")
    assert "learn a vocabulary from this text" in warning
    assert "choose a model for its language" in warning


def test_every_encoding_is_counted(tokenizer: Tokenizer) -> None:
    """All four ways to encode give the ids of the plain tokenizer and add to the counts."""
    counts, expected = TokenCounts(), 0
    counting = tokenizer.with_counter(counts)
    for text in (*ENGLISH, *KOREAN):
        assert counting.encode(text) == tokenizer.encode(text)
        assert counting.encode_with_offsets(text) == tokenizer.encode_with_offsets(text)
        expected += 2 * len(tokenizer.encode(text))
    assert counts.num_tokens == expected
    assert counts.num_unknown == 2 * 7


def test_special_tokens_are_left_out(tokenizer: Tokenizer) -> None:
    """[CLS], [SEP], [MASK] and [PAD] in a text count neither as tokens nor as unknown."""
    counts = TokenCounts()
    ids = tokenizer.with_counter(counts).encode("[CLS] 강 [MASK] . [SEP] [PAD]", allow_special=True)
    assert len(ids) == 6
    assert (counts.num_tokens, counts.num_unknown) == (2, 1)


def test_only_the_copy_counts(tokenizer: Tokenizer) -> None:
    """Counts nest, share the engine, and neither the original nor a pickled copy adds to them."""
    outer, inner = TokenCounts(), TokenCounts()
    counting = tokenizer.with_counter(outer)
    counting.with_counter(inner).encode("강")
    tokenizer.encode("강")
    pickle.loads(pickle.dumps(counting)).encode("강")
    assert (outer, inner) == (TokenCounts(1, 1), TokenCounts(1, 1))
    tokenizer.encode("[MASK]", allow_special=True)
    assert counting._get_backend(allow_special=True) is tokenizer._get_backend(allow_special=True)
    assert counting.hash == tokenizer.hash


def test_the_warning_begins_above_two_percent() -> None:
    """2 % and less is no warning; no token is a share of 0."""
    assert unknown_warning(0.02) is None
    assert "2.1% of the training tokens are" in str(unknown_warning(0.0211, "the training tokens"))
    assert TokenCounts().warning() is None
    known = TokenCounts()
    Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, "a"))).with_counter(known).encode("a a a")
    assert known.warning() is None
    assert known == TokenCounts(3, 0)
