"""The work of fine-tuning: batches of a task's examples, their loss, and the held-out scores.

It never knows how the loop takes its steps, nor how the examples were read.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.bundle import HeadConfig
from bertsmith.errors import TaskError
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.task_models import TaskModel
from bertsmith.runtime.device import Machine
from bertsmith.tasks.families import get_family
from bertsmith.tasks.inputs import MicroBatch, ModelInputs
from bertsmith.tasks.outputs import compute_outputs
from bertsmith.tasks.settings import TaskSettings

#: Units whose held-out loss is computed at once.
_AT_ONCE = 64


@dataclass(frozen=True)
class HeldoutSet:
    """A held-out file: its examples, and the same as inputs."""

    examples: Sequence[Any]
    inputs: ModelInputs


class FinetuningObjective:
    """The work of the loop over a task's training examples."""

    def __init__(
        self,
        model: TaskModel,
        head: HeadConfig,
        task: TaskSettings,
        train: ModelInputs,
        heldout: Mapping[str, HeldoutSet],
        machine: Machine,
        *,
        micro_batch_tokens: int,
        seed: int,
        class_weights: NDArray[np.float32] | None = None,
    ) -> None:
        """``heldout``: by name, the first one decides. ``class_weights``: float32 [C]."""
        self.model, self._head, self._machine = model, head, machine
        self._family, self._task = get_family(head.kind), task
        self._train, self._heldout, self._weights = train, heldout, class_weights
        # A batch in which nothing is asked about would have no mean loss.
        self._taught = train.indices_with_target()
        if not self._taught:
            raise TaskError(
                f"{task.train}: the tokenizer leaves nothing that could be learnt; expected one "
                "example at least with a token that is asked about"
            )
        self._batch, self._micro_batch_tokens, self._seed = task.batch, micro_batch_tokens, seed

    @property
    def steps_per_epoch(self) -> int:
        """The steps that see every example with a target once; the last one may be short."""
        return math.ceil(len(self._taught) / self._batch)

    def iter_batches(self, first_step: int) -> Iterator[list[MicroBatch]]:
        """Yield the pieces of each step's batch, without end, each epoch in an order of its own."""
        epoch, within = divmod(first_step, self.steps_per_epoch)
        while True:
            order = self._order(epoch)
            for step in range(within, self.steps_per_epoch):
                chosen = order[step * self._batch : (step + 1) * self._batch]
                yield [self._piece(part) for part in self._cut(chosen)]
            epoch, within = epoch + 1, 0

    def _order(self, epoch: int) -> list[int]:
        chance = np.random.default_rng((self._seed, epoch))
        return [self._taught[place] for place in chance.permutation(len(self._taught)).tolist()]

    def _cut(self, chosen: list[int]) -> Iterator[list[int]]:
        """Part a batch where the tokens of a piece would be too many."""
        part: list[int] = []
        tokens = 0
        for number in chosen:
            size = self._train.num_tokens(number)
            if part and tokens + size > self._micro_batch_tokens:
                yield part
                part, tokens = [], 0
            part.append(number)
            tokens += size
        yield part

    def _piece(self, part: list[int]) -> MicroBatch:
        return self._train.make_micro_batch(part, self._weights).to(self._machine.device)

    def compute_losses(
        self, piece: MicroBatch, whole: list[MicroBatch], noise: DropoutSeed
    ) -> dict[str, Tensor]:
        """Return what a piece adds to the mean over its batch, by the weights of its targets."""
        with self._machine.autocast():
            found = self.model(piece.packed, piece.token_indices, noise)
        each = self._family.compute_losses(found.float(), piece, self._head)
        total = torch.stack([one.target_weights.sum() for one in whole]).sum()
        return {"loss": (each * piece.target_weights).sum() / total}

    def describe_batch(self, step: int) -> str:
        """Say which examples the batch of ``step`` holds."""
        epoch, within = divmod(step, self.steps_per_epoch)
        chosen = self._order(epoch)[within * self._batch : (within + 1) * self._batch]
        places = "; ".join(self._train.locations[number] for number in chosen[:3])
        return f"that of epoch {epoch + 1} with {places} and {max(len(chosen) - 3, 0)} more"

    def count_tokens(self, whole: list[MicroBatch]) -> int:
        """Count the tokens of a batch."""
        return sum(len(piece.packed.ids) for piece in whole)

    def count_macs(self, whole: list[MicroBatch]) -> float:
        """Count multiply-adds: three times the forward pass (one forward, two backward).

        A frozen encoder goes forward only.
        """
        model, total = self.model, 0.0
        for piece in whole:
            tokens, count = len(piece.packed.ids), sum(piece.sequences_per_unit)
            encoder = model.config.macs_per_token(tokens / count)
            if isinstance(model, BertWithBiLSTM):
                lstm = sum(weight.numel() for weight in model.lstm.parameters())
                used = model.states[-1] / model.config.layers
                used *= 1 if model.features.frozen else 3
                total += tokens * (used * encoder + 3 * lstm)
            else:
                asked = count if piece.token_indices is None else len(piece.token_indices)
                unasked = (tokens - asked) * model.config.macs_saved_per_unused_output()
                total += 3 * (tokens * encoder - unasked)
        return total

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics of each held-out set; those of the first without its name."""
        figures: dict[str, float] = {}
        for number, (name, own) in enumerate(self._heldout.items()):
            found = self._figures(own)
            figures |= {f"{name}_{key}" if number else key: value for key, value in found.items()}
        return figures

    def _figures(self, own: HeldoutSet) -> dict[str, float]:
        """Return mean loss, metrics and the number of examples of a held-out file."""
        found = compute_outputs(self.model, own.inputs, self._machine.autocast)
        total = count = 0.0
        taught = own.inputs.indices_with_target()
        for first in range(0, len(taught), _AT_ONCE):
            numbers = taught[first : first + _AT_ONCE]
            part = own.inputs.make_micro_batch(numbers)
            rows = torch.from_numpy(np.concatenate([found[number] for number in numbers]))
            each = self._family.compute_losses(rows, part, self._head)
            total, count = total + float(each.sum()), count + len(each)
        task = self._task
        if self._head.kind == "single" and "accuracy" not in task.metrics:
            # The accuracy is compared with that of the commonest label after training.
            task = task.model_copy(update={"metrics": [*task.metrics, "accuracy"]})
        figures = self._family.compute_metrics(found, own.inputs, own.examples, self._head, task)
        loss = total / count if count else math.nan
        return {"loss": loss, **figures, "examples": float(len(own.examples))}
