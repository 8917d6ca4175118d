"""Distillation of a fine-tuned teacher: models, examples, and the teacher's outputs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bertsmith.bundle import (
    FineTunedBundle,
    HeadConfig,
    load_fine_tuned,
    load_for_fine_tuning,
    locate_model,
    save_fine_tuned,
)
from bertsmith.bundle.metadata import get_recorded_task, read_max_seqlen
from bertsmith.errors import SettingsError, TaskError
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.task_models import TaskModel
from bertsmith.progress import Progress
from bertsmith.runtime.device import Machine
from bertsmith.settings import get_table
from bertsmith.tasks.embedding_settings import TextColumns
from bertsmith.tasks.families import get_family, get_task_settings
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs, TaskMicroBatch
from bertsmith.tasks.metrics import LOWER_IS_BETTER
from bertsmith.tasks.outputs import compute_outputs
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.reranking_data import resolve_reranking_columns
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.tasks.settings import TaskSettings, get_default_max_seqlen, get_family_name
from bertsmith.train.distillation.losses import output_losses
from bertsmith.train.distillation.settings import DistillRunSettings, DistillSettings
from bertsmith.train.distillation.student import check_same_tokenizer, copy_teacher_weights
from bertsmith.train.distillation.teacher_cache import cache_outputs
from bertsmith.train.engine.provenance import remove_directories
from bertsmith.train.finetuning.objective import FinetuningObjective, encode_task_data
from bertsmith.train.finetuning.task_data import TaskData, read_task_data

#: Kinds of tasks whose teachers can be distilled.
_SUPPORTED_KINDS = ("single", "multi", "regression", "entities", "tags")


def resolve_task(distill: DistillSettings, teacher: FineTunedBundle) -> TaskSettings:
    """Return the settings of the teacher's task with the files and columns of this run.

    Raises:
        SettingsError: If the teacher's task cannot be distilled, or the files do not suit it.
    """
    if teacher.head.kind not in _SUPPORTED_KINDS:
        raise SettingsError(
            f"{teacher.path}: a teacher of the kind {teacher.head.kind!r} cannot be distilled on "
            f"its task; supported are {', '.join(_SUPPORTED_KINDS)}"
        )
    if len(distill.train_files) > 1:
        raise SettingsError(
            f"--data was given {len(distill.train_files)} times, but the objective task takes one "
            "file; join the files"
        )
    recorded_name = get_recorded_task(teacher.info).get("name")
    name = recorded_name or get_family_name(teacher.head.kind)
    data = Path(distill.train_files[0])
    files: dict[str, Any] = {
        "train_file": str(data), "validation_files": dict(distill.validation_files)
    }  # fmt: skip
    if data.is_dir():
        if name not in PUBLIC_TASKS:
            raise SettingsError(
                f"{data}: this is a folder, but the teacher's task ({name}) is not a public task; "
                "give --data FILE"
            )
        files = PUBLIC_TASKS[name].resolve_settings(data)
        if distill.validation_files:
            files["validation_files"] = dict(distill.validation_files)
    fields = ("text_column", "pair_column", "label_column", "label_columns")
    values = {field: getattr(distill, field) for field in fields}
    columns = {field: value for field, value in values.items() if value not in (None, [])}
    if not columns and teacher.info.get("task") == "rerank":
        columns = _find_reranking_columns(data, distill, teacher)
    # The other settings are those with which the teacher was fine-tuned.
    changes = {
        "name": name,
        "fingerprint": "",
        "max_train_examples": distill.max_train_examples,
        "validation_fraction": distill.validation_fraction,
        "validation_fold": 0,
        "encoding": distill.encoding,
        "delimiter": distill.delimiter,
        "skip_invalid": distill.skip_invalid,
        "class_weights": "none",
        "batch_size": distill.batch_size,
    }
    return get_task_settings(teacher, {**changes, **files, **columns})


def _find_reranking_columns(
    path: Path, distill: DistillSettings, teacher: FineTunedBundle
) -> dict[str, str]:
    """Return the columns of a reranker's table, as names of ``TaskSettings``.

    These are the columns of the teacher's training table, or standard names. Without either, the
    result is empty.
    """
    reading = {name: getattr(distill, name) for name in ("encoding", "delimiter", "skip_invalid")}
    settings = RerankingSettings.parse(reading, "the settings")
    recorded = get_table(get_table(teacher.info, "provenance"), "reranking").get("columns", {})
    teacher_columns = TextColumns.parse(recorded, "the teacher")
    try:
        columns = resolve_reranking_columns(path, settings, TextColumns(), teacher_columns)
    except TaskError:
        # Reading the examples reports what is wrong, with the options of `distill`.
        return {}
    fields = {"text_column": columns.text, "pair_column": columns.pair}
    fields["label_column"] = columns.score
    return {field: name for field, name in fields.items() if name is not None}


@dataclass(frozen=True)
class TaskDistillation:
    """The models and examples of a run with the objective ``task``.

    Attributes:
        teacher: The fine-tuned teacher.
        student: The student.
        settings: Settings of the run.
        task: Settings of the task.
        data: Training and held-out examples.
    """

    teacher: FineTunedBundle
    student: FineTunedBundle
    settings: DistillRunSettings
    task: TaskSettings
    data: TaskData

    @classmethod
    def load(cls, settings: DistillRunSettings, *, reads_data: bool = True) -> "TaskDistillation":
        """Load the teacher, build the student, and read the examples.

        Args:
            settings: Settings of the run.
            reads_data: Whether to read the examples; without them, the student can only be saved.

        Raises:
            BertsmithError: If a model or file is invalid, or the student does not suit the teacher.
        """
        distill = settings.distill
        teacher = load_fine_tuned(distill.teacher)
        task = resolve_task(distill, teacher)
        max_positions = min(settings.model.max_positions, teacher.config.max_positions)
        recorded_max_seqlen = task.max_seqlen or get_default_max_seqlen(task.kind)
        max_seqlen = distill.max_seqlen or min(recorded_max_seqlen, max_positions)
        teacher.config.check_max_seqlen("distill.max_seqlen", max_seqlen, "the teacher")
        settings.model.check_max_seqlen("distill.max_seqlen", max_seqlen, "the student")
        task = task.model_copy(update={"max_seqlen": max_seqlen})
        settings = settings.model_copy(
            update={"distill": distill.model_copy(update={"max_seqlen": max_seqlen})}
        )
        # With validation files and without a loss on labels, the training table needs no labels.
        needs_labels = distill.hard_weight > 0 or not task.validation_files
        data = TaskData([], {}, {})
        if reads_data:
            data = read_task_data(task, labeled=needs_labels)
        student = build_student(teacher, settings)
        return cls(teacher, student, settings, task, data)

    @property
    def model(self) -> TaskModel:
        """The student."""
        return self.student.model

    @property
    def counts(self) -> dict[str, ExampleCounts]:
        """For each file, how many examples were read and skipped."""
        return self.data.counts

    @property
    def batch_tokens(self) -> int:
        """Upper bound of the number of tokens per step."""
        assert self.task.max_seqlen is not None
        return min(self.task.batch_size, len(self.data.train)) * self.task.max_seqlen

    @property
    def metric_names(self) -> list[str]:
        """Names of the metrics; the first one selects the best epoch."""
        return self.task.metrics

    @property
    def higher_is_better(self) -> bool:
        """Whether a higher value of the first metric is better."""
        return self.task.metrics[0] not in LOWER_IS_BETTER

    def describe(self) -> str:
        """Return a description of the data and the loss."""
        distill = self.settings.distill
        loss = f"outputs of the teacher at temperature {distill.temperature:g}"
        if self.task.kind == "regression":
            loss = "squared error of the teacher's outputs"
        if distill.hard_weight:
            loss += f", labels with weight {distill.hard_weight:g}"
        return f"{len(self.data.train):,} training examples, {loss}"

    def build_objective(
        self, run: Path, machine: Machine, progress: Progress
    ) -> "TaskDistillationObjective":
        """Compute or open the teacher's outputs, and return the objective of the training loop."""
        head = self.teacher.head
        train, heldout = encode_task_data(self.data, self.task, head, self.teacher.tokenizer)
        distill = self.settings.distill
        outputs = None
        if distill.hard_weight < 1:
            outputs = _TeacherOutputs.compute(self, train, run, machine, progress)
        if train.targets is None:
            assert outputs is not None
            # The teacher's outputs are the only targets.
            targets = [outputs.get_rows([index]) for index in range(len(train))]
            train = replace(train, targets=targets)
        settings = self.settings
        objective = FinetuningObjective(
            self.model,
            head,
            self.task,
            train,
            heldout,
            machine,
            micro_batch_tokens=settings.run.micro_batch_tokens,
            seed=settings.run.seed,
        )
        return TaskDistillationObjective(
            objective, outputs, head, machine, distill.temperature, distill.hard_weight,
        )  # fmt: skip

    def save(self, directory: Path, info: Mapping[str, Any]) -> None:
        """Write the student as a fine-tuned model directory."""
        info = {**info, "task": self.teacher.info.get("task", self.task.name)}
        # Inference and `evaluate` read the settings of the task there.
        task = remove_directories(self.task.model_dump(mode="json"))
        info["provenance"] = {**info["provenance"], "task": task}
        student = self.student
        # As for `finetune rerank`, other toolkits read the maximum length of a CrossEncoder there.
        max_seqlen = self.task.max_seqlen if self.task.kind == "regression" else None
        save_fine_tuned(
            directory, student.model, student.tokenizer, student.head, info, max_seqlen=max_seqlen
        )


