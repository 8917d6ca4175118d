"""The fine-tuning objective: batches, losses and held-out metrics of a task."""

import math
from collections.abc import Mapping, Sequence
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
from bertsmith.tasks.inputs import ModelInputs, TaskMicroBatch
from bertsmith.tasks.outputs import compute_outputs
from bertsmith.tasks.settings import TaskSettings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine.batch_split import split_lengths
from bertsmith.train.engine.heldout_metrics import evaluate_all
from bertsmith.train.engine.step_batches import build_batch_iterator
from bertsmith.train.finetuning.task_data import TaskData

#: Number of inputs per batch in the computation of the held-out loss.
_EVAL_BATCH_SIZE = 64


@dataclass(frozen=True)
class HeldoutSet:
    """The examples of a held-out file, and their model inputs."""

    examples: Sequence[Any]
    inputs: ModelInputs


class FinetuningObjective:
    """Implements ``Objective`` for the training examples of a task."""

    #: The position in the data is a function of the step.
    data_state = None

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
        is_compiled: bool = False,
    ) -> None:
        """Create the objective.

        Args:
            model: Model to train.
            head: Config of the head: task kind, and labels of the outputs.
            task: Task settings.
            train: Training inputs.
            heldout: Held-out sets by name; the metrics of the first one select the best epoch.
            machine: Device, precision and processes.
            micro_batch_tokens: Maximum tokens of a micro-batch.
            seed: Seed of the random order of the training inputs.
            class_weights: Weight of each class in the loss, float32 [C]; None: equal weights.
            is_compiled: Whether to compile the model for training, with shapes that vary.

        Raises:
            TaskError: If no training input has a target.
        """
        self.model = model
        #: The compiled model, which only training uses.
        self._training_model: Any = torch.compile(model, dynamic=True) if is_compiled else model
        self._head = head
        self._task = task
        self._family = get_family(head.kind)
        self._train = train
        self._heldout = heldout
        self._machine = machine
        self._batch_size = task.batch_size
        self._micro_batch_tokens = micro_batch_tokens
        self._seed = seed
        self._class_weights = class_weights
        self.iter_batches = build_batch_iterator(self._make_micro_batches)
        self._epoch = -1
        self._order: list[int] = []
        # Inputs without a target are left out, because a batch of them would have no mean loss.
        self._train_indices = train.find_inputs_with_target()
        if not self._train_indices:
            raise TaskError(
                f"{task.train_file}: no training target is left after tokenization; add at least "
                "one example whose labeled text has a token"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in an epoch, in which each input with a target occurs once."""
        return math.ceil(len(self._train_indices) / self._batch_size)

    def _draw_batch(self, step: int) -> list[int]:
        """Return the indices of the training inputs of a step; each epoch has a new order."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if self._epoch != epoch:
            rng = np.random.default_rng((self._seed, epoch))
            permutation = rng.permutation(len(self._train_indices)).tolist()
            self._order = [self._train_indices[i] for i in permutation]
            self._epoch = epoch
        first = step_in_epoch * self._batch_size
        return self._order[first : first + self._batch_size]

    def _make_micro_batches(self, step: int) -> list[TaskMicroBatch]:
        """Return the batch of a step in micro-batches.

        Those that this process computes are on the device. Only the sizes of others are needed.
        """
        indices = self._draw_batch(step)
        processes = self._machine.processes
        lengths = [self._train.count_tokens(index) for index in indices]
        parts = split_lengths(lengths, self._micro_batch_tokens, processes.world_size)
        micro_batches = [
            self._train.make_micro_batch(indices[first:end], self._class_weights)
            for first, end in parts
        ]
        assigned = processes.assign_indices(len(parts))
        return [
            micro_batch.to(self._machine.device) if number in assigned else micro_batch
            for number, micro_batch in enumerate(micro_batches)
        ]

    def compute_losses(
        self,
        micro_batch: TaskMicroBatch,
        micro_batches: list[TaskMicroBatch],
        dropout_seed: DropoutSeed,
    ) -> dict[str, Tensor]:
        """Return the contribution of a micro-batch to the weighted mean loss of its batch."""
        with self._machine.autocast():
            outputs = self._training_model(
                micro_batch.packed, micro_batch.token_indices, dropout_seed
            )
        losses = self._family.compute_losses(outputs.float(), micro_batch, self._head)
        weights = [batch.target_weights.sum().to(losses.device) for batch in micro_batches]
        total_weight = torch.stack(weights).sum()
        return {"loss": (losses * micro_batch.target_weights).sum() / total_weight}

    def describe_batch(self, step: int) -> str:
        """Return the epoch and the first three examples of a batch, for an error message."""
        indices = self._draw_batch(step)
        locations = "; ".join(self._train.locations[index] for index in indices[:3])
        others = f" and {len(indices) - 3} more" if len(indices) > 3 else ""
        return f"epoch {step // self.steps_per_epoch + 1}, {locations}{others}"

    def count_tokens(self, micro_batches: list[TaskMicroBatch]) -> int:
        """Return the number of tokens in a batch."""
        return sum(len(micro_batch.packed.ids) for micro_batch in micro_batches)

    def count_macs(self, micro_batches: list[TaskMicroBatch]) -> float:
        """Return the number of multiply-accumulates of a step.

        The backward pass has twice as many as the forward pass; a frozen encoder has no backward
        pass.
        """
        model = self.model
        total = 0.0
        for micro_batch in micro_batches:
            num_tokens = len(micro_batch.packed.ids)
            num_sequences = sum(micro_batch.sequences_per_input)
            encoder_macs = model.config.macs_per_token(num_tokens / num_sequences)
            if isinstance(model, BertWithBiLSTM):
                lstm_macs = sum(weight.numel() for weight in model.lstm.parameters())
                # Layers above the last one that the BiLSTM uses are not computed.
                layer_fraction = model.state_indices[-1] / model.config.layers
                num_passes = 1 if model.features.frozen else 3
                total += num_tokens * (layer_fraction * num_passes * encoder_macs + 3 * lstm_macs)
            else:
                indices = micro_batch.token_indices
                num_outputs = num_sequences if indices is None else len(indices)
                num_unused_outputs = num_tokens - num_outputs
                saved_macs = num_unused_outputs * model.config.macs_saved_per_unused_output()
                total += 3 * (num_tokens * encoder_macs - saved_macs)
        return total

    def evaluate(self) -> dict[str, float]:
        """Return loss and metrics of all held-out sets; see ``evaluate_all``."""
        return evaluate_all(self._heldout, self._evaluate_set)

    def _compute_outputs(self, inputs: ModelInputs) -> list[NDArray[np.float32]]:
        """Return the outputs of each input in all processes, which divide the inputs among them."""
        processes = self._machine.processes
        share = inputs.select(range(processes.rank, len(inputs), processes.world_size))
        share_outputs = (
            compute_outputs(self.model, share, self._machine.autocast) if len(share) else []
        )
        outputs = [np.empty(0, np.float32)] * len(inputs)
        for rank, rank_outputs in enumerate(processes.all_gather(share_outputs)):
            outputs[rank :: processes.world_size] = rank_outputs
        return outputs

    def _evaluate_set(self, heldout: HeldoutSet) -> dict[str, float]:
        """Return the mean loss, the metrics and the number of examples of a held-out set."""
        outputs = self._compute_outputs(heldout.inputs)
        loss_sum = 0.0
        num_targets = 0
        indices_with_target = heldout.inputs.find_inputs_with_target()
        for first in range(0, len(indices_with_target), _EVAL_BATCH_SIZE):
            indices = indices_with_target[first : first + _EVAL_BATCH_SIZE]
            micro_batch = heldout.inputs.make_micro_batch(indices)
            batch_outputs = torch.from_numpy(np.concatenate([outputs[index] for index in indices]))
            losses = self._family.compute_losses(batch_outputs, micro_batch, self._head)
            loss_sum += float(losses.sum())
            num_targets += len(losses)
        task = self._task
        if self._head.kind == "single" and "accuracy" not in task.metrics:
            # The accuracy is needed after training, for the comparison with the majority class.
            task = task.model_copy(update={"metrics": [*task.metrics, "accuracy"]})
        metrics = self._family.compute_metrics(
            outputs, heldout.inputs, heldout.examples, self._head, task
        )
        loss = loss_sum / num_targets if num_targets else math.nan
        return {"loss": loss, **metrics, "examples": float(len(heldout.examples))}


def encode_task_data(
    data: TaskData, task: TaskSettings, head: HeadConfig, tokenizer: Tokenizer
) -> tuple[ModelInputs, dict[str, HeldoutSet]]:
    """Encode the training examples, and the held-out sets by name."""
    family = get_family(task.kind)

    def encode(name: str, examples: list[Any]) -> ModelInputs:
        # Examples held out from the training file are counted as part of that file.
        counts = data.counts.get(name, data.counts["train"])
        return family.encode_examples(examples, tokenizer, head, task, counts)

    train = encode("train", data.train)
    heldout = {
        name: HeldoutSet(examples, encode(name, examples))
        for name, examples in data.heldout.items()
    }
    return train, heldout
