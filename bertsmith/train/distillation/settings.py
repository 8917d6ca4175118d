"""Settings of a distillation run; does not import torch."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, model_validator

from bertsmith.bundle.config import is_fine_tuned, read_config
from bertsmith.bundle.directory import MODULES_FILE, locate_model, pin_model_path
from bertsmith.bundle.metadata import read_info
from bertsmith.bundle.mlm_head import check_mlm_head
from bertsmith.data.store import MANIFEST_FILE
from bertsmith.errors import BertsmithError, ModelError, SettingsError
from bertsmith.model.config import SIZES, ModelConfig, get_size_preset
from bertsmith.settings import Settings, SettingsTable, get_table
from bertsmith.tasks.settings import Column
from bertsmith.train.engine.finetuning_overrides import (
    Tables,
    build_run_values,
    check_data_files,
    drop_default,
    drop_default_max_seqlen,
    read_table_overrides,
)
from bertsmith.train.engine.run_directory import check_run_directory
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import CheckpointSettings, FinetuneRunSettings, OptimSettings

ObjectiveName = Literal["embedding", "task", "mlm", "relations", "hidden"]
PositiveInt = Annotated[int, Field(ge=1)]
PositiveFloat = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]

#: Objectives that read the texts of a token store; the others read tables.
_TEXT_OBJECTIVES: Final[tuple[ObjectiveName, ...]] = ("mlm", "relations", "hidden")
#: Default epochs, over tables and over a token store, which is much larger.
_DEFAULT_EPOCHS, _STORE_EPOCHS = 3.0, 1.0
#: Default tokens of a micro-batch on a token store, whose logits or relations need memory.
_STORE_MICRO_BATCH_TOKENS: Final = 2048
#: Default learning rates: of a student that starts from trained weights, and of a random one.
_DEFAULT_LR, _RANDOM_LR = 1e-4, 5e-4
#: Default maximum tokens of a sequence of a token store.
STORE_MAX_SEQLEN: Final = 128
#: Default of the maximum number of relation heads, as for base models in MiniLMv2.
_MAX_RELATION_HEADS: Final = 48
#: Settings that choose the student, of which only one is set.
_STUDENT_CHOICES: Final = ("size", "layers", "student_layers")
#: Default examples per step of each objective.
_BATCH_SIZES: Final[dict[ObjectiveName, int]] = {
    "embedding": 64, "task": 32, "mlm": 32, "relations": 32, "hidden": 32,
}  # fmt: skip
#: Settings that only some objectives use -> these objectives.
_OBJECTIVES_USING: Final[dict[str, tuple[ObjectiveName, ...]]] = {
    "embedding_loss": ("embedding",),
    "projection": ("embedding",),
    "score_column": ("embedding",),
    "max_validation_examples": ("embedding",),
    **dict.fromkeys(("max_train_examples", "label_columns"), ("task",)),
    **dict.fromkeys(("temperature", "hard_weight"), ("task", "mlm")),
    "masking_rate": ("mlm",),
    **dict.fromkeys(("teacher_layer", "relation_heads"), ("relations",)),
    **dict.fromkeys(
        (
            "validation_files",
            "validation_fraction",
            "text_column",
            "pair_column",
            "label_column",
            "encoding",
            "delimiter",
            "skip_invalid",
        ),
        ("embedding", "task"),
    ),
}


class DistillSettings(SettingsTable):
    """Teacher, student, texts and loss of a distillation run."""

    table: ClassVar[str] = "distill"

    #: Model directory of the teacher.
    teacher: str = ""
    #: What the student learns: `embedding` (the vectors of texts), `task` (the outputs of a
    #: fine-tuned teacher), `mlm` (the predictions of its masked-LM head), `relations`
    #: (self-attention relations, MiniLMv2) or `hidden` (hidden states). None: task for a fine-tuned
    #: teacher, embedding for one in sentence-transformers' layout, mlm for one with a masked-LM
    #: head, else relations.
    objective: ObjectiveName | None = None
    #: Size of a student with random weights: tiny, mini, small, medium, base or large.
    size: str | None = None
    #: Number of layers of a student that starts from layers of the teacher, evenly spaced.
    layers: PositiveInt | None = None
    #: Layers of the teacher, from 1, that the layers of the student start from.
    student_layers: list[PositiveInt] = Field(default_factory=list)
    #: Tables or .txt files with the training texts; task: one table, or the folder of a public
    #: task; mlm, relations and hidden: a token store.
    train_files: list[str] = Field(default_factory=list)
    #: Validation tables by name. With run.model_selection = "best", the first one selects the best
    #: checkpoint.
    validation_files: dict[str, str] = Field(default_factory=dict)
    #: Hash of all data files and of the teacher, computed when the run starts.
    fingerprint: str = ""
    #: Column of the text. None: a standard name, or the column of the teacher's training table.
    text_column: Column | None = None
    #: Column of a second text.
    pair_column: Column | None = None
    #: embedding: column of the similarity of two texts in validation tables.
    score_column: Column | None = None
    #: Column of the label; needed for validation and for hard_weight.
    label_column: Column | None = None
    #: task: a column of 0 and 1 for each label of a teacher with several labels per text.
    label_columns: list[Column] = Field(default_factory=list)
    #: task: maximum number of training examples, a random subset; None for all.
    max_train_examples: Annotated[int, Field(ge=2)] | None = None
    #: Fraction of the training texts that is held out if there are no validation files.
    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.1
    #: embedding: maximum number of training texts that are held out.
    max_validation_examples: PositiveInt = 1000
    #: Text encoding of the files.
    encoding: str = "utf-8"
    #: Delimiter of CSV; "": detected.
    delimiter: str = ""
    #: Whether invalid rows are skipped and counted; otherwise an invalid row is an error.
    skip_invalid: bool = False
    #: embedding: `cosine` (1 - cosine similarity with the teacher's vector) or `mse` (squared
    #: error, averaged over the dimensions).
    embedding_loss: Literal["cosine", "mse"] = "cosine"
    #: embedding, if the widths differ: `dense` (a linear layer after pooling; vectors have the
    #: teacher's width) or `pca` (vectors have the student's width, and the targets are principal
    #: components of the teacher's vectors).
    projection: Literal["dense", "pca"] = "dense"
    #: task, mlm: the logits of teacher and student are divided by it (Hinton et al. 2015,
    #: arXiv:1503.02531).
    temperature: PositiveFloat = 2.0
    #: task, mlm: weight of the loss on the labels or the original tokens, from 0 to 1; the loss on
    #: the teacher's outputs has the remaining weight.
    hard_weight: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    #: mlm: share of tokens to predict.
    masking_rate: Annotated[float, Field(gt=0.0, le=1.0)] = 0.15
    #: relations: layer of the teacher, from 1. None: the last one.
    teacher_layer: PositiveInt | None = None
    #: relations: number of relation heads, a divisor of both widths. None: the largest one up to
    #: 48.
    relation_heads: PositiveInt | None = None
    #: Maximum tokens per input. None: that of the teacher, limited by the student; 128 for a token
    #: store.
    max_seqlen: Annotated[int, Field(ge=8)] | None = None
    #: Examples per optimizer step. None: 64 for embedding, else 32.
    batch_size: PositiveInt | None = None

    @model_validator(mode="after")
    def _check_single_student(self) -> Self:
        names = [name for name in _STUDENT_CHOICES if getattr(self, name)]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} both choose the student; give one of them")
        if self.size is not None and self.size not in SIZES:
            raise ValueError(f"size is {self.size!r}; choose one of {', '.join(SIZES)}")
        return self

    def list_files(self) -> list[Path]:
        """Return all data files and folders, and the model directory of the teacher."""
        paths = (*self.train_files, *self.validation_files.values(), self.teacher)
        return [Path(path) for path in paths]


class DistillRunSettings(Settings):
    """All settings of a distillation run, stored in RUN/settings.toml."""

    model: ModelConfig
    distill: DistillSettings = DistillSettings()
    optim: OptimSettings = OptimSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    run: FinetuneRunSettings = FinetuneRunSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()


def read_overrides(
    config: Path | str | None,
    values: Mapping[str, Any] | None,
    assignments: Sequence[str],
    *,
    has_start_model: bool,
) -> dict[str, Any]:
    """Return the user's settings as nested tables, as ``read_table_overrides`` does.

    Args:
        config: The TOML file.
        values: Nested settings.
        assignments: Settings as "section.name=value".
        has_start_model: Whether the student starts from a model (``--from``), which replaces the
            choice of the student in the file.
    """
    drop_defaults = partial(_drop_defaults, has_start_model=has_start_model)
    return read_table_overrides("distill", config, values, assignments, drop_defaults)


def _drop_defaults(
    tables: Tables, user_values: Mapping[str, Any], *, has_start_model: bool
) -> None:
    """Remove the defaults of another run, and its student if the user chooses another one.

    The defaults that depend on the teacher of that run are removed if it still exists.
    """
    distill = tables["distill"]
    stored = DistillSettings.parse(distill, "the settings of the run: distill")
    default_lr = _DEFAULT_LR if stored.size is None else _RANDOM_LR
    drop_default(tables.get("optim", {}), "lr", default_lr)
    if stored.objective is not None:
        drop_default(distill, "batch_size", _BATCH_SIZES[stored.objective])
    new_values = get_table(user_values, "distill")
    if has_start_model or any(new_values.get(name) for name in _STUDENT_CHOICES):
        for name in _STUDENT_CHOICES:
            distill.pop(name, None)
    try:
        directory = locate_model(stored.teacher)
        teacher = read_config(directory, read_info(directory))
    except BertsmithError:
        return
    is_text = stored.objective in _TEXT_OBJECTIVES
    default_max_seqlen = STORE_MAX_SEQLEN if is_text else teacher.max_positions
    drop_default_max_seqlen(tables, "distill", default_max_seqlen)
    drop_default(distill, "teacher_layer", teacher.layers)
    width = tables.get("model", {}).get("width")
    if isinstance(width, int):
        default_heads = get_default_relation_heads(teacher.width, width)
        drop_default(distill, "relation_heads", default_heads)
    layers = distill.get("student_layers", [])
    if 0 < len(layers) <= teacher.layers and layers == choose_layers(teacher.layers, len(layers)):
        distill["layers"] = len(distill.pop("student_layers"))


def get_default_relation_heads(teacher_width: int, student_width: int) -> int:
    """Return the largest number of relation heads up to 48 that divides both widths."""
    common = math.gcd(teacher_width, student_width)
    return max(number for number in range(1, _MAX_RELATION_HEADS + 1) if common % number == 0)


def resolve_settings(
    teacher: Path, data: Sequence[Path], start_from: Path | None, overrides: Mapping[str, Any]
) -> DistillRunSettings:
    """Return the settings of a run that can be resolved without reading its weights and data files.

    The model config is that of the student.

    Args:
        teacher: Model directory of the teacher.
        data: Training files, which replace those of the overrides.
        start_from: Model directory that the student starts from; None if the settings describe it.
        overrides: Settings of the user, as nested tables.

    Raises:
        SettingsError: If a setting is invalid.
        TaskError: If a data file does not exist.
    """
    directory = locate_model(teacher)
    values = build_run_values(
        "distill",
        start_from or directory,
        data,
        overrides,
        lr=_DEFAULT_LR,
        epochs=_DEFAULT_EPOCHS,
    )
    values["distill"] = {**values.get("distill", {}), "teacher": str(directory.resolve())}
    distill = DistillRunSettings.parse(values, "the settings").distill
    check_data_files(distill, distill.list_files())
    objective = distill.objective or _choose_objective(directory)
    _check_teacher(directory, objective)
    if objective in _TEXT_OBJECTIVES:
        _check_store(distill, objective)
        values["run"] = {"micro_batch_tokens": _STORE_MICRO_BATCH_TOKENS, **values["run"]}
        schedule = values["schedule"]
        if "epochs" not in get_table(overrides, "schedule") and schedule.get("steps") is None:
            values["schedule"] = {**schedule, "epochs": _STORE_EPOCHS}
    _reject_unused_settings(objective, values["distill"])
    config = read_config(directory, read_info(directory))
    student_layers = _resolve_student_layers(distill, config.layers, start_from)
    if distill.size is not None:
        sizes = get_size_preset(distill.size)
        values["run"] = {**values["run"], "start_from": ""}
        lr = overrides.get("optim", {}).get("lr", _RANDOM_LR)
        values["optim"] = {**values["optim"], "lr": lr}
    else:
        sizes = {"layers": len(student_layers) or config.layers}
    if start_from is not None:
        start_directory = locate_model(start_from)
        config, sizes = read_config(start_directory, read_info(start_directory)), {}
    model_overrides = {"nsp": False, **sizes, **overrides.get("model", {})}
    values["model"] = config.model_dump() | model_overrides
    values["distill"] |= {
        "objective": objective,
        "layers": None,
        "student_layers": student_layers,
        "batch_size": distill.batch_size or _BATCH_SIZES[objective],
    }
    return DistillRunSettings.parse(values, "the settings")


def _check_store(distill: DistillSettings, objective: ObjectiveName) -> None:
    """Raise SettingsError unless the data are a single token store."""
    file = Path(distill.train_files[-1])
    if len(distill.train_files) > 1 or not (file / MANIFEST_FILE).is_file():
        raise SettingsError(
            f"{file}: the objective {objective} reads a single token store; make one with "
            f"`bertsmith prepare TEXT --tokenizer {distill.teacher} --out STORE`, or give "
            "--objective embedding to learn from a table or lines"
        )


def _choose_objective(teacher: Path) -> ObjectiveName:
    """Return the default objective of a kind of teacher."""
    if is_fine_tuned(teacher):
        return "task"
    if _is_sentence_transformer(teacher):
        return "embedding"
    try:
        check_mlm_head(teacher)
    except ModelError:
        return "relations"
    return "mlm"


def _is_sentence_transformer(directory: Path) -> bool:
    """Return whether a model directory, or its parent, is a sentence-transformers directory."""
    return any((folder / MODULES_FILE).is_file() for folder in (directory, directory.parent))


def _check_teacher(teacher: Path, objective: ObjectiveName) -> None:
    """Check that a teacher has the outputs of an objective.

    Raises:
        SettingsError: If it is not fine-tuned, for the objective ``task``.
        ModelError: If it has no masked-LM head, for the objective ``mlm``.
    """
    if objective == "mlm":
        check_mlm_head(teacher)
    if objective == "task" and not is_fine_tuned(teacher):
        raise SettingsError(
            f"{teacher}: the objective task needs a fine-tuned teacher, but this model has no "
            "task head; fine-tune it with `bertsmith finetune`, or give --objective embedding"
        )


def _reject_unused_settings(objective: ObjectiveName, distill: Mapping[str, Any]) -> None:
    """Raise SettingsError if the user has changed a setting that the objective does not use."""
    for name, objectives in _OBJECTIVES_USING.items():
        default = DistillSettings.model_fields[name].get_default(call_default_factory=True)
        if objective not in objectives and distill.get(name, default) != default:
            raise SettingsError(
                f"distill.{name}: not used by the objective {objective}, only by "
                f"{', '.join(objectives)}; remove it"
            )


def _resolve_student_layers(
    distill: DistillSettings, num_layers: int, start_from: Path | None
) -> list[int]:
    """Return the layers of the teacher that the student starts from; empty for other students.

    Args:
        distill: The settings of the user.
        num_layers: Number of layers of the teacher.
        start_from: Model directory that the student starts from, or None.

    Raises:
        SettingsError: If there is not exactly one choice of a student, or the teacher has fewer
            layers.
    """
    choices = [distill.size, distill.layers, distill.student_layers or None, start_from]
    if sum(choice is not None for choice in choices) != 1:
        problem = "no student" if not any(choices) else "--from and another choice of the student"
        raise SettingsError(f"{problem}: give one of --layers, --student-layers, --size and --from")
    layers = distill.student_layers
    if distill.layers is not None:
        layers = choose_layers(num_layers, distill.layers)
    if layers and max(layers) > num_layers:
        raise SettingsError(
            f"distill.student_layers has {max(layers)}, but the teacher has {num_layers} layers; "
            "give numbers from 1 to that"
        )
    return list(layers)


def choose_layers(num_teacher_layers: int, num_layers: int) -> list[int]:
    """Return evenly spaced layers of the teacher, from 1: the first, the last, and some between.

    A single layer is the first one.

    Raises:
        SettingsError: If the teacher has fewer layers.
    """
    if num_layers > num_teacher_layers:
        raise SettingsError(
            f"distill.layers is {num_layers}, but the teacher has {num_teacher_layers} layers; "
            "give at most that many"
        )
    num_gaps = max(num_layers - 1, 1)
    # Halves are rounded up.
    return [
        1 + (2 * index * (num_teacher_layers - 1) + num_gaps) // (2 * num_gaps)
        for index in range(num_layers)
    ]


def check_arguments(
    teacher: Path,
    data: Sequence[Path],
    start_from: Path | None,
    out: Path,
    config: Path | str | None,
    assignments: Sequence[str],
    values: Mapping[str, Any],
) -> DistillRunSettings:
    """Check the arguments of ``distill`` without importing torch, and return the settings.

    Raises:
        BertsmithError: If ``distill`` would reject these arguments.
    """
    check_run_directory(out)
    has_start_model = start_from is not None
    overrides = read_overrides(config, values, assignments, has_start_model=has_start_model)
    if start_from is not None:
        locate_model(start_from)
        start_from = pin_model_path(start_from)
    return resolve_settings(pin_model_path(teacher), data, start_from, overrides)


def check_is_comparable(settings: DistillRunSettings) -> None:
    """Raise SettingsError if a run has no score, or its student cannot learn without a teacher."""
    distill = settings.distill
    if distill.objective in _TEXT_OBJECTIVES:
        raise SettingsError(
            f"--compare: a student of the objective {distill.objective} has no task; compare it "
            "with `bertsmith lab panel`"
        )
    # The folder of a public task has a validation table.
    if not distill.validation_files and not any(map(Path.is_dir, map(Path, distill.train_files))):
        raise SettingsError("--compare needs a validation table: give --dev FILE")
    if distill.objective == "embedding" and distill.batch_size == 1:
        raise SettingsError(
            "--compare: distill.batch_size is 1, but the student without a teacher learns by "
            "comparing texts; give --batch-size 2 or more"
        )
