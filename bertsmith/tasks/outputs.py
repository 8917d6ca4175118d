"""What a fine-tuned model says of many sequences, in batches counted by tokens.

It never knows texts or labels.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.model.packed import batch_by_length, pack_sequences, preferred_batch_tokens
from bertsmith.model.task_models import TaskModel
from bertsmith.runtime.thread_pool import map_in_threads
from bertsmith.tasks.inputs import ModelInputs, to_batch_token_indices

#: What computes the outputs of a model: ``compute_outputs`` below, or a server that packs the inputs of all
#: its clients together.
ComputeOutputs = Callable[[TaskModel, ModelInputs], list[NDArray[np.float32]]]


def compute_outputs(
    model: TaskModel,
    inputs: ModelInputs,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[NDArray[np.float32]]:
    """Return float32 [m, C] for each unit: a row a sequence, or a place.

    ``model`` is in eval mode. ``autocast``: makes the context of each batch.
    """
    device = next(model.parameters()).device
    budget = preferred_batch_tokens(device, model.config.feed_forward)
    flat = [(unit, one) for unit, own in enumerate(inputs.sequences) for one in own]
    found: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(flat)

    @torch.no_grad()
    def compute(group: list[int]) -> list[NDArray[np.float32]]:
        packed = pack_sequences([flat[number][1] for number in group])
        places, sizes = None, [1] * len(group)
        if inputs.token_indices is not None:
            asked = [inputs.token_indices[flat[number][0]] for number in group]
            sizes = list(map(len, asked))
            places = to_batch_token_indices(packed, asked).to(device)
        with autocast():
            said = model(packed.to(device), places).float().cpu().numpy()
        return np.split(said, np.cumsum(sizes)[:-1])

    batches = batch_by_length([len(ids) for _, (ids, _) in flat], budget)
    for group, answers in map_in_threads(compute, batches, device):
        for number, rows in zip(group, answers, strict=True):
            found[number] = rows
    result, first = [], 0
    for own in inputs.sequences:
        result.append(np.concatenate(found[first : first + len(own)]))
        first += len(own)
    return result
