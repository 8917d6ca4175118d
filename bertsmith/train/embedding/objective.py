"""The objective of an embedding model: batches, gradient caching and held-out metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bertsmith.model.ops.cross_entropy import to_full_precision
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch
from bertsmith.model.sentence_embedding import BertForSentenceEmbedding
from bertsmith.runtime.device import Machine, seed_dropout
from bertsmith.tasks.embedding_data import EmbeddingExamples
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.embedding.batches import BatchSampler, split_by_length
from bertsmith.train.embedding.evaluation import (
    HeldoutTexts,
    describe_texts,
    pack_texts,
)
from bertsmith.train.embedding.losses import Targets, iter_loss_terms
from bertsmith.train.engine.heldout_metrics import evaluate_all
from bertsmith.train.engine.step import derive_dropout_seed
from bertsmith.train.engine.step_batches import build_batch_iterator, move_tensors


@dataclass(frozen=True)
class EmbeddingMicroBatch:
    """Texts of a batch that are encoded together, and the targets of the whole batch.

    Attributes:
        packed: The texts, with similar lengths.
        rows: int64 [B], the index of each text in the batch.
        targets: Targets of the whole batch.
        step: Step of the batch.
        index: Number of the micro-batch in the batch, from 0.
    """

    packed: PackedBatch
    rows: Tensor
    targets: Targets
    step: int
    index: int


class EmbeddingObjective:
    """Implements ``Objective`` for the training examples of an embedding model.

    The loss compares all texts of a batch. If they do not fit into one micro-batch, gradients are
    cached (Gao et al. 2021, arXiv:2101.06983): all vectors are computed without an autograd graph,
    then the gradient of the loss with respect to the vectors, and then, one micro-batch after
    another, the gradient of the weights. Both forward passes of a micro-batch have the same dropout
    masks, so the result is the gradient of the batch with all graphs in memory.

    Several processes each encode some micro-batches, and share the vectors: the texts of all
    processes are negatives of each other.
    """

    #: The position in the data is a function of the step.
    data_state = None

    def __init__(
        self,
        model: BertForSentenceEmbedding,
        settings: EmbeddingSettings,
        examples: EmbeddingExamples,
        heldout: Mapping[str, HeldoutTexts],
        machine: Machine,
        tokenizer: Tokenizer,
        *,
        micro_batch_tokens: int,
        seed: int,
    ) -> None:
        """Create the objective.

        Args:
            model: Model to train.
            settings: Loss and batch size.
            examples: Training examples.
            heldout: Held-out texts by name; the first ones select the best epoch.
            machine: Device and precision.
            tokenizer: Decodes texts for error messages.
            micro_batch_tokens: Maximum tokens of a micro-batch, including padding.
            seed: Seed of the order of the examples and of dropout.
        """
        self.model = model
        self._settings = settings
        self._texts = examples.texts
        self._heldout = heldout
        self._machine = machine
        self._tokenizer = tokenizer
        self._micro_batch_tokens = micro_batch_tokens
        self._seed = seed
        self._sampler = BatchSampler(examples, settings, seed)
        self.iter_batches = build_batch_iterator(self.make_micro_batches)
        #: Gradient of the loss with respect to the vectors of the current batch, float32 [U, W].
        self._vector_gradients: Tensor | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""
        return self._sampler.num_batches

    def make_micro_batches(self, step: int) -> list[EmbeddingMicroBatch]:
        """Return the batch of a step, in micro-batches of texts of similar length."""
        batch = self._sampler.draw_batch(*divmod(step, self.steps_per_epoch))
        targets = move_tensors(batch.targets, self._machine.device)
        lengths = self._texts.get_lengths(batch.texts).tolist()
        return [
            EmbeddingMicroBatch(
                pack_texts(self._texts, batch.texts[rows].tolist()).to(self._machine.device),
                torch.tensor(rows, device=self._machine.device),
                targets,
                step,
                index,
            )
            for index, rows in enumerate(
                split_by_length(
                    lengths, self._micro_batch_tokens, self._machine.processes.world_size
                )
            )
        ]

    def compute_losses(
        self,
        micro_batch: EmbeddingMicroBatch,
        micro_batches: list[EmbeddingMicroBatch],
        dropout_seed: DropoutSeed,
    ) -> dict[str, Tensor]:
        """Return the loss of a batch that is one micro-batch.

        For larger batches, and in several processes, return a value whose gradient is that of the
        loss with respect to the weights through the texts of ``micro_batch``. The value is the loss
        of the batch in the first micro-batch, and 0 in the others.
        """
        processes = self._machine.processes
        if len(micro_batches) == 1 and processes.world_size == 1:
            vectors = self._encode(micro_batch, dropout_seed)
            return {"loss": self._sum_terms(vectors[micro_batch.rows.argsort()], micro_batch)}
        loss = torch.zeros((), device=self._machine.device)
        if micro_batch.index == processes.assign_indices(len(micro_batches))[0]:
            batch_loss = self._cache_gradients(micro_batches)
            if micro_batch.index == 0:
                loss = batch_loss
            seed_dropout(self._machine.device, int(dropout_seed.seed))
        assert self._vector_gradients is not None
        vectors = self._encode(micro_batch, dropout_seed)
        product = (vectors * self._vector_gradients[micro_batch.rows]).sum()
        return {"loss": product - product.detach() + loss}

    def _cache_gradients(self, micro_batches: list[EmbeddingMicroBatch]) -> Tensor:
        """Compute the loss of a batch and its gradient with respect to the vectors.

        Each process encodes the micro-batches that it has been assigned, and gets the vectors of
        the others.
        """
        processes = self._machine.processes
        num_texts = sum(len(micro_batch.rows) for micro_batch in micro_batches)
        vectors: Tensor | None = None
        with torch.no_grad():
            for index in processes.assign_indices(len(micro_batches)):
                micro_batch = micro_batches[index]
                seed = derive_dropout_seed(self._seed, micro_batch.step, index)
                seed_dropout(self._machine.device, seed)
                part = self._encode(micro_batch, DropoutSeed(torch.tensor(seed)))
                if vectors is None:
                    vectors = part.new_zeros(num_texts, part.shape[1])
                if processes.rank < len(micro_batches):
                    vectors[micro_batch.rows] = part
        assert vectors is not None
        vectors = processes.sum_tensor(vectors).requires_grad_()
        loss = self._sum_terms(vectors, micro_batches[0], with_backward=True)
        self._vector_gradients = vectors.grad
        return loss

    def _encode(self, micro_batch: EmbeddingMicroBatch, dropout_seed: DropoutSeed) -> Tensor:
        """Return the vectors of the texts of a micro-batch, float32 [B, W]."""
        with self._machine.autocast():
            vectors: Tensor = self.model(micro_batch.packed, dropout_seed)
        # A Dense module computes them in bf16.
        return to_full_precision(vectors)

    def _sum_terms(
        self, vectors: Tensor, micro_batch: EmbeddingMicroBatch, *, with_backward: bool = False
    ) -> Tensor:
        """Return the loss of the vectors of a batch, in the order of the batch.

        With ``with_backward``, the gradient is computed term by term, and the result is detached.
        """
        total = torch.zeros((), device=vectors.device)
        # Similarities of 16 bits are too coarse for the loss.
        with torch.autocast(vectors.device.type, enabled=False), torch.enable_grad():
            for term in iter_loss_terms(vectors, micro_batch.targets, self._settings):
                if with_backward:
                    term.backward()  # type: ignore[no-untyped-call]
                total = total + (term.detach() if with_backward else term)
        return total

    def describe_batch(self, step: int) -> str:
        """Return the epoch and the start of the first text of a batch, for an error message."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        numbers = self._sampler.draw_batch(epoch, step_in_epoch).texts
        return describe_texts(epoch, self._texts, numbers, self._tokenizer)

    def count_tokens(self, micro_batches: list[EmbeddingMicroBatch]) -> int:
        """Return the number of tokens in a batch."""
        return sum(len(micro_batch.packed.ids) for micro_batch in micro_batches)

    def count_macs(self, micro_batches: list[EmbeddingMicroBatch]) -> float:
        """Return the number of multiply-accumulates of a step.

        The backward pass has twice as many as a forward pass. Gradient caching has a second forward
        pass.
        """
        config = self.model.config
        num_passes = 3 if len(micro_batches) == 1 else 4
        total = 0.0
        for micro_batch in micro_batches:
            num_tokens, num_texts = len(micro_batch.packed.ids), len(micro_batch.rows)
            macs = num_tokens * config.macs_per_token(num_tokens / num_texts)
            if self.model.reads_single_token:
                macs -= (num_tokens - num_texts) * config.macs_saved_per_unused_output()
            total += num_passes * macs
        return total

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of all held-out sets; see ``evaluate_all``."""
        metrics = evaluate_all(
            self._heldout, lambda heldout: heldout.evaluate(self.model, self._machine)
        )
        return self._machine.processes.broadcast(metrics)
