"""The pre-training objective: masked LM and next-sentence prediction over a store."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.store import Split
from bertsmith.data.stream import EndlessStream, prefetch_batches
from bertsmith.model.bert import BertForPreTraining, Losses
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.schedule import Phase
from bertsmith.train.pretraining.evaluation import build_heldout_stream, evaluate
from bertsmith.train.pretraining.micro_batches import PretrainingMicroBatch, split_batch, to_device
from bertsmith.train.pretraining.recipes import PretrainSettings


def compute_mean_losses(
    model: nn.Module,
    micro_batch: PretrainingMicroBatch,
    micro_batches: list[PretrainingMicroBatch],
    dropout_seed: DropoutSeed,
) -> dict[str, Tensor]:
    """Return the share of a micro-batch in the mean losses of masked LM and NSP over the batch.

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
    )
    num_predictions = sum(len(batch.masked_labels) for batch in micro_batches)
    mean_losses = {"mlm_loss": losses.mlm_loss / num_predictions}
    if losses.nsp_loss is not None:
        num_sequences = sum(batch.num_sequences for batch in micro_batches)
        mean_losses["nsp_loss"] = losses.nsp_loss / num_sequences
    return mean_losses


class PretrainingObjective:
    """Implements ``Objective`` for the phases of a pre-training run."""

    def __init__(
        self,
        model: BertForPreTraining,
        compiled_model: nn.Module,
        settings: PretrainSettings,
        phases: Sequence[Phase],
        train: Split,
        heldout: Split,
        vocabulary: VocabularyInfo,
        machine: Machine,
    ) -> None:
        """Create the objective; without run.compile, ``compiled_model`` is ``model``."""
        self.model, self._compiled_model = model, compiled_model
        self._settings, self._machine = settings, machine
        self._phases, self._train, self._vocabulary = phases, train, vocabulary
        self._heldout_stream = build_heldout_stream(heldout, vocabulary, settings.data)

    def iter_batches(self, first_step: int) -> Iterator[list[PretrainingMicroBatch]]:
        """Yield the micro-batches of each step. Each phase starts with a new epoch."""
        run, batch_size = self._settings.run, self._settings.data.batch_size
        first_epoch = 0
        for phase in self._phases:
            num_examples = (phase.end_step - phase.start_step) * batch_size
            stream = EndlessStream(
                self._train, self._vocabulary, self._settings.data,
                length=phase.max_seqlen, seed=run.seed, first_epoch=first_epoch,
            )  # fmt: skip
            skipped_steps = max(first_step - phase.start_step, 0)
            steps = phase.end_step - phase.start_step - skipped_steps
            if steps > 0:
                first_example = skipped_steps * batch_size
                for batch in prefetch_batches(stream, first_example, batch_size, steps=steps):
                    parts = split_batch(batch, run.micro_batch_tokens)
                    yield [to_device(part, self._machine.device) for part in parts]
            first_epoch = stream.locate(num_examples - 1)[0] + 1

    def compute_losses(
        self,
        micro_batch: PretrainingMicroBatch,
        micro_batches: list[PretrainingMicroBatch],
        dropout_seed: DropoutSeed,
    ) -> dict[str, Tensor]:
        """Return the share of a micro-batch in the mean losses of masked LM and NSP."""
        return compute_mean_losses(self._compiled_model, micro_batch, micro_batches, dropout_seed)

    def describe_batch(self, step: int) -> str:
        """Return a description of the examples in the batch of ``step``."""
        phase = next(phase for phase in self._phases if step < phase.end_step)
        first = (step - phase.start_step) * self._settings.data.batch_size
        return (
            f"that of examples {first} to {first + self._settings.data.batch_size - 1} "
            f"of the phase with sequence length {phase.max_seqlen}"
        )

    def count_tokens(self, micro_batches: list[PretrainingMicroBatch]) -> int:
        """Return the number of tokens in a batch."""
        return sum(len(micro_batch.packed.ids) for micro_batch in micro_batches)

    def count_macs(self, micro_batches: list[PretrainingMicroBatch]) -> float:
        """Return the number of multiply-accumulates of a step.

        The backward pass takes twice as many as the forward pass. The last layer and the MLM head
        are counted only at the positions where they are computed.
        """
        config = self.model.config
        total = 0.0
        for micro_batch in micro_batches:
            num_tokens = len(micro_batch.packed.ids)
            total += num_tokens * config.macs_per_token(num_tokens / micro_batch.num_sequences)
            num_outputs = len(micro_batch.masked_labels)
            total += num_outputs * config.macs_per_prediction()
            num_outputs += 0 if micro_batch.nsp_labels is None else micro_batch.num_sequences
            total -= (num_tokens - num_outputs) * config.macs_saved_per_unused_output()
        return 3 * total

    def evaluate(self) -> dict[str, float]:
        """Return the metrics on held-out text."""
        num_sequences = self._settings.run.max_eval_sequences
        return evaluate(self.model, self._heldout_stream, num_sequences, self._machine).to_metrics()
