"""TSDAE: reconstructs texts from the vectors of texts of which most words are deleted."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.model.sentence_embedding import BertForSentenceEmbedding
from bertsmith.runtime.device import Machine
from bertsmith.tasks.embedding_data import EmbeddingExamples, EncodedTexts, Ints
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.embedding.batches import BatchSampler, split_by_length
from bertsmith.train.embedding.evaluation import HeldoutTexts, describe_texts
from bertsmith.train.engine.heldout_metrics import evaluate_all
from bertsmith.train.engine.step_batches import build_batch_iterator

#: Number of the random generator of a batch, next to those of ``BatchSampler``.
_NOISE_STREAM = 2
#: Held-out texts that are on the device at the same time.
_EVAL_CHUNK_SIZE = 4096


@dataclass(frozen=True)
class DenoisingMicroBatch:
    """Noisy texts, and the texts to reconstruct.

    Attributes:
        noisy: The noisy texts.
        inputs: The texts without their last tokens.
        labels: int64 [T], the next token of each token of ``inputs``.
        num_targets: Number of labels of the whole batch.
    """

    noisy: PackedBatch
    inputs: PackedBatch
    labels: Tensor
    num_targets: int


class DenoisingObjective:
    """Implements ``Objective`` for unlabeled texts, with the loss of TSDAE.

    The loss is the mean cross-entropy of the tokens of the texts, given the vectors of the noisy
    texts before normalization. Its value for a text does not depend on the other texts.
    """

    #: The position in the data is a function of the step.
    data_state = None

    def __init__(
        self,
        model: BertForSentenceEmbedding,
        settings: EmbeddingSettings,
        examples: EmbeddingExamples,
        heldout: Mapping[str, HeldoutTexts],
        machine: Machine,
        tokenizer: Tokenizer,
        *,
        micro_batch_tokens: int,
        seed: int,
    ) -> None:
        """Create the objective; the arguments are those of ``EmbeddingObjective``.

        Args:
            model: Model to train, with a decoder.
            settings: Batch size and noise.
            examples: Training texts.
            heldout: Held-out texts by name; the first ones select the best epoch.
            machine: Device and precision.
            tokenizer: Says which tokens continue a word.
            micro_batch_tokens: Maximum tokens of a micro-batch, including padding.
            seed: Seed of the order of the texts, of noise and of dropout.
        """
        self.model = model
        self._settings = settings
        self._examples = examples
        self._heldout = heldout
        self._machine = machine
        self._tokenizer = tokenizer
        self._micro_batch_tokens = micro_batch_tokens
        self._seed = seed
        self._sampler = BatchSampler(examples, settings, seed)
        self.iter_batches = build_batch_iterator(self.make_micro_batches)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch."""
        return self._sampler.num_batches

    def make_micro_batches(self, step: int) -> list[DenoisingMicroBatch]:
        """Return the batch of a step, in micro-batches of texts of similar length."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        indices = self._sampler.get_indices(epoch, step_in_epoch)
        rng = np.random.default_rng((self._seed, epoch, _NOISE_STREAM, step_in_epoch))
        return self._build_micro_batches(self._examples.texts, self._examples.anchors[indices], rng)

    def _build_micro_batches(
        self, texts: EncodedTexts, numbers: Ints, rng: np.random.Generator
    ) -> list[DenoisingMicroBatch]:
        """Return micro-batches of the texts with these numbers, with noise from ``rng``."""
        sequences = [texts.get(number) for number in numbers.tolist()]
        is_continuation, ratio = self._tokenizer.is_continuation, self._settings.deletion_ratio
        noisy_sequences = [delete_words(ids, is_continuation, ratio, rng) for ids in sequences]
        lengths = [len(ids) for ids in sequences]
        num_targets = sum(lengths) - len(lengths)
        device = self._machine.device
        return [
            DenoisingMicroBatch(
                _pack([noisy_sequences[row] for row in rows]).to(device),
                _pack([sequences[row][:-1] for row in rows]).to(device),
                torch.tensor([token for row in rows for token in sequences[row][1:]]).to(device),
                num_targets,
            )
            for rows in split_by_length(
                lengths, self._micro_batch_tokens, self._machine.processes.world_size
            )
        ]

    def compute_losses(
        self,
        micro_batch: DenoisingMicroBatch,
        micro_batches: list[DenoisingMicroBatch],
        dropout_seed: DropoutSeed | None,
    ) -> dict[str, Tensor]:
        """Return the loss of the texts of a micro-batch, divided by the labels of the batch."""
        decoder = self.model.decoder
        assert decoder is not None
        with self._machine.autocast():
            vectors = self.model(micro_batch.noisy, dropout_seed, normalize=False)
            loss = decoder(
                self.model.bert, micro_batch.inputs, micro_batch.labels, vectors, dropout_seed
            )
        return {"loss": loss / micro_batch.num_targets}

    def describe_batch(self, step: int) -> str:
        """Return the epoch and the start of the first text of a batch, for an error message."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        numbers = self._examples.anchors[self._sampler.get_indices(epoch, step_in_epoch)]
        return describe_texts(epoch, self._examples.texts, numbers, self._tokenizer)

    def count_tokens(self, micro_batches: list[DenoisingMicroBatch]) -> int:
        """Return the number of tokens of the noisy texts and of the texts in a batch."""
        return sum(len(batch.noisy.ids) + len(batch.inputs.ids) for batch in micro_batches)

    def count_macs(self, micro_batches: list[DenoisingMicroBatch]) -> float:
        """Return the number of multiply-accumulates of a step.

        The backward pass has twice as many as the forward pass.
        """
        config = self.model.config
        total = 0.0
        for micro_batch in micro_batches:
            for batch in (micro_batch.noisy, micro_batch.inputs):
                num_tokens = len(batch.ids)
                length = num_tokens / (len(batch.cu_seqlens) - 1)
                total += num_tokens * config.macs_per_token(length)
            macs_per_target = config.macs_per_prediction() + config.layers * config.width**2
            total += len(micro_batch.labels) * macs_per_target
        return 3 * total

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of all held-out sets; that of unlabeled texts is this loss."""
        metrics = evaluate_all(self._heldout, self._evaluate_set)
        return self._machine.processes.broadcast(metrics)

    def _evaluate_set(self, heldout: HeldoutTexts) -> dict[str, float]:
        examples = heldout.examples
        if not isinstance(examples, EmbeddingExamples) or examples.kind != "texts":
            return heldout.evaluate(self.model, self._machine)
        rng = np.random.default_rng(0)
        total_loss, num_targets = 0.0, 0
        for start in range(0, len(examples), _EVAL_CHUNK_SIZE):
            numbers = examples.anchors[start : start + _EVAL_CHUNK_SIZE]
            micro_batches = self._build_micro_batches(examples.texts, numbers, rng)
            with torch.no_grad():
                losses = [
                    float(self.compute_losses(batch, micro_batches, None)["loss"])
                    for batch in micro_batches
                ]
            num_chunk_targets = micro_batches[0].num_targets
            total_loss += sum(losses) * num_chunk_targets
            num_targets += num_chunk_targets
        return {"loss": total_loss / num_targets, "examples": float(len(examples))}


def delete_words(
    ids: list[int], is_continuation: NDArray[np.bool_], ratio: float, rng: np.random.Generator
) -> list[int]:
    """Delete each word of a text with probability ``ratio``; at least one word remains.

    Args:
        ids: [CLS] text [SEP]; a text without tokens is returned unchanged.
        is_continuation: bool [V], whether each token continues a word.
        ratio: Probability of deleting a word.
        rng: Draws the words.
    """
    tokens = np.array(ids[1:-1], np.int64)
    if not len(tokens):
        return ids
    starts_word = ~is_continuation[tokens]
    starts_word[0] = True
    words = np.cumsum(starts_word) - 1
    is_kept = rng.random(words[-1] + 1) >= ratio
    if not is_kept.any():
        is_kept[rng.integers(len(is_kept))] = True
    return [ids[0], *tokens[is_kept[words]].tolist(), ids[-1]]


def _pack(sequences: list[list[int]]) -> PackedBatch:
    return pack_sequences([(ids, [0] * len(ids)) for ids in sequences])
