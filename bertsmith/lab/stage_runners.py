"""Functions that run stages, one for each kind of stage."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bertsmith.bundle import load
from bertsmith.data.plan import PrepareOptions
from bertsmith.data.prepare import prepare
from bertsmith.errors import (
    CorpusError,
    DivergedError,
    InputError,
    RunError,
    StoppedError,
    StoreError,
    TaskError,
)
from bertsmith.files import atomic_directory
from bertsmith.lab.recipe import add_recipe_defaults
from bertsmith.lab.stage import Stage
from bertsmith.model.bert import count_parameters
from bertsmith.plurals import count_noun
from bertsmith.progress import Progress
from bertsmith.settings import merge_settings
from bertsmith.tasks import classification
from bertsmith.tasks.classification import TextExample
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import TaskSettings
from bertsmith.text.corpus import (
    CorpusOptions,
    CorpusReport,
    Source,
    find_sources,
    read_documents,
)
from bertsmith.text.vocabulary import VocabularyOptions, learn_vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import checkpoint, metrics_log
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.pretraining.pretrain import pretrain, write_initial_model
from bertsmith.train.pretraining.snapshot import write_snapshot


@dataclass(frozen=True)
class Job:
    """A stage to run, with its paths.

    Attributes:
        stage: The stage.
        output: The file or directory to write. It exists if an earlier run was interrupted.
        inputs: The outputs of the stage's dependencies, by their role.
        progress: Receives progress bars.
    """

    stage: Stage
    output: Path
    inputs: Mapping[str, Path]
    progress: Progress

    @property
    def model(self) -> Path:
        """The model that the stage reads: the output of a dependency, or the user's model."""
        return self.inputs["model"] if "model" in self.inputs else self.stage.files["model"]


#: A function that runs a stage and returns its result as JSON values.
StageFunction = Callable[[Job], dict[str, Any]]

#: Name of the output file or directory in a stage's directory.
OUTPUT = "output"
#: Names of the sampled text: whole documents, or documents with one sentence per line.
TEXT_FILE, SENTENCES_FILE = "text.jsonl", "sentences.jsonl"
#: Field that functions return in addition to the result: the number of a signal that arrived when
#: the stage had already finished, otherwise None.
LATE_SIGNAL = "late_signal"
#: Settings of pre-training that do not affect the result, and are not part of a stage's key. With
#: checkpoints every ten minutes, those of snapshots would exceed checkpoint.keep and be removed.
_UNKEYED_SETTINGS = {"checkpoint": {"minutes": 24 * 60}}
#: Training curves in results are sampled to about this number of points.
_CURVE_POINTS = 100


def sample_text(job: Job) -> dict[str, Any]:
    """Write the first documents of a corpus as JSON lines, up to a number of characters."""
    max_characters = job.stage.settings["max_characters"]
    report = CorpusReport()
    text_sources = find_sources([str(file) for file in job.stage.files.values()])
    num_documents = num_characters = 0
    is_presplit = True
    with atomic_directory(job.output) as folder:
        with (folder / TEXT_FILE).open("w", encoding="utf-8") as out, _explain_corpus_errors():
            for document in read_documents(text_sources, CorpusOptions(), report):
                out.write(json.dumps({"text": document.text}, ensure_ascii=False) + "\n")
                is_presplit = is_presplit and document.presplit
                num_documents += 1
                num_characters += len(document.text)
                if num_characters >= max_characters:
                    break
            report.require_documents()
        if is_presplit:
            (folder / TEXT_FILE).rename(folder / SENTENCES_FILE)
    return {"documents": num_documents, "characters": num_characters}


@contextmanager
def _explain_corpus_errors() -> Iterator[None]:
    """Add a hint to corpus errors: the command that converts text to a readable format."""
    try:
        yield
    except CorpusError as error:
        raise CorpusError(
            f"{error} (the lab has no options for text formats; convert the text with `bertsmith "
            "corpus convert` first)"
        ) from error


