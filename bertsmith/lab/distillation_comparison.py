"""The table of a distillation run: teacher, student, and the same student without a teacher.

Each model also has a row for its fast mode, which converts the weights to 8 or 16 bits when the
model is loaded.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from bertsmith.bundle import FineTunedBundle, load_fine_tuned, locate_model
from bertsmith.bundle.directory import WEIGHT_FILES
from bertsmith.errors import SettingsError, StoppedError, TaskError
from bertsmith.interop.sentence_transformers import read_pooling
from bertsmith.model.bert import BertModel, count_parameters
from bertsmith.progress import Progress
from bertsmith.settings import read_stored_settings
from bertsmith.tasks.beir import find_qrels, is_beir_folder
from bertsmith.tasks.embedding_columns import has_columns, read_first_row, resolve_columns
from bertsmith.tasks.embedding_settings import EmbeddingSettings, TextColumns
from bertsmith.tasks.families import get_family, get_task_settings
from bertsmith.tasks.outputs import compute_outputs
from bertsmith.train.distillation.distill import distill, load_distillation
from bertsmith.train.distillation.embedding_distillation import (
    build_embedding_settings,
    get_training_columns,
    read_texts,
)
from bertsmith.train.distillation.settings import (
    DistillRunSettings,
    DistillSettings,
    check_is_comparable,
)
from bertsmith.train.distillation.task_distillation import resolve_task
from bertsmith.train.embedding.finetune import finetune_embedder
from bertsmith.train.embedding.training_data import HELDOUT_SPLITS, get_text_prompts
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.use.embed import Embedder
from bertsmith.use.evaluate import evaluate
from bertsmith.use.evaluate_embeddings import build_tokenize_function, evaluate_embeddings
from bertsmith.use.model_setup import set_up_model
from bertsmith.use.quantization import choose_16_bit_dtype
from bertsmith.use.vector_settings import VectorSettings

#: Texts whose encoding is timed, and number of repetitions; the fastest counts.
_MAX_TIMED_TEXTS, _NUM_REPETITIONS = 256, 3
#: Suffixes of the directories of the student without a teacher, and of its initial model.
BASELINE_SUFFIX: Final = "-without-teacher"
#: The initial student, in the run directory.
_INITIAL_STUDENT_DIR: Final = "initial-student"


@dataclass(frozen=True)
class ComparisonRow:
    """One model in one precision.

    Attributes:
        model: Name of the model.
        precision: "fp32", or that of the fast mode: "int8" or "bf16".
        num_parameters: Number of parameters.
        num_bytes: Size of the weight files. The fast mode has no files of its own.
        texts_per_second: Tokenized texts per second on the CPU.
        metric: Name of the score.
        score: Score on the validation file.
    """

    model: str
    precision: str
    num_parameters: int
    num_bytes: int
    texts_per_second: float
    metric: str
    score: float


def compare_distilled(
    run: Path, progress: Progress, clock: Callable[[], float] = time.perf_counter
) -> list[ComparisonRow]:
    """Train the student of a finished run without its teacher, and compare all models.

    The student without a teacher starts from the same weights and has the same data and number of
    epochs. An embedding student is trained as by ``finetune_embedder``, a task student on the
    labels. It is in RUN-without-teacher; if the training data have no labels, it is left out.

    Args:
        run: The run directory.
        progress: Receives log messages and progress.
        clock: Returns the time in seconds.

    Raises:
        StoppedError: If a signal stopped the training without the teacher.
        BertsmithError: If the run has no score, or a file is invalid.
    """
    path = run / SETTINGS_FILE
    settings = DistillRunSettings.parse(read_stored_settings(path), str(path))
    check_is_comparable(settings)
    check_validation_table(settings)
    models = {"teacher": Path(settings.distill.teacher), "student": run}
    is_embedding = settings.distill.objective == "embedding"
    train = _train_embedder_without_teacher if is_embedding else _train_task_without_teacher
    try:
        result = train(run, settings, progress)
    except TaskError as error:
        progress.log(f"the student without a teacher is left out: {error}")
    else:
        if result.signal is not None:
            raise StoppedError(result.signal)
        models["student without teacher"] = result.run
    measure = _measure_embedder if is_embedding else _measure_task_model
    has_bf16 = choose_16_bit_dtype(torch.device("cpu")) is not None
    precisions = {"fp32": False, "bf16" if has_bf16 else "int8": True}
    rows = []
    for name, model in models.items():
        for precision, fast in precisions.items():
            progress.log(f"measuring {name}, {precision}")
            values = measure(model, settings, clock, fast=fast)
            rows.append(
                ComparisonRow(
                    model=name, precision=precision, num_bytes=_count_file_bytes(model), **values
                )
            )
    return rows


def check_validation_table(settings: DistillRunSettings) -> None:
    """Raise SettingsError if models cannot be compared on the first validation table of a run.

    Unlabeled texts have no metric that does not depend on training.
    """
    file = Path(next(iter(settings.distill.validation_files.values()), ""))
    if settings.distill.objective != "embedding" or is_beir_folder(file):
        return
    reading = build_embedding_settings(settings.distill)
    if resolve_columns(file, reading, reading.validation_columns).kind == "texts":
        raise SettingsError(
            f"--compare: {file} has texts without a pair, score or label, which have no metric; "
            "give --dev another table, or name its columns with --pair, --score or --label"
        )


def _train_task_without_teacher(
    run: Path, settings: DistillRunSettings, progress: Progress
) -> FinetuneResult:
    """Train the student on the labels only."""
    return distill(
        settings.distill.teacher,
        _get_sibling(run, BASELINE_SUFFIX),
        start_from=_get_start_model(settings),
        config=run / SETTINGS_FILE,
        values={"distill": {"hard_weight": 1.0}},
        progress=progress,
    )


def _train_embedder_without_teacher(
    run: Path, settings: DistillRunSettings, progress: Progress
) -> FinetuneResult:
    """Train the initial student on the same data as an embedding model without a teacher."""
    start = run / _INITIAL_STUDENT_DIR
    load_distillation(settings, reads_data=False).save(start, {})
    return finetune_embedder(
        start,
        _get_sibling(run, BASELINE_SUFFIX),
        data=settings.distill.train_files,
        values=build_baseline_values(settings),
        progress=progress,
    )


def build_baseline_values(settings: DistillRunSettings) -> dict[str, Any]:
    """Return the settings with which the student of a run is trained without its teacher.

    The device, the number of epochs and the selection of weights are those of the run, too.
    """
    distilled = settings.distill
    reading = build_embedding_settings(distilled)
    names = {"validation_files", "encoding", "delimiter", "skip_invalid", "validation_columns"}
    schedule = settings.schedule.model_dump(exclude_none=True)
    if "epochs" in schedule:
        del schedule["steps"]
    return {
        "embedding": {
            "columns": _find_training_columns(distilled, reading).model_dump(),
            "batch_size": distilled.batch_size,
            "max_seqlen": distilled.max_seqlen,
            **reading.model_dump(include=names),
        },
        "model": settings.model.get_dropout_rates(),
        "optim": settings.optim.model_dump(),
        "schedule": schedule,
        "run": settings.run.model_dump(exclude={"start_from", "start_id", "world_size"}),
    }


def _find_training_columns(distill: DistillSettings, reading: EmbeddingSettings) -> TextColumns:
    """Return the named columns of the training tables, also those of scores or labels.

    ``score_column`` and ``label_column`` describe validation tables. The training tables may have
    them too, and pairs with low scores are no positives.
    """
    file = Path(distill.train_files[0])
    if not get_training_columns(file, reading).list_columns():
        return TextColumns()
    columns = reading.validation_columns
    first_row = read_first_row(file, reading, columns)
    has_all = first_row is not None and has_columns(first_row, columns)
    return columns if has_all else reading.columns


def _get_sibling(run: Path, suffix: str) -> Path:
    """Return the directory next to a run with a suffix added to its name."""
    run = run.resolve()
    return run.with_name(run.name + suffix)


def _get_start_model(settings: DistillRunSettings) -> Path | None:
    """Return the model given by --from; None if layers or a size describe the student."""
    if settings.distill.size is not None or settings.distill.student_layers:
        return None
    return Path(settings.run.start_from)


def _count_file_bytes(model: Path) -> int:
    """Return the size of the weight files of a model, with those of its Dense modules."""
    directory = locate_model(model)
    files = [directory / name for name in WEIGHT_FILES if (directory / name).is_file()][:1]
    if files and files[0].name.endswith(".index.json"):
        files = [*directory.glob(f"{files[0].name.partition('.')[0]}-*")]
    return sum(file.stat().st_size for file in [*files, *directory.glob("*_Dense/*.safetensors")])


def _time_texts(encode: Callable[[], object], num_texts: int, clock: Callable[[], float]) -> float:
    """Return the texts per second of the fastest repetition; a first one is not timed."""
    encode()
    durations = []
    for _ in range(_NUM_REPETITIONS):
        start = clock()
        encode()
        durations.append(clock() - start)
    return num_texts / min(durations)


def _measure_task_model(
    model: Path, settings: DistillRunSettings, clock: Callable[[], float], *, fast: bool
) -> dict[str, Any]:
    """Return the parameters, speed and score of a fine-tuned model."""
    bundle: FineTunedBundle = load_fine_tuned(model)
    num_parameters = count_parameters(bundle.model)
    task = resolve_task(settings.distill, bundle)
    task = task.model_copy(update={"max_seqlen": settings.distill.max_seqlen})
    file = Path(next(iter(task.validation_files.values())))
    columns = ("text_column", "pair_column", "label_column", "label_columns", "label_separator")
    names = (*columns, "header", "delimiter", "encoding", "max_seqlen", "skip_invalid", "metrics")
    changes = {name: getattr(task, name) for name in names}
    bundle = set_up_model(bundle, fast=fast)
    metrics = evaluate(bundle, file, changes=changes)
    task = get_task_settings(bundle, changes)
    family = get_family(task.kind)
    examples, counts = family.read_examples(file, task, labels=bundle.head.labels or None)
    examples = examples[:_MAX_TIMED_TEXTS]
    inputs = family.encode_examples(examples, bundle.tokenizer, bundle.head, task, counts)
    return {
        "num_parameters": num_parameters,
        "texts_per_second": _time_texts(
            lambda: compute_outputs(bundle.model, inputs), len(examples), clock
        ),
        "metric": task.metrics[0],
        "score": metrics[task.metrics[0]],
    }


def _measure_embedder(
    model: Path, settings: DistillRunSettings, clock: Callable[[], float], *, fast: bool
) -> dict[str, Any]:
    """Return the parameters, speed and score of an embedding model."""
    embedder = Embedder.load(model)
    pooling = read_pooling(embedder.path)
    assert isinstance(embedder.encoder, BertModel)
    num_parameters = count_parameters(embedder.encoder)
    for module in () if pooling is None else pooling.post_modules:
        if not isinstance(module, str):
            num_parameters += module.weight.numel()
            num_parameters += 0 if module.bias is None else module.bias.numel()
    embedder = Embedder.load(model, fast=fast)
    reading = build_embedding_settings(settings.distill)
    validation = reading.model_copy(update={"columns": reading.validation_columns})
    file = Path(next(iter(settings.distill.validation_files.values())))
    split = find_qrels(file, HELDOUT_SPLITS).stem if is_beir_folder(file) else "test"
    metrics = evaluate_embeddings(embedder, file, settings=validation, split=split)
    (metric, score), *_ = metrics.items()
    text_file = Path(settings.distill.train_files[0]) if is_beir_folder(file) else file
    text_settings = reading if is_beir_folder(file) else validation
    prompts = get_text_prompts(embedder.text_config)
    tokenize = build_tokenize_function(embedder)
    texts, _ = read_texts([text_file], text_settings, tokenize, prompts)
    sequences = [texts.get(number) for number in range(min(len(texts), _MAX_TIMED_TEXTS))]
    spec = embedder.resolve_settings(VectorSettings())
    return {
        "num_parameters": num_parameters,
        "texts_per_second": _time_texts(
            lambda: list(embedder.encode_batches(sequences, spec)), len(sequences), clock
        ),
        "metric": metric,
        "score": score,
    }
