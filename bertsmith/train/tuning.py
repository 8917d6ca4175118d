"""The work of fine-tuning: batches of a task's examples, their loss, and the held-out scores.

It never knows how the loop takes its steps, nor how the examples were read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.bundle import Head
from bertsmith.model.dropout import Noise
from bertsmith.model.packed import Packed, pack
from bertsmith.model.task import SequenceModel
from bertsmith.tasks.classify import Inputs, score
from bertsmith.tasks.outputs import outputs
from bertsmith.train.device import Machine


@dataclass(frozen=True)
class TaskPiece:
    """A part of a batch. targets: see ``Inputs``. weights: float32 [B], what each counts."""

    packed: Packed
    targets: Tensor
    weights: Tensor


class Tuning:
    """The work of the loop over a task's training examples."""

    def __init__(
        self,
        model: SequenceModel,
        head: Head,
        train: Inputs,
        heldout: Mapping[str, Inputs],
        machine: Machine,
        *,
        batch: int,
        micro_tokens: int,
        seed: int,
        metrics: Sequence[str],
        class_weights: np.ndarray[Any, np.dtype[np.float32]] | None = None,
    ) -> None:
        """``heldout``: by name, the first one decides. ``class_weights``: float32 [C]."""
        self.model, self._head, self._machine = model, head, machine
        self._train, self._heldout, self._metrics = train, heldout, metrics
        self._batch, self._micro_tokens, self._seed = batch, micro_tokens, seed
        assert train.targets is not None
        self._targets = train.targets
        self._weights = np.ones(len(train), np.float32)
        if class_weights is not None:
            self._weights = class_weights[train.targets]

    @property
    def steps_per_epoch(self) -> int:
        """The steps that see every example once; the last one may be short."""
        return math.ceil(len(self._train) / self._batch)

    def pieces(self, first_step: int) -> Iterator[list[TaskPiece]]:
        """Yield the pieces of each step's batch, without end, each epoch in an order of its own."""
        epoch, within = divmod(first_step, self.steps_per_epoch)
        while True:
            order = self._order(epoch)
            for step in range(within, self.steps_per_epoch):
                chosen = order[step * self._batch : (step + 1) * self._batch]
                yield [self._piece(part) for part in self._cut(chosen)]
            epoch, within = epoch + 1, 0

    def _order(self, epoch: int) -> list[int]:
        order: list[int] = (
            np.random.default_rng((self._seed, epoch)).permutation(len(self._train)).tolist()
        )
        return order

    def _cut(self, chosen: list[int]) -> Iterator[list[int]]:
        """Part a batch where the tokens of a piece would be too many."""
        part: list[int] = []
        tokens = 0
        for number in chosen:
            size = len(self._train.sequences[number][0])
            if part and tokens + size > self._micro_tokens:
                yield part
                part, tokens = [], 0
            part.append(number)
            tokens += size
        yield part

    def _piece(self, part: list[int]) -> TaskPiece:
        device = self._machine.device
        return TaskPiece(
            pack([self._train.sequences[number] for number in part]).to(device),
            torch.from_numpy(self._targets[part]).to(device),
            torch.from_numpy(self._weights[part]).to(device),
        )

    def losses(self, piece: TaskPiece, whole: list[TaskPiece], noise: Noise) -> dict[str, Tensor]:
        """Return what a piece adds to the mean over its batch, by the weights of its examples."""
        with self._machine.autocast():
            logits = self.model(piece.packed, noise)
        each = example_losses(logits.float(), piece.targets, self._head)
        total = torch.stack([one.weights.sum() for one in whole]).sum()
        return {"loss": (each * piece.weights).sum() / total}

    def whereabouts(self, step: int) -> str:
        """Say which examples the batch of ``step`` holds."""
        epoch, within = divmod(step, self.steps_per_epoch)
        chosen = self._order(epoch)[within * self._batch : (within + 1) * self._batch]
        places = "; ".join(self._train.where[number] for number in chosen[:3])
        return f"that of epoch {epoch + 1} with {places} and {max(len(chosen) - 3, 0)} more"

    def tokens(self, whole: list[TaskPiece]) -> int:
        """Count the tokens of a batch."""
        return sum(len(piece.packed.ids) for piece in whole)

    def products(self, whole: list[TaskPiece]) -> float:
        """Count multiply-adds: three times the forward pass (one forward, two backward)."""
        config = self.model.config
        total = 0.0
        for piece in whole:
            tokens, count = len(piece.packed.ids), len(piece.weights)
            total += tokens * config.products_per_token(tokens / count)
        return 3 * total

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics of each held-out set; those of the first without its name."""
        figures: dict[str, float] = {}
        for number, (name, inputs) in enumerate(self._heldout.items()):
            found = heldout_figures(self.model, inputs, self._head, self._metrics, self._machine)
            figures |= {f"{name}_{key}" if number else key: value for key, value in found.items()}
        return figures


def example_losses(logits: Tensor, targets: Tensor, head: Head) -> Tensor:
    """Return float32 [B]: cross-entropy, mean binary cross-entropy or squared error.

    logits: float32 [B, C]. targets: see ``Inputs``.
    """
    if head.kind == "single":
        return F.cross_entropy(logits, targets, reduction="none")
    if head.kind == "multi":
        each = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
        return each.mean(-1)
    return (logits[:, 0] - targets) ** 2


def heldout_figures(
    model: SequenceModel, inputs: Inputs, head: Head, metrics: Sequence[str], machine: Machine
) -> dict[str, float]:
    """Return loss, metrics and the number of examples. ``model`` must be in eval mode."""
    assert inputs.targets is not None
    logits = outputs(model, inputs.sequences, machine.autocast())
    each = example_losses(torch.from_numpy(logits), torch.from_numpy(inputs.targets), head)
    figures = score(logits, inputs.targets, head, metrics)
    return {"loss": float(each.mean()), **figures, "examples": float(len(inputs))}
