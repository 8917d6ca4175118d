r"""Compare variants of the pre-training settings over several seeds.

A TOML file names the variants. Each variant is a list of assignments as for --set. All variants are
compared with the first one:

    common = ["run.threads=2"]          # applied to all variants

    [variants]
    fast = []
    muon = ["optim.optimizer=muon"]

Measure seconds per step on an idle machine, train later on a busy one, then print the table:

    python benchmarks/recipe_search.py variants.toml --data store --results results --calibrate
    python benchmarks/recipe_search.py variants.toml --data store --results results \
        --budget-minutes 30 --seeds 0,1,2
    python benchmarks/recipe_search.py variants.toml --results results --report

Each run is a process of `bertsmith pretrain`, so a search that was killed continues when it is
started again. Finished runs are lines of RESULTS/results.jsonl. The held-out loss of all variants
is computed on the same examples: single segments of up to 128 tokens with 15 % masked tokens. The
field run_loss is the loss that `bertsmith pretrain` reports, whose examples depend on the data
settings of the variant. The field curve has this loss at all evaluations, with the minutes from the
start of the run; `--report --plot FILE` draws it.
"""

import argparse
import hashlib
import json
import os
import shutil
import statistics
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from logged_process import run_logged
from reporting import describe_machine
from scipy import stats

from bertsmith import bundle
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Store
from bertsmith.errors import SettingsError, StoreError
from bertsmith.files import lock_open_file
from bertsmith.runtime.device import Machine
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.pretraining.evaluation import build_heldout_stream, evaluate
from bertsmith.train.pretraining.resolve import Overrides, compute_store_id, resolve_settings

RESULTS_FILE = "results.jsonl"
CALIBRATION_FILE = "calibration.json"
#: Steps at the start of a run that are not timed.
WARMUP_STEPS = 2


@dataclass(frozen=True)
class Variant:
    """A named list of settings, such as "optim.lr=1e-3"."""

    name: str
    settings: tuple[str, ...]


def read_variants(path: Path) -> list[Variant]:
    """Return the variants of a TOML file, with the common settings, in the order of the file."""
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    common = values.get("common", [])
    return [Variant(name, (*common, *items)) for name, items in values["variants"].items()]


def train(
    variant: Variant,
    seed: int,
    budget_options: Sequence[str],
    run: Path,
    options: argparse.Namespace,
) -> None:
    """Train or resume the run of a variant; exit if it fails.

    Args:
        variant: The variant.
        seed: The random seed.
        budget_options: The options of `bertsmith pretrain` for the training budget.
        run: The directory of the run.
        options: The arguments of the command line.
    """
    settings = [*variant.settings, f"run.seed={seed}", "run.log_every=1"]
    command = [sys.executable, "-m", "bertsmith", "pretrain", "--data", str(options.data),
               "--size", options.size, "--out", str(run), *budget_options]  # fmt: skip
    command += [part for setting in settings for part in ("--set", setting)]
    run.parent.mkdir(parents=True, exist_ok=True)
    log_file = run.with_name(f"{run.name}.log")
    if code := run_logged(command, log_file):
        sys.exit(f"{variant.name}, seed {seed}: exit status {code}; see {log_file}")


def open_store(path: Path) -> Store:
    """Return a store; exit if it cannot be read."""
    try:
        return Store.open(path)
    except StoreError as error:
        sys.exit(f"error: {error}")


def hash_settings(variant: Variant, store: Store, size: str) -> str:
    """Return a hash of all settings of a variant, including the defaults of this version.

    Exit if a setting is unknown or contradicts another one.
    """
    overrides = Overrides(
        data=store.path,
        size=size,
        assignments=variant.settings,
        cuda=torch.cuda.is_available(),
    )
    try:
        settings = resolve_settings(overrides, store)
    except SettingsError as error:
        sys.exit(f"{variant.name}: {error}")
    text = settings.model_dump_json(exclude={"run": {"store_path"}})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measure_step_seconds(run: Path) -> float:
    """Return the mean seconds of a training step of a run, without the warm-up steps."""
    seconds = [line["seconds"] for line in read_metrics(run) if line["kind"] == "train"]
    return float((seconds[-1] - seconds[WARMUP_STEPS - 1]) / (len(seconds) - WARMUP_STEPS))


