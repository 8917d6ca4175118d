"""Kill processes of a run that torchrun restarts, and compare it with an uninterrupted run.

    python benchmarks/elastic.py [CORPUS...] [--kills 100] [--hangs 1] [--json FILE]

Three comparisons:

same: random processes of a run with --processes processes are killed. The run must end with the
    bytes of an uninterrupted run with as many processes.
hang: as above, but processes are suspended (SIGSTOP), which the others notice by a timeout.
changing: the run is stopped, and continued in another number of processes of --schedule. Each step
    must have the examples of an uninterrupted run in one process, and the same loss up to rounding.
    Training amplifies differences in rounding, so the tolerance is measured: up to each step, the
    largest difference may be CONTROL_FACTOR times as large as that between two runs in one process,
    whose batches are divided into other micro-batches.

Without a corpus it trains on the docstrings of the installed packages.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from reporting import describe_machine
from resume import TIMEOUT_SECONDS, collect_run_contents, prepare_store, read_last_step

#: The difference of the losses may be this many times as large as that of the control runs.
CONTROL_FACTOR = 10
#: Relative difference of the losses that is always allowed, a few times the rounding of float32.
MIN_TOLERANCE = 1e-6
#: The program of each process. It writes its process id to a file, and process 0 logs a hash of the
#: examples of each step.
WORKER = """
import os, sys
from datetime import timedelta
from pathlib import Path

work = Path(sys.argv.pop(1))
timeout = float(sys.argv.pop(1))
rank = os.environ.get("RANK", "0")
(work / f"pid-{rank}").write_text(str(os.getpid()))

import hashlib, json
from bertsmith.cli.main import main
from bertsmith.runtime import process_group
from bertsmith.train.engine import loop

process_group.TIMEOUT = timedelta(seconds=timeout)
take_step = loop.take_step

def take_step_and_log(loss_fn, micro_batches, *arguments, step, **options):
    result = take_step(loss_fn, micro_batches, *arguments, step=step, **options)
    if rank == "0":
        digest = hashlib.sha256()
        for tensors in ("ids", "labels"):
            for batch in micro_batches:
                tensor = batch.packed.ids if tensors == "ids" else batch.masked_labels
                digest.update(tensor.numpy().tobytes())
        with (work / "examples.jsonl").open("a") as file:
            file.write(json.dumps([step + 1, digest.hexdigest()]) + "\\n")
    return result

loop.take_step = take_step_and_log
main()
"""


@dataclass
class Run:
    """A run and its files.

    Attributes:
        command: Arguments of bertsmith.
        work: Folder of the run directory ``work / "run"``, the program and the logs.
        timeout: Seconds after which a process that does not respond is considered lost.
        num_during_checkpoint: Number of kills while a checkpoint was being written.
    """

    command: Sequence[str]
    work: Path
    timeout: float
    num_during_checkpoint: int = field(default=0, init=False)

    @property
    def directory(self) -> Path:
        """The run directory."""
        return self.work / "run"

    def launch(self, num_processes: int, max_restarts: int = 0) -> "subprocess.Popen[bytes]":
        """Start the run in processes of torchrun, or continue it."""
        self.work.mkdir(parents=True, exist_ok=True)
        program = self.work / "worker.py"
        program.write_text(WORKER)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(num_processes), "--max-restarts", str(max_restarts)]
        launcher += [str(program), str(self.work), str(self.timeout), *self.command]
        with (self.work / "log").open("ab") as output:
            return subprocess.Popen(
                [*launcher, "--out", str(self.directory)], stdout=output, stderr=output
            )

    def run_to_end(self, launcher: "subprocess.Popen[bytes]") -> None:
        """Wait until torchrun ends; raise RuntimeError if it fails."""
        if launcher.wait(TIMEOUT_SECONDS) != 0:
            raise RuntimeError((self.work / "log").read_text()[-3000:])

    def read_pid(self, rank: int) -> int:
        """Return the id of a process; 0 if it has not started yet."""
        path = self.work / f"pid-{rank}"
        return int(path.read_text() or 0) if path.exists() else 0

    def read_examples(self) -> dict[int, set[str]]:
        """Return the hashes of the examples of each step, of all attempts."""
        hashes: dict[int, set[str]] = {}
        for line in (self.work / "examples.jsonl").read_text().splitlines():
            step, digest = json.loads(line)
            hashes.setdefault(step, set()).add(digest)
        return hashes


def wait_until_step(launcher: "subprocess.Popen[bytes]", run: Run, step: int) -> None:
    """Wait until the metrics log contains ``step``; raise RuntimeError if the run ends or hangs."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while read_last_step(run.directory) < step:
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.kill()
            raise RuntimeError(f"no step {step}:\n{(run.work / 'log').read_text()[-3000:]}")
        time.sleep(0.005)