def list_data_files(distill: DistillSettings) -> list[Path]:
    """Return all data files of a run, also those in the folder of a public task."""
    return resolve_task(distill, load_fine_tuned(distill.teacher)).list_files()


@dataclass(frozen=True)
class _TeacherOutputs:
    """The teacher's outputs for the training inputs.

    Attributes:
        rows: float16 or float32 [number of rows, C], memory-mapped.
        offsets: int64 [number of inputs + 1], the first row of each input.
    """

    rows: NDArray[np.floating[Any]]
    offsets: NDArray[np.int64]

    @classmethod
    def compute(
        cls,
        distillation: TaskDistillation,
        inputs: ModelInputs,
        run: Path,
        machine: Machine,
        progress: Progress,
    ) -> "_TeacherOutputs":
        """Compute the outputs, or open those in the cache of the run."""
        teacher = distillation.teacher.model.to(machine.device)
        teacher.bert.kernel = machine.kernel
        row_counts = [1] * len(inputs)
        if inputs.token_indices is not None:
            row_counts = list(map(len, inputs.token_indices))
        offsets = np.concatenate([[0], np.cumsum(row_counts)]).astype(np.int64)

        def compute_rows(start: int, end: int) -> NDArray[np.float32]:
            # Chunks of rows start and end within inputs.
            first = int(np.searchsorted(offsets, start, "right")) - 1
            last = int(np.searchsorted(offsets, end, "left"))
            outputs = compute_outputs(teacher, inputs.select(range(first, last)), machine.autocast)
            rows = np.concatenate(outputs)
            return rows[start - offsets[first] : end - offsets[first]]

        num_outputs = distillation.teacher.head.num_outputs
        fingerprint = distillation.settings.distill.fingerprint
        rows = cache_outputs(
            run, int(offsets[-1]), num_outputs, fingerprint, compute_rows, progress,
            np.float32 if distillation.teacher.head.kind == "regression" else np.float16,
        )  # fmt: skip
        teacher.cpu()
        return cls(rows, offsets)

    def get_rows(self, indices: list[int]) -> NDArray[np.float32]:
        """Return the outputs of some inputs, float32 [M, C]."""
        parts = [self.rows[self.offsets[index] : self.offsets[index + 1]] for index in indices]
        return np.concatenate(parts).astype(np.float32)

    def count_rows(self, indices: list[int]) -> int:
        """Return the number of rows of some inputs."""
        return int((self.offsets[1:] - self.offsets[:-1])[indices].sum())


