"""Labels of the left-to-right objective: each token is predicted from the tokens before it.

Section 5.1 of the paper compares this objective with masked LM.
"""

import numpy as np

from bertsmith.data.counter_rng import IntArray
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import CuSeqlens


def build_causal_lm_labels(
    ids: IntArray, cu_seqlens: CuSeqlens, vocabulary: VocabularyInfo
) -> tuple[IntArray, IntArray]:
    """Label each position with the next token of its sequence, unless that token is special.

    Args:
        ids: Token ids, int64 [T]; they are not changed.
        cu_seqlens: Start of each sequence, int32 [B + 1].
        vocabulary: Vocabulary of the ids, for its special tokens.

    Returns:
        The labeled positions, int64 [P], ascending, and the ids of their next tokens, int64 [P].
    """
    is_target = ~vocabulary.is_special[ids]
    # No token precedes the first token of a sequence, so it cannot be predicted.
    is_target[cu_seqlens[:-1]] = False
    target_positions = np.flatnonzero(is_target)
    return target_positions - 1, ids[target_positions]
