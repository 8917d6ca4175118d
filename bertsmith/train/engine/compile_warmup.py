"""The first batches that a compiled model meets, the same at every start of a run.

It never knows the data: only sizes matter here. From the sizes met first the compiler decides
how work is parted among threads, and so in which order sums are added up. A resumed run begins
with another batch than one that was never stopped, and could so compute other bytes.
"""

from itertools import accumulate

import numpy as np

from bertsmith.data.packing import Batch
from bertsmith.data.settings import DataSettings

#: About one token in so many is predicted; the first of them that makes P unlike all other sizes.
_STRIDES = (7, 6, 8, 5, 9, 4, 3)


def warmup_batches(data: DataSettings, max_length: int, micro_batch_tokens: int) -> list[Batch]:
    """Return a batch for each graph that a run can need: of some sequences, and of a single one.

    A size of 1 always gets a graph of its own. ``max_length``: the greatest length of the phases;
    ``micro_batch_tokens``: the most tokens of a piece, beyond which a batch is cut.
    """
    result = []
    if data.batch > 1:
        count = max(2, min(data.batch, micro_batch_tokens // data.length))
        result.append(_batch([data.length - number % 5 for number in range(count)], nsp=data.nsp))
    if data.batch == 1 or data.batch * max_length > micro_batch_tokens:
        result.append(_batch([data.length], nsp=data.nsp))
    return result


def _batch(lengths: list[int], *, nsp: bool) -> Batch:
    """Return a batch of sequences of nothing; no two of its sizes are equal without need.

    The compiler takes two sizes that are equal at first for equal always.
    """
    total, count = sum(lengths), len(lengths)
    sizes = {count, count + 1, max(lengths), total}
    masked = [np.arange(0, total, stride) for stride in _STRIDES]
    chosen = next((one for one in masked if len(one) not in sizes), masked[0])
    return Batch(
        ids=np.zeros(total, np.int64),
        segments=np.zeros(total, np.int64),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        cu_seqlens=np.array([0, *accumulate(lengths)], np.int32),
        max_seqlen=max(lengths),
        masked_positions=chosen,
        masked_labels=np.zeros(len(chosen), np.int64),
        nsp_labels=np.zeros(count, np.int64) if nsp else None,
    )