def calibrate(variants: Sequence[Variant], options: argparse.Namespace) -> None:
    """Measure the seconds per step of all variants in turns, and store the median of each variant.

    A short run has the phases of the schedule in the same proportions as a long run, except for the
    attention bias at the start, which lasts up to half of a short run.
    """
    store = open_store(options.data)
    shutil.rmtree(options.results / "calibration", ignore_errors=True)
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(options.rounds):
        for variant in variants:
            run = options.results / "calibration" / f"{variant.name}-{number}"
            train(variant, 0, ["--steps", str(options.calibration_steps)], run, options)
            times[variant.name].append(measure_step_seconds(run))
            print(f"round {number + 1}, {variant.name}: {times[variant.name][-1]:.4f} s per step")
    path = options.results / CALIBRATION_FILE
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    measurements = content.setdefault(options.size, {})
    for variant in variants:
        measurements[variant.name] = {
            "settings": list(variant.settings),
            "settings_hash": hash_settings(variant, store, options.size),
            "step_seconds": statistics.median(times[variant.name]),
            "all_step_seconds": times[variant.name],
            "machine": describe_machine(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}")


def get_budget(
    variant: Variant, settings_hash: str, options: argparse.Namespace
) -> tuple[str, list[str]]:
    """Return the name of the training budget, and the options of `bertsmith pretrain` for it.

    Args:
        variant: The variant.
        settings_hash: The hash of its settings.
        options: The arguments of the command line.
    """
    if options.steps:
        return f"{options.steps:,} steps", ["--steps", str(options.steps)]
    if options.minutes:
        return f"{options.minutes:g} minutes", ["--minutes", str(options.minutes)]
    path = options.results / CALIBRATION_FILE
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    measurement = content.get(options.size, {}).get(variant.name, {})
    if measurement.get("settings_hash") != settings_hash:
        sys.exit(f"{path}: no measurement of {variant.name} with these settings; run --calibrate")
    steps = max(1, round(options.budget_minutes * 60 / measurement["step_seconds"]))
    return f"{options.budget_minutes:g} calibrated minutes", ["--steps", str(steps)]


def compute_heldout_loss(model_directory: Path, store: Store, num_sequences: int) -> float:
    """Return the masked-LM loss of a model on single segments with 15 % masked tokens."""
    model = bundle.load(model_directory).model
    vocabulary = VocabularyInfo.from_tokenizer(store.load_tokenizer())
    settings = DataSettings(nsp=False, max_seqlen=min(128, model.config.max_positions))
    stream = build_heldout_stream(store.load_split("heldout"), vocabulary, settings)
    machine = Machine(torch.device("cpu"), "fp32", "padded")
    return evaluate(model, stream, num_sequences, machine).to_metrics()["mlm_loss"]


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return the results in a folder, without a last line that has no line ending (incomplete)."""
    path = folder / RESULTS_FILE
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines[:-1]]


def append_result(folder: Path, result: dict[str, Any]) -> None:
    """Append a result to the results file after removing an incomplete last line."""
    path = folder / RESULTS_FILE
    with path.open("a+b") as file:
        # Another search may append a result at the same time.
        lock_open_file(file)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(result).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def sum_training_time(lines: Sequence[dict[str, Any]]) -> tuple[float, int]:
    """Return the training seconds and the number of tokens of a run from its metrics.

    A logged step stands for all the steps since the line before it. The number of tokens is exact
    if every step was logged.
    """
    seconds, num_tokens, num_steps = 0.0, 0, 0
    for line in lines:
        if line["kind"] == "train":
            num_tokens += line["tokens"] * (line["step"] - num_steps)
            seconds, num_steps = line["seconds"], line["step"]
    return seconds, num_tokens


def read_curve(lines: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    """Return the minutes and the masked-LM loss of each evaluation of a run.

    Only runs with a time budget log the time of an evaluation. In other runs, the time is that of
    the training line before the evaluation.
    """
    curve, seconds = [], 0.0
    for line in lines:
        seconds = line.get("elapsed_seconds", line.get("seconds", seconds))
        if line["kind"] == "heldout":
            curve.append((round(seconds / 60, 2), round(line["mlm_loss"], 4)))
    return curve


def plot_curves(groups: Mapping[str, Sequence[dict[str, Any]]], path: Path) -> None:
    """Plot the held-out loss of all runs against the minutes, in the color of their variant.

    Each group of comparable results has its own panel.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5 * len(groups)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(groups), squeeze=False)[:, 0]
    for axes, (title, results) in zip(all_axes, groups.items(), strict=True):
        names = dict.fromkeys(result["variant"] for result in results)
        for number, name in enumerate(names):
            runs = [result for result in results if result["variant"] == name]
            # A single entry of the legend for all seeds of a variant.
            labels = [name, *[None] * (len(runs) - 1)]
            for run, label in zip(runs, labels, strict=True):
                minutes, losses = zip(*run["curve"], strict=True)
                axes.plot(
                    minutes, losses, color=f"C{number}", marker="o", markersize=3, label=label
                )
        axes.set_title(title, fontsize="medium")
        axes.set_xlabel("minutes")
        axes.set_ylabel("held-out masked-LM loss (nats per token)")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(path)


