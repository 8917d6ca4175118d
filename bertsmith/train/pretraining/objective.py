"""The pre-training objective: masked LM and next-sentence prediction over a store."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.store import Split
from bertsmith.data.stream import PREFETCH_DISTANCE, EpochStreams, prefetch
from bertsmith.model.bert import BertForPreTraining, Losses
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.copy_stream import CopyStream
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.duration import Duration
from bertsmith.train.pretraining.evaluation import HeldoutEvaluator
from bertsmith.train.pretraining.micro_batches import PretrainingMicroBatch, split_batch
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.static_shapes import StaticShape
from bertsmith.train.pretraining.training_batches import DataPosition, TrainingBatches


def compute_mean_losses(
    model: nn.Module,
    micro_batch: PretrainingMicroBatch,
    micro_batches: list[PretrainingMicroBatch],
    dropout_seed: DropoutSeed,
) -> dict[str, Tensor]:
    """Return the contribution of a micro-batch to the mean losses of its batch, by name.

    The losses are ``mlm_loss`` or, in the left-to-right part of a run, ``causal_lm_loss``; and
    ``nsp_loss`` if the batch has NSP labels.

    Args:
        model: A ``BertForPreTraining``, compiled or not.
        micro_batch: The micro-batch whose losses are computed.
        micro_batches: All micro-batches of the batch.
        dropout_seed: Seed of the dropout masks.
    """
    losses: Losses = model(
        micro_batch.packed,
        micro_batch.masked_positions,
        micro_batch.masked_labels,
        micro_batch.nsp_labels,
        dropout_seed,
        is_causal=micro_batch.is_causal,
        neighbor_bias=micro_batch.neighbor_bias,
    )
    # A batch of [UNK] tokens only has no predictions; its loss is 0.
    num_predictions = max(1, sum(batch.num_predictions for batch in micro_batches))
    name = "causal_lm_loss" if micro_batch.is_causal else "mlm_loss"
    mean_losses = {name: losses.mlm_loss / num_predictions}
    if losses.nsp_loss is not None:
        num_sequences = sum(batch.num_sequences for batch in micro_batches)
        mean_losses["nsp_loss"] = losses.nsp_loss / num_sequences
    return mean_losses


@dataclass(frozen=True)
class _PreparedBatch:
    """A batch of the training data, split into micro-batches.

    Attributes:
        micro_batches: The micro-batches. Those that this process computes are on the device.
        position: Position in the training data after the batch.
        batch_size: Number of sequences.
        copied: Event after which the micro-batches are on the GPU; None on a CPU.
    """

    micro_batches: list[PretrainingMicroBatch]
    position: DataPosition
    batch_size: int
    copied: torch.cuda.Event | None = None


class PretrainingObjective:
    """Implements ``Objective`` for a pre-training run."""

    def __init__(
        self,
        model: BertForPreTraining,
        compiled_model: nn.Module,
        settings: PretrainSettings,
        duration: Duration,
        epochs: EpochStreams,
        heldout: Split,
        vocabulary: VocabularyInfo,
        machine: Machine,
        *,
        has_static_shapes: bool = False,
    ) -> None:
        """Create the objective.

        Args:
            model: The model.
            compiled_model: The compiled model; ``model`` itself without run.compile.
            settings: Settings of the run.
            duration: Length of the run.
            epochs: Training examples of each epoch.
            heldout: Text for evaluation.
            vocabulary: Special tokens and continuation pieces.
            machine: Device, precision and processes.
            has_static_shapes: Whether all micro-batches of a phase have the same shape.
        """
        self.model = model
        self._compiled_model = compiled_model
        self._settings = settings
        self._machine = machine
        self._has_static_shapes = has_static_shapes
        self._duration = duration
        self._batches = TrainingBatches(
            epochs,
            settings.data,
            settings.schedule,
            duration.get_batch_progress(PREFETCH_DISTANCE),
        )
        device = machine.device
        self._copy_stream = CopyStream(device) if device.type == "cuda" else None
        self._position = DataPosition()
        self._batch_size = 0
        self._evaluator = HeldoutEvaluator(heldout, vocabulary, settings)

    @property
    def data_state(self) -> Mapping[str, int]:
        """Position after the last batch, so that a resumed run need not count past epochs."""
        return asdict(self._position)

    def iter_batches(
        self, first_step: int, data_state: Mapping[str, int] | None = None
    ) -> Iterator[list[PretrainingMicroBatch]]:
        """Yield the micro-batches of each step, from ``first_step`` or ``data_state`` on.

        Each phase starts with a new epoch.
        """
        if data_state is None:
            self._position = self._batches.find_position(first_step)
        else:
            fields: Mapping[str, Any] = data_state
            self._position = DataPosition(**fields)
        for batch in prefetch(self._prepare_batches(first_step, self._position)):
            self._position, self._batch_size = batch.position, batch.batch_size
            if self._copy_stream is not None and batch.copied is not None:
                assigned = self._machine.processes.assign_indices(len(batch.micro_batches))
                for index in assigned:
                    tensors = batch.micro_batches[index].list_tensors()
                    self._copy_stream.finish(batch.copied, tensors)
            yield batch.micro_batches

    def _prepare_batches(self, first_step: int, position: DataPosition) -> Iterator[_PreparedBatch]:
        """Yield the batch of each step, split into micro-batches."""
        if self._copy_stream is not None:
            self._copy_stream.select_device()
        is_cuda = self._machine.device.type == "cuda"
        num_processes = self._machine.processes.world_size
        max_tokens = self._settings.run.micro_batch_tokens
        assert max_tokens is not None
        for batch, next_position in self._batches.iter_batches(first_step, position):
            shape = None
            if self._has_static_shapes:
                max_seqlen = self._batches.get_max_seqlen(next_position.phase)
                shape = StaticShape.choose(len(batch), max_seqlen, max_tokens, num_processes)
                parts = shape.split(batch)
            else:
                parts = split_batch(batch, max_tokens, num_processes)
            # Only the sizes of the micro-batches of other processes are needed.
            assigned = self._machine.processes.assign_indices(len(parts))
            micro_batches = [
                PretrainingMicroBatch.build(part, shape, pin_memory=is_cuda)
                if index in assigned
                else PretrainingMicroBatch.build(part)
                for index, part in enumerate(parts)
            ]
            prepared = _PreparedBatch(micro_batches, next_position, len(batch))
            yield prepared if self._copy_stream is None else self._start_copies(prepared, assigned)

    def _start_copies(self, batch: _PreparedBatch, assigned: Sequence[int]) -> _PreparedBatch:
        """Start to copy the micro-batches of this process to the GPU."""
        assert self._copy_stream is not None
        micro_batches, copied = self._copy_stream.start(
            lambda: [
                part.to(self._machine.device) if index in assigned else part
                for index, part in enumerate(batch.micro_batches)
            ]
        )
        return replace(batch, micro_batches=micro_batches, copied=copied)

    def compute_losses(
        self,
        micro_batch: PretrainingMicroBatch,
        micro_batches: list[PretrainingMicroBatch],
        dropout_seed: DropoutSeed,
    ) -> dict[str, Tensor]:
        """Return the contribution of a micro-batch to the mean losses of its batch, by name."""
        return compute_mean_losses(self._compiled_model, micro_batch, micro_batches, dropout_seed)

    def describe_batch(self, step: int) -> str:
        """Return the examples of the last batch that was yielded, for an error message."""
        end = self._position.example
        return (
            f"examples {end - self._batch_size} to {end - 1} of the phase with sequence "
            f"length {self._batches.get_max_seqlen(self._position.phase)}"
        )

    def count_tokens(self, micro_batches: list[PretrainingMicroBatch]) -> int:
        """Return the number of tokens in a batch."""
        return sum(micro_batch.num_tokens for micro_batch in micro_batches)

    def count_macs(self, micro_batches: list[PretrainingMicroBatch]) -> float:
        """Return the number of multiply-accumulates of a step.

        The backward pass has twice as many as the forward pass. The last layer and the MLM head
        are counted only at the positions where they are computed.
        """
        config = self.model.config
        total = 0.0
        for micro_batch in micro_batches:
            num_tokens = micro_batch.num_tokens
            total += num_tokens * config.macs_per_token(num_tokens / micro_batch.num_sequences)
            num_outputs = micro_batch.num_predictions
            total += num_outputs * config.macs_per_prediction()
            num_outputs += 0 if micro_batch.nsp_labels is None else micro_batch.num_sequences
            total -= (num_tokens - num_outputs) * config.macs_saved_per_unused_output()
        return 3 * total

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on held-out text."""
        return self._evaluator.evaluate(self.model, self._machine)
