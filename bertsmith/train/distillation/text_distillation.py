"""Distillation on the texts of a token store: models, texts and losses.

The masks of a masked LM are new in each epoch, and the hidden states of a text are much larger than
its tokens. The teacher therefore computes its outputs in each step; they are not cached.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from bertsmith.bundle import PretrainedBundle, load, load_encoder, locate_model, save
from bertsmith.bundle.encoder import save_encoder
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import ExampleBatch
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Store
from bertsmith.data.stream import EndlessStream, EpochStreams, prefetch
from bertsmith.errors import SettingsError
from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.progress import Progress
from bertsmith.runtime.device import Machine
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.distillation.settings import (
    STORE_MAX_SEQLEN,
    DistillRunSettings,
    DistillSettings,
    get_default_relation_heads,
)
from bertsmith.train.distillation.student import check_same_tokenizer, copy_teacher_weights
from bertsmith.train.distillation.text_losses import (
    EncoderStudent,
    HiddenStateLoss,
    MaskedLMLoss,
    RelationLoss,
    TextLoss,
)
from bertsmith.train.pretraining.evaluation import build_heldout_stream, evaluate
from bertsmith.train.pretraining.micro_batches import (
    PretrainingMicroBatch,
    split_batch,
    to_device,
)

#: Maximum number of held-out sequences.
_MAX_HELDOUT_SEQUENCES: Final = 500
#: Sequences per batch of an evaluation.
_EVAL_BATCH_SIZE: Final = 32


@dataclass(frozen=True)
class TextDistillation:
    """The models and texts of a run with the objective ``mlm``, ``relations`` or ``hidden``.

    Attributes:
        teacher: The teacher: with its masked-LM head for ``mlm``, else its encoder.
        model: The student.
        tokenizer: The tokenizer of both.
        settings: Settings of the run.
        store: The token store; None if the student can only be saved.
    """

    teacher: BertForPreTraining | BertModel
    model: BertForPreTraining | EncoderStudent
    tokenizer: Tokenizer
    settings: DistillRunSettings
    store: Store | None

    @classmethod
    def load(cls, settings: DistillRunSettings, *, reads_data: bool = True) -> "TextDistillation":
        """Load the teacher, build the student, and open the token store.

        Args:
            settings: Settings of the run.
            reads_data: Whether to open the store; without it, the student can only be saved.

        Raises:
            BertsmithError: If a model or the store is invalid, or does not suit the others.
        """
        distill = settings.distill
        max_seqlen = distill.max_seqlen or min(STORE_MAX_SEQLEN, settings.model.max_positions)
        teacher, tokenizer = _load_teacher(distill)
        teacher.config.check_max_seqlen("distill.max_seqlen", max_seqlen, "the teacher")
        settings.model.check_max_seqlen("distill.max_seqlen", max_seqlen, "the student")
        changes: dict[str, Any] = {"max_seqlen": max_seqlen}
        if distill.objective == "relations":
            changes |= _resolve_relations(settings, teacher)
        settings = settings.model_copy(update={"distill": distill.model_copy(update=changes)})
        model = _build_student(teacher, tokenizer, settings)
        store = None
        if reads_data:
            store = Store.open(distill.train_files[0])
            store.check_tokenizer(tokenizer)
        return cls(teacher, model, tokenizer, settings, store)

    @property
    def counts(self) -> dict[str, ExampleCounts]:
        """Empty, because the texts were counted when the store was prepared."""
        return {}

    @property
    def batch_tokens(self) -> int:
        """Number of tokens per step."""
        distill = self.settings.distill
        return (distill.batch_size or 1) * (distill.max_seqlen or 1)

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics; the first one selects the best epoch."""
        return (
            ["mlm_loss", "mlm_accuracy"] if self.settings.distill.objective == "mlm" else ["loss"]
        )

    @property
    def higher_is_better(self) -> bool:
        """False, because the first metric is a loss."""
        return False

    def describe(self) -> str:
        """Return a description of the data and the loss."""
        distill = self.settings.distill
        loss = {
            "mlm": f"masked-LM head of the teacher at temperature {distill.temperature:g}",
            "hidden": "hidden states of the teacher",
            "relations": f"self-attention relations of layer {distill.teacher_layer} of the "
            f"teacher, {distill.relation_heads} relation heads",
        }[distill.objective or "mlm"]
        if distill.hard_weight:
            loss += f", original tokens with weight {distill.hard_weight:g}"
        return f"{distill.train_files[0]}, {loss}, computed in each step"

    def build_loss(self) -> TextLoss:
        """Return the loss of the objective."""
        distill = self.settings.distill
        if isinstance(self.model, BertForPreTraining):
            assert isinstance(self.teacher, BertForPreTraining)
            return MaskedLMLoss(
                self.model, self.teacher, self.tokenizer.vocab_size, distill.temperature,
                distill.hard_weight,
            )  # fmt: skip
        assert isinstance(self.teacher, BertModel)
        if distill.objective == "hidden":
            return HiddenStateLoss(self.model, self.teacher)
        assert distill.teacher_layer is not None
        assert distill.relation_heads is not None
        return RelationLoss(self.model, self.teacher, distill.teacher_layer, distill.relation_heads)

    def build_objective(
        self, run: Path, machine: Machine, progress: Progress
    ) -> "TextDistillationObjective":
        """Return the objective of the training loop. The teacher computes in each step."""
        assert self.store is not None
        self.teacher.to(machine.device)
        get_bert(self.teacher).kernel = machine.kernel
        return TextDistillationObjective(self, self.store, machine)

    def save(self, directory: Path, info: Mapping[str, Any]) -> None:
        """Write the student as a model directory; without masked-LM head unless it is trained."""
        if isinstance(self.model, BertForPreTraining):
            save(directory, self.model, self.tokenizer, info)
        else:
            save_encoder(directory, self.model.bert, self.tokenizer, info)


