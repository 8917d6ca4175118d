r"""Pre-train a BERT within minutes, fine-tune it on GLUE, and write a record that others can beat.

    python benchmarks/speedrun.py --minutes 25 --size base --store store --data glue --out speedrun
    python benchmarks/speedrun.py --minutes 1 --size tiny --text corpus.txt --data glue --tasks rte

The data is a token store, or text from which a vocabulary and a store are made first. Each
pre-training seed is a process of `bertsmith pretrain` with a wall-clock budget. `bertsmith lab
panel` then fine-tunes each model on GLUE with several seeds and evaluates it on the validation
sets; test sets are not read. The network is not used. A speedrun that was killed continues when the
same command is started again, with the minutes that are left.

OUT/record has the record (record.json and record.md), and the settings, the metrics log and the
output of each pre-training run. The score of a model is the mean of its tasks in percent; a task
with several measures counts as their mean.
"""

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from logged_process import run_logged
from speedrun_record import build_record, describe_run, record_start, write_record

from bertsmith.bundle.metadata import read_metadata
from bertsmith.cli.console import TerminalProgress, log
from bertsmith.data.plan import fingerprint_sources
from bertsmith.data.store import MANIFEST_FILE, Store
from bertsmith.errors import BertsmithError, StoppedError
from bertsmith.lab.panel.cells import PanelOptions
from bertsmith.lab.panel.data import PanelData
from bertsmith.lab.panel.panel import Panel, PanelOutcome
from bertsmith.lab.panel.tasks import LEARNING_RATE, PanelTask, select_tasks, split_by_data
from bertsmith.progress import NullProgress
from bertsmith.text.sources import find_sources

#: Default size of the vocabulary that is learned from text.
VOCAB_SIZE = 32_768
#: Models up to this width are fine-tuned with the default learning rate of the panel, and wider
#: models with that of the paper for base.
MAX_NARROW_WIDTH, WIDE_LEARNING_RATE = 512, 5e-5


