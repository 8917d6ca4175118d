"""The work of pre-training: masked LM and next sentence over a store.

It never knows how the loop takes its steps or saves them.
"""

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
from bertsmith.train.pretraining.micro_batches import MicroBatch, split_batch, to_device
from bertsmith.train.pretraining.recipes import PretrainSettings


def compute_mean_losses(
    compute: nn.Module, piece: MicroBatch, whole: list[MicroBatch], noise: DropoutSeed
) -> dict[str, Tensor]:
    """Return what a piece adds to the two means over its whole batch."""
    losses: Losses = compute(
        piece.packed, piece.masked_positions, piece.masked_labels, piece.nsp_labels, noise
    )
    terms = {"masked_lm": losses.mlm_loss / sum(len(one.masked_labels) for one in whole)}
    if losses.nsp_loss is not None:
        terms["next_sentence"] = losses.nsp_loss / sum(one.num_sequences for one in whole)
    return terms


class PretrainingObjective:
    """The work of the loop over the phases of a run."""

    def __init__(
        self,
        model: BertForPreTraining,
        compute: nn.Module,
        settings: PretrainSettings,
        phases: Sequence[Phase],
        train: Split,
        heldout: Split,
        facts: VocabularyInfo,
        machine: Machine,
    ) -> None:
        """``compute`` is the model or its compiled form."""
        self.model, self._compute, self._settings, self._machine = model, compute, settings, machine
        self._phases, self._train, self._facts = phases, train, facts
        self._stream = build_heldout_stream(heldout, facts, settings.data)

    def iter_batches(self, first_step: int) -> Iterator[list[MicroBatch]]:
        """Yield the pieces of each step's batch; a phase begins with an epoch of its own."""
        run, size = self._settings.run, self._settings.data.batch
        epoch = 0
        for phase in self._phases:
            examples = (phase.end_step - phase.start_step) * size
            epochs = EndlessStream(
                self._train, self._facts, self._settings.data,
                length=phase.length, seed=run.seed, first_epoch=epoch,
            )  # fmt: skip
            skipped = max(first_step - phase.start_step, 0)
            steps = phase.end_step - phase.start_step - skipped
            if steps > 0:
                for batch in prefetch_batches(epochs, skipped * size, size, steps=steps):
                    cuts = split_batch(batch, run.micro_batch_tokens)
                    yield [to_device(piece, self._machine.device) for piece in cuts]
            epoch = epochs.locate(examples - 1)[0] + 1

    def compute_losses(
        self, piece: MicroBatch, whole: list[MicroBatch], noise: DropoutSeed
    ) -> dict[str, Tensor]:
        """Return the two terms of the loss, each a mean over the whole batch."""
        return compute_mean_losses(self._compute, piece, whole, noise)

    def describe_batch(self, step: int) -> str:
        """Say which examples the batch of ``step`` holds."""
        phase = next(phase for phase in self._phases if step < phase.end_step)
        first = (step - phase.start_step) * self._settings.data.batch
        return (
            f"that of examples {first} to {first + self._settings.data.batch - 1} "
            f"of the phase of length {phase.length}"
        )

    def count_tokens(self, whole: list[MicroBatch]) -> int:
        """Count the tokens of a batch."""
        return sum(len(piece.packed.ids) for piece in whole)

    def count_macs(self, whole: list[MicroBatch]) -> float:
        """Count multiply-adds: three times the forward pass (one forward, two backward)."""
        config = self.model.config
        total = 0.0
        for piece in whole:
            tokens = len(piece.packed.ids)
            total += tokens * config.macs_per_token(tokens / piece.num_sequences)
            asked = len(piece.masked_labels)
            total += asked * config.macs_per_prediction()
            asked += 0 if piece.nsp_labels is None else piece.num_sequences
            total -= (tokens - asked) * config.macs_saved_per_unused_output()
        return 3 * total

    def evaluate(self) -> dict[str, float]:
        """Return held-out loss, perplexity and accuracies; see ``evaluate``."""
        return evaluate(
            self.model, self._stream, self._settings.run.eval_sequences, self._machine
        ).to_metrics()
