"""Cutting long sentences: where they are cut, and that pre-training sees all of their tokens."""

import json
from pathlib import Path

import numpy as np
import pytest

from bertsmith.data.long_sentences import (
    MAX_PIECE_TOKENS,
    MAX_SENTENCE_TOKENS,
    cut_long_sentences,
)
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Store
from bertsmith.data.stream import ExampleStream
from tests.data.synthetic_corpus import TOKENIZER, prepare_store

#: A vocabulary in which ids from 10 on continue a word.
IS_CONTINUATION = np.arange(20) >= 10


def test_only_long_sentences_are_cut() -> None:
    """A sentence of the maximum length stays whole; the sentences around a long one do too."""
    sizes = np.array([3, MAX_SENTENCE_TOKENS, MAX_SENTENCE_TOKENS + 1, 5])
    cut = cut_long_sentences(np.ones(sizes.sum(), np.int64), sizes, IS_CONTINUATION)
    assert cut.num_pieces.tolist() == [1, 1, 5, 1]
    assert cut.sizes.tolist() == [3, MAX_SENTENCE_TOKENS, *[MAX_PIECE_TOKENS] * 4, 1, 5]


def test_no_sentences() -> None:
    """Without sentences, there are no pieces."""
    empty = np.zeros(0, np.int64)
    cut = cut_long_sentences(empty, empty, IS_CONTINUATION)
    assert len(cut.sizes) == len(cut.num_pieces) == 0


def test_pieces_end_at_the_end_of_a_word() -> None:
    """Words of 5 tokens are not divided: a piece has the 6 words that fit."""
    ids = np.tile([1, 11, 12, 13, 14], 40)
    cut = cut_long_sentences(ids, np.array([len(ids)]), IS_CONTINUATION)
    assert cut.sizes.tolist() == [30, 30, 30, 30, 30, 30, 20]


def test_word_that_is_longer_than_a_piece_is_divided() -> None:
    """A word of 80 tokens is divided; the next piece starts with the next word if it can."""
    ids = np.array([1, *[11] * 79] * 2 + [2] * 40)
    cut = cut_long_sentences(ids, np.array([len(ids)]), IS_CONTINUATION)
    assert cut.sizes.sum() == len(ids)
    assert cut.sizes.tolist() == [32, 32, 16, 32, 32, 32, 24]


@pytest.mark.parametrize("nsp", [False, True])
def test_every_token_of_a_text_without_sentence_ends_is_trained_on(
    tmp_path: Path, nsp: bool
) -> None:
    """A few epochs contain all tokens of documents that consist of a single long sentence."""
    texts = [" ".join([letter] * 150 + ["the"] * 150) for letter in "abcdefgh"]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_store(corpus, tmp_path / "store", held_out=0.0)
    split = Store.open(tmp_path / "store").load_split("train")
    vocabulary = VocabularyInfo.from_tokenizer(TOKENIZER)
    num_seen = 0
    for epoch in range(3):
        settings = DataSettings(nsp=nsp)
        stream = ExampleStream(split, vocabulary, settings, length=64, seed=0, epoch=epoch)
        batch = stream.batch(0, len(stream))
        num_special = len(stream) * (3 if nsp else 2)
        num_seen += len(batch.ids) - num_special
        ids = batch.ids.copy()
        ids[batch.masked_positions] = batch.masked_labels
        # All letters occur, which are the first halves of the documents, and "the" of the second.
        assert set(TOKENIZER.encode("a b c d e f g h the")) <= set(ids.tolist())
    assert num_seen > 0.9 * 3 * split.counts.tokens
