"""Record of a speedrun: scores, environment, and the files to publish."""

import argparse
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
from recipe_search import compute_heldout_loss, sum_training_time
from reporting import describe_machine

from bertsmith.data.store import Store
from bertsmith.files import write_atomic, write_json
from bertsmith.lab.panel.panel import PanelOutcome
from bertsmith.plurals import count_noun, format_minutes
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.engine.run_clock import ELAPSED_FILE
from bertsmith.train.pretraining.resolve import compute_store_id
from bertsmith.version import __version__

#: The environments in which a speedrun was started, in OUT.
STARTS_FILE = "starts.json"
ROOT = Path(__file__).parent.parent


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
