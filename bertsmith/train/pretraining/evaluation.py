"""Held-out figures: losses, accuracies and their interval, on masks drawn the same way every time.

It never knows when a run evaluates, nor what it does with the figures.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.masking import TokenFacts
from bertsmith.data.packing import Batch
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.data.stream import Stream
from bertsmith.data.unigram import unigram_entropy
from bertsmith.model.bert import PreTrainingModel
from bertsmith.runtime.device import Machine
from bertsmith.train.pretraining.micro_batches import to_device

#: The same examples with the same masks whatever the run's own seed.
_SEED, _EPOCH = 0, 0
#: The normal deviate of a two-sided 95 % interval.
_DEVIATE = 1.959964


def heldout_stream(split: Split, facts: TokenFacts, settings: DataSettings) -> Stream:
    """Return the held-out examples, the same for every run over a store at this length."""
    return Stream(split, facts, settings, settings.length, _SEED, _EPOCH)


def wilson(hits: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927, JASA 22, p. 209)."""
    share, z2 = hits / trials, _DEVIATE**2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    spread = math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    half = _DEVIATE * spread / (1 + z2 / trials)
    return middle - half, middle + half


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
    #: [UNK] is special, so it is no target of the losses above either.
    unigram_entropy: float
    #: The share of [UNK] among the tokens of these sequences, other special tokens left out.
    unknown_share: float

    @property
    def larger_class(self) -> float:
        """The share that always saying the more frequent label would get right."""
        return max(self.followed, self.sequences - self.followed) / self.sequences

    def figures(self) -> dict[str, float]:
        """Return the figures of the journal."""
        # A text of nothing but [UNK] has no target.
        mean = self.masked_loss / self.predictions if self.predictions else math.nan
        result = {
            "masked_lm": mean,
            # Beyond, float64 ends; so high a loss says that the run is lost anyway.
            "perplexity": math.exp(mean) if mean < 700 else math.inf,
            "masked_accuracy": self.masked_hits / max(self.predictions, 1),
            "unigram_entropy": self.unigram_entropy,
            "unknown_share": self.unknown_share,
        }
        if self.sequences:
            result["next_sentence"] = self.next_loss / self.sequences
            result["next_sentence_accuracy"] = self.next_hits / self.sequences
            low, high = wilson(self.next_hits, self.sequences)
            result |= {"next_sentence_low": low, "next_sentence_high": high}
            result["larger_class"] = self.larger_class
        return result


def evaluate(
    model: PreTrainingModel, stream: Stream, sequences: int, machine: Machine, at_once: int = 64
) -> Heldout:
    """Evaluate the first ``sequences`` examples of a held-out stream, in the machine's precision.

    ``model`` must be in eval mode. Examples with next-sentence labels count for both tasks.
    """
    count = min(sequences, len(stream))
    names = ("masked_loss", "masked_hits", "predictions")
    sums = dict.fromkeys((*names, "next_loss", "next_hits", "sequences", "followed"), 0.0)
    words = np.zeros(model.config.vocab_size, np.int64)
    num_unknown = 0
    for first in range(0, count, at_once):
        batch = stream.batch(first, min(at_once, count - first))
        piece = to_device(batch, machine.device)
        with machine.autocast():
            losses = model.evaluate(
                piece.packed, piece.masked_positions, piece.masked_labels, piece.not_next
            )
        words += _words(batch, stream, model.config.vocab_size)
        # Masking neither replaces [UNK] nor puts it anywhere.
        num_unknown += int(np.count_nonzero(batch.ids == stream.facts.unk_id))
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
        unknown_share=num_unknown / max(num_unknown + int(words.sum()), 1),
    )


def _words(batch: Batch, stream: Stream, vocab_size: int) -> NDArray[np.int64]:
    """Count the words of a batch as they stood before masking, special tokens left out."""
    ids = batch.ids.copy()
    if stream.masks:
        ids[batch.masked_positions] = batch.masked_labels
    counts = np.bincount(ids[~stream.facts.special[ids]], minlength=vocab_size)
    return counts.astype(np.int64)
