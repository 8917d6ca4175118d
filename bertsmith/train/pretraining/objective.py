"""The work of pre-training: masked LM and next sentence over a store.

It never knows how the loop takes its steps or saves them.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from bertsmith.data.masking import TokenFacts
from bertsmith.data.store import Split
from bertsmith.data.stream import Epochs, batches
from bertsmith.model.bert import Losses, PreTrainingModel
from bertsmith.model.ops.dropout import Noise
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.schedule import Phase
from bertsmith.train.pretraining.evaluation import evaluate, heldout_stream
from bertsmith.train.pretraining.micro_batches import Piece, cut, to_device
from bertsmith.train.pretraining.recipes import PretrainSettings


def mean_losses(
    compute: nn.Module, piece: Piece, whole: list[Piece], noise: Noise
) -> dict[str, Tensor]:
    """Return what a piece adds to the two means over its whole batch."""
    losses: Losses = compute(
        piece.packed, piece.masked_positions, piece.masked_labels, piece.not_next, noise
    )
    terms = {"masked_lm": losses.masked / sum(len(one.masked_labels) for one in whole)}
    if losses.next_sentence is not None:
        terms["next_sentence"] = losses.next_sentence / sum(one.sequences for one in whole)
    return terms


class Pretraining:
    """The work of the loop over the phases of a run."""

    def __init__(
        self,
        model: PreTrainingModel,
        compute: nn.Module,
        settings: PretrainSettings,
        phases: Sequence[Phase],
        train: Split,
        heldout: Split,
        facts: TokenFacts,
        machine: Machine,
    ) -> None:
        """``compute`` is the model or its compiled form."""
        self.model, self._compute, self._settings, self._machine = model, compute, settings, machine
        self._phases, self._train, self._facts = phases, train, facts
        self._stream = heldout_stream(heldout, facts, settings.data)

    def pieces(self, first_step: int) -> Iterator[list[Piece]]:
        """Yield the pieces of each step's batch; a phase begins with an epoch of its own."""
        run, size = self._settings.run, self._settings.data.batch
        epoch = 0
        for phase in self._phases:
            examples = (phase.last - phase.first) * size
            epochs = Epochs(
                self._train, self._facts, self._settings.data,
                length=phase.length, seed=run.seed, first_epoch=epoch,
            )  # fmt: skip
            skipped = max(first_step - phase.first, 0)
            steps = phase.last - phase.first - skipped
            if steps > 0:
                for batch in batches(epochs, skipped * size, size, steps=steps):
                    cuts = cut(batch, run.micro_tokens)
                    yield [to_device(piece, self._machine.device) for piece in cuts]
            epoch = epochs.place(examples - 1)[0] + 1

    def losses(self, piece: Piece, whole: list[Piece], noise: Noise) -> dict[str, Tensor]:
        """Return the two terms of the loss, each a mean over the whole batch."""
        return mean_losses(self._compute, piece, whole, noise)

    def whereabouts(self, step: int) -> str:
        """Say which examples the batch of ``step`` holds."""
        phase = next(phase for phase in self._phases if step < phase.last)
        first = (step - phase.first) * self._settings.data.batch
        return (
            f"that of examples {first} to {first + self._settings.data.batch - 1} "
            f"of the phase of length {phase.length}"
        )

    def tokens(self, whole: list[Piece]) -> int:
        """Count the tokens of a batch."""
        return sum(len(piece.packed.ids) for piece in whole)

    def products(self, whole: list[Piece]) -> float:
        """Count multiply-adds: three times the forward pass (one forward, two backward)."""
        config = self.model.config
        total = 0.0
        for piece in whole:
            tokens = len(piece.packed.ids)
            total += tokens * config.products_per_token(tokens / piece.sequences)
            asked = len(piece.masked_labels)
            total += asked * config.products_per_prediction()
            asked += 0 if piece.not_next is None else piece.sequences
            total -= (tokens - asked) * config.products_unasked()
        return 3 * total

    def evaluate(self) -> dict[str, float]:
        """Return held-out loss, perplexity and accuracies; see ``evaluate``."""
        return evaluate(
            self.model, self._stream, self._settings.run.eval_sequences, self._machine
        ).figures()
