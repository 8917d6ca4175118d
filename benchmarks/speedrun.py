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
import math
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from logged_process import run_logged
from recipe_search import compute_heldout_loss, sum_training_time
from reporting import describe_machine

from bertsmith.bundle.metadata import read_metadata
from bertsmith.cli.console import TerminalProgress, log
from bertsmith.data.plan import fingerprint_sources
from bertsmith.data.store import MANIFEST_FILE, Store
from bertsmith.errors import BertsmithError, StoppedError
from bertsmith.files import write_atomic, write_json
from bertsmith.lab.panel.cells import PanelOptions
from bertsmith.lab.panel.data import PanelData
from bertsmith.lab.panel.panel import Panel, PanelOutcome
from bertsmith.lab.panel.tasks import LEARNING_RATE, PanelTask, select_tasks, split_by_data
from bertsmith.plurals import count_noun, format_minutes
from bertsmith.progress import NullProgress
from bertsmith.text.sources import find_sources
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.engine.run_clock import ELAPSED_FILE
from bertsmith.train.pretraining.resolve import compute_store_id
from bertsmith.version import __version__

#: Default size of the vocabulary that is learned from text.
VOCAB_SIZE = 32_768
#: Models up to this width are fine-tuned with the default learning rate of the panel, and wider
#: models with that of the paper for base.
MAX_NARROW_WIDTH, WIDE_LEARNING_RATE = 512, 5e-5
#: The environments in which a speedrun was started, in OUT.
STARTS_FILE = "starts.json"
ROOT = Path(__file__).parent.parent


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


def compute_score(results: Mapping[str, Any]) -> float | None:
    """Return the mean of the tasks in percent.

    None if a measure is missing or not a number for any fine-tuning seed: the mean over the other
    seeds would be too high, because runs that diverge are not random.
    """
    if list_incomplete_measures(results):
        return None
    return fmean(
        100 * fmean(summary["mean"] for summary in measures.values())
        for measures in results.values()
    )


def count_finite(values: Sequence[float | None]) -> int:
    """Return the number of values that are not missing and finite."""
    return sum(value is not None and math.isfinite(value) for value in values)


def get_mean(summary: Mapping[str, Any]) -> float | None:
    """Return the mean of a measure; None without a value for each fine-tuning seed."""
    values = summary["values"]
    mean: float | None = summary["mean"]
    return mean if count_finite(values) == len(values) else None


def list_incomplete_measures(results: Mapping[str, Any]) -> list[str]:
    """Return the measures without a value for each fine-tuning seed, with the number of values."""
    return [
        f"{task}, {measure} ({count_finite(summary['values'])} of {len(summary['values'])})"
        for task, measures in results.items()
        for measure, summary in measures.items()
        if get_mean(summary) is None
    ]