def wait_until_started(launcher: "subprocess.Popen[bytes]", run: Run, old: list[int]) -> list[int]:
    """Wait until torchrun has replaced all processes; return the new process ids."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        pids = [run.read_pid(rank) for rank in range(len(old))]
        if all(pid not in (0, old_pid) for pid, old_pid in zip(pids, old, strict=True)):
            return pids
        if launcher.poll() is not None or time.monotonic() > deadline:
            launcher.kill()
            raise RuntimeError(f"no restart:\n{(run.work / 'log').read_text()[-3000:]}")
        time.sleep(0.005)


def strike_and_finish(
    run: Run, options: argparse.Namespace, num_strikes: int, number: signal.Signals
) -> list[str]:
    """Send a signal to random processes of a run, let it finish, and describe each strike.

    Four of five signals are sent after a random step. The others are sent at a random time while
    the processes start.
    """
    generator = random.Random(options.seed)
    launcher = run.launch(options.processes, max_restarts=num_strikes)
    pids = [0] * options.processes
    startup_seconds = 5.0
    descriptions = []
    for strike in range(num_strikes):
        start = time.monotonic()
        pids = wait_until_started(launcher, run, pids)
        previous_step = read_last_step(run.directory)
        if strike % 5 == 4:
            time.sleep(generator.uniform(0.0, startup_seconds))
        else:
            steps_per_strike = (options.steps - previous_step) / (num_strikes - strike + 1)
            target = previous_step + 1 + int(generator.uniform(0.0, max(steps_per_strike - 1, 0)))
            wait_until_step(launcher, run, min(target, options.steps - 2))
            startup_seconds = time.monotonic() - start
            time.sleep(generator.uniform(0.0, 0.1))
        rank = generator.randrange(options.processes)
        os.kill(pids[rank], number)
        is_writing = rank == 0 and any((run.directory / "checkpoints").glob(".*.tmp"))
        run.num_during_checkpoint += is_writing
        descriptions.append(f"process {rank} after step {read_last_step(run.directory)}")
        print(f"    {number.name} {strike + 1}: {descriptions[-1]}", flush=True)
    run.run_to_end(launcher)
    return descriptions


def compare_same(
    name: str, command: Sequence[str], work: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Compare a killed or suspended run with an uninterrupted one in as many processes."""
    is_hang = name == "hang"
    num_strikes = options.hangs if is_hang else options.kills
    uninterrupted = Run(command, work / "uninterrupted", options.timeout)
    if not uninterrupted.directory.exists():
        uninterrupted.run_to_end(uninterrupted.launch(options.processes))
    run = Run(command, work / name, options.timeout)
    number = signal.SIGSTOP if is_hang else signal.SIGKILL
    descriptions = strike_and_finish(run, options, num_strikes, number)
    expected = collect_run_contents(uninterrupted.directory, options.steps)
    actual = collect_run_contents(run.directory, options.steps)
    is_equal = {key: actual[key] == value for key, value in expected.items()}
    is_equal["trained steps"] &= actual["trained steps"] == json.dumps(
        list(range(1, options.steps + 1))
    )
    return {
        "processes": options.processes,
        "signals": num_strikes,
        "inside_a_checkpoint": run.num_during_checkpoint,
        "strikes": descriptions,
        "equal": is_equal,
    }


