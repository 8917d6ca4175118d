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

from bertsmith.bundle import load_encoder
from bertsmith.data.settings import DataSettings
from bertsmith.lab.sources import read_squad
from bertsmith.lab.stages import Stage
from bertsmith.model.bert import PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.train import computing, device, optimizer, warming
from bertsmith.train.examples import mean_losses
from bertsmith.train.optimizer import OptimSettings
from bertsmith.train.pieces import cut, to_device
from bertsmith.train.schedule import ScheduleSettings
from bertsmith.train.step import take_step

#: Steps of a probe; the first one is not counted.
_PROBED = 3
#: Characters of text a second that become a vocabulary or a store, and bytes of a task's file a
#: token: rough, and small beside the training.
_CHARACTERS, _BYTES = 1.5e6, 4.5
#: Characters a second that become Korean morphemes, which are found anew by each stage.
_MORPHEMES = 5e4
#: A forward pass beside a whole step; a step with a BiLSTM on top that both learn, beside one
#: without (2026-11-22, four layers of width 128, four tasks: 3.2 to 5.3). Frozen, the layers need
#: no backward pass, which pays for the BiLSTM's.
_FORWARD, _BILSTM = 1 / 3, 4.5


#: What a model that was given is probed with.
_GIVEN = DataSettings(batch=32, length=128)


@dataclass
class Costs:
    """Probes each shape of model once."""

    _seconds: dict[str, float] = field(default_factory=dict)

    def of(self, stage: Stage) -> float | None:
        """Return the seconds that a stage will take, about; None where nobody can tell."""
        if stage.kind in ("text", "words", "store"):
            text = stage if stage.kind == "text" else stage.needs["text"]
            size = sum(file.stat().st_size for file in text.files.values())
            most = min(text.settings["characters"], size)
            words = stage.needs.get("words", stage)
            return float(most / (_MORPHEMES if words.settings.get("segment") else _CHARACTERS))
        if stage.kind == "pretrain":
            return self._pretraining(stage)
        if stage.kind == "finetune":
            return self._tuning(stage)
        return None

    def _pretraining(self, stage: Stage) -> float:
        """Return the seconds of a run's steps and evaluations."""
        steps, run, data = (stage.settings[name] for name in ("steps", "run", "data"))
        every = run.get("eval_every") or max(min(10, steps), steps // 20)
        scored = steps // every * run["eval_sequences"] / data["batch"]
        short = self._step(stage)
        schedule = ScheduleSettings.parse(stage.settings["schedule"], "the probe")
        if schedule.long_length is None:
            return float((steps + _FORWARD * scored) * short)
        long = self._step(stage, schedule.long_length)
        share = schedule.long_share
        return float(steps * (share * long + (1 - share) * short) + _FORWARD * scored * short)

    def _step(self, stage: Stage, length: int | None = None) -> float:
        """Return the seconds of one pre-training step, from a probe of that shape.

        ``length``: of its second phase, None for the first.
        """
        settings = stage.settings
        words = stage.needs["store"].needs["words"].settings["size"]
        shape = {"vocab_size": words, "feed_forward": 4 * settings["model"]["width"]}
        model = settings["model"] | shape
        data = DataSettings.parse(settings["data"] | ({"length": length} if length else {}),
                                  "the probe")  # fmt: skip
        return self._probed(model | {"nsp": data.nsp}, data)

    def _probed(self, model: Mapping[str, Any], data: DataSettings) -> float:
        known = f"{sorted(model.items())} {data.batch} {data.length} {data.objective}"
        if known not in self._seconds:
            self._seconds[known] = _probe(ModelConfig.parse(model, "the probe"), data)
        return self._seconds[known]

    def _tuning(self, stage: Stage) -> float:
        values = stage.settings["values"]
        (train, examples), (dev, _) = (_size(stage.files[name]) for name in ("train", "dev"))
        most = values["task"]["examples"]
        if most is not None:
            train *= min(1.0, most / max(examples, 1))
        features = values.get("features", {})
        factor = _BILSTM if features and not features.get("frozen", True) else 1.0
        steps = values["schedule"]["epochs"] * train * factor
        return float((steps + _FORWARD * dev) * self._a_token(stage))

    def _a_token(self, stage: Stage) -> float:
        """Return the seconds that a token takes in a step of the model that is fine-tuned."""
        source = stage.needs.get("model")
        while source is not None and source.kind != "pretrain":
            source = source.needs.get("run")
        if source is not None:
            data = source.settings["data"]
            return self._step(source) / float(data["batch"] * data["length"])
        config = load_encoder(stage.files["model"]).config
        length = min(_GIVEN.length, config.max_positions)
        data = _GIVEN.model_copy(update={"length": length})
        return self._probed(config.model_dump() | {"nsp": True}, data) / (data.batch * length)


def _size(path: Path) -> tuple[float, int]:
    """Return the tokens of a task's file, roughly, and its examples.

    In SQuAD's form each question is read with its context; the lines of others are as they stand,
    and CoNLL's sentences end at an empty one.
    """
    if path.suffix == ".json":
        articles = read_squad(path)["data"]
        asked = [(one["question"], each["context"]) for article in articles
                 for each in article["paragraphs"] for one in each["qas"]]  # fmt: skip
        return sum(len("".join(own).encode()) for own in asked) / _BYTES, len(asked)
    content = path.read_bytes()
    ends = b"\n\n" if path.suffix == ".txt" else b"\n"
    return len(content) / _BYTES, content.count(ends)


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
