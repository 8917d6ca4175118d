"""Evaluation of pre-training on held-out text: losses, accuracies and a confidence interval.

All evaluations of a run use the same examples and masks.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import ExampleBatch
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.data.stream import ExampleStream
from bertsmith.data.unigram import compute_unigram_entropy
from bertsmith.model.bert import BertForPreTraining
from bertsmith.runtime.device import Machine
from bertsmith.train.pretraining.micro_batches import to_device
from bertsmith.train.pretraining.recipes import PretrainSettings

#: Seed and epoch of the held-out examples. They are fixed, so that evaluations of runs with
#: different seeds are comparable.
_SEED, _EPOCH = 0, 0
#: Maximum number of sequences per batch.
_BATCH_SIZE = 64
#: The 97.5 % quantile of the normal distribution, for a two-sided 95 % interval.
_Z_SCORE = 1.959964


def build_heldout_stream(
    split: Split, vocabulary: VocabularyInfo, settings: DataSettings
) -> ExampleStream:
    """Return the held-out examples, which are the same for all runs with the same data settings.

    The masking rate is that of the last step, so all evaluations of a run are comparable.
    """
    if settings.final_masking_rate is not None:
        settings = settings.model_copy(update={"masking_rate": settings.final_masking_rate})
    return ExampleStream(split, vocabulary, settings, settings.max_seqlen, _SEED, _EPOCH)


def compute_wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion (Wilson 1927, JASA 22, p. 209)."""
    proportion = successes / trials
    z_squared = _Z_SCORE**2
    center = (proportion + z_squared / (2 * trials)) / (1 + z_squared / trials)
    variance = proportion * (1 - proportion) / trials + z_squared / (4 * trials**2)
    half_width = _Z_SCORE * math.sqrt(variance) / (1 + z_squared / trials)
    return center - half_width, center + half_width


@dataclass(frozen=True)
class HeldoutResult:
    """Losses and counts, summed over the held-out sequences. Losses and entropy are in nats.

    Attributes:
        total_sequences: Number of evaluated sequences.
        mlm_loss: Sum of the masked LM losses.
        mlm_correct: Number of correct masked LM predictions.
        num_predictions: Number of masked LM predictions.
        nsp_loss: Sum of the next-sentence losses.
        nsp_correct: Number of correct next-sentence predictions.
        num_sequences: Number of sequences with a next-sentence label.
        num_is_next: Number of sequences whose second segment follows the first in the text.
        unigram_entropy: Entropy of the token frequencies before masking, without special tokens
            such as [UNK], which is never a target.
        unknown_share: Number of [UNK] tokens, divided by the number of all tokens except [CLS],
            [SEP] and other special tokens.
    """

    total_sequences: int
    mlm_loss: float
    mlm_correct: int
    num_predictions: int
    nsp_loss: float
    nsp_correct: int
    num_sequences: int
    num_is_next: int
    unigram_entropy: float
    unknown_share: float

    @property
    def majority_accuracy(self) -> float:
        """The next-sentence accuracy of always predicting the majority class."""
        return max(self.num_is_next, self.num_sequences - self.num_is_next) / self.num_sequences

    def to_metrics(self) -> dict[str, float]:
        """Return the metrics that are written to the metrics log, by name."""
        # Text whose tokens are all [UNK] has no predictions.
        mean_loss = self.mlm_loss / self.num_predictions if self.num_predictions else math.nan
        metrics = {
            "num_sequences": self.total_sequences,
            "mlm_loss": mean_loss,
            # math.exp overflows a float64 above 709.
            "perplexity": math.exp(mean_loss) if mean_loss < 700 else math.inf,
            "mlm_accuracy": self.mlm_correct / max(self.num_predictions, 1),
            "unigram_entropy": self.unigram_entropy,
            "unknown_share": self.unknown_share,
        }
        if self.num_sequences:
            metrics["nsp_loss"] = self.nsp_loss / self.num_sequences
            metrics["nsp_accuracy"] = self.nsp_correct / self.num_sequences
            low, high = compute_wilson_interval(self.nsp_correct, self.num_sequences)
            metrics |= {"nsp_accuracy_low": low, "nsp_accuracy_high": high}
            metrics["nsp_majority_accuracy"] = self.majority_accuracy
        return metrics