def summarize(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return mean and standard deviation; None if a value is missing or there is only one."""
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    is_complete = len(numbers) == len(values)
    return {
        "mean": fmean(numbers) if is_complete else None,
        "std": stdev(numbers) if is_complete and len(numbers) > 1 else None,
    }


def average_panels(
    panels: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, dict[str, float | None]]]:
    """Return mean and standard deviation of the results of all models, by task and measure.

    None for a measure without a value for each fine-tuning seed of each model.
    """
    return {
        task: {
            measure: summarize([get_mean(panel[task][measure]) for panel in panels])
            for measure in measures
        }
        for task, measures in panels[0].items()
    }


def describe_run(
    run: Path, command: str, store: Store, results: Mapping[str, Any], num_sequences: int
) -> dict[str, Any]:
    """Return the part of the record about a pre-training run and its model."""
    lines = read_metrics(run)
    training_seconds, num_tokens = sum_training_time(lines)
    clock = run / ELAPSED_FILE
    seconds = json.loads(clock.read_text())["elapsed_seconds"] if clock.exists() else None
    heldout = [line for line in lines if line["kind"] == "heldout"]
    return {
        "command": command,
        "steps": heldout[-1]["step"],
        "tokens": num_tokens,
        "training_seconds": round(training_seconds, 1),
        "wall_clock_seconds": None if seconds is None else round(seconds, 1),
        "heldout_loss": compute_heldout_loss(run / "model", store, num_sequences),
        "heldout_curve": [[line["step"], line["mlm_loss"]] for line in heldout],
        "score": compute_score(results),
        "panel": results,
    }


def record_start(out: Path) -> list[dict[str, Any]]:
    """Append the environment to the starts of a speedrun in STARTS_FILE; return all starts."""
    path = out / STARTS_FILE
    starts = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    starts.append(describe_environment())
    out.mkdir(parents=True, exist_ok=True)
    write_json(path, starts)
    return starts


def describe_environment() -> dict[str, Any]:
    """Return the time, the machine, the versions and the commit."""
    has_cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            **describe_machine(),
            "accelerator": torch.cuda.get_device_name() if has_cuda else None,
            "cuda": torch.version.cuda if has_cuda else None,
        },
        "versions": {"bertsmith": __version__, "torch": torch.__version__},
        "commit": run_git("rev-parse", "HEAD") or None,
        "has_uncommitted_changes": bool(run_git("status", "--porcelain", "--untracked-files=no")),
    }


def run_git(*arguments: str) -> str:
    """Return the output of git in this repository; "" outside a repository or without git."""
    if shutil.which("git") is None:
        return ""
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def build_record(
    runs: Mapping[int, dict[str, Any]],
    store: Store,
    missing: Sequence[str],
    outcome: PanelOutcome,
    starts: Sequence[dict[str, Any]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Return the record of a speedrun.

    Args:
        runs: The parts of the record about each run, by seed.
        store: The token store.
        missing: The names of tasks without data.
        outcome: The outcome of the panel.
        starts: The environment of each process of the speedrun.
        options: The arguments of the command line.
    """
    budget = format_minutes(options.minutes)
    if options.steps is not None:
        budget = count_noun(options.steps, "step")
    return {
        "name": "speedrun",
        "size": options.size,
        "budget": budget,
        "command": shlex.join([Path(sys.executable).name, "benchmarks/speedrun.py", *options.argv]),
        # The first process of the speedrun; later ones have continued it.
        **starts[0],
        "starts": list(starts),
        "settings": options.set,
        "store": {
            "id": compute_store_id(store),
            "vocab_size": store.manifest.vocab_size,
            "training_tokens": store.load_split("train").counts.tokens,
        },
        "score": summarize([run["score"] for run in runs.values()]),
        "heldout_loss": summarize([run["heldout_loss"] for run in runs.values()]),
        "tokens": summarize([run["tokens"] for run in runs.values()]),
        "panel": average_panels([run["panel"] for run in runs.values()]),
        "finetune_seeds": options.finetune_seeds,
        "finetune_learning_rate": outcome.data["learning_rate"],
        "panel_notes": outcome.data["notes"],
        "tasks_without_data": list(missing),
        "failures": outcome.failures,
        "runs": {str(seed): run for seed, run in runs.items()},
    }


def format_summary(summary: Mapping[str, float | None], digits: int, scale: float = 1.0) -> str:
    """Return "mean ± SD", the mean alone without a standard deviation, or "-" without a mean."""
    if summary["mean"] is None:
        return "-"
    text = f"{scale * summary['mean']:,.{digits}f}"
    return text if summary["std"] is None else f"{text} ± {scale * summary['std']:,.{digits}f}"


def describe_hardware(machine: Mapping[str, Any]) -> str:
    """Return the accelerator, the processor and the memory of a machine as text."""
    processor = f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB"
    return f"{machine['accelerator'] or 'no GPU'}; {processor}"


def list_facts(record: Mapping[str, Any]) -> dict[str, str]:
    """Return what a record was computed with, by name."""
    store = record["store"]
    commits = dict.fromkeys(
        f"{start['commit'] or 'unknown'}{' with changes' * start['has_uncommitted_changes']}"
        for start in record["starts"]
    )
    machines = dict.fromkeys(describe_hardware(start["machine"]) for start in record["starts"])
    versions = dict.fromkeys(
        f"Bertsmith {start['versions']['bertsmith']}, PyTorch {start['versions']['torch']}"
        for start in record["starts"]
    )
    return {
        "date": f"{record['date']}, continued {count_noun(len(record['starts']) - 1, 'time')}",
        "hardware": "; then ".join(machines),
        "commit": ", ".join(commits),
        "versions": "; then ".join(versions),
        "settings": ", ".join(record["settings"]) or "the recipe `fast`",
        "text": f"{count_noun(store['training_tokens'], 'token')}, vocabulary of "
        f"{store['vocab_size']:,} (store {store['id']})",
        "seeds": f"{len(record['runs'])} of pre-training, {record['finetune_seeds']} of "
        "fine-tuning for each; the table has means and standard deviations over pre-training seeds",
    }


def format_record(record: Mapping[str, Any]) -> str:
    """Return a record as Markdown."""
    rows = [
        ("score, mean of the tasks in percent", format_summary(record["score"], 1)),
        ("held-out masked-LM loss, nats", format_summary(record["heldout_loss"], 4)),
        ("training tokens, millions", format_summary(record["tokens"], 1, 1e-6)),
    ]
    for task, measures in record["panel"].items():
        for measure, summary in measures.items():
            rows.append((f"{task}, {measure}", format_summary(summary, 1, 100.0)))
    run_rows = []
    for seed, run in record["runs"].items():
        score = format_summary({"mean": run["score"], "std": None}, 1)
        seconds = run["wall_clock_seconds"] or "-"
        run_rows.append(
            f"| {seed} | {run['steps']:,} | {run['tokens']:,} | {seconds} | "
            f"{run['heldout_loss']:.4f} | {score} |"
        )
    notes = list(record["panel_notes"])
    notes += [f"Failed: {name}: {reason}." for name, reason in record["failures"].items()]
    for seed, run in record["runs"].items():
        if incomplete := list_incomplete_measures(run["panel"]):
            notes.append(
                f"Seed {seed} has no score, because fine-tuning runs failed or diverged, or a "
                f"correlation is undefined: {'; '.join(incomplete)}."
            )
    if record["tasks_without_data"]:
        left_out = ", ".join(record["tasks_without_data"])
        notes.append(f"Tasks without data, which are not part of the score: {left_out}.")
    lines = [
        f"# Speedrun: {record['size']}, {record['budget']}",
        "",
        f"`{record['command']}`",
        "",
        *(f"- {name}: {fact}" for name, fact in list_facts(record).items()),
        "",
        "| measure (validation sets) | value |",
        "| --- | ---: |",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
        "| seed | steps | tokens | wall-clock seconds | held-out loss | score |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        *run_rows,
    ]
    return "\n".join([*lines, *(f"\n{note}" for note in notes)]) + "\n"


def write_record(record: Mapping[str, Any], options: argparse.Namespace) -> Path:
    """Write the record and copies of the files of each run; return the folder."""
    folder: Path = options.out / "record"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in record["runs"]:
        run = options.out / "runs" / f"seed-{seed}"
        shutil.copyfile(run / "metrics.jsonl", folder / f"seed-{seed}.jsonl")
        shutil.copyfile(run / "settings.toml", folder / f"seed-{seed}.toml")
        shutil.copyfile(run.with_suffix(".log"), folder / f"seed-{seed}.log")
    write_json(folder / "record.json", record)
    write_atomic(folder / "record.md", format_record(record))
    return folder


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
