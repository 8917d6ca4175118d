"""Small splits of made-up ids, and facts of a made-up vocabulary."""

from collections.abc import Callable

import numpy as np
import pytest

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.store import Split

#: Words of the made-up vocabulary: 0 to 4 are special, 60 and above go on with a word.
V = 97


@pytest.fixture(scope="session")
def facts() -> VocabularyInfo:
    """Facts of a vocabulary of 97 words: [PAD] [UNK] [CLS] [SEP] [MASK], 55 words, 37 pieces."""
    special, continuations = np.zeros(V, np.bool_), np.zeros(V, np.bool_)
    special[:5] = True
    continuations[60:] = True
    return VocabularyInfo(V, 2, 3, 4, special, continuations, 1)


@pytest.fixture(scope="session")
def make_split() -> Callable[..., Split]:
    """Make a split of documents with sentences of random sizes and random ids."""

    def make(documents: int, sentences: int = 12, tokens: int = 25, seed: int = 0) -> Split:
        chance = np.random.default_rng(seed)
        return Split.from_documents(
            [
                [
                    chance.integers(5, V, chance.integers(1, 2 * tokens)).tolist()
                    for _ in range(chance.integers(1, 2 * sentences))
                ]
                for _ in range(documents)
            ]
        )

    return make


@pytest.fixture(scope="session")
def split(make_split: Callable[..., Split]) -> Split:
    """A split of 400 documents with about 5,000 sentences of about 25 tokens."""
    return make_split(400)
