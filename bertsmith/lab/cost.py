"""What stages will cost here: their seconds, from a short probe of each shape of model.

It never makes a stage.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.data.settings import DataSettings
from bertsmith.lab.stages import Stage
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.train import computing, device, optimizer, warming
from bertsmith.train.examples import mean_losses
from bertsmith.train.optimizer import OptimSettings
from bertsmith.train.pieces import cut, to_device
from bertsmith.train.step import take_step

#: Steps of a probe; the first one is not counted.
_PROBED = 3
#: Characters of text a second that become a vocabulary or a store, and bytes of a task's file a
#: token: rough, and small beside the training.
_CHARACTERS, _BYTES = 1.5e6, 4.5
#: A forward pass beside a whole step.
_FORWARD = 1 / 3


@dataclass
class Costs:
    """Probes each shape of model once."""

    _seconds: dict[str, float] = field(default_factory=dict)

    def of(self, stage: Stage) -> float | None:
        """Return the seconds that a stage will take, about; None where nobody can tell."""
        if stage.kind in ("text", "words", "store"):
            text = stage if stage.kind == "text" else stage.needs["text"]
            most = min(text.settings["characters"], _bytes(text.files["text"]))
            return float(most / _CHARACTERS)
        if stage.kind == "pretrain":
            return float(stage.settings["steps"] * self._step(stage))
        if stage.kind == "finetune":
            return self._tuning(stage)
        return None

    def _step(self, stage: Stage) -> float:
        """Return the seconds of one pre-training step, from a probe of that shape."""
        settings = stage.settings
        words = stage.needs["store"].needs["words"].settings["size"]
        shape = {"vocab_size": words, "feed_forward": 4 * settings["model"]["width"]}
        model = settings["model"] | shape
        data = DataSettings.parse(settings["data"], "the probe")
        return self._probed(model | {"nsp": data.nsp}, data)

    def _probed(self, model: Mapping[str, Any], data: DataSettings) -> float:
        known = f"{sorted(model.items())} {data.batch} {data.length} {data.objective}"
        if known not in self._seconds:
            self._seconds[known] = _probe(ModelConfig.parse(model, "the probe"), data)
        return self._seconds[known]

    def _tuning(self, stage: Stage) -> float | None:
        source = stage.needs.get("model")
        while source is not None and source.kind != "pretrain":
            source = source.needs.get("run")
        if source is None:
            return None
        a_token = self._step(source) / (
            source.settings["data"]["batch"] * source.settings["data"]["length"]
        )
        values = stage.settings["values"]
        train, dev = (_tokens(stage.files[name]) for name in ("train", "dev"))
        examples = values["task"]["examples"]
        if examples is not None:
            train *= min(1.0, examples / max(_examples(stage.files["train"]), 1))
        return float(values["schedule"]["epochs"] * (train + _FORWARD * dev) * a_token)


def _bytes(path: Path) -> int:
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return path.stat().st_size


def _tokens(path: Path) -> float:
    return path.stat().st_size / _BYTES


def _examples(path: Path) -> int:
    """Count the questions of SQuAD's form, the sentences of CoNLL's, or the lines of a table."""
    content = path.read_bytes()
    if path.suffix == ".json":
        return content.count(b'"question"')
    return content.count(b"\n\n" if path.suffix == ".txt" else b"\n")


def _probe(config: ModelConfig, data: DataSettings) -> float:
    """Return the median seconds of a step on made-up ids."""
    machine = device.find(
        "auto", "auto", "auto", attention_dropout=config.attention_dropout, threads=None
    )
    model = PreTrainingModel(config, machine.kernel).to(machine.device).train()
    adam = optimizer.build(model, OptimSettings())
    batch = warming.first_batches(data, data.length, data.batch * data.length)[0]
    if data.objective == "left-to-right":
        places = np.arange(len(batch.ids))
        batch = replace(batch, masked_positions=places, masked_labels=np.zeros_like(places))
    pieces = cut(batch, computing.MICRO_TOKENS)
    whole = [to_device(piece, machine.device) for piece in pieces]
    losses = partial(mean_losses, model)
    seconds = []
    for number in range(_PROBED + 1):
        began = time.perf_counter()
        take_step(losses, whole, model, adam, machine, step=number, seed=0, rate=1e-5, clip=1.0)
        device.synchronize(machine)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[1:])[_PROBED // 2]
