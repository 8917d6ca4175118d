"""What stages will cost here: their seconds, from a short probe of each shape of model.

It never makes a stage.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from bertsmith.bundle import load_encoder
from bertsmith.data.settings import DataSettings
from bertsmith.lab.probe import measure_step_seconds
from bertsmith.lab.sources import estimate_characters, read_squad
from bertsmith.lab.stage import Stage
from bertsmith.lab.stage import content_hash as content_of
from bertsmith.model.config import ModelConfig
from bertsmith.train.engine.schedule import ScheduleSettings

#: Characters of text a second that become a vocabulary or a store; Korean morphemes, which are
#: found anew by each stage.
_CHARACTERS, _MORPHEMES = 1.5e6, 5e4
#: Bytes of a task's file a token: 2.7 to 3.5 with 4,000 words (2026-11-23).
_BYTES = 3.1
#: A forward pass beside a whole step.
_FORWARD = 1 / 3
#: Lengths of a task's batches are probed in steps of so many tokens.
_NEAR = 16
#: What a model that was given is probed with.
_GIVEN = DataSettings(batch=32, length=128)


@dataclass
class CostEstimator:
    """Probes each shape of model once."""

    _seconds: dict[str, float] = field(default_factory=dict)
    #: Shapes of models that were given.
    _given: dict[Path, dict[str, Any]] = field(default_factory=dict)

    def estimate_seconds(self, stage: Stage) -> float | None:
        """Return the seconds that a stage will take, about; None where nobody can tell."""
        if stage.kind in ("text", "words", "store"):
            text = stage if stage.kind == "text" else stage.dependencies["text"]
            size = sum(map(estimate_characters, text.files.values()))
            most = min(text.settings["characters"], size)
            words = stage.dependencies.get("words", stage)
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
        own = stage.settings["data"] | ({"length": length} if length else {})
        data = DataSettings.parse(own, "the probe")
        return self._probed(_shape(stage) | {"nsp": data.nsp}, data)

    def _probed(
        self,
        model: Mapping[str, Any],
        data: DataSettings,
        features: Mapping[str, Any] | None = None,
    ) -> float:
        said = sorted((features or {}).items())
        known = f"{sorted(model.items())} {data.batch} {data.length} {data.objective} {said}"
        if known not in self._seconds:
            config = ModelConfig.parse(model, "the probe")
            self._seconds[known] = measure_step_seconds(config, data, features)
        return self._seconds[known]

    def _tuning(self, stage: Stage) -> float:
        """Return the seconds of a fine-tuning, in batches as long as its examples are on average.

        A frozen encoder has no backward pass; its BiLSTM has one.
        """
        batch = stage.settings["values"]["task"]["batch"]
        tokens, examples = _size(stage.files["train"])
        dev, _ = _size(stage.files["dev"])
        config, most = self._tuned(stage)
        length = math.ceil(tokens / max(examples, 1) / _NEAR) * _NEAR
        data = _GIVEN.model_copy(update={"batch": batch, "length": min(max(length, _NEAR), most)})
        features = stage.settings["values"].get("features")
        a_step = self._probed(config, data, features)
        return (count_training_steps(stage) + _FORWARD * dev / (data.batch * data.length)) * a_step

    def _tuned(self, stage: Stage) -> tuple[dict[str, Any], int]:
        """Return the shape of the model that is fine-tuned, and its positions."""
        source = stage.dependencies.get("model")
        while source is not None and source.kind not in ("pretrain", "begun"):
            source = source.dependencies.get("run")
        if source is not None:
            model = _shape(source)
        else:
            place = stage.files["model"]
            if place not in self._given:
                self._given[place] = load_encoder(place).config.model_dump() | {"nsp": True}
            model = self._given[place]
        return model, int(model["max_positions"])


def count_training_steps(stage: Stage) -> int:
    """Return the steps that a stage trains, of a fine-tuning about; 0 for what does not train."""
    if stage.kind != "finetune":
        return int(stage.settings.get("steps", 0))
    values = stage.settings["values"]
    most, batch = values["task"]["examples"], int(values["task"]["batch"])
    examples = _size(stage.files["train"])[1]
    read = examples if most is None else min(int(most), examples)
    return max(1, round(float(values["schedule"]["epochs"]) * math.ceil(read / batch)))


def _shape(run: Stage) -> dict[str, Any]:
    """Return the sizes of a run's model."""
    model = run.settings["model"]
    words = run.dependencies["store"].dependencies["words"].settings["size"]
    return {**model, "vocab_size": words, "feed_forward": 4 * model["width"]}


def _size(path: Path) -> tuple[float, int]:
    """Return the tokens of a task's file, roughly, and its examples."""
    return _sized(path, content_of(path))


@cache
def _sized(path: Path, content_hash: str) -> tuple[float, int]:  # noqa: ARG001 - of the memory's key
    """Count a file once, however many stages read it, as long as it is the same one.

    In SQuAD's form each question is read with its context. Of CoNLL's lines the word is read, and
    an empty one ends a sentence; those of others are as they stand.
    """
    if path.suffix == ".json":
        articles = read_squad(path)["data"]
        asked = [(one["question"], each["context"]) for article in articles
                 for each in article["paragraphs"] for one in each["qas"]]  # fmt: skip
        return sum(len("".join(own).encode()) for own in asked) / _BYTES, len(asked)
    content = path.read_bytes()
    lines = content.splitlines()
    if path.suffix == ".txt":
        lines = [b"" if line.startswith(b"-DOCSTART-") else line for line in lines]
        words = [line.split(maxsplit=1)[0] for line in lines if line.strip()]
        ends = sum(not line.strip() and bool(before.strip())
                   for before, line in pairwise([b"", *lines, b""]))  # fmt: skip
        return sum(len(word) + 1 for word in words) / _BYTES, ends
    # The first line has the columns' names.
    return len(content) / _BYTES, len(lines) - 1