def _find_sampled_text(job: Job) -> tuple[list[Source], CorpusOptions]:
    """Return the sampled text that a stage reads, and the options for reading it."""
    folder = job.inputs["text"]
    is_presplit = (folder / SENTENCES_FILE).exists()
    file = folder / (SENTENCES_FILE if is_presplit else TEXT_FILE)
    options = CorpusOptions(format="sentences" if is_presplit else "auto")
    return find_sources([str(file)]), options


def train_vocabulary(job: Job) -> dict[str, Any]:
    """Learn a vocabulary from the sampled text."""
    options = VocabularyOptions(**job.stage.settings, threads=os.cpu_count() or 1)
    text_sources, corpus_options = _find_sampled_text(job)
    learned = learn_vocabulary(text_sources, corpus_options, options, job.progress)
    with atomic_directory(job.output) as folder:
        learned.tokenizer.save(folder)
    return {
        "vocab_size": learned.tokenizer.vocab_size,
        "unk_rate": learned.quality.unknown_share,
        "tokens_per_word": learned.quality.pieces_per_word,
        "single_token_rate": learned.quality.single_piece_share,
    }


def build_store(job: Job) -> dict[str, Any]:
    """Tokenize the sampled text into a store."""
    tokenizer = Tokenizer.load(job.inputs["vocabulary"])
    text_sources, corpus_options = _find_sampled_text(job)
    options = PrepareOptions(**job.stage.settings, corpus=corpus_options)
    manifest = prepare(text_sources, tokenizer, job.output, options, job.progress)
    if not all(split.documents for split in manifest.splits.values()):
        num_sentences = sum(split.sentences for split in manifest.splits.values())
        raise StoreError(
            "the text is too short for a held-out split: "
            f"{count_noun(num_sentences, 'sentence')}; use more "
            "text, in a folder of files or a JSON-lines file with one document per line"
        )
    splits = {name: split.model_dump() for name, split in manifest.splits.items()}
    return {"splits": splits, "characters": manifest.report["characters"]}


def pretrain_model(job: Job) -> dict[str, Any]:
    """Pre-train a model on a store. If the run diverges, the result has the key "diverged"."""
    settings = dict(job.stage.settings)
    run = job.output
    steps = settings.pop("steps")
    recipe = settings.pop("recipe")
    try:
        pretrained = pretrain(
            job.inputs["store"],
            run,
            steps=steps,
            recipe=recipe,
            values=merge_settings(_UNKEYED_SETTINGS, add_recipe_defaults(recipe, settings)),
            progress=job.progress,
        )
    except DivergedError as error:
        return {"diverged": str(error), **_read_curves(run)}
    if pretrained.outcome.signal is not None:
        raise StoppedError(pretrained.outcome.signal)
    assert pretrained.model is not None
    checkpoint_every = settings["checkpoint"]["steps"]
    for step, path in checkpoint.list_checkpoints(run):
        # The last checkpoint is kept, because a later call for the finished run loads it.
        if step % checkpoint_every and step != pretrained.outcome.state.step:
            shutil.rmtree(path)
    num_parameters = count_parameters(load(pretrained.model).model)
    return {
        # The scale determines the number of sequences, and earlier results do not have it.
        "heldout_metrics": {
            name: value for name, value in pretrained.heldout.items() if name != "num_sequences"
        },
        "seconds": pretrained.outcome.state.seconds,
        "num_parameters": num_parameters,
        **_read_curves(run),
        LATE_SIGNAL: pretrained.outcome.late_signal,
    }


