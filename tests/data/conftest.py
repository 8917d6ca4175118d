"""Fixtures: a synthetic vocabulary, small splits of random token ids, a corpus and its store."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.store import Split
from tests.data.synthetic_corpus import NUM_DOCUMENTS, prepare_store, write_corpus

#: Size of the synthetic vocabulary: ids 0 to 4 are special, ids from 60 on continue a word.
V = 97


@pytest.fixture(scope="session")
def vocabulary() -> VocabularyInfo:
    """A vocabulary of [PAD] [UNK] [CLS] [SEP] [MASK], 55 words and 37 continuation pieces."""
    is_special, is_continuation = np.zeros(V, np.bool_), np.zeros(V, np.bool_)
    is_special[:5] = True
    is_continuation[60:] = True
    return VocabularyInfo(
        vocab_size=V,
        unk_id=1,
        cls_id=2,
        sep_id=3,
        mask_id=4,
        is_special=is_special,
        is_continuation=is_continuation,
    )


@pytest.fixture(scope="session")
def make_split() -> Callable[..., Split]:
    """Return a function that creates a split of documents with random sentences."""

    def make_random_split(
        documents: int, sentences: int = 12, tokens: int = 25, seed: int = 0
    ) -> Split:
        """Create a split of random documents.

        Args:
            documents: Number of documents.
            sentences: Mean number of sentences per document.
            tokens: Mean number of tokens per sentence.
            seed: Random seed.
        """
        rng = np.random.default_rng(seed)
        return Split.from_documents(
            [
                [
                    rng.integers(5, V, rng.integers(1, 2 * tokens)).tolist()
                    for _ in range(rng.integers(1, 2 * sentences))
                ]
                for _ in range(documents)
            ]
        )

    return make_random_split


@pytest.fixture(scope="session")
def split(make_split: Callable[..., Split]) -> Split:
    """A split of 400 documents with about 5,000 sentences of about 25 tokens."""
    return make_split(400)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of short documents."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path, NUM_DOCUMENTS)
    return path


@pytest.fixture(scope="session")
def expected_store(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the corpus, prepared by one worker without interruption."""
    path = tmp_path_factory.mktemp("stores") / "expected"
    prepare_store(corpus, path, workers=1)
    return path