def get_bert(model: BertForPreTraining | BertModel) -> BertModel:
    """Return the encoder of a model."""
    return model.bert if isinstance(model, BertForPreTraining) else model


def _load_teacher(distill: DistillSettings) -> tuple[BertForPreTraining | BertModel, Tokenizer]:
    """Return the teacher with the head that the objective needs, and its tokenizer.

    Raises:
        ModelError: If the teacher has no masked-LM head, which the objective ``mlm`` needs.
    """
    if distill.objective == "mlm":
        pretrained = load(distill.teacher)
        pretrained.require_mlm_head()
        return pretrained.model, pretrained.tokenizer
    encoder = load_encoder(distill.teacher)
    return encoder.model, encoder.tokenizer


def _resolve_relations(
    settings: DistillRunSettings, teacher: BertForPreTraining | BertModel
) -> dict[str, int]:
    """Return the layer of the teacher and the number of relation heads.

    Raises:
        SettingsError: If the teacher has fewer layers, or the heads do not divide both widths.
    """
    distill = settings.distill
    layer = distill.teacher_layer or teacher.config.layers
    if layer > teacher.config.layers:
        raise SettingsError(
            f"distill.teacher_layer is {layer}, but the teacher has {teacher.config.layers} "
            "layers; give at most that"
        )
    widths = (teacher.config.width, settings.model.width)
    common = math.gcd(*widths)
    divisors = [number for number in range(1, common + 1) if common % number == 0]
    num_heads = distill.relation_heads
    if num_heads is None:
        num_heads = get_default_relation_heads(*widths)
    if num_heads not in divisors:
        raise SettingsError(
            f"distill.relation_heads is {num_heads}, which does not divide the widths of teacher "
            f"and student, {widths[0]} and {widths[1]}; use one of "
            f"{', '.join(map(str, divisors))}"
        )
    return {"teacher_layer": layer, "relation_heads": num_heads}


def _build_student(
    teacher: BertForPreTraining | BertModel, tokenizer: Tokenizer, settings: DistillRunSettings
) -> BertForPreTraining | EncoderStudent:
    """Return the student at the start of a run, drawn from PyTorch's default generator.

    Raises:
        ModelError: If the start model cannot be loaded, or has another tokenizer.
    """
    distill, config = settings.distill, settings.model
    has_mlm_head = distill.objective == "mlm"
    pretraining_model = BertForPreTraining(config)
    student = pretraining_model if has_mlm_head else pretraining_model.bert
    if distill.student_layers:
        copy_teacher_weights(student, teacher, distill.student_layers)
    elif distill.size is None:
        start: PretrainedBundle = load(locate_model(settings.run.start_from))
        check_same_tokenizer(tokenizer, start.tokenizer, start.path)
        source = start.model if has_mlm_head else start.model.bert
        copy_teacher_weights(student, source, range(1, config.layers + 1))
    if isinstance(student, BertForPreTraining):
        return student
    needs_projection = distill.objective == "hidden" and config.width != teacher.config.width
    return EncoderStudent(student, teacher.config.width if needs_projection else None)


