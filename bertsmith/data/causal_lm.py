"""Labels of the left-to-right objective: each token is predicted from those before it.

Section 5.1 of the paper compares it with masked LM.
"""

import numpy as np

from bertsmith.data.counter_rng import IntArray
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import CuSeqlens


def build_causal_lm_labels(
    ids: IntArray, cu_seqlens: CuSeqlens, vocabulary: VocabularyInfo
) -> tuple[IntArray, IntArray]:
    """Label each position with the next token of its sequence, unless that is a special token.

    Args:
        ids: Token ids, int64 [T]; they are not changed.
        cu_seqlens: Start of each sequence, int32 [B + 1].
        vocabulary: Tells which ids are special tokens.

    Returns:
        The labeled positions, int64 [P], ascending, and the ids of their next tokens, int64 [P].
    """
    is_target = ~vocabulary.is_special[ids]
    # The first token of a sequence has no token before it to be predicted from.
    is_target[cu_seqlens[:-1]] = False
    targets = np.flatnonzero(is_target)
    return targets - 1, ids[targets]
