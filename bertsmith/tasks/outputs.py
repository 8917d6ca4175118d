"""Computing the outputs of a fine-tuned model in batches of inputs of similar length."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from bertsmith.model.packed import pack_sequences
from bertsmith.model.task_models import TaskModel
from bertsmith.runtime.inference_batches import batch_by_length, choose_batch_tokens
from bertsmith.runtime.thread_pool import map_in_threads
from bertsmith.tasks.inputs import ModelInputs, TokenSequence, to_batch_token_indices

#: ``compute_outputs`` or a replacement. The replacement in the server batches the requests of all
#: clients.
ComputeOutputs = Callable[[TaskModel, ModelInputs], list[NDArray[np.float32]]]


def compute_outputs(
    model: TaskModel,
    inputs: ModelInputs,
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[NDArray[np.float32]]:
    """Return the outputs of each input, float32 [m, C].

    The m rows are the sequences of the input, or its tokens in ``inputs.token_indices`` if that is
    set.

    Args:
        model: A model in eval mode.
        inputs: The encoded examples.
        autocast: Returns the autocast context in which a batch is computed.
    """
    device = next(model.parameters()).device
    max_tokens = choose_batch_tokens(device, model.config.feed_forward)
    sequences = [sequence for input_sequences in inputs.sequences for sequence in input_sequences]
    sequence_outputs: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(sequences)

    def compute_batch(batch: list[int]) -> list[NDArray[np.float32]]:
        token_indices = None
        if inputs.token_indices is not None:
            # Inputs with token indices have a single sequence, so both have the same index.
            token_indices = [inputs.token_indices[index] for index in batch]
        with autocast():
            return compute_batch_outputs(
                model, [sequences[index] for index in batch], token_indices
            )

    lengths = [len(token_ids) for token_ids, _ in sequences]
    batches = batch_by_length(lengths, max_tokens)
    for batch, batch_outputs in map_in_threads(compute_batch, batches, device):
        for index, rows in zip(batch, batch_outputs, strict=True):
            sequence_outputs[index] = rows
    input_outputs = []
    start = 0
    for input_sequences in inputs.sequences:
        end = start + len(input_sequences)
        input_outputs.append(np.concatenate(sequence_outputs[start:end]))
        start = end
    return input_outputs


@torch.no_grad()
def compute_batch_outputs(
    model: TaskModel,
    sequences: Sequence[TokenSequence],
    token_indices: Sequence[Sequence[int]] | None = None,
) -> list[NDArray[np.float32]]:
    """Return the outputs of each sequence, float32 [m, C], from a single batch.

    Args:
        model: A model in eval mode.
        sequences: Token ids and segment ids of each sequence.
        token_indices: Indices of the tokens of each sequence for which outputs are needed. None if
            the model selects them.
    """
    device = next(model.parameters()).device
    packed = pack_sequences(sequences)
    batch_token_indices = None
    row_counts = [1] * len(sequences)
    if token_indices is not None:
        row_counts = list(map(len, token_indices))
        batch_token_indices = to_batch_token_indices(packed, token_indices).to(device)
    rows = model(packed.to(device), batch_token_indices).float().cpu().numpy()
    return np.split(rows, np.cumsum(row_counts)[:-1])
