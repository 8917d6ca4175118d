"""Estimates how long the cells of a panel take, from short measurements on this machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bertsmith.bundle import HeadConfig
from bertsmith.data.settings import DataSettings
from bertsmith.lab.panel.cells import PanelOptions
from bertsmith.lab.panel.held_out import sample_sentences
from bertsmith.lab.panel.models import PanelModel
from bertsmith.lab.panel.tasks import BATCH_SIZE, PanelTask
from bertsmith.lab.probe import measure_forward_seconds, measure_step_seconds
from bertsmith.model.config import ModelConfig
from bertsmith.tasks.families import get_family
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import TaskSettings, get_default_max_seqlen
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.minimal_pairs import read_sentences

#: Sequence lengths are rounded up to a multiple of this, so that tasks share measurements.
_LENGTH_MULTIPLE = 16
#: Examples that are tokenized to measure the mean length.
_NUM_SAMPLED = 500
#: The frozen probe encodes all texts once for each pooling.
_NUM_POOLINGS = 2
#: Duration of the two logistic regressions of the frozen probe, in seconds.
_REGRESSION_SECONDS = 20.0


class Workload(NamedTuple):
    """The work of a cell.

    Attributes:
        num_steps: Training steps.
        train_tokens: Tokens of all training steps together.
        forward_tokens: Tokens of all forward passes without training.
        length: Mean tokens per sequence.
        other_seconds: Duration of other computations.
    """

    num_steps: int
    train_tokens: float
    forward_tokens: float
    length: float
    other_seconds: float = 0.0


@dataclass
class PanelCostEstimator:
    """Estimates the duration of cells. Equal shapes and files are measured only once."""

    options: PanelOptions
    _step_seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    _forward_seconds: dict[tuple[str, int], float] = field(default_factory=dict)
    _workloads: dict[tuple[str, str, int], Workload] = field(default_factory=dict)

    def estimate_seconds(
        self, model: PanelModel, task: PanelTask, files: Mapping[str, Path]
    ) -> float:
        """Return the estimated duration of a cell in seconds."""
        work = self._get_workload(model, task, files)
        length = math.ceil(work.length / _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        length = min(max(length, _LENGTH_MULTIPLE), model.config.max_positions)
        seconds = work.other_seconds
        if work.forward_tokens:
            seconds += work.forward_tokens * self._measure_forward(model.config, length)
        if work.train_tokens:
            # A step is measured with sequences of the rounded mean length.
            tokens_per_step = work.train_tokens / work.num_steps
            step_seconds = self._measure_step(model.config, length)
            seconds += work.num_steps * step_seconds * tokens_per_step / (BATCH_SIZE * length)
        return seconds

    def _get_workload(
        self, model: PanelModel, task: PanelTask, files: Mapping[str, Path]
    ) -> Workload:
        key = (task.name, model.tokenizer.hash, model.config.max_positions)
        if key not in self._workloads:
            paths = list(files.values())
            if task.evaluation == "held-out":
                sentences = sample_sentences(paths, self.options.num_sentences)
                self._workloads[key] = count_pll_work(model.tokenizer, sentences, ["within-word"])
            elif task.evaluation == "minimal-pairs":
                max_pairs = self.options.max_pairs
                sentences = [text for path in paths for text in read_sentences(path, max_pairs)]
                self._workloads[key] = count_pll_work(
                    model.tokenizer, sentences, ["original", "within-word"]
                )
            else:
                self._workloads[key] = _count_task_work(model, task, files)
        return self._workloads[key]

    def _measure_step(self, config: ModelConfig, length: int) -> float:
        """Return the seconds of a fine-tuning step with sequences of ``length`` tokens."""
        key = (config.model_copy(update={"nsp": False}).model_dump_json(), length)
        if key not in self._step_seconds:
            data = DataSettings(batch_size=BATCH_SIZE, max_seqlen=length)
            self._step_seconds[key] = measure_step_seconds(config, data, is_classification=True)
        return self._step_seconds[key]

    def _measure_forward(self, config: ModelConfig, length: int) -> float:
        """Return the seconds of a forward pass for a token of sequences of ``length`` tokens."""
        key = (config.model_copy(update={"nsp": False}).model_dump_json(), length)
        if key not in self._forward_seconds:
            self._forward_seconds[key] = measure_forward_seconds(config, length)
        return self._forward_seconds[key]


def count_pll_work(
    tokenizer: Tokenizer, sentences: Sequence[str], variants: Sequence[str]
) -> Workload:
    """Return the work of computing PLLs: a copy of the sentence for each token and variant.

    Variants share the copies of tokens that do not continue in the next token.
    """
    num_copy_tokens = num_copies = 0
    for ids in tokenizer.encode_batch(list(dict.fromkeys(sentences))):
        copies = len(ids)
        if len(variants) > 1:
            copies += int(np.count_nonzero(tokenizer.is_continuation[ids[1:]]))
        num_copies += copies
        num_copy_tokens += copies * (len(ids) + 2)
    return Workload(0, 0.0, num_copy_tokens, num_copy_tokens / max(num_copies, 1))


def _count_task_work(model: PanelModel, task: PanelTask, files: Mapping[str, Path]) -> Workload:
    """Return the work of fine-tuning on a task or of the frozen probe."""
    num_train, train_length = _measure_lengths(model, task, files["train"])
    num_dev, dev_length = _measure_lengths(model, task, files["dev"])
    if task.max_train_examples is not None:
        num_train = min(num_train, task.max_train_examples)
    train_tokens, dev_tokens = num_train * train_length, num_dev * dev_length
    if task.evaluation == "probe":
        forward_tokens = _NUM_POOLINGS * (train_tokens + dev_tokens)
        return Workload(0, 0.0, forward_tokens, train_length, _REGRESSION_SECONDS)
    num_steps = max(1, round(task.epochs * math.ceil(num_train / BATCH_SIZE)))
    return Workload(num_steps, task.epochs * train_tokens, dev_tokens, train_length)


def _measure_lengths(model: PanelModel, task: PanelTask, file: Path) -> tuple[int, float]:
    """Return the number of examples of a file, and the mean number of tokens of a sample."""
    fixed_settings = PUBLIC_TASKS[task.public_task].fixed_settings
    values = {**fixed_settings, "name": task.public_task}
    default_max_seqlen = get_default_max_seqlen(fixed_settings["kind"])
    values["max_seqlen"] = min(default_max_seqlen, model.config.max_positions)
    settings = TaskSettings.parse(values, "the task")
    family = get_family(settings.kind)
    examples, counts = family.read_examples(file, settings)
    labels = tuple(settings.labels) or family.collect_labels(examples, str(file))
    step = max(1, len(examples) // _NUM_SAMPLED)
    head = HeadConfig(settings.kind, labels)
    inputs = family.encode_examples(examples[::step], model.tokenizer, head, settings, counts)
    num_tokens = sum(inputs.count_tokens(index) for index in range(len(inputs)))
    return len(examples), num_tokens / max(len(inputs), 1)
