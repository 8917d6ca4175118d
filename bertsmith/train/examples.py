"""From the numpy batches of the store to what the model takes, and the work of pre-training.

It never knows how batches are drawn or how the loop saves.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from bertsmith.data.masking import TokenFacts
from bertsmith.data.packing import Batch
from bertsmith.data.store import Split
from bertsmith.data.stream import Epochs, Stream, batches
from bertsmith.data.unigram import unigram_entropy
from bertsmith.model.bert import Losses, PreTrainingModel
from bertsmith.model.dropout import Noise
from bertsmith.model.packed import Packed
from bertsmith.train.device import Machine
from bertsmith.train.recipe import PretrainSettings
from bertsmith.train.schedule import Phase

#: The held-out stream: the same examples with the same masks whatever the run's own seed.
_HELDOUT_SEED, _HELDOUT_EPOCH = 0, 0


@dataclass(frozen=True)
class Piece:
    """A batch on the device, with its predictions (see ``data.packing.Batch``)."""

    packed: Packed
    masked_positions: Tensor
    masked_labels: Tensor
    not_next: Tensor | None

    @property
    def sequences(self) -> int:
        """The number of sequences B."""
        return self.packed.boundaries.shape[0] - 1


def to_device(batch: Batch, device: torch.device) -> Piece:
    """Move a numpy batch to the device."""

    def tensor(values: NDArray[np.int64] | NDArray[np.int32]) -> Tensor:
        result = torch.from_numpy(values)
        return (
            result.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else result
        )

    return Piece(
        Packed(
            ids=tensor(batch.ids),
            segments=tensor(batch.segments),
            positions=tensor(batch.positions),
            boundaries=tensor(batch.boundaries),
            longest=batch.longest,
        ),
        tensor(batch.masked_positions),
        tensor(batch.masked_labels),
        None if batch.not_next is None else tensor(batch.not_next),
    )


def cut(batch: Batch, most_tokens: int) -> list[Batch]:
    """Cut a batch between sequences into pieces of at most ``most_tokens`` (one is the least)."""
    if len(batch.ids) <= most_tokens:
        return [batch]
    pieces, first = [], 0
    while first < len(batch):
        room = int(batch.boundaries[first]) + most_tokens
        last = int(np.searchsorted(batch.boundaries, room, "right")) - 1
        last = min(max(last, first + 1), len(batch))
        pieces.append(batch.slice(first, last))
        first = last
    return pieces


class Pretraining:
    """Masked LM and next sentence over a store: the work of the loop."""

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
        self._stream = Stream(
            heldout, facts, settings.data, settings.data.length, _HELDOUT_SEED, _HELDOUT_EPOCH
        )

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
        losses: Losses = self._compute(
            piece.packed, piece.masked_positions, piece.masked_labels, piece.not_next, noise
        )
        terms = {"masked_lm": losses.masked / sum(len(one.masked_labels) for one in whole)}
        if losses.next_sentence is not None:
            terms["next_sentence"] = losses.next_sentence / sum(one.sequences for one in whole)
        return terms

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
            total += len(piece.masked_labels) * config.products_per_prediction()
        return 3 * total

    def evaluate(self) -> dict[str, float]:
        """Return held-out loss, perplexity and accuracies; see ``evaluate``."""
        return evaluate(
            self.model, self._stream, self._settings.run.eval_sequences, self._machine
        ).figures()


@dataclass(frozen=True)
class Heldout:
    """Sums over the held-out sequences. Entropy and losses are in nats."""

    masked_loss: float
    masked_hits: int
    predictions: int
    next_loss: float
    next_hits: int
    sequences: int
    #: Sequences whose second segment truly follows; 0 without next sentence.
    followed: int
    #: Unigram entropy of the tokens of these sequences, before masking, special ones left out.
    unigram_entropy: float

    def figures(self) -> dict[str, float]:
        """Return the figures of the journal."""
        mean = self.masked_loss / self.predictions
        result = {
            "masked_lm": mean,
            "perplexity": float(np.exp(mean)),
            "masked_accuracy": self.masked_hits / self.predictions,
            "unigram_entropy": self.unigram_entropy,
        }
        if self.sequences:
            result["next_sentence"] = self.next_loss / self.sequences
            result["next_sentence_accuracy"] = self.next_hits / self.sequences
            result["larger_class"] = max(self.followed, self.sequences - self.followed) / (
                self.sequences
            )
        return result


def evaluate(
    model: PreTrainingModel, stream: Stream, sequences: int, machine: Machine, at_once: int = 64
) -> Heldout:
    """Evaluate the first ``sequences`` examples of a held-out stream, in float32 on the CPU.

    ``model`` must be in eval mode. Examples with next-sentence labels count for both tasks.
    """
    count = min(sequences, len(stream))
    names = ("masked_loss", "masked_hits", "predictions")
    sums = dict.fromkeys((*names, "next_loss", "next_hits", "sequences", "followed"), 0.0)
    words = np.zeros(model.config.vocab_size, np.int64)
    for first in range(0, count, at_once):
        batch = stream.batch(first, min(at_once, count - first))
        piece = to_device(batch, machine.device)
        with machine.autocast():
            losses = model.evaluate(
                piece.packed, piece.masked_positions, piece.masked_labels, piece.not_next
            )
        words += _words(batch, stream, model.config.vocab_size)
        assert losses.masked_hits is not None
        sums["masked_loss"] += float(losses.masked)
        sums["masked_hits"] += int(losses.masked_hits)
        sums["predictions"] += len(batch.masked_labels)
        if batch.not_next is not None and losses.next_sentence is not None:
            assert losses.next_hits is not None
            sums["next_loss"] += float(losses.next_sentence)
            sums["next_hits"] += int(losses.next_hits)
            sums["sequences"] += len(batch)
            sums["followed"] += int((batch.not_next == 0).sum())
    return Heldout(
        masked_loss=sums["masked_loss"],
        masked_hits=int(sums["masked_hits"]),
        predictions=int(sums["predictions"]),
        next_loss=sums["next_loss"],
        next_hits=int(sums["next_hits"]),
        sequences=int(sums["sequences"]),
        followed=int(sums["followed"]),
        unigram_entropy=unigram_entropy(words),
    )


def _words(batch: Batch, stream: Stream, vocab_size: int) -> NDArray[np.int64]:
    """Count the words of a batch as they stood before masking, special tokens left out."""
    ids = batch.ids.copy()
    ids[batch.masked_positions] = batch.masked_labels
    counts = np.bincount(ids[~stream.facts.special[ids]], minlength=vocab_size)
    return counts.astype(np.int64)