def compare_changing(
    command: Sequence[str], work: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """Compare a run whose number of processes changes with an uninterrupted one in one process."""
    # Dropout masks depend on the micro-batches, and these on the number of processes.
    command = [*command, "--set", "model.dropout=0", "--set", "model.attention_dropout=0"]
    single = Run(command, work / "single", options.timeout)
    single.run_to_end(single.launch(1))
    control_tokens = f"run.micro_batch_tokens={2 * options.micro_batch_tokens}"
    control = Run([*command, "--set", control_tokens], work / "control", options.timeout)
    control.run_to_end(control.launch(1))
    run = Run(command, work / "changing", options.timeout)
    sizes = []
    for part, num_processes in zip(
        range(options.changes + 1), cycle(options.schedule), strict=False
    ):
        sizes.append(num_processes)
        launcher = run.launch(num_processes)
        if part == options.changes:
            run.run_to_end(launcher)
            break
        wait_until_step(launcher, run, options.steps * (part + 1) // (options.changes + 1))
        # SIGTERM saves a checkpoint. SIGKILL to torchrun's group would lose the last steps.
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(TIMEOUT_SECONDS)
        print(f"    {num_processes} processes until {read_last_step(run.directory)}", flush=True)
    expected = single.read_examples()
    actual = run.read_examples()
    differences = compute_loss_differences(run.directory, single.directory)
    control_differences = compute_loss_differences(control.directory, single.directory)
    return {
        "processes": sizes,
        "max_relative_loss_difference": differences[-1],
        "max_relative_loss_difference_of_control": control_differences[-1],
        "equal": {
            "examples of each step": actual == expected and set(map(len, actual.values())) == {1},
            "loss up to rounding": all(
                difference <= max(CONTROL_FACTOR * control, MIN_TOLERANCE)
                for difference, control in zip(differences, control_differences, strict=True)
            ),
        },
    }


def compute_loss_differences(run: Path, other: Path) -> list[float]:
    """Return the largest relative difference of the losses of two runs up to each step."""
    losses, other_losses = (
        {line["step"]: line["loss"] for line in read_train_lines(folder)} for folder in (run, other)
    )
    differences = (abs(losses[step] / other_losses[step] - 1.0) for step in other_losses)
    return list(accumulate(differences, max))


def read_train_lines(run: Path) -> list[dict[str, Any]]:
    """Return the lines of the metrics log about training steps."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "train"]


def build_command(store: Path, options: argparse.Namespace) -> list[str]:
    """Return the arguments of ``bertsmith pretrain``, without the run directory."""
    settings = {
        "run.device": "cpu",
        "run.precision": "fp32",
        "run.threads": 1,
        "run.log_every": 1,
        "run.eval_every": max(options.steps // 6, 1),
        "run.max_eval_sequences": 32,
        "run.micro_batch_tokens": options.micro_batch_tokens,
        "checkpoint.steps": options.every,
        "checkpoint.keep_optimizer": "true",
        "data.batch_size": options.batch,
        "data.max_seqlen": 64,
        "model.attention_dropout": 0.1,
        **dict(assignment.split("=", 1) for assignment in options.set),
    }
    command = ["pretrain", "--data", str(store), "--size", options.size]
    command += ["--steps", str(options.steps)]
    return command + [
        part for item in settings.items() for part in ("--set", "=".join(map(str, item)))
    ]


def main() -> None:
    """Run the comparisons; exit with status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="*", help="text files; default: docstrings")
    parser.add_argument("--store", type=Path, help="an existing store to train on")
    parser.add_argument(
        "--work", type=Path, help="a new working directory; default: a temporary one"
    )
    parser.add_argument("--mode", nargs="+", default=["same", "hang", "changing"])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--hangs", type=int, default=1)
    parser.add_argument(
        "--timeout", type=float, default=30.0, help="seconds until a hang is noticed"
    )
    parser.add_argument("--schedule", type=int, nargs="+", default=[2, 3, 1])
    parser.add_argument("--changes", type=int, default=5, help="changes of the number of processes")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--words", type=int, default=4000, help="vocabulary size")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--micro-batch-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0, help="seed of the kill times")
    parser.add_argument("--set", action="append", default=[], help="additional setting")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    measurements: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        store = options.store or prepare_store(options.corpus, options.words, work)
        command = build_command(store, options)
        for mode in options.mode:
            print(f"{mode}:", flush=True)
            start = time.monotonic()
            if mode == "changing":
                measurements[mode] = compare_changing(command, work, options)
            else:
                measurements[mode] = compare_same(mode, command, work, options)
            print(
                f"    {measurements[mode]['equal']} in {time.monotonic() - start:.0f} s", flush=True
            )
    all_equal = all(all(comparison["equal"].values()) for comparison in measurements.values())
    if options.json:
        result = {
            "name": "elastic",
            "ratios": {},
            "figures": measurements,
            "machine": describe_machine(),
        }
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("all equal" if all_equal else "NOT equal")
    sys.exit(0 if all_equal else 1)


if __name__ == "__main__":
    main()
