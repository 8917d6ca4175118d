"""The objective of a reranker: batches, losses and held-out metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.model.task_models import TaskModel
from bertsmith.runtime.device import Machine
from bertsmith.tasks.embedding_data import Ints
from bertsmith.tasks.reranking_data import PairEncoder, RerankingExamples
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine.batch_split import split_lengths
from bertsmith.train.engine.heldout_metrics import evaluate_all
from bertsmith.train.engine.step_batches import build_batch_iterator, move_tensors
from bertsmith.train.reranking.batches import BatchSampler
from bertsmith.train.reranking.evaluation import HeldoutQueries
from bertsmith.train.reranking.losses import Targets, build_targets, sum_loss_terms


@dataclass(frozen=True)
class RerankingMicroBatch:
    """Documents of one or several queries, and the targets of their scores.

    All documents of a query that are compared are in the same micro-batch.
    """

    packed: PackedBatch
    targets: Targets


class RerankingObjective:
    """Implements ``Objective`` for the training examples of a reranker."""

    #: The position in the data is a function of the step.
    data_state = None

    def __init__(
        self,
        model: TaskModel,
        settings: RerankingSettings,
        examples: RerankingExamples,
        heldout: Mapping[str, HeldoutQueries],
        machine: Machine,
        tokenizer: Tokenizer,
        *,
        micro_batch_tokens: int,
        seed: int,
        negatives: Ints | None = None,
    ) -> None:
        """Create the objective.

        Args:
            model: Model to train, with one output.
            settings: Loss and batch size; ``max_seqlen`` is set.
            examples: Training examples; each query has a term in the loss.
            heldout: Held-out queries by name; the first ones select the best epoch.
            machine: Device and precision.
            tokenizer: Has the special tokens, and decodes queries for error messages.
            micro_batch_tokens: Maximum tokens of a micro-batch. The documents of a query are not
                split.
            seed: Seed of the order of the queries and of random documents.
            negatives: The documents that can be drawn as random negatives; None: those of
                ``examples``.
        """
        assert settings.max_seqlen is not None
        self.model = model
        self._settings = settings
        self._texts = examples.texts
        self._heldout = heldout
        self._machine = machine
        self._tokenizer = tokenizer
        self._micro_batch_tokens = micro_batch_tokens
        self._sampler = BatchSampler(examples, settings, seed, negatives)
        self.iter_batches = build_batch_iterator(self.make_micro_batches)
        self._encoder = PairEncoder(examples.texts, tokenizer, settings.max_seqlen)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""
        return self._sampler.num_batches

    def make_micro_batches(self, step: int) -> list[RerankingMicroBatch]:
        """Return the batch of a step in micro-batches of entire queries."""
        groups = self._sampler.draw_batch(*divmod(step, self.steps_per_epoch))
        sequences = [
            [self._encoder.encode(group.query, document) for document in group.documents.tolist()]
            for group in groups
        ]
        lengths = [sum(len(ids) for ids, _ in group_sequences) for group_sequences in sequences]
        device, processes = self._machine.device, self._machine.processes
        micro_batches = []
        parts = split_lengths(lengths, self._micro_batch_tokens, processes.world_size)
        for start, end in parts:
            packed = pack_sequences([pair for group in sequences[start:end] for pair in group])
            scores = [group.scores for group in groups[start:end]]
            targets = move_tensors(build_targets(scores, self._settings), device)
            micro_batches.append(RerankingMicroBatch(packed.to(device), targets))
        return micro_batches

    def compute_losses(
        self,
        micro_batch: RerankingMicroBatch,
        micro_batches: list[RerankingMicroBatch],
        dropout_seed: DropoutSeed,
    ) -> dict[str, Tensor]:
        """Return the contribution of a micro-batch to the mean loss of its batch."""
        with self._machine.autocast():
            outputs = self.model(micro_batch.packed, None, dropout_seed)[:, 0]
        num_terms = sum(len(batch.targets) for batch in micro_batches)
        # Scores of 16 bits are too coarse for the loss.
        with torch.autocast(outputs.device.type, enabled=False):
            total = sum_loss_terms(outputs.float(), micro_batch.targets, self._settings)
        return {"loss": total / num_terms}

    def describe_batch(self, step: int) -> str:
        """Return the epoch and the start of the first query of a batch, for an error message."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        groups = self._sampler.draw_batch(epoch, step_in_epoch)
        query = self._tokenizer.decode(self._texts.get(groups[0].query))[:60]
        return f"epoch {epoch + 1}, the query {query!r} and {len(groups) - 1} more"

    def count_tokens(self, micro_batches: list[RerankingMicroBatch]) -> int:
        """Return the number of tokens in a batch."""
        return sum(len(micro_batch.packed.ids) for micro_batch in micro_batches)

    def count_macs(self, micro_batches: list[RerankingMicroBatch]) -> float:
        """Return the number of multiply-accumulates of a step.

        The backward pass has twice as many as the forward pass.
        """
        config = self.model.config
        total = 0.0
        for micro_batch in micro_batches:
            num_tokens = len(micro_batch.packed.ids)
            num_pairs = len(micro_batch.packed.cu_seqlens) - 1
            macs = num_tokens * config.macs_per_token(num_tokens / num_pairs)
            macs -= (num_tokens - num_pairs) * config.macs_saved_per_unused_output()
            total += 3 * macs
        return total

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of all held-out sets; see ``evaluate_all``."""
        assert self._settings.max_seqlen is not None
        max_seqlen = self._settings.max_seqlen

        def evaluate(heldout: HeldoutQueries) -> dict[str, float]:
            encoder = PairEncoder(heldout.examples.texts, self._tokenizer, max_seqlen)
            return heldout.evaluate(self.model, encoder, self._machine.autocast)

        return self._machine.processes.broadcast(evaluate_all(self._heldout, evaluate))
