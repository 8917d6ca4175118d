"""Held-out figures: losses, accuracies and their interval, on masks drawn the same way every time.

It never knows when a run evaluates, nor what it does with the figures.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import Batch
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.data.stream import ExampleStream
from bertsmith.data.unigram import unigram_entropy
from bertsmith.model.bert import BertForPreTraining
from bertsmith.runtime.device import Machine
from bertsmith.train.pretraining.micro_batches import to_device

#: The same examples with the same masks whatever the run's own seed.
_SEED, _EPOCH = 0, 0
#: The normal deviate of a two-sided 95 % interval.
_DEVIATE = 1.959964


def build_heldout_stream(
    split: Split, facts: VocabularyInfo, settings: DataSettings
) -> ExampleStream:
    """Return the held-out examples, the same for every run over a store at this length."""
    return ExampleStream(split, facts, settings, settings.length, _SEED, _EPOCH)


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927, JASA 22, p. 209)."""
    share, z2 = hits / trials, _DEVIATE**2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    spread = math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    half = _DEVIATE * spread / (1 + z2 / trials)
    return middle - half, middle + half


@dataclass(frozen=True)
class HeldoutResult:
    """Sums over the held-out sequences. Entropy and losses are in nats."""

    mlm_loss: float
    mlm_correct: int
    num_predictions: int
    nsp_loss: float
    nsp_correct: int
    num_sequences: int
    #: Sequences whose second segment truly follows; 0 without next sentence.
    num_is_next: int
    #: Unigram entropy of the tokens of these sequences, before masking, special ones left out.
    #: [UNK] is special, so it is no target of the losses above either.
    unigram_entropy: float
    #: The share of [UNK] among the tokens of these sequences, other special tokens left out.
    unknown_share: float

    @property
    def majority_share(self) -> float:
        """The share that always saying the more frequent label would get right."""
        return max(self.num_is_next, self.num_sequences - self.num_is_next) / self.num_sequences

    def to_metrics(self) -> dict[str, float]:
        """Return the figures of the journal."""
        # A text of nothing but [UNK] has no target.
        mean = self.mlm_loss / self.num_predictions if self.num_predictions else math.nan
        result = {
            "masked_lm": mean,
            # Beyond, float64 ends; so high a loss says that the run is lost anyway.
            "perplexity": math.exp(mean) if mean < 700 else math.inf,
            "masked_accuracy": self.mlm_correct / max(self.num_predictions, 1),
            "unigram_entropy": self.unigram_entropy,
            "unknown_share": self.unknown_share,
        }
        if self.num_sequences:
            result["next_sentence"] = self.nsp_loss / self.num_sequences
            result["next_sentence_accuracy"] = self.nsp_correct / self.num_sequences
            low, high = wilson_interval(self.nsp_correct, self.num_sequences)
            result |= {"next_sentence_low": low, "next_sentence_high": high}
            result["larger_class"] = self.majority_share
        return result


def evaluate(
    model: BertForPreTraining,
    stream: ExampleStream,
    sequences: int,
    machine: Machine,
    batch_size: int = 64,
) -> HeldoutResult:
    """Evaluate the first ``sequences`` examples of a held-out stream, in the machine's precision.

    ``model`` must be in eval mode. Examples with next-sentence labels count for both tasks.
    """
    count = min(sequences, len(stream))
    names = ("masked_loss", "masked_hits", "predictions")
    sums = dict.fromkeys((*names, "next_loss", "next_hits", "sequences", "followed"), 0.0)
    words = np.zeros(model.config.vocab_size, np.int64)
    num_unknown = 0
    for first in range(0, count, batch_size):
        batch = stream.batch(first, min(batch_size, count - first))
        piece = to_device(batch, machine.device)
        with machine.autocast():
            losses = model.evaluate(
                piece.packed, piece.masked_positions, piece.masked_labels, piece.nsp_labels
            )
        words += _count_unmasked_tokens(batch, stream, model.config.vocab_size)
        # Masking neither replaces [UNK] nor puts it anywhere.
        num_unknown += int(np.count_nonzero(batch.ids == stream.vocabulary.unk_id))
        assert losses.mlm_correct is not None
        sums["masked_loss"] += float(losses.mlm_loss)
        sums["masked_hits"] += int(losses.mlm_correct)
        sums["predictions"] += len(batch.masked_labels)
        if batch.nsp_labels is not None and losses.nsp_loss is not None:
            assert losses.nsp_correct is not None
            sums["next_loss"] += float(losses.nsp_loss)
            sums["next_hits"] += int(losses.nsp_correct)
            sums["sequences"] += len(batch)
            sums["followed"] += int((batch.nsp_labels == 0).sum())
    return HeldoutResult(
        mlm_loss=sums["masked_loss"],
        mlm_correct=int(sums["masked_hits"]),
        num_predictions=int(sums["predictions"]),
        nsp_loss=sums["next_loss"],
        nsp_correct=int(sums["next_hits"]),
        num_sequences=int(sums["sequences"]),
        num_is_next=int(sums["followed"]),
        unigram_entropy=unigram_entropy(words),
        unknown_share=num_unknown / max(num_unknown + int(words.sum()), 1),
    )


def _count_unmasked_tokens(
    batch: Batch, stream: ExampleStream, vocab_size: int
) -> NDArray[np.int64]:
    """Count the words of a batch as they stood before masking, special tokens left out."""
    ids = batch.ids.copy()
    if stream.is_masked_lm:
        ids[batch.masked_positions] = batch.masked_labels
    counts = np.bincount(ids[~stream.vocabulary.is_special[ids]], minlength=vocab_size)
    return counts.astype(np.int64)
