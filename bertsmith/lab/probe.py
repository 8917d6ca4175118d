"""Measures the duration of training steps and forward passes, with random token ids."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from statistics import median_high
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertsmith.data.packing import ExampleBatch
from bertsmith.data.settings import DataSettings
from bertsmith.model.bert import BertForPreTraining, BertModel
from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import pack_sequences
from bertsmith.model.task_models import BertForSequenceClassification
from bertsmith.runtime import device
from bertsmith.runtime.inference_batches import choose_batch_tokens
from bertsmith.train.engine import optimizer
from bertsmith.train.engine.probe import measure_steps
from bertsmith.train.engine.settings import (
    DEFAULT_MICRO_BATCH_TOKENS,
    OptimSettings,
)
from bertsmith.train.engine.step import LossFunction, take_step
from bertsmith.train.pretraining.compile_warmup import build_warmup_batches
from bertsmith.train.pretraining.micro_batches import PretrainingMicroBatch, split_batch, to_device
from bertsmith.train.pretraining.objective import compute_mean_losses

#: Tokens per micro-batch on a CPU, where larger micro-batches are not faster.
_CPU_MICRO_TOKENS = 4096
#: Total duration of the timed steps in seconds; at least one step is timed.
_PROBE_SECONDS = 1.0


def measure_step_seconds(
    config: ModelConfig,
    data: DataSettings,
    features: Mapping[str, Any] | None = None,
    *,
    is_classification: bool = False,
) -> float:
    """Return the median duration of a training step in seconds.

    Only the first micro-batch of a batch is timed. Its duration is scaled to the number of tokens
    in the batch.

    Args:
        config: The model settings.
        data: Batch size, sequence length and objective.
        features: The settings of a BiLSTM that replaces the pre-training heads, None without a
            BiLSTM.
        is_classification: Whether a classification head replaces the pre-training heads.
    """
    machine = device.resolve_machine(
        "auto",
        "auto",
        "auto",
        attention_dropout=config.attention_dropout,
        head_dim=config.head_dim,
        threads=None,
    )
    is_cpu = machine.device.type == "cpu"
    max_tokens = _CPU_MICRO_TOKENS if is_cpu else DEFAULT_MICRO_BATCH_TOKENS
    batch = _build_random_batch(data)
    first = split_batch(batch, max_tokens)[0]
    micro_batches = [to_device(first, machine.device)]
    loss_fn: LossFunction
    model: nn.Module
    if features is not None:
        settings = BiLSTMSettings.parse(features, "the settings of a stage")
        model = BertWithBiLSTM(
            config, num_outputs=2, features=settings, is_sequence_level=True, kernel=machine.kernel
        )
        loss_fn = partial(_compute_mean_square_loss, model)
    elif is_classification:
        model = BertForSequenceClassification(config, 2, machine.kernel)
        loss_fn = partial(_compute_mean_square_loss, model)
    else:
        model = BertForPreTraining(config, machine.kernel)
        loss_fn = partial(compute_mean_losses, model)
    model = model.to(machine.device).train()
    adam = optimizer.build_optimizer(model, OptimSettings())

    def run_step(number: int, micro_batches: list[Any]) -> None:
        take_step(
            loss_fn,
            micro_batches,
            model,
            adam,
            machine,
            step=number,
            seed=0,
            lr=1e-5,
            max_grad_norm=1.0,
        )
        device.synchronize(machine)

    times, _ = measure_steps(repeat(micro_batches), run_step, _PROBE_SECONDS)
    # This scaling counts the optimizer update once per micro-batch instead of once per batch. The
    # error is small, because the update is short.
    return median_high(times) * len(batch.ids) / len(first.ids)


@torch.inference_mode()
def measure_forward_seconds(config: ModelConfig, length: int) -> float:
    """Return the median duration of the encoder's forward pass for one token, in seconds.

    Args:
        config: The model settings.
        length: Tokens per sequence.
    """
    torch_device = device.resolve_device("auto", "run.device")
    model = BertModel(config).to(torch_device).eval()
    num_sequences = max(choose_batch_tokens(torch_device, config.feed_forward) // length, 1)
    ids = [0] * length
    batch = pack_sequences([(ids, ids)] * num_sequences).to(torch_device)

    def run_forward(_: int, __: list[Any]) -> None:
        model(batch)
        if torch_device.type == "cuda":
            torch.cuda.synchronize()

    times, _ = measure_steps(repeat([]), run_forward, _PROBE_SECONDS)
    return median_high(times) / (num_sequences * length)


def _build_random_batch(data: DataSettings) -> ExampleBatch:
    """Return a batch of random token ids with masked-LM or left-to-right predictions."""
    batch = build_warmup_batches(data, data.max_seqlen, data.batch_size * data.max_seqlen)[0]
    if data.objective != "left-to-right":
        return batch
    # A left-to-right model predicts every token.
    positions = np.arange(len(batch.ids))
    return replace(batch, masked_positions=positions, masked_labels=np.zeros_like(positions))


def _compute_mean_square_loss(
    model: nn.Module,
    micro_batch: PretrainingMicroBatch,
    micro_batches: list[PretrainingMicroBatch],
    seed: DropoutSeed,
) -> dict[str, Tensor]:
    """Return the mean square of the outputs, an arbitrary loss with gradients."""
    outputs: Tensor = model(micro_batch.packed, None, seed)
    return {"mean_square": outputs.square().mean() / len(micro_batches)}
