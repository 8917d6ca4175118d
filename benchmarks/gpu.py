r"""Check and measure Bertsmith on a GPU, in stages of less than nine minutes.

    python benchmarks/gpu.py --stage A --store store --out gpu
    python benchmarks/gpu.py --stage A --out gpu --dry

A: the hardware, kernels compared with float32 on the CPU, pre-training of base with a profile,
   compiled shapes, each optimization switched off, transformers, and embeddings.
B: large, length 512, fine-tuning, a killed run, checkpoints, NCCL, gloo, the server, and matrix
   products in fp8.
C: the speedrun (speedrun.py), which continues if the stage is run again.

Each check is a process with a time limit. If a check fails, hangs or runs out of memory, its error
is reported and the next check starts; what it had measured before is kept. OUT/stage-A.json has all
results, OUT/NAME.log the output of a check. With --dry, the checks run on the CPU with tiny models,
parts that need CUDA are left out, and --data is not needed.

Without --store, the store is made from the documentation in this repository. For results to
publish, use a store of about 20 million tokens.

On a machine without network, carry wheels of the packages that its image lacks. An image with
PyTorch and transformers usually lacks these:

    annotated-types fastapi orjson pydantic pydantic-core sentencex starlette tomli-w
    typing-inspection uvicorn zstandard
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from speedrun import prepare_store
from speedrun_record import ROOT, describe_environment

from bertsmith.files import write_json

#: Maximum seconds of a stage.
STAGE_SECONDS = 530.0
#: A check is skipped if fewer seconds of the stage are left.
MIN_SECONDS = 10.0
#: Seconds that the processes of a check have to end after SIGTERM, before they are killed.
GRACE_SECONDS = 10.0
#: Vocabulary size of the store that is made without --store.
VOCAB_SIZE = 2000
#: Names of checks and their time limits in seconds, in the order of importance.
STAGES: dict[str, dict[str, float]] = {
    "A": {
        "hardware": 40.0, "kernels": 90.0, "stream": 120.0, "transformers": 150.0,
        "embedding": 90.0, "shapes": 240.0, "switches": 240.0,
    },
    "B": {
        "large": 120.0, "length": 90.0, "resume": 120.0, "checkpoint": 60.0, "finetuning": 90.0,
        "nccl": 60.0, "gloo": 90.0, "serving": 90.0, "fp8": 30.0,
    },
    "C": {"speedrun": STAGE_SECONDS},
}  # fmt: skip


def print_line(text: str) -> None:
    """Print a line at once, so that a stage that is killed has printed everything before."""
    print(text, flush=True)


def build_store(options: argparse.Namespace) -> Path:
    """Return the token store: the given one, or one of the documentation in this repository."""
    if options.store is not None:
        store: Path = options.store
        return store
    text = sorted(str(path) for path in (ROOT / "docs").rglob("*.md"))
    return prepare_store(text, VOCAB_SIZE, options.out)


def read_results(path: Path) -> dict[str, Any]:
    """Return what a check has written so far; empty if it has written nothing."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return results


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a check and all processes of its group, some of which can outlive the check."""
    deadline = time.monotonic() + GRACE_SECONDS
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            # An ended check belongs to the group until its status is read.
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_check(name: str, limit: float, store: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a check in a process.

    Args:
        name: Name of the check.
        limit: Time limit in seconds.
        store: Token store.
        options: The arguments of the command line.

    Returns:
        ``status`` ("ok", "failed" or "timeout"), ``seconds``, ``results``, and for a failed check
        ``error``, the last line of its output.
    """
    results_file, log_file = options.out / f"{name}.json", options.out / f"{name}.log"
    results_file.unlink(missing_ok=True)
    command = [sys.executable, "-u", str(Path(__file__).with_name("gpu_checks.py")), name]
    command += ["--store", str(store), "--out", str(options.out)]
    command += ["--data", str(options.data)] if options.data else []
    command += ["--dry"] if options.dry else []
    start = time.monotonic()
    status = "ok"
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            if process.wait(limit):
                status = "failed"
        except subprocess.TimeoutExpired:
            status = "timeout"
        finally:
            stop(process)
    outcome: dict[str, Any] = {
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "results": read_results(results_file),
    }
    if status != "ok":
        lines = log_file.read_text(errors="replace").strip().split("\n")
        outcome["error"] = lines[-1]
    return outcome


def format_results(results: dict[str, Any], indent: str = "  ") -> list[str]:
    """Return nested results as indented lines."""
    lines = []
    for key, value in results.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *format_results(value, indent + "  ")]
        else:
            text = f"{value:,.4g}" if isinstance(value, float) else str(value)
            lines.append(f"{indent}{key}: {text}")
    return lines


def run_stage(options: argparse.Namespace) -> dict[str, Any]:
    """Run the checks of a stage; return the outcome of each, by name."""
    limits = STAGES[options.stage]
    names = options.only.split(",") if options.only else list(limits)
    unknown = [name for name in names if name not in limits]
    if unknown:
        sys.exit(f"--only {unknown[0]}: stage {options.stage} has the checks {', '.join(limits)}")
    end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    store = build_store(options)
    outcomes: dict[str, Any] = {}
    for name in names:
        seconds_left = end - time.monotonic()
        if seconds_left < MIN_SECONDS:
            outcomes[name] = {"status": "skipped", "error": "no time was left in this stage"}
        else:
            print_line(f"{name} (at most {min(limits[name], seconds_left):.0f} s)")
            outcomes[name] = run_check(name, min(limits[name], seconds_left), store, options)
        outcome = outcomes[name]
        reason = f": {outcome['error']}" if "error" in outcome else ""
        print_line(f"{name}: {outcome['status']} in {outcome.get('seconds', 0)} s{reason}")
        for line in format_results(outcome.get("results", {})):
            print_line(line)
    return outcomes


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=sorted(STAGES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for results and logs")
    parser.add_argument("--store", type=Path, help="token store")
    parser.add_argument("--data", type=Path, help="folder with the data of GLUE, for stage C")
    parser.add_argument("--dry", action="store_true", help="run on the CPU with tiny models")
    parser.add_argument("--only", help="checks to run, separated by commas")
    parser.add_argument(
        "--seconds", type=float, default=STAGE_SECONDS, help="maximum duration of the stage"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Run a stage and write its results; return the exit status."""
    options = parse_arguments(argv)
    if not (options.dry or torch.cuda.is_available()):
        sys.exit("PyTorch finds no CUDA device here; --dry runs the checks on the CPU")
    start = datetime.now(UTC).isoformat(timespec="seconds")
    outcomes = run_stage(options)
    path = options.out / f"stage-{options.stage}.json"
    record = {"stage": options.stage, "dry": options.dry, "start": start}
    write_json(path, {**record, **describe_environment(), "checks": outcomes})
    print_line(f"wrote {path}")
    return int(any(outcome["status"] != "ok" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
