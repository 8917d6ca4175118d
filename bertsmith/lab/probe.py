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
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.model.feature_based import FeatureModel
from bertsmith.model.ops.dropout import Noise
from bertsmith.runtime import device
from bertsmith.train.engine import compile_warmup, compute_settings, optimizer
from bertsmith.train.engine.probe import time_steps
from bertsmith.train.engine.settings import OptimSettings
from bertsmith.train.engine.step import Losses, take_step
from bertsmith.train.pretraining.micro_batches import Piece, cut, to_device
from bertsmith.train.pretraining.objective import mean_losses

#: Tokens of a piece on a CPU, which is as fast with few.
_TOKENS = 4096
#: Seconds that a probe takes after its first steps, if one is not longer.
_SECONDS = 1.0


def seconds_of_a_step(
    config: ModelConfig, data: DataSettings, features: Mapping[str, Any] | None = None
) -> float:
    """Return the median seconds of a training step, by the first piece of its batch.

    data: how many sequences of which length; features: of a BiLSTM on top, which learns instead of
    the heads of pre-training.
    """
    machine = device.find(
        "auto", "auto", "auto", attention_dropout=config.attention_dropout, threads=None
    )
    most = _TOKENS if machine.device.type == "cpu" else compute_settings.MICRO_TOKENS
    batch = _batch(data)
    first = cut(batch, most)[0]
    whole = [to_device(first, machine.device)]
    losses: Losses
    model: nn.Module
    if features is None:
        model = PreTrainingModel(config, machine.kernel)
        losses = partial(mean_losses, model)
    else:
        own = FeatureSettings.parse(features, "the probe")
        model = FeatureModel(config, 2, own, whole=True, kernel=machine.kernel)
        losses = partial(_of_features, model)
    model = model.to(machine.device).train()
    adam = optimizer.build(model, OptimSettings())

    def take(number: int, whole: list[Any]) -> None:
        take_step(losses, whole, model, adam, machine, step=number, seed=0, rate=1e-5, clip=1.0)
        device.synchronize(machine)

    seconds, _ = time_steps(repeat(whole), take, _SECONDS)
    # The update of the weights, which a batch has once, is counted with each piece: it is small.
    return seconds * len(batch.ids) / len(first.ids)


def _batch(data: DataSettings) -> Batch:
    batch = compile_warmup.first_batches(data, data.length, data.batch * data.length)[0]
    if data.objective != "left-to-right":
        return batch
    places = np.arange(len(batch.ids))
    return replace(batch, masked_positions=places, masked_labels=np.zeros_like(places))


def _of_features(
    model: nn.Module, piece: Piece, whole: list[Piece], noise: Noise
) -> dict[str, Tensor]:
    """Return a loss of all outputs of a BiLSTM, for whose cost its target does not matter."""
    outputs: Tensor = model(piece.packed, None, noise)
    return {"made_up": outputs.square().mean() / len(whole)}
