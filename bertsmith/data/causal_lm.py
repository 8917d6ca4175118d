"""The left-to-right objective: each token is predicted from those before it (section 5.1).

It never knows how the sequences came about; it needs their ids and where they start.
"""

import numpy as np

from bertsmith.data.counter_rng import IntArray
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import CuSeqlens


def build_causal_lm_labels(
    ids: IntArray, boundaries: CuSeqlens, facts: VocabularyInfo
) -> tuple[IntArray, IntArray]:
    """Return where a word is predicted, int64 [P], ascending, and which one, int64 [P].

    Args:
        ids: int64 [T], which stay as they are.
        boundaries: int32 [B + 1].
        facts: of the vocabulary.

    Returns:
        Every place whose next token, in the same sequence, is no special one; and these tokens.
    """
    usable = ~facts.is_special[ids]
    # A sequence's first token has none before it.
    usable[boundaries[:-1]] = False
    after = np.flatnonzero(usable)
    return after - 1, ids[after]