def evaluate(
    model: BertForPreTraining,
    stream: ExampleStream,
    max_sequences: int,
    machine: Machine,
    batch_size: int = _BATCH_SIZE,
) -> HeldoutResult:
    """Evaluate a model on the first examples of a held-out stream, divided among all processes.

    Args:
        model: Model in eval mode.
        stream: Held-out examples.
        max_sequences: Maximum number of sequences.
        machine: Device, precision and processes.
        batch_size: Maximum number of sequences per batch.
    """
    total_sequences = min(max_sequences, len(stream))
    processes = machine.processes
    batch_size = min(batch_size, -(-total_sequences // processes.world_size))
    mlm_loss = nsp_loss = 0.0
    mlm_correct = num_predictions = nsp_correct = num_sequences = num_is_next = num_unknown = 0
    token_counts = np.zeros(model.config.vocab_size, np.int64)
    starts = range(0, total_sequences, batch_size)
    for first in starts[processes.rank :: processes.world_size]:
        batch = stream.batch(first, min(batch_size, total_sequences - first))
        micro_batch = to_device(batch, machine.device)
        with machine.autocast():
            losses = model.evaluate(
                micro_batch.packed,
                micro_batch.masked_positions,
                micro_batch.masked_labels,
                micro_batch.nsp_labels,
            )
        token_counts += _count_unmasked_tokens(batch, stream, model.config.vocab_size)
        # Masking neither replaces nor inserts [UNK], so the masked batch has the right number.
        num_unknown += int(np.count_nonzero(batch.ids == stream.vocabulary.unk_id))
        assert losses.mlm_correct is not None
        mlm_loss += float(losses.mlm_loss)
        mlm_correct += int(losses.mlm_correct)
        num_predictions += len(batch.masked_labels)
        if batch.nsp_labels is not None and losses.nsp_loss is not None:
            assert losses.nsp_correct is not None
            nsp_loss += float(losses.nsp_loss)
            nsp_correct += int(losses.nsp_correct)
            num_sequences += len(batch)
            num_is_next += int((batch.nsp_labels == 0).sum())
    mlm_loss, nsp_loss = processes.sum([mlm_loss, nsp_loss], machine.device)
    mlm_correct, num_predictions, nsp_correct, num_sequences, num_is_next, num_unknown = (
        processes.sum(
            [mlm_correct, num_predictions, nsp_correct, num_sequences, num_is_next, num_unknown],
            machine.device,
        )
    )
    token_counts = np.array(processes.sum(token_counts.tolist(), machine.device))
    return HeldoutResult(
        total_sequences=total_sequences,
        mlm_loss=mlm_loss,
        mlm_correct=mlm_correct,
        num_predictions=num_predictions,
        nsp_loss=nsp_loss,
        nsp_correct=nsp_correct,
        num_sequences=num_sequences,
        num_is_next=num_is_next,
        unigram_entropy=compute_unigram_entropy(token_counts),
        unknown_share=num_unknown / max(num_unknown + int(token_counts.sum()), 1),
    )


class HeldoutEvaluator:
    """Evaluates a model on the held-out text of a run, at the sequence length of each phase.

    Every evaluation of a run with a second phase has both lengths, also in the first phase. So all
    evaluations take the same time, and they show what the second phase improves.

    Attributes:
        num_sequences: Number of sequences of an evaluation at the length of the first phase.
    """

    def __init__(
        self, split: Split, vocabulary: VocabularyInfo, settings: PretrainSettings
    ) -> None:
        """Count the held-out examples.

        Args:
            split: The held-out documents.
            vocabulary: Special tokens and continuation pieces.
            settings: Settings of the run.

        Raises:
            StoreError: If the held-out text is too short for an example.
        """
        data, schedule = settings.data, settings.schedule
        self._stream = build_heldout_stream(split, vocabulary, data)
        self.num_sequences = min(settings.run.max_eval_sequences, len(self._stream))
        self._phase2_stream: ExampleStream | None = None
        max_seqlen = schedule.phase2_max_seqlen if schedule.phase2_fraction > 0 else None
        if max_seqlen is not None and max_seqlen > data.max_seqlen:
            longer = data.model_copy(update={"max_seqlen": max_seqlen})
            self._phase2_stream = build_heldout_stream(split, vocabulary, longer)
            self._max_seqlens = data.max_seqlen, max_seqlen

    def evaluate(
        self, model: BertForPreTraining, machine: Machine, max_sequences: int | None = None
    ) -> dict[str, float]:
        """Return the metrics that are written to the metrics log, by name.

        The metrics at the length of the second phase start with "phase2_". They have so many fewer
        sequences that the number of tokens is about the same.

        Args:
            model: Model in eval mode.
            machine: Device, precision and processes.
            max_sequences: Maximum number of sequences; None: ``num_sequences``.
        """
        num_sequences = min(max_sequences or self.num_sequences, self.num_sequences)
        metrics = evaluate(model, self._stream, num_sequences, machine).to_metrics()
        if self._phase2_stream is None:
            return metrics
        length, phase2_length = self._max_seqlens
        num_sequences, batch_size = (
            max(1, count * length // phase2_length) for count in (num_sequences, _BATCH_SIZE)
        )
        phase2_metrics = evaluate(
            model, self._phase2_stream, num_sequences, machine, batch_size
        ).to_metrics()
        names = ("num_sequences", "mlm_loss", "mlm_accuracy")
        return metrics | {f"phase2_{name}": phase2_metrics[name] for name in names}


def _count_unmasked_tokens(
    batch: ExampleBatch, stream: ExampleStream, vocab_size: int
) -> NDArray[np.int64]:
    """Return the count of each token in a batch before masking, int64 [V]; 0 for special tokens."""
    ids = batch.ids.copy()
    if stream.is_masked_lm:
        ids[batch.masked_positions] = batch.masked_labels
    counts = np.bincount(ids[~stream.vocabulary.is_special[ids]], minlength=vocab_size)
    return counts.astype(np.int64)
