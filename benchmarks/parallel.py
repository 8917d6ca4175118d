"""Measure pre-training in two processes, and how many GPUs the data stream of a process can feed.

    python benchmarks/parallel.py --store STORE --rounds 5 --json FILE

1. Runs with one process and two threads alternate with runs with two processes and one thread each
   (torchrun, gloo). The benchmark reports the tokens per second of both, and their ratio. The first
   half of the steps of each run is not counted.
2. One process with one thread computes batches without training. Each process of a run computes all
   batches, so this speed is an upper bound for the tokens per second of all processes together.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu_training import open_session
from reporting import report

from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.metrics_log import read_metrics

#: Target speed of base at length 128 on one H100, in tokens per second (docs/benchmarks.md).
GPU_TOKENS_PER_SECOND = 838_000


def measure_run(num_processes: int, folder: Path, options: argparse.Namespace) -> float:
    """Return the tokens per second of a run whose processes use two threads together."""
    shutil.rmtree(folder, ignore_errors=True)
    threads = 2 // num_processes
    command = [sys.executable]
    if num_processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(num_processes)]
    command += ["-m", "bertsmith", "pretrain", "--data", str(options.store), "--out", str(folder)]
    command += ["--size", options.size, "--steps", str(options.steps)]
    # Evaluations and checkpoints are not part of the measured steps.
    settings = {
        "run.threads": threads, "run.device": "cpu", "run.log_every": 1,
        "run.max_eval_sequences": 2,
        "data.batch_size": options.batch, "run.micro_batch_tokens": options.micro_batch_tokens,
    }  # fmt: skip
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    subprocess.run(command, check=True, env=environment, capture_output=True)
    lines = [line for line in read_metrics(folder) if line["kind"] == "train"]
    return float(statistics.median(line["tokens_per_second"] for line in lines[len(lines) // 2 :]))


def measure_stream(options: argparse.Namespace) -> float:
    """Return the tokens per second of the data stream in one thread, without training."""
    torch.set_num_threads(1)
    settings = ["run.device=cpu", "data.batch_size=256", "run.micro_batch_tokens=65536"]
    session = open_session(options.store, "tiny", settings)
    batches = session.build_objective(StepDuration(10**6)).iter_batches(0)
    next(batches)
    num_tokens = 0
    start = time.perf_counter()
    while time.perf_counter() - start < options.seconds:
        num_tokens += sum(part.num_tokens for part in next(batches))
    return num_tokens / (time.perf_counter() - start)


def main() -> None:
    """Run both measurements."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, required=True, help="token store")
    parser.add_argument("--size", default="mini")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--micro-batch-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=30, help="steps of a run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of part 2")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    speeds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.rounds):
            for num_processes, values in speeds.items():
                values.append(measure_run(num_processes, Path(folder) / "run", options))
                print(
                    f"round {number + 1}, {num_processes}: {values[-1]:,.0f} tokens/s", flush=True
                )
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    stream_speed = measure_stream(options)
    measurements: dict[str, Any] = {
        "one process with two threads, tokens per second": statistics.median(speeds[1]),
        "two processes with one thread, tokens per second": statistics.median(speeds[2]),
        "data stream of one process, tokens per second": stream_speed,
        "GPUs at the target speed of base that it can feed": stream_speed / GPU_TOKENS_PER_SECOND,
    }
    ratio_summary = {
        "two processes / two threads": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
    }
    report("parallel", ratio_summary, measurements, options.json)


if __name__ == "__main__":
    main()