def run_command(arguments: Sequence[str], log_file: Path, **environment: str) -> None:
    """Run a command of Bertsmith in a process and append its output to a file; exit if it fails."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    log(f"$ {format_command(arguments)}")
    with log_file.open("ab") as file:
        file.write(f"$ {format_command(arguments)}\n".encode())
    command = [sys.executable, "-m", "bertsmith", *arguments]
    if code := run_logged(command, log_file, environment):
        last_line = log_file.read_text(encoding="utf-8").strip().rpartition("\n")[2]
        sys.exit(f"{arguments[0]}: exit status {code}; see the end of {log_file}:\n{last_line}")


def format_command(arguments: Sequence[str]) -> str:
    """Return a command of Bertsmith as a line for a shell."""
    return shlex.join(["bertsmith", *arguments])


def prepare_store(text: Sequence[str], vocab_size: int, out: Path) -> Path:
    """Learn a vocabulary from text and write a token store, unless they exist; return its path."""
    sources = fingerprint_sources(find_sources(text), NullProgress())
    content = [[source.name, source.fingerprint] for source in sources]
    digest = hashlib.sha256(json.dumps([content, vocab_size]).encode()).hexdigest()[:8]
    vocabulary, store = out / f"vocabulary-{digest}", out / f"store-{digest}"
    log_file = out / "prepare.log"
    if not (vocabulary / "vocab.txt").exists():
        options = ["--size", str(vocab_size), "--out", str(vocabulary)]
        run_command(["vocab", *text, *options], log_file)
    if not (store / MANIFEST_FILE).exists():
        options = ["--tokenizer", str(vocabulary), "--out", str(store)]
        run_command(["prepare", *text, *options], log_file)
    return store


def build_pretrain_arguments(store: Path, seed: int, options: argparse.Namespace) -> list[str]:
    """Return the arguments of `bertsmith` that pre-train a model with a seed."""
    budget = ["--minutes", f"{options.minutes:g}"]
    if options.steps is not None:
        budget = ["--steps", str(options.steps)]
    run = options.out / "runs" / f"seed-{seed}"
    arguments = ["pretrain", "--data", str(store), "--size", options.size, *budget]
    arguments += ["--out", str(run)]
    # The number of tokens is computed from a log of all steps.
    for setting in (*options.set, f"run.seed={seed}", "run.log_every=1"):
        arguments += ["--set", setting]
    return arguments


def build_compiler_environment(run: Path) -> dict[str, str]:
    """Return environment variables for a compiler cache that only one run uses.

    With a shared cache, later runs would need less time for compilation than the first one. The
    cache is next to the run directory, because a new run needs an empty one.
    """
    cache = run.absolute().with_name(f"{run.name}-compiler-cache")
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
    }


def find_tasks(options: argparse.Namespace) -> tuple[list[PanelTask], list[str]]:
    """Return the tasks to evaluate, and the names of those without data.

    Raises:
        BertsmithError: If a task of --tasks is unknown, a file of a task is missing, or no task has
            data.
    """
    tasks, missing = select_tasks_with_data(options)
    # Otherwise the panel would find this out after all runs.
    panel_data = PanelData(options.data, None, (), options.out / "panel" / "work" / "splits")
    for task in tasks:
        panel_data.find_files(task)
    return tasks, missing


def select_tasks_with_data(options: argparse.Namespace) -> tuple[list[PanelTask], list[str]]:
    """Return the selected tasks whose folder exists, and the names of the others."""
    names = ["glue"]
    if options.tasks is not None:
        names = [name.strip() for name in options.tasks.split(",")]
    tasks = select_tasks(names, has_text=False, has_minimal_pairs=False)
    if options.tasks is not None:
        return tasks, []
    tasks, missing = split_by_data(tasks, options.data)
    return tasks, [task.name for task in missing]


def run_panel(
    models: Sequence[Path], tasks: Sequence[PanelTask], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], PanelOutcome]:
    """Fine-tune and evaluate the models.

    Returns:
        The results of each model, by task and measure; and the outcome of the panel.
    """
    learning_rate = options.lr
    if learning_rate is None:
        width = max(read_metadata(model)[1].width for model in models)
        learning_rate = LEARNING_RATE if width <= MAX_NARROW_WIDTH else WIDE_LEARNING_RATE
    panel = Panel(
        models, tasks, data=options.data, out=options.out / "panel",
        options=PanelOptions(num_seeds=options.finetune_seeds, learning_rate=learning_rate),
        with_untrained=False, progress=TerminalProgress(),
    )  # fmt: skip
    try:
        outcome = panel.run()
    except StoppedError as stopped:
        log(str(stopped))
        sys.exit(128 + stopped.signal)
    results = [outcome.data["results"][model.label] for model in panel.models]
    return results, outcome


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of the command line, and ``argv`` itself as an attribute."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--store", type=Path, help="token store")
    source.add_argument("--text", nargs="+", help="text for a vocabulary and a store")
    parser.add_argument("--data", type=Path, required=True, help="folder with the data of GLUE")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--minutes", type=float, default=25.0, help="wall-clock minutes of a run")
    budget.add_argument("--steps", type=int, help="steps of a run, for tests")
    parser.add_argument("--size", default="base", help="model size")
    parser.add_argument("--seeds", default="0,1,2", help="pre-training seeds, separated by commas")
    parser.add_argument("--finetune-seeds", type=int, default=3, help="number of fine-tuning seeds")
    parser.add_argument("--tasks", help="tasks of the panel; default: all of GLUE with data")
    parser.add_argument("--lr", type=float, help="learning rate of fine-tuning; default by width")
    parser.add_argument("--set", action="append", default=[], help="setting of `pretrain`")
    parser.add_argument("--vocab-size", type=int, help=f"size for --text (default: {VOCAB_SIZE})")
    parser.add_argument("--eval-sequences", type=int, default=1024, help="held-out sequences")
    parser.add_argument("--out", type=Path, default=Path("speedrun"), help="folder for all files")
    options = parser.parse_args(argv, argparse.Namespace(argv=list(argv)))
    if options.store and options.vocab_size:
        parser.error("--vocab-size has no effect with --store; remove one of them")
    if options.finetune_seeds < 1:
        parser.error("--finetune-seeds must be at least 1")
    if options.lr is not None and options.lr <= 0:
        parser.error("--lr must be more than 0")
    return options


def main(argv: Sequence[str]) -> None:
    """Run or continue a speedrun."""
    options = parse_arguments(argv)
    try:
        tasks, missing = find_tasks(options)
        store_path = options.store or prepare_store(
            options.text, options.vocab_size or VOCAB_SIZE, options.out
        )
        store = Store.open(store_path)
        starts = record_start(options.out)
        commands = {}
        for seed in map(int, options.seeds.split(",")):
            arguments = build_pretrain_arguments(store_path, seed, options)
            run = options.out / "runs" / f"seed-{seed}"
            # A finished run only checks that its settings are the same.
            run_command(arguments, run.with_suffix(".log"), **build_compiler_environment(run))
            commands[seed] = format_command(arguments)
        folders = {seed: options.out / "runs" / f"seed-{seed}" for seed in commands}
        results, outcome = run_panel([run / "model" for run in folders.values()], tasks, options)
        runs = {
            seed: describe_run(folders[seed], commands[seed], store, result, options.eval_sequences)
            for seed, result in zip(folders, results, strict=True)
        }
        record = build_record(runs, store, missing, outcome, starts, options)
        folder = write_record(record, options)
    except BertsmithError as error:
        sys.exit(str(error))
    print((folder / "record.md").read_text())
    log(f"wrote {folder}; publish this folder")


if __name__ == "__main__":
    main(sys.argv[1:])
