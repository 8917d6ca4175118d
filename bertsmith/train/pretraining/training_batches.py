"""The batches of a pre-training run: size, length, objective and masks depend on its progress."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from bertsmith.data.packing import ExampleBatch
from bertsmith.data.settings import DataSettings
from bertsmith.data.stream import EndlessStream, EpochStreams
from bertsmith.train.engine.duration import RunProgress
from bertsmith.train.pretraining.schedule import PretrainScheduleSettings

#: Maximum fraction of a run in which attention has a bias towards neighboring tokens.
_MAX_BIASED_FRACTION: Final = 0.5


@dataclass(frozen=True)
class DataPosition:
    """Position in the training data.

    Attributes:
        phase: 0, or 1 in the second phase.
        first_epoch: First epoch of the phase. Each phase starts with a new epoch.
        example: Number of examples of the phase before this position.
        num_epochs: Number of epochs of the phase before the epoch of the last example.
        epoch_start: Number of examples in these epochs.
        is_causal_over: Whether the left-to-right part of the run is over, which never starts again,
            even if a new estimate of the end of the run moves it. The examples continue.
    """

    phase: int = 0
    first_epoch: int = 0
    example: int = 0
    num_epochs: int = 0
    epoch_start: int = 0
    is_causal_over: bool = False


def compute_batch_size(
    fraction: float, data: DataSettings, schedule: PretrainScheduleSettings
) -> int:
    """Return the number of sequences of a step.

    Args:
        fraction: Fraction of the run that is completed before the step.
        data: Initial and final batch size.
        schedule: Fraction of the run in which the batch grows.
    """
    initial_size = data.initial_batch_size
    if initial_size is None:
        return data.batch_size
    ramp_fraction = min(fraction / schedule.batch_ramp_fraction, 1.0)
    return initial_size + round((data.batch_size - initial_size) * ramp_fraction)


def compute_masking_rate(fraction: float, data: DataSettings) -> float:
    """Return the masking rate of a step.

    Args:
        fraction: Fraction of the run that is completed before the step.
        data: Initial and final masking rate.
    """
    if data.final_masking_rate is None:
        return data.masking_rate
    return data.masking_rate + (data.final_masking_rate - data.masking_rate) * fraction


class TrainingBatches:
    """The batches of a run. Each example of an epoch is used once, in order."""

    def __init__(
        self,
        epochs: EpochStreams,
        data: DataSettings,
        schedule: PretrainScheduleSettings,
        progress: RunProgress,
    ) -> None:
        """Create the batches; no example is computed yet.

        Args:
            epochs: The examples of each epoch.
            data: Length of the sequences, size of the batches and masking rate.
            schedule: The phases.
            progress: How much of the run is completed.
        """
        self._epochs = epochs
        self._data = data
        self._schedule = schedule
        self._progress = progress
        self._streams: dict[tuple[int, int], EndlessStream] = {}

    def get_max_seqlen(self, phase: int) -> int:
        """Return the maximum sequence length in a phase."""
        return (self._schedule.phase2_max_seqlen if phase else None) or self._data.max_seqlen

    def compute_batch_size(self, step: int) -> int:
        """Return the number of sequences of a step."""
        fraction = self._progress.compute_completed_fraction(step)
        return compute_batch_size(fraction, self._data, self._schedule)

    def compute_neighbor_bias(self, step: int) -> float:
        """Return the strength of the attention bias towards neighboring tokens, from 0 to 1."""
        max_steps = self._schedule.neighbor_bias_steps
        if max_steps == 0:
            return 0.0
        completed_fraction = self._progress.compute_completed_fraction(step)
        return max(0.0, 1.0 - max(step / max_steps, completed_fraction / _MAX_BIASED_FRACTION))

    def find_position(self, step: int) -> DataPosition:
        """Return the position before ``step`` in a run with a fixed number of steps."""
        position = DataPosition()
        for previous_step in range(step):
            position = self._enter_phase(previous_step, position)
            position = self._advance(position, self.compute_batch_size(previous_step))
        return position

    def iter_batches(
        self, first_step: int, position: DataPosition
    ) -> Iterator[tuple[ExampleBatch, DataPosition]]:
        """Yield the batch of each step and the position after it.

        In a run with a time budget, the phase, objective, size, masking rate and attention bias of
        a batch are those of the time at which it is computed. If a thread computes batches ahead,
        this is about three steps earlier.

        Args:
            first_step: Step of the first batch.
            position: Position before the first batch.
        """
        total_steps = self._progress.total_steps
        steps = itertools.count(first_step)
        for step in steps if total_steps is None else range(first_step, total_steps):
            position = self._enter_phase(step, position)
            first = position.example
            count = self.compute_batch_size(step)
            fraction = self._progress.compute_completed_fraction(step)
            masking_rate = compute_masking_rate(fraction, self._data)
            batch = self._get_stream(position).batch(
                first, count, masking_rate, is_causal=not position.is_causal_over
            )
            if not batch.is_causal:
                batch = replace(batch, neighbor_bias=self.compute_neighbor_bias(step))
            position = self._advance(position, count)
            yield batch, position

    def _advance(self, position: DataPosition, count: int) -> DataPosition:
        """Return the position after ``count`` more examples."""
        example = position.example + count
        epoch, index = self._get_stream(position).locate(example - 1)
        return replace(
            position,
            example=example,
            num_epochs=epoch - position.first_epoch,
            epoch_start=example - 1 - index,
        )

    def _enter_phase(self, step: int, position: DataPosition) -> DataPosition:
        """Return the position at which the batch of ``step`` starts."""
        if not position.is_causal_over:
            is_causal = self._progress.is_in_first(step, self._schedule.causal_fraction)
            position = replace(position, is_causal_over=not is_causal)
        if position.phase or self._schedule.phase2_max_seqlen is None:
            return position
        if not self._progress.is_in_last(step, self._schedule.phase2_fraction):
            return position
        if position.example == 0:
            return replace(position, phase=1)
        last_epoch, _ = self._get_stream(position).locate(position.example - 1)
        return DataPosition(
            phase=1, first_epoch=last_epoch + 1, is_causal_over=position.is_causal_over
        )

    def _get_stream(self, position: DataPosition) -> EndlessStream:
        """Return the examples of a phase."""
        key = (position.phase, position.first_epoch)
        if key not in self._streams:
            # The examples of an earlier phase are not needed any more.
            self._streams = {
                key: EndlessStream(
                    self._epochs,
                    length=self.get_max_seqlen(position.phase),
                    first_epoch=position.first_epoch + position.num_epochs,
                    epoch_start=position.epoch_start,
                )
            }
        return self._streams[key]
