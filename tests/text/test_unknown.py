"""Counting [UNK] while a tokenizer encodes, and the warning about a high share."""

import pickle

import pytest

from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.unknown import TokenCounts, format_unknown_warning
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


def test_korean_text_with_an_english_vocabulary(tokenizer: Tokenizer) -> None:
    """Each Korean word is one [UNK] and only the full stops are known, so there is a warning."""
    counts = TokenCounts()
    tokenizer.with_counter(counts).encode_batch(KOREAN)
    # 4 and 3 words, and 2 full stops.
    assert (counts.num_tokens, counts.num_unknown) == (9, 7)
    assert counts.unknown_share == 7 / 9
    warning = counts.format_warning()
    assert warning is not None
    assert warning.startswith("warning: 77.8% of the tokens are [UNK]: the vocabulary does not")
    assert "learn a vocabulary from this text (bertsmith vocab), or a larger one" in warning
    assert "choose a model for its language" in warning


def test_all_encode_methods_are_counted(tokenizer: Tokenizer) -> None:
    """Encoding with a counter gives the same ids and counts them, with and without offsets."""
    counts = TokenCounts()
    num_tokens = 0
    counting_tokenizer = tokenizer.with_counter(counts)
    for text in (*ENGLISH, *KOREAN):
        assert counting_tokenizer.encode(text) == tokenizer.encode(text)
        assert counting_tokenizer.encode_with_offsets(text) == tokenizer.encode_with_offsets(text)
        # Each text is encoded twice.
        num_tokens += 2 * len(tokenizer.encode(text))
    assert counts.num_tokens == num_tokens
    # KOREAN has 7 words.
    assert counts.num_unknown == 2 * 7


def test_special_tokens_are_not_counted(tokenizer: Tokenizer) -> None:
    """[CLS], [SEP], [MASK] and [PAD] in a text are counted neither as tokens nor as unknown."""
    counts = TokenCounts()
    text = "[CLS] 강 [MASK] . [SEP] [PAD]"
    ids = tokenizer.with_counter(counts).encode(text, allow_special=True)
    assert len(ids) == 6
    assert (counts.num_tokens, counts.num_unknown) == (2, 1)


def test_only_the_copy_with_the_counter_counts(tokenizer: Tokenizer) -> None:
    """A copy with a counter counts; the original, which shares the backends, does not.

    A pickled copy has no counter.
    """
    outer, inner = TokenCounts(), TokenCounts()
    counting_tokenizer = tokenizer.with_counter(outer)
    counting_tokenizer.with_counter(inner).encode("강")
    tokenizer.encode("강")
    pickle.loads(pickle.dumps(counting_tokenizer)).encode("강")
    assert (outer, inner) == (TokenCounts(1, 1), TokenCounts(1, 1))
    tokenizer.encode("[MASK]", allow_special=True)
    assert counting_tokenizer._get_backend(allow_special=True) is tokenizer._get_backend(
        allow_special=True
    )
    assert counting_tokenizer.hash == tokenizer.hash


def test_share_above_two_percent_gives_a_warning() -> None:
    """There is a warning above a share of 2 %, and none without tokens."""
    assert format_unknown_warning(0.02) is None
    assert "2.1% of the training tokens are" in str(
        format_unknown_warning(0.0211, "the training tokens")
    )
    assert TokenCounts().format_warning() is None
    counts = TokenCounts()
    tokenizer = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, "a")))
    tokenizer.with_counter(counts).encode("a a a")
    assert counts.format_warning() is None
    assert counts == TokenCounts(3, 0)