class TextDistillationObjective:
    """Implements ``Objective`` for a student that reads the texts of a token store."""

    #: The position in the data is a function of the step.
    data_state = None

    def __init__(self, distillation: TextDistillation, store: Store, machine: Machine) -> None:
        """Create the objective.

        Args:
            distillation: Teacher, student and settings.
            store: The texts.
            machine: Device and precision.
        """
        self.model = distillation.model
        self._distillation = distillation
        self._loss = distillation.build_loss()
        self._machine = machine
        self._settings = distillation.settings
        distill = self._settings.distill
        assert distill.max_seqlen is not None
        assert distill.batch_size is not None
        self._batch_size = distill.batch_size
        self._has_masks = distill.objective == "mlm"
        data = DataSettings(
            max_seqlen=distill.max_seqlen,
            batch_size=distill.batch_size,
            nsp=False,
            masking_rate=distill.masking_rate,
        )
        vocabulary = VocabularyInfo.from_tokenizer(distillation.tokenizer)
        split = store.load_split("train")
        epochs = EpochStreams(split, vocabulary, data, self._settings.run.seed)
        self._stream = EndlessStream(epochs, length=distill.max_seqlen)
        num_examples = len(epochs.get(distill.max_seqlen, 0))
        self.steps_per_epoch = math.ceil(num_examples / self._batch_size)
        self._heldout = build_heldout_stream(store.load_split("heldout"), vocabulary, data)

    def iter_batches(
        self, first_step: int, data_state: Mapping[str, int] | None = None
    ) -> Iterator[list[PretrainingMicroBatch]]:
        """Yield the micro-batches of each step from ``first_step`` on, without end.

        ``data_state`` is not used.
        """
        batches = (
            self._stream.batch(step * self._batch_size, self._batch_size)
            for step in itertools.count(first_step)
        )
        for batch in prefetch(batches):
            parts = split_batch(batch, self._settings.run.micro_batch_tokens)
            yield [self._to_micro_batch(part) for part in parts]

    def _to_micro_batch(self, batch: ExampleBatch) -> PretrainingMicroBatch:
        """Copy a batch to the device, without masks unless the objective is masked LM."""
        if not self._has_masks:
            ids = batch.ids.copy()
            ids[batch.masked_positions] = batch.masked_labels
            empty = np.empty(0, np.int64)
            batch = replace(batch, ids=ids, masked_positions=empty, masked_labels=empty)
        return to_device(batch, self._machine.device)

    def compute_losses(
        self,
        micro_batch: PretrainingMicroBatch,
        micro_batches: list[PretrainingMicroBatch],
        dropout_seed: DropoutSeed | None,
    ) -> dict[str, Tensor]:
        """Return the contribution of a micro-batch to the mean losses of its batch."""
        with self._machine.autocast():
            losses = self._loss.compute(
                micro_batch.packed,
                micro_batch.masked_positions,
                micro_batch.masked_labels,
                dropout_seed,
            )
        share = self._count_terms(micro_batch) / sum(map(self._count_terms, micro_batches))
        return {name: share * total / count for name, (total, count) in losses.items()}

    def _count_terms(self, micro_batch: PretrainingMicroBatch) -> int:
        """Return the number of terms of the losses: masked tokens, or all tokens."""
        return micro_batch.num_predictions if self._has_masks else micro_batch.num_tokens

    def describe_batch(self, step: int) -> str:
        """Return the examples in the batch of ``step`` (from 0) as text, for error messages."""
        first = step * self._batch_size
        return f"examples {first} to {first + self._batch_size - 1}"

    def count_tokens(self, micro_batches: list[PretrainingMicroBatch]) -> int:
        """Return the number of tokens in a batch."""
        return sum(micro_batch.num_tokens for micro_batch in micro_batches)

    def count_macs(self, micro_batches: list[PretrainingMicroBatch]) -> float:
        """Return the multiply-accumulates of a step: student (three passes) and teacher (one)."""
        student = self.model.config
        teacher = self._distillation.teacher.config
        total = 0.0
        for micro_batch in micro_batches:
            num_tokens, count = micro_batch.num_tokens, micro_batch.num_predictions
            length = num_tokens / micro_batch.num_sequences
            for config, num_passes in ((student, 3), (teacher, 1)):
                macs = num_tokens * config.macs_per_token(length)
                if self._has_masks:
                    macs += count * config.macs_per_prediction()
                    macs -= (num_tokens - count) * config.macs_saved_per_unused_output()
                total += num_passes * macs
        return total

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on held-out texts."""
        if isinstance(self.model, BertForPreTraining):
            result = evaluate(self.model, self._heldout, _MAX_HELDOUT_SEQUENCES, self._machine)
            return {**result.to_metrics(), "examples": float(result.total_sequences)}
        num_sequences = min(_MAX_HELDOUT_SEQUENCES, len(self._heldout))
        loss_sum, num_tokens = 0.0, 0
        for first in range(0, num_sequences, _EVAL_BATCH_SIZE):
            batch = self._heldout.batch(first, min(_EVAL_BATCH_SIZE, num_sequences - first))
            micro_batch = self._to_micro_batch(batch)
            with torch.no_grad():
                losses = self.compute_losses(micro_batch, [micro_batch], None)
            loss_sum += float(torch.stack(list(losses.values())).sum()) * micro_batch.num_tokens
            num_tokens += micro_batch.num_tokens
        return {"loss": loss_sum / num_tokens, "examples": float(num_sequences)}
