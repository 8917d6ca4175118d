"""Compute the sequences of requests with a model, in the batches of the batcher."""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.model.task_models import TaskModel
from bertsmith.serve.batching import Batcher
from bertsmith.serve.deadline import Deadline, wait_for_result
from bertsmith.serve.fair_queue import BatchFunction
from bertsmith.serve.models import (
    ServedModel,
    compute_attentions,
    compute_task_outputs,
    compute_top_tokens,
    require_finite,
)
from bertsmith.tasks.inputs import ModelInputs
from bertsmith.use.explain import AttentionMaps, EncodedTexts
from bertsmith.use.masked_lm import MaskedSequence, TopTokens
from bertsmith.use.pair import EncodedPair, compute_batch_probabilities
from bertsmith.use.token_vectors import Floats


class BatchKey(NamedTuple):
    """Sequences with equal keys can share a batch.

    Attributes:
        model: name of the model.
        version: version of the model, which changes when the models are reloaded.
        operation: what the model computes, such as "fill", and its settings.
    """

    model: str
    version: int
    operation: Hashable


class ModelCalls:
    """Submits the sequences of one request to the batcher."""

    def __init__(self, model: ServedModel, batcher: Batcher, deadline: Deadline) -> None:
        """Select a model.

        Args:
            model: the model.
            batcher: computes the batches.
            deadline: the request's deadline.
        """
        self._model = model
        self._batcher = batcher
        self._deadline = deadline

    def submit(
        self,
        operation: Hashable,
        compute_batch: BatchFunction,
        payloads: Sequence[tuple[int, Any]],
    ) -> Future[list[Any]]:
        """Queue sequences and return the future of their results.

        Args:
            operation: what is computed, see ``BatchKey``.
            compute_batch: computes the results of a batch.
            payloads: (number of tokens, payload) of each sequence.

        Raises:
            BertsmithError: an error of ``Batcher.submit``.
        """
        key = BatchKey(self._model.name, self._model.version, operation)
        compute_finite = require_finite(self._model.name, compute_batch)
        return self._batcher.submit(key, compute_finite, payloads, self._deadline)

    def compute(
        self,
        operation: Hashable,
        compute_batch: BatchFunction,
        payloads: Sequence[tuple[int, Any]],
    ) -> list[Any]:
        """Queue sequences and wait for their results; the arguments are those of ``submit``.

        Raises:
            DeadlineExceededError: the deadline passed before all results were computed.
            DisconnectedError: the client disconnected.
            NotFiniteError: a result has NaN or infinity.
            BertsmithError: an error of ``submit``.
        """
        future = self.submit(operation, compute_batch, payloads)
        return wait_for_result(future, self._deadline)

    def predict_top_tokens(
        self,
        bundle: PretrainedBundle,
        lengths: Sequence[int],
        get_sequence: Callable[[int], MaskedSequence],
        top: int,
    ) -> Iterator[tuple[Sequence[tuple[int, int]], TopTokens]]:
        """Predict masked tokens; a ``TopTokenPredictor``."""
        payloads = [(length, (get_sequence(index), top)) for index, length in enumerate(lengths)]
        results = self.compute("fill", partial(compute_top_tokens, bundle), payloads)
        for index, top_tokens in enumerate(results):
            yield [(index, mask) for mask in range(len(top_tokens.token_ids))], top_tokens

    def compute_pair_probabilities(
        self, bundle: PretrainedBundle, sequences: Sequence[EncodedPair]
    ) -> list[float]:
        """Return the probability that the second text follows the first, for each pair."""
        payloads = [(len(ids), (ids, segments)) for ids, segments in sequences]
        return self.compute("pair", partial(compute_batch_probabilities, bundle), payloads)

    def compute_outputs(self, task_model: TaskModel, inputs: ModelInputs) -> list[Floats]:
        """Return the outputs of a fine-tuned model for each example; a ``ComputeOutputs``."""
        payloads: list[tuple[int, Any]] = []
        for index, sequences in enumerate(inputs.sequences):
            self._check_segments(segments for _, segments in sequences)
            token_indices = None
            if inputs.token_indices is not None:
                token_indices = inputs.token_indices[index]
            payloads += [
                (len(ids), ((ids, segments), token_indices)) for ids, segments in sequences
            ]
        outputs = self.compute("outputs", partial(compute_task_outputs, task_model), payloads)
        # Join the outputs of the sequences of each example.
        remaining_outputs = iter(outputs)
        return [
            np.concatenate(list(itertools.islice(remaining_outputs, len(sequences))))
            for sequences in inputs.sequences
        ]

    def _check_segments(self, sequences: Iterable[Sequence[int]]) -> None:
        """Raise InputError if a sequence has two segments and the model only one.

        Args:
            sequences: the segment ids of each sequence.
        """
        if self._model.bundle.config.segments == 1 and any(map(any, sequences)):
            raise InputError("this model takes single texts, got a pair; send single texts")

    def compute_attention(self, encoded: EncodedTexts) -> AttentionMaps:
        """Return the attention probabilities of a text or pair."""
        self._check_segments([encoded.segments])
        payloads = [(len(encoded.ids), encoded)]
        compute_batch = partial(compute_attentions, self._model)
        results: list[AttentionMaps] = self.compute("attention", compute_batch, payloads)
        return results[0]
