"""What a fine-tuned model says of many sequences, in batches counted by tokens.

It never knows texts or labels.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.model.packed import groups, pack
from bertsmith.model.task import SequenceModel


@torch.no_grad()
def outputs(
    model: SequenceModel,
    sequences: Sequence[tuple[list[int], list[int]]],
    autocast: AbstractContextManager[object] | None = None,
) -> NDArray[np.float32]:
    """Return float32 [n, C] for n (ids, segments), in their order. ``model`` is in eval mode."""
    device = next(model.parameters()).device
    result = np.empty((len(sequences), model.output.out_features), np.float32)
    for group in groups([len(ids) for ids, _ in sequences]):
        packed = pack([sequences[number] for number in group]).to(device)
        with autocast or nullcontext():
            found = model(packed)
        result[group] = found.float().cpu().numpy()
    return result
