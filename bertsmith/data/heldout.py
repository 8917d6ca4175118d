"""Which documents are held out, told by the hashes of their texts.

It never knows the texts. A document's side depends on its text and on one limit for the whole
corpus, so equal documents are never on both sides.
"""

import numpy as np

from bertsmith.data.draws import Ints, Words

#: Of all tokens, the share held out where none is asked for ...
SHARE = 0.01
#: ... but so many tokens at least (about a thousand pairs at length 128) ...
ENOUGH_TOKENS = 1 << 17
#: ... unless that is more than this share.
LARGEST_SHARE = 0.05
#: Pairs need two documents on either side.
FEWEST_DOCUMENTS = 2


def held_out_limit(hashes: Words, tokens: Ints, share: float | None) -> int:
    """Return the document hash below which documents are held out.

    Args:
        hashes: uint64 [documents].
        tokens: tokens of each document [documents].
        share: of all tokens; None for 1 %, but at least 131,072 tokens unless that were more
            than 5 %. Documents are taken in the order of their hashes until it is reached, two
            at least; two at least stay. Fewer than four different documents: none is held out.

    Returns:
        The limit in [0, 2**64); equal documents have equal hashes, so they are on one side.
    """
    unique, owner = np.unique(hashes, return_inverse=True)
    total = float(tokens.sum())
    if share == 0.0 or len(unique) < 2 * FEWEST_DOCUMENTS:
        return 0
    if share is None:
        wanted = max(SHARE * total, min(ENOUGH_TOKENS, LARGEST_SHARE * total))
    else:
        wanted = share * total
    sums = np.cumsum(np.bincount(owner, tokens))
    count = int(np.searchsorted(sums, wanted)) + 1
    count = min(max(count, FEWEST_DOCUMENTS), len(unique) - FEWEST_DOCUMENTS)
    return int(unique[count])
