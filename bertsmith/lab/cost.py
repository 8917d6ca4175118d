"""Estimates the duration of stages on this machine from short measurements of training steps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle import load_encoder
from bertsmith.data.settings import DataSettings
from bertsmith.lab.probe import measure_step_seconds
from bertsmith.lab.sources import estimate_characters, read_squad
from bertsmith.lab.stage import Stage, hash_content
from bertsmith.model.config import ModelConfig
from bertsmith.train.engine.duration import get_default_interval
from bertsmith.train.pretraining.schedule import PretrainScheduleSettings

#: Speed of sampling text, learning a vocabulary or building a store, in characters per second.
_CHARACTERS_PER_SECOND = 1.5e6
#: The same speed with a morpheme segmenter (Korean), which runs again in each stage.
_SEGMENTED_CHARACTERS_PER_SECOND = 5e4
#: Bytes per token of task files (2.7 to 3.5 with a vocabulary of 4,000, measured 2026-11-23).
_BYTES_PER_TOKEN = 3.1
#: Duration of a forward pass relative to a training step.
_FORWARD_SHARE = 1 / 3
#: Fine-tuning lengths are rounded up to a multiple of this, so that tasks with similar lengths
#: share a measurement.
_LENGTH_MULTIPLE = 16
#: Batch settings of fine-tuning measurements; batch size and length are replaced.
_PROBE_DATA = DataSettings(batch_size=32, max_seqlen=128)


@dataclass
class CostEstimator:
    """Estimates the duration of stages; steps of equal shape are measured only once."""

    #: Seconds per training step, by a text with the settings that affect them.
    _step_seconds: dict[str, float] = field(default_factory=dict)
    #: Model settings by model directory.
    _external_models: dict[Path, dict[str, Any]] = field(default_factory=dict)

    def estimate_seconds(self, stage: Stage) -> float | None:
        """Return the estimated duration of a stage in seconds, None for kinds without estimate."""
        if stage.kind in ("text", "vocabulary", "store"):
            return _estimate_text_processing(stage)
        if stage.kind == "pretrain":
            return self._estimate_pretraining(stage)
        if stage.kind == "finetune":
            return self._estimate_finetuning(stage)
        return None

    def _estimate_pretraining(self, stage: Stage) -> float:
        """Return the duration of a pre-training run's steps and evaluations, in seconds."""
        num_steps = stage.settings["steps"]
        run = stage.settings["run"]
        num_evaluations = num_steps // (run.get("eval_every") or get_default_interval(num_steps))
        num_eval_batches = (
            num_evaluations * run["max_eval_sequences"] / stage.settings["data"]["batch_size"]
        )
        step_seconds = self._measure_pretraining_step(stage)
        eval_seconds = _FORWARD_SHARE * num_eval_batches * step_seconds
        schedule = PretrainScheduleSettings.parse(
            stage.settings["schedule"], "the settings of a stage"
        )
        if schedule.phase2_max_seqlen is None:
            return float(num_steps * step_seconds + eval_seconds)
        long_step_seconds = self._measure_pretraining_step(stage, schedule.phase2_max_seqlen)
        num_long_steps = num_steps * schedule.phase2_fraction
        train_seconds = (
            num_long_steps * long_step_seconds + (num_steps - num_long_steps) * step_seconds
        )
        return float(train_seconds + eval_seconds)

    def _measure_pretraining_step(self, stage: Stage, length: int | None = None) -> float:
        """Return the seconds per training step of a pre-training run.

        Args:
            stage: The pre-training run.
            length: The sequence length of the second phase, None for the first phase.
        """
        settings = stage.settings["data"] | ({"max_seqlen": length} if length else {})
        data = DataSettings.parse(settings, "the settings of a stage")
        return self._measure_step(_get_model_settings(stage) | {"nsp": data.nsp}, data)

    def _measure_step(
        self,
        model: Mapping[str, Any],
        data: DataSettings,
        features: Mapping[str, Any] | None = None,
    ) -> float:
        """Return the seconds per training step, measured on the first call for a shape.

        Args:
            model: The model settings.
            data: Batch size and sequence length.
            features: The settings of a BiLSTM on top of the model.
        """
        sorted_features = sorted((features or {}).items())
        key = (
            f"{sorted(model.items())} {data.batch_size} {data.max_seqlen} {data.objective} "
            f"{sorted_features}"
        )
        if key not in self._step_seconds:
            config = ModelConfig.parse(model, "the settings of a stage")
            self._step_seconds[key] = measure_step_seconds(config, data, features)
        return self._step_seconds[key]

    def _estimate_finetuning(self, stage: Stage) -> float:
        """Return the duration of fine-tuning in seconds, if all examples had the average length."""
        batch_size = stage.settings["values"]["task"]["batch_size"]
        num_tokens, num_examples = _count_task_file(stage.files["train"])
        num_dev_tokens, _ = _count_task_file(stage.files["dev"])
        config, max_positions = self._get_finetuned_model(stage)
        length = math.ceil(num_tokens / max(num_examples, 1) / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        length = min(max(length, _LENGTH_MULTIPLE), max_positions)
        data = _PROBE_DATA.model_copy(update={"batch_size": batch_size, "max_seqlen": length})
        features = stage.settings["values"].get("features")
        step_seconds = self._measure_step(config, data, features)
        dev_batches = num_dev_tokens / (data.batch_size * data.max_seqlen)
        return (count_training_steps(stage) + _FORWARD_SHARE * dev_batches) * step_seconds

    def _get_finetuned_model(self, stage: Stage) -> tuple[dict[str, Any], int]:
        """Return the settings of the model that is fine-tuned, and its maximum positions."""
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


def _estimate_text_processing(stage: Stage) -> float:
    """Return the seconds of sampling text, learning a vocabulary or building a store."""
    text = stage if stage.kind == "text" else stage.dependencies["text"]
    num_available = sum(estimate_characters(file) for file in text.files.values())
    num_characters = min(text.settings["max_characters"], num_available)
    vocabulary = stage.dependencies.get("vocabulary", stage)
    is_segmented = vocabulary.settings.get("segment")
    speed = _SEGMENTED_CHARACTERS_PER_SECOND if is_segmented else _CHARACTERS_PER_SECOND
    return float(num_characters / speed)


def convert_to_core_hours(seconds: float) -> float:
    """Return the core-hours of a computation that uses all CPU threads of PyTorch."""
    return seconds * torch.get_num_threads() / 3600


def count_training_steps(stage: Stage) -> int:
    """Return the number of training steps of a stage.

    The number is approximate for fine-tuning, and 0 for stages without training.
    """
    if stage.kind != "finetune":
        return int(stage.settings.get("steps", 0))
    values = stage.settings["values"]
    max_examples = values["task"]["max_train_examples"]
    batch_size = int(values["task"]["batch_size"])
    _, num_examples = _count_task_file(stage.files["train"])
    if max_examples is not None:
        num_examples = min(int(max_examples), num_examples)
    steps_per_epoch = math.ceil(num_examples / batch_size)
    return max(1, round(float(values["schedule"]["epochs"]) * steps_per_epoch))


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
    """Return the counts of ``_count_task_file``, computed once per file content."""
    if path.suffix == ".json":
        num_bytes, num_examples = _count_squad(path)
    elif path.suffix == ".txt":
        num_bytes, num_examples = _count_conll(path)
    else:
        content = path.read_bytes()
        # The first line of a TSV file is the header.
        num_bytes = len(content)
        num_examples = len(content.splitlines()) - 1
    return num_bytes / _BYTES_PER_TOKEN, num_examples


def _count_squad(path: Path) -> tuple[int, int]:
    """Return the bytes of all questions with their contexts, and the number of questions."""
    num_bytes = num_questions = 0
    for article in read_squad(path)["data"]:
        for paragraph in article["paragraphs"]:
            num_context_bytes = len(paragraph["context"].encode())
            for question in paragraph["qas"]:
                num_bytes += num_context_bytes + len(question["question"].encode())
                num_questions += 1
    return num_bytes, num_questions


def _count_conll(path: Path) -> tuple[int, int]:
    """Return the bytes of all words with a space each, and the number of sentences."""
    num_bytes = num_sentences = 0
    is_in_sentence = False
    for line in path.read_bytes().splitlines():
        if not line.strip() or line.startswith(b"-DOCSTART-"):
            is_in_sentence = False
            continue
        word, *_ = line.split(maxsplit=1)
        num_bytes += len(word) + 1
        num_sentences += not is_in_sentence
        is_in_sentence = True
    return num_bytes, num_sentences
