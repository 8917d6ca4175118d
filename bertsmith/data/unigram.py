"""Unigram entropy: the loss of the best model that ignores context, a baseline for masked LM."""

import numpy as np

from bertsmith.data.counter_rng import IntArray
from bertsmith.data.store import Split, describe_out_of_vocabulary, make_damaged_file_error

#: Number of ids counted at a time.
_CHUNK_IDS = 1 << 22


def compute_unigram_entropy(counts: IntArray) -> float:
    """Return the entropy, in nats, of the token distribution with these counts, int64 [V]."""
    positive = counts[counts > 0].astype(np.float64)
    if not len(positive):
        return 0.0
    probabilities = positive / positive.sum()
    return float(-(probabilities * np.log(probabilities)).sum())


def count_token_ids(split: Split, vocab_size: int) -> IntArray:
    """Return how often each token id occurs in a split, int64 [V].

    Raises:
        StoreError: The split holds an id outside the vocabulary.
    """
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, len(split.ids), _CHUNK_IDS):
        chunk_counts = np.bincount(split.ids[first : first + _CHUNK_IDS], minlength=vocab_size)
        if len(chunk_counts) > vocab_size:
            problem = describe_out_of_vocabulary(len(chunk_counts) - 1, vocab_size)
            raise make_damaged_file_error(split.name, problem)
        counts += chunk_counts
    return counts
