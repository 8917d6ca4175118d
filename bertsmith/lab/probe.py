"""What a step of a model costs here, by a few on made-up ids.

It never knows which stages are asked about.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
from torch import Tensor, nn

from bertsmith.data.packing import Batch
from bertsmith.data.settings import DataSettings
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.runtime import device
from bertsmith.train.engine import compile_warmup, compute_settings, optimizer
from bertsmith.train.engine.probe import median_step_seconds
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.step import LossFunction, take_step
from bertsmith.train.pretraining.micro_batches import MicroBatch, split_batch, to_device
from bertsmith.train.pretraining.objective import compute_mean_losses

#: Tokens of a piece on a CPU, which is as fast with few.
_TOKENS = 4096
#: Seconds that a probe takes after its first steps, if one is not longer.
_SECONDS = 1.0


def measure_step_seconds(
    config: ModelConfig, data: DataSettings, features: Mapping[str, Any] | None = None
) -> float:
    """Return the median seconds of a training step, by the first piece of its batch.

    data: how many sequences of which length; features: of a BiLSTM on top, which learns instead of
    the heads of pre-training.
    """
    machine = device.resolve_machine(
        "auto", "auto", "auto", attention_dropout=config.attention_dropout, threads=None
    )
    most = _TOKENS if machine.device.type == "cpu" else compute_settings.MICRO_TOKENS
    batch = _batch(data)
    first = split_batch(batch, most)[0]
    whole = [to_device(first, machine.device)]
    losses: LossFunction
    model: nn.Module
    if features is None:
        model = BertForPreTraining(config, machine.kernel)
        losses = partial(compute_mean_losses, model)
    else:
        own = FeatureSettings.parse(features, "the probe")
        model = BertWithBiLSTM(config, 2, own, is_sequence_level=True, kernel=machine.kernel)
        losses = partial(_of_features, model)
    model = model.to(machine.device).train()
    adam = optimizer.build_optimizer(model, OptimSettings())

    def take(number: int, whole: list[Any]) -> None:
        take_step(
            losses, whole, model, adam, machine, step=number, seed=0, lr=1e-5, max_grad_norm=1.0
        )
        device.synchronize(machine)

    seconds, _ = median_step_seconds(repeat(whole), take, _SECONDS)
    # The update of the weights, which a batch has once, is counted with each piece: it is small.
    return seconds * len(batch.ids) / len(first.ids)


def _batch(data: DataSettings) -> Batch:
    batch = compile_warmup.warmup_batches(data, data.length, data.batch * data.length)[0]
    if data.objective != "left-to-right":
        return batch
    places = np.arange(len(batch.ids))
    return replace(batch, masked_positions=places, masked_labels=np.zeros_like(places))


def _of_features(
    model: nn.Module, piece: MicroBatch, whole: list[MicroBatch], noise: DropoutSeed
) -> dict[str, Tensor]:
    """Return a loss of all outputs of a BiLSTM, for whose cost its target does not matter."""
    outputs: Tensor = model(piece.packed, None, noise)
    return {"made_up": outputs.square().mean() / len(whole)}
