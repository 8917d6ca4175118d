"""Configs, random weights and random batches for tests of models."""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.model.task_models import TaskModel
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

#: Sizes of most models in the tests. They are distinct primes, so that swapped axes give an error,
#: except the width D = 3 * 7, the product of the number of heads and the head dimension.
VOCAB_SIZE = 101
NUM_HEADS = 3
WIDTH = NUM_HEADS * 7
FEED_FORWARD = 37
MAX_POSITIONS = 43
#: Fields of a model config with these sizes.
PRIME_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "layers": 2,
    "width": WIDTH,
    "heads": NUM_HEADS,
    "feed_forward": FEED_FORWARD,
    "max_positions": MAX_POSITIONS,
    "segments": 2,
    # Different rates, so that swapped rates change the result.
    "dropout": 0.17,
    "attention_dropout": 0.29,
}
Model = TypeVar("Model", bound=BertForPreTraining | TaskModel)
#: Sequence lengths of a batch with padding, and of a batch without padding.
RAGGED_LENGTHS, EQUAL_LENGTHS = (23, 5, 41, 1, 13), (19, 19, 19)


@dataclass(frozen=True)
class PreTrainingBatch:
    """The positional arguments of ``BertForPreTraining.forward``."""

    packed: PackedBatch
    masked_positions: Tensor
    masked_labels: Tensor
    nsp_labels: Tensor

    @property
    def lengths(self) -> list[int]:
        """The length of each sequence."""
        lengths: list[int] = self.packed.cu_seqlens.diff().tolist()
        return lengths

    @property
    def arguments(self) -> tuple[PackedBatch, Tensor, Tensor, Tensor]:
        """The fields in order, to pass to the model."""
        return self.packed, self.masked_positions, self.masked_labels, self.nsp_labels


def make_prime_size_config(**changes: Any) -> ModelConfig:
    """Return a config whose sizes are distinct primes, with changed fields."""
    return ModelConfig(**(PRIME_SIZES | changes))


def draw_batch(
    config: ModelConfig, lengths: tuple[int, ...] = RAGGED_LENGTHS, seed: int = 0
) -> PreTrainingBatch:
    """Draw a random pre-training batch.

    The batch does not contain the id 0 ([PAD]), because transformers does not train its embedding.

    Args:
        config: The model's config.
        lengths: Length of each sequence.
        seed: Seed of the random generator.
    """
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, config.vocab_size, (length,), generator=generator).tolist()
        a_length = int(torch.randint(1, length + 1, (), generator=generator))
        sequences.append((ids, [0] * a_length + [1] * (length - a_length)))
    is_masked = torch.rand(sum(lengths), generator=generator) < 0.3
    # The first token of each sequence is masked, so that each sequence has a prediction.
    first_token_indices = [0, *accumulate(lengths[:-1])]
    is_masked[first_token_indices] = True
    positions = is_masked.nonzero().flatten()
    labels = torch.randint(config.vocab_size, positions.shape, generator=generator)
    nsp_labels = torch.randint(2, (len(lengths),), generator=generator)
    return PreTrainingBatch(pack_sequences(sequences), positions, labels, nsp_labels)


def randomize_weights(model: Model, seed: int = 0) -> Model:
    """Set all weights of a model to random values, including biases and LayerNorm.

    With zero biases, a test would not notice that two biases are swapped.
    """
    # With this standard deviation, attention scores and logits are about 1 for every width.
    std = 1.4 / math.sqrt(model.config.width)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            noise = torch.randn(weight.shape, generator=generator)
            is_norm_weight = weight.dim() == 1 and name.endswith("weight")
            weight.copy_(1 + 0.2 * noise if is_norm_weight else std * noise)
    return model


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Return a tokenizer with the special tokens and the words word0, word1 and so on."""
    words = tuple(f"word{index}" for index in range(vocab_size - len(SPECIAL_TOKENS)))
    return Tokenizer(TokenizerSpec(vocab=SPECIAL_TOKENS + words))
