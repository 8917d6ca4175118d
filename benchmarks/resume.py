"""Kill and resume a pre-training run repeatedly, and compare it with an uninterrupted run.

The benchmark runs `bertsmith pretrain` and compares the weights, Adam's moments, the weights of the
model directory and the metrics log (without times) byte for byte.

    python benchmarks/resume.py [CORPUS...] [--kills 10] [--mode eager compiled] [--json FILE]

Without a corpus it trains on the docstrings of the installed packages.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.train.engine.metrics_log import TIMING_KEYS

#: Checkpoint files that must be identical in both runs.
STATE_FILES = ("weights.safetensors", "moments.safetensors")
#: A process that needs longer to reach the next step is considered hung.
TIMEOUT_SECONDS = 900.0


@dataclass
class KillLog:
    """The progress of the run at each kill.

    Attributes:
        descriptions: Last logged step and last checkpoint at each kill.
        num_during_checkpoint: Number of kills while a checkpoint was being written.
    """

    descriptions: list[str] = field(default_factory=list)
    num_during_checkpoint: int = 0


def build_command(*arguments: str) -> list[str]:
    """Return a Bertsmith command that uses this Python interpreter."""
    return [sys.executable, "-m", "bertsmith", *arguments]


def prepare_store(corpus: Sequence[str], vocab_size: int, work: Path) -> Path:
    """Learn a vocabulary from text and write a token store; return its path."""
    sources = list(corpus)
    if not sources:
        sources = [str(work / "docstrings.jsonl")]
        subprocess.run(build_command("corpus", "docstrings", "--out", *sources), check=True)
    vocab, store = work / "vocab", work / "store"
    subprocess.run(
        build_command("vocab", *sources, "--size", str(vocab_size), "--out", str(vocab)),
        check=True,
    )
    command = build_command("prepare", *sources, "--tokenizer", str(vocab), "--out", str(store))
    subprocess.run(command, check=True)
    return store


def build_pretrain_command(
    store: Path, out: Path, options: argparse.Namespace, mode: str
) -> list[str]:
    """Return the `bertsmith pretrain` command of a run."""
    settings = {
        "run.compile": "true" if mode == "compiled" else "false",
        "run.device": "cpu",
        "run.precision": options.precision,
        "run.log_every": 1,
        "run.eval_every": max(options.steps // 6, 1),
        "run.max_eval_sequences": 32,
        "checkpoint.steps": options.every,
        # The comparison includes Adam's moments.
        "checkpoint.keep_optimizer": "true",
        "data.batch_size": options.batch,
        # The random state of attention dropout must survive a resume too.
        "model.attention_dropout": 0.1,
        # Several micro-batches per step, and a second phase with longer sequences.
        "run.micro_batch_tokens": options.micro_batch_tokens,
        "schedule.phase2_max_seqlen": 192,
        "schedule.phase2_fraction": 0.25,
        **dict(assignment.split("=", 1) for assignment in options.set),
    }
    assignments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return build_command(
        "pretrain",
        "--data",
        str(store),
        "--out",
        str(out),
        "--size",
        options.size,
        "--steps",
        str(options.steps),
        *assignments,
    )


def build_environment(compile_cache: Path | None) -> dict[str, str]:
    """Return the environment of a process; empty the cache of compiled code if there is one."""
    if compile_cache is None:
        return dict(os.environ)
    shutil.rmtree(compile_cache, ignore_errors=True)
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(compile_cache)}


def read_last_step(run: Path) -> int:
    """Return the step of the last complete line in the metrics log."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def wait_for_step(process: "subprocess.Popen[bytes]", run: Path, step: int) -> None:
    """Wait until the metrics log contains ``step``.

    Raises:
        RuntimeError: If the process ends or hangs before it reaches ``step``.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while read_last_step(run) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the run ended or hung before step {step}:\n{read_output(run)}")
        time.sleep(0.005)


def read_output(run: Path) -> str:
    """Return the messages that the processes of a run have printed."""
    path = run.with_suffix(".log")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def kill_and_resume(
    command: list[str], run: Path, options: argparse.Namespace, cache: Path | None, step_time: float
) -> KillLog:
    """Start and kill the run repeatedly, then let it finish.

    Four of five kills happen during training: at a random step, and at a random time within a few
    steps. The others happen at a random time while the process starts.
    """
    generator = random.Random(options.seed)
    kill_log = KillLog()
    startup_seconds = 5.0
    for kill in range(options.kills):
        with run.with_suffix(".log").open("ab") as output:
            start = time.monotonic()
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                env=build_environment(cache),
                start_new_session=True,
            )
            previous_step = read_last_step(run)
            if kill % 5 == 4:
                time.sleep(generator.uniform(0.0, startup_seconds))
            else:
                steps_per_kill = (options.steps - previous_step) / (options.kills - kill + 1)
                target = previous_step + 1 + int(generator.uniform(0.0, max(steps_per_kill - 1, 0)))
                # A resumed run first truncates its metrics log; wait until it logs again.
                wait_for_step(process, run, 1)
                time.sleep(0.2)
                wait_for_step(process, run, min(target, options.steps - 2))
                startup_seconds = time.monotonic() - start
                time.sleep(generator.uniform(0.0, 3 * step_time))
        process.kill()
        process.wait()
        checkpoints = run / "checkpoints"
        unfinished = [*checkpoints.glob(".*.tmp")] if checkpoints.exists() else []
        kill_log.num_during_checkpoint += bool(unfinished)
        saved_step = max((int(path.name[5:]) for path in checkpoints.glob("step-*")), default=0)
        kill_log.descriptions.append(f"{read_last_step(run)} (saved {saved_step})")
        print(
            f"    kill {kill + 1}: at step {read_last_step(run)}, last checkpoint {saved_step}"
            + (", while writing a checkpoint" if unfinished else ""),
            flush=True,
        )
    with run.with_suffix(".log").open("ab") as output:
        subprocess.run(
            command, check=True, stdout=output, stderr=output, env=build_environment(cache)
        )
    return kill_log


def collect_run_contents(run: Path, steps: int) -> dict[str, str]:
    """Return a hash or text of everything that must be identical in both runs, by name."""
    result = {}
    checkpoint = run / "checkpoints" / f"step-{steps}"
    for name, path in {
        **{f"{checkpoint.name}/{name}": checkpoint / name for name in STATE_FILES},
        "model/model.safetensors": run / "model" / "model.safetensors",
    }.items():
        result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    result["state.json without seconds"] = json.dumps({**state, "seconds": 0})
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    without_times = [
        {key: value for key, value in record.items() if key not in TIMING_KEYS}
        for record in records
    ]
    result["metrics log without times"] = "\n".join(json.dumps(record) for record in without_times)
    trained_steps = [record["step"] for record in records if record["kind"] == "train"]
    result["trained steps"] = json.dumps(trained_steps)
    return result


def compare(mode: str, store: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Compare a killed run with an uninterrupted run in one mode; print and return the result."""
    print(f"{mode}:", flush=True)
    # By default each process compiles its code again, so results do not depend on a cache.
    cache = work / "inductor" if mode == "compiled" and not options.keep_cache else None
    uninterrupted, killed = work / f"{mode}-uninterrupted", work / f"{mode}-killed"
    start = time.monotonic()
    command = build_pretrain_command(store, uninterrupted, options, mode)
    with uninterrupted.with_suffix(".log").open("ab") as output:
        subprocess.run(
            command, check=True, stdout=output, stderr=output, env=build_environment(cache)
        )
    seconds = time.monotonic() - start
    records = [
        json.loads(line) for line in (uninterrupted / "metrics.jsonl").read_text().splitlines()
    ]
    step_time = records[-1].get("seconds", records[-2].get("seconds", 1.0)) / options.steps
    print(f"    uninterrupted: {options.steps} steps in {seconds:.0f} s", flush=True)
    # The number of threads affects rounding, and a run on a busy machine uses fewer threads.
    with (uninterrupted / "settings.toml").open("rb") as file:
        options.set = [*options.set, f"run.threads={tomllib.load(file)['run']['threads']}"]
    kill_log = kill_and_resume(
        build_pretrain_command(store, killed, options, mode), killed, options, cache, step_time
    )
    expected = collect_run_contents(uninterrupted, options.steps)
    actual = collect_run_contents(killed, options.steps)
    is_equal = {name: expected[name] == actual[name] for name in expected}
    # Each step must be logged exactly once.
    all_steps = json.dumps(list(range(1, options.steps + 1)))
    is_equal["trained steps"] = expected["trained steps"] == actual["trained steps"] == all_steps
    for name, equal in is_equal.items():
        digest = expected[name][:16] if len(expected[name]) == 64 else ""
        print(f"    {'equal    ' if equal else 'DIFFERENT'}  {name}  {digest}", flush=True)
    return {
        "kills": options.kills,
        "killed_at_step": kill_log.descriptions,
        "killed_inside_a_checkpoint": kill_log.num_during_checkpoint,
        "last_loss": [record["loss"] for record in records if record["kind"] == "train"][-1],
        "equal": is_equal,
    }


def main() -> None:
    """Run the comparison in each mode; exit with status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="*", help="text files; default: docstrings")
    parser.add_argument("--store", type=Path, help="an existing store to train on")
    parser.add_argument("--work", type=Path, help="working directory; default: a temporary one")
    parser.add_argument("--mode", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--words", type=int, default=4000, help="vocabulary size")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--micro-batch-tokens", type=int, default=700)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="seed of the kill times")
    parser.add_argument(
        "--keep-cache", action="store_true", help="share compiled code between processes"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="additional setting, as for pretrain"
    )
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        store = options.store or prepare_store(options.corpus, options.words, work)
        measurements = {mode: compare(mode, store, work, options) for mode in options.mode}
    all_equal = all(all(comparison["equal"].values()) for comparison in measurements.values())
    machine = {
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
    }
    result = {"name": "resume", "ratios": {}, "figures": measurements, "machine": machine}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("all equal, byte for byte" if all_equal else "NOT equal")
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
