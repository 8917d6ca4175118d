"""The objective of an embedding student: batches, losses and held-out metrics."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch
from bertsmith.model.sentence_embedding import BertForSentenceEmbedding
from bertsmith.runtime.device import Machine
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.tasks.embedding_data import EncodedTexts
from bertsmith.tasks.retrieval import normalize_rows
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.distillation.losses import embedding_losses
from bertsmith.train.embedding.evaluation import describe_texts, encode_texts, pack_texts
from bertsmith.train.engine.heldout_metrics import evaluate_all
from bertsmith.train.engine.step_batches import build_batch_iterator

#: float16 [number of texts, W] on disk, or float32 in memory.
Targets = NDArray[Any]


class HeldoutSet(Protocol):
    """Held-out texts with metrics."""

    @property
    def metric_names(self) -> Sequence[str]:
        """Names of the metrics; the first one selects the best epoch."""

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the first metric is better."""

    def evaluate(self, model: BertForSentenceEmbedding, machine: Machine) -> dict[str, float]:
        """Return the metrics and the number of examples."""


@dataclass(frozen=True)
class TeacherAgreement:
    """Held-out texts on which the student is compared with the teacher.

    Attributes:
        texts: All texts.
        numbers: int64 [m], the numbers of the held-out texts.
        targets: The teacher's vector of each text, [number of texts, W].
        truncate_dim: Number of first dimensions that the vectors of the student keep; None for all.
    """

    metric_names: ClassVar[tuple[str, ...]] = ("teacher_cosine",)
    higher_is_better: ClassVar[bool] = True

    texts: EncodedTexts
    numbers: NDArray[np.int64]
    targets: Targets
    truncate_dim: int | None = None

    def evaluate(self, model: BertForSentenceEmbedding, machine: Machine) -> dict[str, float]:
        """Return the mean cosine similarity of the vectors of student and teacher."""
        vectors = encode_texts(model, machine, self.texts, self.numbers)[:, : self.truncate_dim]
        targets = self.targets[self.numbers, : self.truncate_dim].astype(np.float32)
        cosines = (normalize_rows(vectors) * normalize_rows(targets)).sum(1)
        return {"teacher_cosine": float(cosines.mean()), "examples": float(len(self.numbers))}


@dataclass(frozen=True)
class EmbeddingMicroBatch:
    """Texts of a batch that are encoded together.

    Attributes:
        packed: The texts, with similar lengths.
        targets: Vectors of the teacher, float32 [B, W].
    """

    packed: PackedBatch
    targets: Tensor


class EmbeddingDistillationObjective:
    """Implements ``Objective``: each text is to have the vector that the teacher has computed."""

    #: The position in the data is a function of the step.
    data_state = None

    def __init__(
        self,
        model: BertForSentenceEmbedding,
        texts: EncodedTexts,
        train_texts: NDArray[np.int64],
        targets: Targets,
        heldout: Mapping[str, HeldoutSet],
        machine: Machine,
        tokenizer: Tokenizer,
        *,
        loss: Literal["cosine", "mse"],
        batch_size: int,
        micro_batch_tokens: int,
        seed: int,
    ) -> None:
        """Create the objective.

        Args:
            model: The student.
            texts: All texts.
            train_texts: int64 [n], the numbers of the texts that are trained on.
            targets: The teacher's vector of each text, [number of texts, W].
            heldout: Held-out sets by name; the first one selects the best epoch.
            machine: Device and precision.
            tokenizer: Decodes texts for error messages.
            loss: The loss.
            batch_size: Texts per step.
            micro_batch_tokens: Maximum tokens of a micro-batch, including padding.
            seed: Seed of the order of the texts.
        """
        self.model = model
        self._texts = texts
        self._train_texts = train_texts
        self._targets = targets
        self._heldout = heldout
        self._machine = machine
        self._tokenizer = tokenizer
        self._loss: Literal["cosine", "mse"] = loss
        self._batch_size = batch_size
        self._micro_batch_tokens = micro_batch_tokens
        self._seed = seed
        self._epoch = -1
        self._order = train_texts
        self.iter_batches = build_batch_iterator(self._make_micro_batches)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""
        return math.ceil(len(self._train_texts) / self._batch_size)

    def _draw_batch(self, step: int) -> NDArray[np.int64]:
        """Return the numbers of the texts of a step. Each epoch has a new random order."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self._train_texts)
            self._epoch = epoch
        first = step_in_epoch * self._batch_size
        return self._order[first : first + self._batch_size]

    def _make_micro_batches(self, step: int) -> list[EmbeddingMicroBatch]:
        """Return the texts of a step in micro-batches of similar length."""
        numbers = self._draw_batch(step)
        device = self._machine.device
        lengths = self._texts.get_lengths(numbers).tolist()
        micro_batches = []
        for rows in batch_by_length(lengths, self._micro_batch_tokens):
            targets = torch.from_numpy(self._targets[numbers[rows]].astype(np.float32))
            packed = pack_texts(self._texts, numbers[rows].tolist())
            micro_batches.append(EmbeddingMicroBatch(packed.to(device), targets.to(device)))
        return micro_batches

    def compute_losses(
        self,
        micro_batch: EmbeddingMicroBatch,
        micro_batches: list[EmbeddingMicroBatch],
        dropout_seed: DropoutSeed,
    ) -> dict[str, Tensor]:
        """Return the contribution of a micro-batch to the mean loss of its batch."""
        with self._machine.autocast():
            vectors = self.model(micro_batch.packed, dropout_seed)
        losses = embedding_losses(vectors.float(), micro_batch.targets, self._loss)
        return {"loss": losses.sum() / sum(len(batch.targets) for batch in micro_batches)}

    def describe_batch(self, step: int) -> str:
        """Return the epoch and the start of the first text of a batch, for an error message."""
        numbers = self._draw_batch(step)
        return describe_texts(step // self.steps_per_epoch, self._texts, numbers, self._tokenizer)

    def count_tokens(self, micro_batches: list[EmbeddingMicroBatch]) -> int:
        """Return the number of tokens in a batch."""
        return sum(len(micro_batch.packed.ids) for micro_batch in micro_batches)

    def count_macs(self, micro_batches: list[EmbeddingMicroBatch]) -> float:
        """Return the number of multiply-accumulates of a step of the student.

        The backward pass has twice as many as the forward pass.
        """
        config = self.model.config
        total = 0.0
        for micro_batch in micro_batches:
            num_tokens, num_texts = len(micro_batch.packed.ids), len(micro_batch.targets)
            macs = num_tokens * config.macs_per_token(num_tokens / num_texts)
            if self.model.reads_single_token:
                macs -= (num_tokens - num_texts) * config.macs_saved_per_unused_output()
            total += 3 * macs
        return total

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of all held-out sets; see ``evaluate_all``."""
        return evaluate_all(
            self._heldout, lambda heldout: heldout.evaluate(self.model, self._machine)
        )
