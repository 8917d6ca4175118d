"""How each kind of stage is made, with the same functions that the command line calls.

It never knows which experiment a stage belongs to.
"""

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
    BertsmithError,
    CorpusError,
    DivergedError,
    RunError,
    StoreError,
    TaskError,
)
from bertsmith.files import atomic_directory
from bertsmith.lab.stage import Stage
from bertsmith.model.bert import count_parameters
from bertsmith.progress import Progress
from bertsmith.settings import merge_settings
from bertsmith.text.corpus import CorpusOptions, CorpusReport, Source, find_sources, read_documents
from bertsmith.text.vocabulary import VocabularyOptions, learn_vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import checkpoint, metrics_log
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.pretraining.pretrain import pretrain, write_initial_model
from bertsmith.train.pretraining.snapshot import write_snapshot


@dataclass(frozen=True)
class Job:
    """A stage to be made: its folder, and where what it needs stands, by the part it plays."""

    stage: Stage
    folder: Path
    inputs: Mapping[str, Path]
    progress: Progress

    @property
    def model(self) -> Path:
        """The model that a stage asks: another stage's, or one that was given."""
        return self.inputs["model"] if "model" in self.inputs else self.stage.files["model"]


#: Makes a stage, and returns its result, plain values.
StageFunction = Callable[[Job], dict[str, Any]]

#: Under which name the outcome of a stage stands in its folder.
OUTPUT = "outcome"
#: The file of a cut text, and of one with a sentence a line in each document.
TEXT_FILE, SENTENCES_FILE = "text.jsonl", "sentences.jsonl"
#: Under this name a result hands over a signal that came when the stage was done.
LATE_SIGNAL = "late"
#: Points of a training curve that a result keeps.
_POINTS = 100


class StoppedError(BertsmithError):
    """A signal stopped a stage; what it had done is saved."""

    def __init__(self, number: int) -> None:
        super().__init__("stopped, all saved; the same command goes on from there")
        self.signal = number


def cut_text(job: Job) -> dict[str, Any]:
    """Keep the first documents of a corpus, up to a number of characters, as JSON lines."""
    most, report = job.stage.settings["characters"], CorpusReport()
    found = find_sources([str(file) for file in job.stage.files.values()])
    documents = size = 0
    presplit = True
    with atomic_directory(job.folder / OUTPUT) as new:
        with (new / TEXT_FILE).open("w", encoding="utf-8") as out, _told_of_corpus():
            for document in read_documents(found, CorpusOptions(), report):
                out.write(json.dumps({"text": document.text}, ensure_ascii=False) + "\n")
                presplit = presplit and document.presplit
                documents, size = documents + 1, size + len(document.text)
                if size >= most:
                    break
            report.require_documents()
        if presplit:
            (new / TEXT_FILE).rename(new / SENTENCES_FILE)
    return {"documents": documents, "characters": size}


@contextmanager
def _told_of_corpus() -> Iterator[None]:
    """Name the command that has options for text that the lab cannot read as it is."""
    try:
        yield
    except CorpusError as error:
        raise CorpusError(
            f"{error} (the lab has no such options: bring the text into JSON lines by `bertsmith "
            "corpus convert`, and give it that)"
        ) from error


def _corpus(job: Job) -> tuple[list[Source], CorpusOptions]:
    """Return the text that a stage needs, and how it is read."""
    folder = job.inputs["text"]
    presplit = (folder / SENTENCES_FILE).exists()
    file = folder / (SENTENCES_FILE if presplit else TEXT_FILE)
    return find_sources([str(file)]), CorpusOptions(format="sentences" if presplit else "auto")


def learn_words(job: Job) -> dict[str, Any]:
    """Learn a vocabulary of the text that the stage needs."""
    options = VocabularyOptions(**job.stage.settings, threads=os.cpu_count() or 1)
    learnt = learn_vocabulary(*_corpus(job), options, job.progress)
    with atomic_directory(job.folder / OUTPUT) as new:
        learnt.tokenizer.save(new)
    shares = {name: value for name, value in learnt.quality.to_json().items()
              if isinstance(value, float)}  # fmt: skip
    return {"words": learnt.tokenizer.vocab_size, **shares}


def make_store(job: Job) -> dict[str, Any]:
    """Turn the text that the stage needs into a store, with the vocabulary that it needs."""
    words = Tokenizer.load(job.inputs["words"])
    found, reading = _corpus(job)
    options = PrepareOptions(**job.stage.settings, corpus=reading)
    manifest = prepare(found, words, job.folder / OUTPUT, options, job.progress)
    if not all(split.documents for split in manifest.splits.values()):
        num_sentences = sum(split.sentences for split in manifest.splits.values())
        raise StoreError(
            f"the text is too short to hold out a part of it: {num_sentences:,} sentences; give "
            "more: a folder of files, or a file of JSON lines with a document each"
        )
    counts = {name: split.model_dump() for name, split in manifest.splits.items()}
    return {"splits": counts, "characters": manifest.report["characters"]}