class TaskDistillationObjective:
    """Implements ``Objective``: outputs are compared with those of the teacher, and with labels."""

    def __init__(
        self,
        objective: FinetuningObjective,
        teacher_outputs: _TeacherOutputs | None,
        head: HeadConfig,
        machine: Machine,
        temperature: float,
        hard_weight: float,
    ) -> None:
        """Create the objective.

        Args:
            objective: Batches and held-out metrics of the task.
            teacher_outputs: The teacher's outputs for the training inputs; None if the labels have
                all the weight.
            head: Kind of the task and its labels.
            machine: Device and precision.
            temperature: Divides the logits.
            hard_weight: Weight of the loss on the labels.
        """
        self._objective = objective
        self._teacher_outputs = teacher_outputs
        self._head = head
        self._machine = machine
        self._temperature = temperature
        self._hard_weight = hard_weight
        self.steps_per_epoch = objective.steps_per_epoch
        self.data_state = objective.data_state
        self.iter_batches = objective.iter_batches
        self.describe_batch = objective.describe_batch
        self.count_tokens = objective.count_tokens
        self.count_macs = objective.count_macs
        self.evaluate = objective.evaluate

    def compute_losses(
        self,
        micro_batch: TaskMicroBatch,
        micro_batches: list[TaskMicroBatch],
        dropout_seed: DropoutSeed,
    ) -> dict[str, Tensor]:
        """Return the contribution of a micro-batch to the mean losses of its batch.

        ``soft_loss`` compares with the teacher and ``hard_loss`` with the labels. Each is
        multiplied by its weight.
        """
        with self._machine.autocast():
            outputs = self._objective.model(
                micro_batch.packed, micro_batch.token_indices, dropout_seed
            )
        outputs = outputs.float()
        losses: dict[str, Tensor] = {}
        if self._teacher_outputs is not None:
            teacher = torch.from_numpy(self._teacher_outputs.get_rows(micro_batch.input_indices))
            soft = output_losses(
                outputs, teacher.to(outputs.device), self._head.kind, self._temperature
            )
            num_rows = sum(
                self._teacher_outputs.count_rows(batch.input_indices) for batch in micro_batches
            )
            losses["soft_loss"] = (1 - self._hard_weight) * soft.sum() / num_rows
        if self._hard_weight > 0:
            hard = get_family(self._head.kind).compute_losses(outputs, micro_batch, self._head)
            num_targets = sum(len(batch.targets) for batch in micro_batches)
            losses["hard_loss"] = self._hard_weight * hard.sum() / num_targets
        return losses


