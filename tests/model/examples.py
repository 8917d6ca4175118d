"""Random configs, weights and batches for the tests of the model.

It never knows the models that these are compared with.
"""

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

#: Distinct primes, so that no two axes can be mistaken for each other; D = 3 x 7.
PRIMES: dict[str, Any] = {
    "vocab_size": 101,
    "layers": 2,
    "width": 21,
    "heads": 3,
    "feed_forward": 37,
    "max_positions": 43,
    "segments": 2,
    # Rates that differ, so that one taken for the other shows.
    "dropout": 0.17,
    "attention_dropout": 0.29,
}
Model = TypeVar("Model", bound=BertForPreTraining | TaskModel)
#: Lengths of the sequences of a batch.
RAGGED, EQUAL = (23, 5, 41, 1, 13), (19, 19, 19)


@dataclass(frozen=True)
class PreTrainingBatch:
    """A batch as Bertsmith takes it.

    packed, masked_positions, masked_labels, not_next: as ``PreTrainingModel.forward`` takes them.
    """

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
        """The positional arguments of the model."""
        return self.packed, self.masked_positions, self.masked_labels, self.nsp_labels


def prime_config(**changes: Any) -> ModelConfig:
    """Return a config of distinct prime sizes."""
    return ModelConfig(**(PRIMES | changes))


def random_batch(
    config: ModelConfig, lengths: tuple[int, ...] = RAGGED, seed: int = 0
) -> PreTrainingBatch:
    """Draw a batch; id 0, [PAD], is left out, since transformers never trains its embedding."""
    chance = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(1, config.vocab_size, (length,), generator=chance).tolist()
        first = int(torch.randint(1, length + 1, (), generator=chance))
        sequences.append((ids, [0] * first + [1] * (length - first)))
    masked = torch.rand(sum(lengths), generator=chance) < 0.3
    # No sequence goes without a prediction, the shortest included.
    masked[[0, *accumulate(lengths)][:-1]] = True
    positions = masked.nonzero().flatten()
    labels = torch.randint(config.vocab_size, positions.shape, generator=chance)
    not_next = torch.randint(2, (len(lengths),), generator=chance)
    return PreTrainingBatch(pack_sequences(sequences), positions, labels, not_next)


def randomize_weights(model: Model, seed: int = 0) -> Model:
    """Draw every weight, biases and LayerNorm too: zeros and ones would hide a mistaken name."""
    # Scores of attention and logits come out about one in size, whatever the width.
    spread = 1.4 / math.sqrt(model.config.width)
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.requires_grad:
                continue
            noise = torch.randn(weight.shape, generator=chance)
            scale_of_norm = weight.dim() == 1 and name.endswith("weight")
            weight.copy_(1 + 0.2 * noise if scale_of_norm else spread * noise)
    return model


def make_tokenizer(words: int) -> Tokenizer:
    """Return a tokenizer with that many made-up words."""
    more = tuple(f"word{index}" for index in range(words - len(SPECIAL_TOKENS)))
    return Tokenizer(TokenizerSpec(vocab=SPECIAL_TOKENS + more))