def pretrain_model(job: Job) -> dict[str, Any]:
    """Pre-train on the store that the stage needs. That it diverges is a result as well."""
    settings, run = dict(job.stage.settings), job.folder / OUTPUT
    steps, recipe = settings.pop("steps"), settings.pop("recipe")
    try:
        done = pretrain(job.inputs["store"], run, steps=steps, recipe=recipe, values=settings,
                        progress=job.progress)  # fmt: skip
    except DivergedError as error:
        return {"diverged": str(error), **_curves(run)}
    if done.outcome.signal is not None:
        raise StoppedError(done.outcome.signal)
    assert done.model is not None
    every = settings["checkpoint"]["every"]
    for number, path in checkpoint.list_checkpoints(run):
        # A run that is started once more after its end resumes from its last checkpoint.
        if number % every and number != done.outcome.state.step:
            shutil.rmtree(path)
    parameters = count_parameters(load(done.model).model)
    return {"heldout": done.heldout, "seconds": done.outcome.state.seconds,
            "parameters": parameters, **_curves(run), LATE_SIGNAL: done.outcome.late_signal}  # fmt: skip


def _curves(run: Path) -> dict[str, Any]:
    """Return what the journal tells of a run: losses, and gradients' norms where they are there."""
    lines = metrics_log.read_metrics(run)
    told = [line for line in lines if line["kind"] == "train"]
    every = max(1, len(told) // _POINTS)
    return {
        "training": [[line["step"], line["masked_lm"]] for line in told[::every]],
        "gradients": [[line["step"], line["gradients"]] for line in told[::every]
                      if "gradients" in line],
        "heldout_curve": [[line["step"], line["masked_lm"]] for line in lines
                          if line["kind"] == "heldout"],
    }  # fmt: skip


def begin_model(job: Job) -> dict[str, Any]:
    """Make the model that a run begins with."""
    settings = dict(job.stage.settings)
    recipe = settings.pop("recipe")
    write_initial_model(job.inputs["store"], job.folder / OUTPUT, recipe=recipe, values=settings)
    return {}


def take_snapshot(job: Job) -> dict[str, Any]:
    """Make a model directory of a checkpoint on the way of a run."""
    write_snapshot(job.inputs["run"], job.stage.settings["step"], job.folder / OUTPUT)
    return {}


def tune_model(job: Job) -> dict[str, Any]:
    """Fine-tune a model on a task; only the figures stay."""
    settings = dict(job.stage.settings)
    task, values = settings["task"], settings["values"]
    files = {"train": str(job.stage.files["train"].resolve()),
             "heldout": {"dev": str(job.stage.files["dev"].resolve())}}  # fmt: skip
    # The last step's score is the result: that there are no others is none of a stage's settings.
    # So is which examples are read: results from before there was a choice have the first ones.
    task_values = {**files, "examples_draw": "first"}
    values = merge_settings(values, {"task": task_values, "run": {"evaluate": "end"}})
    run = job.folder / OUTPUT
    data, begun = job.stage.files["train"].parent, run.exists()
    begin = partial(finetune, task, job.model, run, data=data, values=values, progress=job.progress)
    try:
        try:
            done = begin()
        except RunError as error:
            if not begun or isinstance(error, DivergedError):
                raise
            # It was stopped, and its files have moved since: the same ones, but not to the run.
            shutil.rmtree(run)
            done = begin()
    except DivergedError as error:
        return {"diverged": str(error)}
    except TaskError as error:
        hint = " (an option of finetune; the lab has none)" if "--skip-bad" in str(error) else ""
        raise TaskError(f"{error}{hint}") from error
    if done.signal is not None:
        raise StoppedError(done.signal)
    return {"metrics": done.metrics, "figures": done.figures, "counts": done.counts,
            "steps": done.steps, "seconds": done.seconds, LATE_SIGNAL: done.late}  # fmt: skip


#: Kinds of which only the result is kept: nothing is made of what they leave.
RESULT_ONLY_KINDS = ("finetune",)
#: The kinds of stages that all experiments share.
STAGE_FUNCTIONS: dict[str, StageFunction] = {
    "text": cut_text,
    "words": learn_words,
    "store": make_store,
    "pretrain": pretrain_model,
    "begun": begin_model,
    "snapshot": take_snapshot,
    "finetune": tune_model,
}
