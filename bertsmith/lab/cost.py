"""Estimates how many seconds stages take on this machine, from a short probe per model shape."""

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
from bertsmith.lab.stage import Stage, hash_content
from bertsmith.model.config import ModelConfig
from bertsmith.train.engine.schedule import ScheduleSettings

#: Characters per second for learning a vocabulary or building a store, without and with a
#: morpheme segmenter (Korean), which runs again in each stage.
_CHARACTERS_PER_SECOND, _SEGMENTED_CHARACTERS_PER_SECOND = 1.5e6, 5e4
#: Bytes per token of task files: 2.7 to 3.5 with a vocabulary of 4,000 (measured 2026-11-23).
_BYTES_PER_TOKEN = 3.1
#: Cost of a forward pass relative to a training step.
_FORWARD_SHARE = 1 / 3
#: Sequence lengths of fine-tuning batches are rounded up to this multiple, to share probes.
_LENGTH_MULTIPLE = 16
#: Batch settings that fine-tuning probes start from.
_PROBE_DATA = DataSettings(batch=32, length=128)


@dataclass
class CostEstimator:
    """Estimates stage costs and probes each model shape only once."""

    #: Seconds per training step, by a text key of the probed shape.
    _step_seconds: dict[str, float] = field(default_factory=dict)
    #: Model settings of external model directories.
    _external_models: dict[Path, dict[str, Any]] = field(default_factory=dict)

    def estimate_seconds(self, stage: Stage) -> float | None:
        """Return roughly how many seconds a stage takes, None for kinds without an estimate."""
        if stage.kind in ("text", "vocabulary", "store"):
            text = stage if stage.kind == "text" else stage.dependencies["text"]
            available = sum(map(estimate_characters, text.files.values()))
            num_characters = min(text.settings["max_characters"], available)
            vocabulary = stage.dependencies.get("vocabulary", stage)
            is_segmented = vocabulary.settings.get("segment")
            speed = _SEGMENTED_CHARACTERS_PER_SECOND if is_segmented else _CHARACTERS_PER_SECOND
            return float(num_characters / speed)
        if stage.kind == "pretrain":
            return self._estimate_pretraining(stage)
        if stage.kind == "finetune":
            return self._estimate_finetuning(stage)
        return None

    def _estimate_pretraining(self, stage: Stage) -> float:
        """Return the seconds of a pre-training run's steps and evaluations."""
        steps, run, data = (stage.settings[name] for name in ("steps", "run", "data"))
        eval_every = run.get("eval_every") or max(min(10, steps), steps // 20)
        eval_batches = steps // eval_every * run["eval_sequences"] / data["batch"]
        short = self._measure_pretraining_step(stage)
        schedule = ScheduleSettings.parse(stage.settings["schedule"], "the probe")
        if schedule.long_length is None:
            return float((steps + _FORWARD_SHARE * eval_batches) * short)
        long = self._measure_pretraining_step(stage, schedule.long_length)
        long_share = schedule.long_share
        training = steps * (long_share * long + (1 - long_share) * short)
        return float(training + _FORWARD_SHARE * eval_batches * short)

    def _measure_pretraining_step(self, stage: Stage, length: int | None = None) -> float:
        """Return the seconds per pre-training step.

        Args:
            stage: The pre-training run.
            length: Sequence length of the second phase, None for the first phase.
        """
        settings = stage.settings["data"] | ({"length": length} if length else {})
        data = DataSettings.parse(settings, "the probe")
        return self._probe_step(_get_model_settings(stage) | {"nsp": data.nsp}, data)

    def _probe_step(
        self,
        model: Mapping[str, Any],
        data: DataSettings,
        features: Mapping[str, Any] | None = None,
    ) -> float:
        """Return the seconds per step of a shape, measured on the first call."""
        sorted_features = sorted((features or {}).items())
        key = (f"{sorted(model.items())} {data.batch} {data.length} {data.objective} "
               f"{sorted_features}")  # fmt: skip
        if key not in self._step_seconds:
            config = ModelConfig.parse(model, "the probe")
            self._step_seconds[key] = measure_step_seconds(config, data, features)
        return self._step_seconds[key]

    def _estimate_finetuning(self, stage: Stage) -> float:
        """Return the seconds of fine-tuning, assuming sequences of the average length.

        A frozen encoder has no backward pass, but a BiLSTM on top of it does.
        """
        batch_size = stage.settings["values"]["task"]["batch"]
        num_tokens, num_examples = _count_task_file(stage.files["train"])
        num_dev_tokens, _ = _count_task_file(stage.files["dev"])
        config, max_positions = self._get_finetuned_model(stage)
        length = math.ceil(num_tokens / max(num_examples, 1) / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        length = min(max(length, _LENGTH_MULTIPLE), max_positions)
        data = _PROBE_DATA.model_copy(update={"batch": batch_size, "length": length})
        features = stage.settings["values"].get("features")
        step_seconds = self._probe_step(config, data, features)
        dev_batches = num_dev_tokens / (data.batch * data.length)
        return (count_training_steps(stage) + _FORWARD_SHARE * dev_batches) * step_seconds

    def _get_finetuned_model(self, stage: Stage) -> tuple[dict[str, Any], int]:
        """Return the model settings of the fine-tuned model and its maximum positions."""
        source = stage.dependencies.get("model")
        while source is not None and source.kind not in ("pretrain", "initialized-model"):
            source = source.dependencies.get("run")
        if source is not None:
            model = _get_model_settings(source)
        else:
            path = stage.files["model"]
            if path not in self._external_models:
                config = load_encoder(path).config
                self._external_models[path] = config.model_dump() | {"nsp": True}
            model = self._external_models[path]
        return model, int(model["max_positions"])


def count_training_steps(stage: Stage) -> int:
    """Return a stage's training steps: approximate for fine-tuning, 0 without training."""
    if stage.kind != "finetune":
        return int(stage.settings.get("steps", 0))
    values = stage.settings["values"]
    max_examples, batch_size = values["task"]["examples"], int(values["task"]["batch"])
    num_examples = _count_task_file(stage.files["train"])[1]
    if max_examples is not None:
        num_examples = min(int(max_examples), num_examples)
    return max(1, round(float(values["schedule"]["epochs"]) * math.ceil(num_examples / batch_size)))


def _get_model_settings(run: Stage) -> dict[str, Any]:
    """Return the model settings of a pre-training run."""
    model = run.settings["model"]
    vocab_size = run.dependencies["store"].dependencies["vocabulary"].settings["size"]
    return {**model, "vocab_size": vocab_size, "feed_forward": 4 * model["width"]}


def _count_task_file(path: Path) -> tuple[float, int]:
    """Return the approximate number of tokens in a task file, and its number of examples."""
    return _count_cached(path, hash_content(path))


@cache
def _count_cached(path: Path, file_hash: str) -> tuple[float, int]:  # noqa: ARG001 - cache key
    """Count tokens and examples once per file content.

    SQuAD: one example per question, read with its context. CoNLL: one example per sentence, ended
    by an empty line, of which only the word column counts. Other files: one example per line.
    """
    if path.suffix == ".json":
        articles = read_squad(path)["data"]
        questions = [(question["question"], paragraph["context"]) for article in articles
                     for paragraph in article["paragraphs"]
                     for question in paragraph["qas"]]  # fmt: skip
        num_bytes = sum(len("".join(pair).encode()) for pair in questions)
        return num_bytes / _BYTES_PER_TOKEN, len(questions)
    content = path.read_bytes()
    lines = content.splitlines()
    if path.suffix == ".txt":
        lines = [b"" if line.startswith(b"-DOCSTART-") else line for line in lines]
        words = [line.split(maxsplit=1)[0] for line in lines if line.strip()]
        num_sentences = sum(not line.strip() and bool(previous.strip())
                            for previous, line in pairwise([b"", *lines, b""]))  # fmt: skip
        return sum(len(word) + 1 for word in words) / _BYTES_PER_TOKEN, num_sentences
    # The first line is the header.
    return len(content) / _BYTES_PER_TOKEN, len(lines) - 1