def build_student(teacher: FineTunedBundle, settings: DistillRunSettings) -> FineTunedBundle:
    """Return the student at the start of a run, drawn from PyTorch's default generator.

    The output layer and the pooler of a student of the teacher's width start from the teacher's.

    Raises:
        ModelError: If the start model cannot be loaded, or has another tokenizer.
    """
    distill = settings.distill
    if distill.size is None and not distill.student_layers:
        path = locate_model(settings.run.start_from)
        dropout_rates = settings.model.get_dropout_rates()
        student = load_for_fine_tuning(path, teacher.head, dropout_rates, keep_head=True)
        check_same_tokenizer(teacher.tokenizer, student.tokenizer, path)
        return student
    model = teacher.head.build_model(settings.model)
    if distill.student_layers:
        # The output layer of a teacher with a BiLSTM reads the outputs of the BiLSTM.
        has_bilstm = isinstance(teacher.model, BertWithBiLSTM)
        source = teacher.model.bert if has_bilstm else teacher.model
        target = model.bert if has_bilstm else model
        copy_teacher_weights(target, source, distill.student_layers)
    return FineTunedBundle(
        model.eval(), teacher.tokenizer, settings.model, teacher.head, teacher.path,
        max_seqlen=read_max_seqlen(teacher.path, settings.model),
    )  # fmt: skip