def _read_curves(run: Path) -> dict[str, Any]:
    """Return the loss curves of a run, and the gradient norms if they were logged."""
    records = metrics_log.read_metrics(run)
    train_records = [record for record in records if record["kind"] == "train"]
    stride = max(1, len(train_records) // _CURVE_POINTS)
    sampled = train_records[::stride]
    return {
        "training_curve": [[record["step"], record["mlm_loss"]] for record in sampled],
        "gradient_norms": [
            [record["step"], record["grad_norms"]] for record in sampled if "grad_norms" in record
        ],
        "heldout_curve": [
            [record["step"], record["mlm_loss"]]
            for record in records
            if record["kind"] == "heldout"
        ],
    }


def initialize_model(job: Job) -> dict[str, Any]:
    """Write the model that a pre-training run starts from."""
    settings = dict(job.stage.settings)
    recipe = settings.pop("recipe")
    values = add_recipe_defaults(recipe, settings)
    write_initial_model(job.inputs["store"], job.output, recipe=recipe, values=values)
    return {}


def export_snapshot(job: Job) -> dict[str, Any]:
    """Write the model directory of a run's intermediate checkpoint."""
    write_snapshot(job.inputs["run"], job.stage.settings["step"], job.output)
    return {}


def finetune_model(job: Job) -> dict[str, Any]:
    """Fine-tune a model on a task and return its held-out metrics."""
    task = job.stage.settings["task"]
    train, dev = (job.stage.files[role].resolve() for role in ("train", "dev"))
    default_settings = {}
    if job.stage.settings["values"].get("task", {}).get("max_train_examples") is not None:
        # Before this setting was introduced, the first examples were used.
        default_settings = {"task": {"train_subset": "first"}}
    fixed_settings = {
        "task": {"train_file": str(train), "validation_files": {"dev": str(dev)}},
        # The model is evaluated after the last step only.
        "run": {"eval_strategy": "end"},
    }
    # The default and fixed settings are added here, so that they are not part of the stage's key.
    values = merge_settings(
        merge_settings(default_settings, job.stage.settings["values"]), fixed_settings
    )
    data = job.stage.files["train"].parent
    start = partial(
        finetune, task, job.model, job.output, data=data, values=values, progress=job.progress
    )
    try:
        with explain_skip_invalid("finetune"):
            finetuned = _resume_or_restart(start, job.output)
    except DivergedError as error:
        return {"diverged": str(error)}
    if finetuned.signal is not None:
        raise StoppedError(finetuned.signal)
    return {
        "metric_names": finetuned.metric_names,
        "metrics": finetuned.metrics,
        "counts": finetuned.counts,
        "steps": finetuned.steps,
        "seconds": finetuned.seconds,
        LATE_SIGNAL: finetuned.late_signal,
    }


@contextmanager
def explain_skip_invalid(command: str) -> Iterator[None]:
    """Add to errors that advise --skip-invalid that it is an option of another command."""
    try:
        yield
    except (TaskError, InputError) as error:
        if "--skip-invalid" not in str(error):
            raise
        message = f"{error} (an option of {command}; the lab has none)"
        raise type(error)(message) from error


def read_public_examples(path: Path, task: str) -> list[TextExample]:
    """Return the examples of a file of a public task with texts or pairs of texts."""
    settings = TaskSettings.parse({**PUBLIC_TASKS[task].fixed_settings, "name": task}, "the task")
    with explain_skip_invalid("finetune"):
        examples, _ = classification.read_examples(path, settings)
    return examples


def _resume_or_restart(start: Callable[[], FinetuneResult], run: Path) -> FinetuneResult:
    """Call ``start``; if it cannot resume an interrupted run, delete the run and call it again.

    An interrupted run cannot be resumed if its input files have moved.
    """
    is_resumed = run.exists()
    try:
        return start()
    except DivergedError:
        # DivergedError is a RunError, but starting again would not help.
        raise
    except RunError:
        if not is_resumed:
            raise
    shutil.rmtree(run)
    return start()


#: Kinds of stages whose output is deleted when the result is stored, because no other stage reads
#: the output.
RESULT_ONLY_KINDS = ("finetune",)
#: The functions of all kinds of stages that several experiments use.
STAGE_FUNCTIONS: dict[str, StageFunction] = {
    "text": sample_text,
    "vocabulary": train_vocabulary,
    "store": build_store,
    "pretrain": pretrain_model,
    "initialized-model": initialize_model,
    "snapshot": export_snapshot,
    "finetune": finetune_model,
}