def run_variant(variant: Variant, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train a variant with a seed, unless its result on this store exists; return the result.

    If the stored result was evaluated on another number of sequences, the model is evaluated again.
    Results of another version with other defaults are not used, and those of another processor only
    if the number of steps does not depend on it.
    """
    store = open_store(options.data)
    settings_hash = hash_settings(variant, store, options.size)
    budget, budget_options = get_budget(variant, settings_hash, options)
    key = {
        "variant": variant.name, "seed": seed, "settings": list(variant.settings),
        "settings_hash": settings_hash, "size": options.size, "budget": budget,
        "length": budget_options, "store_id": compute_store_id(store),
    }  # fmt: skip
    machine = describe_machine()
    for result in read_results(options.results):
        is_same = (key | {"eval_sequences": options.eval_sequences}).items() <= result.items()
        if is_same and (
            not options.minutes or result["machine"]["processor"] == machine["processor"]
        ):
            return result
    # Within a time, another processor takes another number of steps, so it has a run of its own.
    content = key | {"processor": machine["processor"]} if options.minutes else key
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:8]
    run = options.results / "runs" / f"{variant.name}-{seed}-{digest}"
    train(variant, seed, budget_options, run, options)
    lines = read_metrics(run)
    seconds, num_tokens = sum_training_time(lines)
    heldout = [line for line in lines if line["kind"] == "heldout"][-1]
    result = {
        **key,
        "eval_sequences": options.eval_sequences,
        "heldout_loss": compute_heldout_loss(run / "model", store, options.eval_sequences),
        "run_loss": heldout["mlm_loss"],
        "nsp_accuracy": heldout.get("nsp_accuracy"),
        "steps": heldout["step"],
        "seconds": round(seconds, 1),
        "tokens": num_tokens,
        "curve": read_curve(lines),
        "machine": machine,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    append_result(options.results, result)
    return result


def group_results(
    results: Sequence[dict[str, Any]], variants: Sequence[Variant]
) -> dict[str, list[dict[str, Any]]]:
    """Return comparable results: those of one size, budget and store, by a title.

    If the budget is a time, the number of steps depends on the processor, which is then part of the
    title. Results of a variant whose settings or defaults have changed since are left out, and all
    but the last one of each variant and seed.
    """
    settings = {variant.name: list(variant.settings) for variant in variants}
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if settings.get(result["variant"]) == result["settings"]:
            title = f"{result['size']}, {result['budget']}"
            if result["length"][0] == "--minutes":
                title += f", {result['machine']['processor']}"
            # Earlier versions did not store these values.
            if "store_id" in result:
                title += f", store {result['store_id']}, {result['eval_sequences']:,} sequences"
            groups.setdefault(title, []).append(result)
    return {title: select_current(group) for title, group in groups.items()}


def select_current(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last result of each variant and seed.

    Results with other defaults or another length than the variant's last result are left out.
    """

    def get_version(result: dict[str, Any]) -> tuple[str | None, list[str]]:
        return result.get("settings_hash"), result["length"]

    versions = {result["variant"]: get_version(result) for result in results}
    current = {
        (result["variant"], result["seed"]): result
        for result in results
        if get_version(result) == versions[result["variant"]]
    }
    return list(current.values())


def summarize(results: Sequence[dict[str, Any]], variants: Sequence[Variant]) -> list[str]:
    """Return a Markdown table of the variants for each size, budget and store in the results.

    Results of a variant whose settings have changed since are left out.
    """
    lines = []
    for title, group in group_results(results, variants).items():
        lines += [f"{title}:", "", *build_table(group, variants), ""]
    return lines


def build_table(results: Sequence[dict[str, Any]], variants: Sequence[Variant]) -> list[str]:
    """Return a Markdown table with one line per variant.

    The difference of a variant from the first one, and the p-value of a paired t-test, are computed
    over the n seeds that both variants have. NSP is the accuracy of next-sentence prediction.
    """
    runs_by_variant: dict[str, dict[int, dict[str, Any]]] = {
        variant.name: {} for variant in variants
    }
    for result in results:
        if result["variant"] in runs_by_variant:
            runs_by_variant[result["variant"]][result["seed"]] = result
    lines = [
        "| variant | seeds | held-out loss | SD | difference (n) | p | run loss | NSP | steps |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    reference = runs_by_variant[variants[0].name]
    for variant in variants:
        runs = runs_by_variant[variant.name]
        if not runs:
            continue
        values = [run["heldout_loss"] for run in runs.values()]
        std = f"{statistics.stdev(values):.4f}" if len(values) > 1 else ""
        common_seeds = [] if variant is variants[0] else sorted(runs.keys() & reference.keys())
        losses = [runs[seed]["heldout_loss"] for seed in common_seeds]
        reference_losses = [reference[seed]["heldout_loss"] for seed in common_seeds]
        difference = p_value = ""
        if losses:
            pairs = zip(losses, reference_losses, strict=True)
            mean_difference = statistics.fmean(loss - other for loss, other in pairs)
            difference = f"{mean_difference:+.4f} ({len(losses)})"
        if len(losses) > 1:
            p_value = f"{stats.ttest_rel(losses, reference_losses).pvalue:.3f}"
        run_loss = statistics.fmean(run["run_loss"] for run in runs.values())
        accuracies = [run["nsp_accuracy"] for run in runs.values()]
        accuracy = "" if None in accuracies else f"{statistics.fmean(accuracies):.3f}"
        steps = " ".join(sorted({f"{run['steps']:,}" for run in runs.values()}))
        lines.append(
            f"| {variant.name} | {len(runs)} | {statistics.fmean(values):.4f} | {std} | "
            f"{difference} | {p_value} | {run_loss:.4f} | {accuracy} | {steps} |"
        )
    return lines


def parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("variants", type=Path, help="TOML file with the variants")
    parser.add_argument("--results", type=Path, required=True, help="folder for runs and results")
    parser.add_argument("--data", type=Path, help="token store")
    parser.add_argument("--size", default="mini", help="model size")
    parser.add_argument("--seeds", help="seeds, separated by commas (default: 0,1,2)")
    parser.add_argument("--only", help="names of the variants to run, separated by commas")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--steps", type=int, help="steps of each run")
    action.add_argument("--minutes", type=float, help="wall-clock minutes of each run")
    action.add_argument(
        "--budget-minutes",
        type=float,
        help="minutes of each run, converted to steps with the speed from --calibrate",
    )
    action.add_argument("--calibrate", action="store_true", help="measure seconds per step")
    action.add_argument("--report", action="store_true", help="print a table of the results")
    parser.add_argument("--plot", type=Path, help="with --report: PNG file of the loss curves")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the calibration")
    parser.add_argument(
        "--calibration-steps", type=int, default=60, help="steps of each measurement"
    )
    parser.add_argument("--eval-sequences", type=int, default=1024, help="held-out sequences")
    options = parser.parse_args()
    if not options.report and options.data is None:
        parser.error("--data is missing; pass the path of a token store")
    if options.calibration_steps <= WARMUP_STEPS:
        parser.error(f"--calibration-steps must be more than {WARMUP_STEPS}, the warm-up steps")
    if options.plot and not options.report:
        parser.error("--plot needs --report")
    if options.report and (options.only or options.seeds):
        parser.error("--report shows all results; remove --only and --seeds")
    return options


def main() -> None:
    """Train and compare the variants, or measure their speed, or print the results."""
    options = parse_arguments()
    variants = read_variants(options.variants)
    if options.report:
        results = read_results(options.results)
        print("\n".join(summarize(results, variants)))
        if options.plot:
            with_curves = group_results([run for run in results if "curve" in run], variants)
            if not with_curves:
                sys.exit(f"{options.results}: no results of these variants with a curve to plot")
            plot_curves(with_curves, options.plot)
        return
    options.results.mkdir(parents=True, exist_ok=True)
    names = [variant.name for variant in variants]
    selected = options.only.split(",") if options.only else names
    if unknown := set(selected) - set(names):
        sys.exit(f"--only: no variant {', '.join(sorted(unknown))}; expected {', '.join(names)}")
    variants = [variant for variant in variants if variant.name in selected]
    if options.calibrate:
        calibrate(variants, options)
        return
    for seed in map(int, (options.seeds or "0,1,2").split(",")):
        for variant in variants:
            result = run_variant(variant, seed, options)
            print(
                f"{variant.name}, seed {seed}: held-out loss {result['heldout_loss']:.4f}, "
                f"{result['steps']:,} steps, {result['seconds']:,.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
