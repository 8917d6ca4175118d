"""How well words can be guessed from their frequency alone: the measure that context must beat.

It never knows a model.
"""

import numpy as np

from bertsmith.data.counter_rng import IntArray
from bertsmith.data.store import Split, damaged_file_error, describe_out_of_vocabulary

#: The ids counted together.
_TOGETHER = 1 << 22


def unigram_entropy(counts: IntArray) -> float:
    """Return the entropy in nats of the words' shares, from how often each occurs [V].

    It is the loss of the best guess that looks at no context.
    """
    seen = counts[counts > 0].astype(np.float64)
    if not len(seen):
        return 0.0
    shares = seen / seen.sum()
    return float(-(shares * np.log(shares)).sum())


def count_token_ids(split: Split, vocab_size: int) -> IntArray:
    """Return how often each id occurs in a split, int64 [V]; StoreError for an id beyond V."""
    counts = np.zeros(vocab_size, np.int64)
    for first in range(0, len(split.ids), _TOGETHER):
        block = np.bincount(split.ids[first : first + _TOGETHER], minlength=vocab_size)
        if len(block) > vocab_size:
            raise damaged_file_error(
                split.name, describe_out_of_vocabulary(len(block) - 1, vocab_size)
            )
        counts += block
    return counts
