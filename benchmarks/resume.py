"""Kill a pre-training run again and again, resume it, and compare it with an undisturbed one.

It never looks inside the program: it runs `bertsmith pretrain` and compares the files, byte for
byte: weights, both moments of the optimizer, the model directory's weights, and the journal but
for its times.

    python benchmarks/resume.py [CORPUS...] [--kills 10] [--mode eager compiled] [--json FILE]

Without a corpus it takes the documentation strings of the installed packages.
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

#: The files of state that must not differ, besides the journal.
STATE = ("weights.safetensors", "moments.safetensors")
#: Seconds after which a process that has not come to its next step is taken to hang.
PATIENCE = 900.0


@dataclass
class Disturbed:
    """What happened to a run: where each kill came, and which one fell into a checkpoint."""

    at: list[str] = field(default_factory=list)
    inside_checkpoint: int = 0


def bertsmith(*arguments: str) -> list[str]:
    """Return the command line of the program, under this interpreter."""
    return [sys.executable, "-m", "bertsmith", *arguments]


def store_of(corpus: Sequence[str], words: int, work: Path) -> Path:
    """Make vocabulary and store from text, by the program's own verbs."""
    given = list(corpus)
    if not given:
        given = [str(work / "docstrings.jsonl")]
        subprocess.run(bertsmith("corpus", "docstrings", "--out", *given), check=True)
    vocab, store = work / "vocab", work / "store"
    subprocess.run(
        bertsmith("vocab", *given, "--size", str(words), "--out", str(vocab)), check=True
    )
    command = bertsmith("prepare", *given, "--tokenizer", str(vocab), "--out", str(store))
    subprocess.run(command, check=True)
    return store


def train_command(store: Path, out: Path, options: argparse.Namespace, mode: str) -> list[str]:
    """Return the command that is run, killed, and run again."""
    settings = {
        "run.compile": "true" if mode == "compiled" else "false",
        "run.device": "cpu",
        "run.precision": options.precision,
        "run.log_every": 1,
        "run.eval_every": max(options.steps // 6, 1),
        "run.eval_sequences": 32,
        "checkpoint.every": options.every,
        # The moments are compared too.
        "checkpoint.keep_optimizer": "true",
        "data.batch": options.batch,
        # Both moments and both dropouts shall matter.
        "model.attention_dropout": 0.1,
        # A batch in pieces, and a second phase of longer sequences.
        "run.micro_batch_tokens": options.micro_batch_tokens,
        "schedule.long_length": 192,
        "schedule.long_share": 0.25,
        **dict(one.split("=", 1) for one in options.set),
    }
    assignments = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    return bertsmith(
        "pretrain", "--data", str(store), "--out", str(out), "--size", options.size,
        "--steps", str(options.steps), *assignments,
    )  # fmt: skip


def environment(cache: Path | None) -> dict[str, str]:
    """Return the environment of a process; ``cache`` is where compiled code is kept."""
    if cache is None:
        return dict(os.environ)
    shutil.rmtree(cache, ignore_errors=True)
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache)}


def last_step(run: Path) -> int:
    """Return the last whole line's step in the journal."""
    path = run / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def wait_for(process: "subprocess.Popen[bytes]", run: Path, step: int) -> None:
    """Wait until the journal has come to ``step``; RuntimeError if the process ends before."""
    end = time.monotonic() + PATIENCE
    while last_step(run) < step:
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError(f"the run ended or hung before step {step}:\n{log_of(run)}")
        time.sleep(0.005)


def log_of(run: Path) -> str:
    """Return what the processes of a run said."""
    path = run.with_suffix(".log")
    return path.read_text(encoding="utf-8") if path.exists() else ""


def disturb(
    command: list[str], run: Path, options: argparse.Namespace, cache: Path | None, step_time: float
) -> Disturbed:
    """Start the run, kill it at a random moment, and again; then let it come to its end.

    Most moments lie in training: the step is drawn over what is left, and the moment within some
    steps after it. One in five lies in the start, anywhere from the first import on.
    """
    chance = random.Random(options.seed)
    done, start_up = Disturbed(), 5.0
    for number in range(options.kills):
        with run.with_suffix(".log").open("ab") as log:
            began = time.monotonic()
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment(cache), start_new_session=True
            )
            before = last_step(run)
            if number % 5 == 4:
                time.sleep(chance.uniform(0.0, start_up))
            else:
                room = (options.steps - before) / (options.kills - number + 1)
                target = before + 1 + int(chance.uniform(0.0, max(room - 1, 0)))
                # A resumed run cuts its journal first, so the target is waited for in it anew.
                wait_for(process, run, 1)
                time.sleep(0.2)
                wait_for(process, run, min(target, options.steps - 2))
                start_up = time.monotonic() - began
                time.sleep(chance.uniform(0.0, 3 * step_time))
        process.kill()
        process.wait()
        folder = run / "checkpoints"
        unfinished = [*folder.glob(".*.tmp")] if folder.exists() else []
        done.inside_checkpoint += bool(unfinished)
        saved = max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)
        done.at.append(f"{last_step(run)} (saved {saved})")
        print(f"    kill {number + 1}: journal at step {last_step(run)}, last checkpoint {saved}"
              + (", inside a checkpoint" if unfinished else ""), flush=True)  # fmt: skip
    with run.with_suffix(".log").open("ab") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment(cache))
    return done


def content(run: Path, steps: int) -> dict[str, str]:
    """Return a hash of each thing that must not differ."""
    result = {}
    folder = run / "checkpoints" / f"step-{steps}"
    for name, path in {
        **{f"{folder.name}/{name}": folder / name for name in STATE},
        "model/model.safetensors": run / "model" / "model.safetensors",
    }.items():
        result[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    result["state.json but for seconds"] = json.dumps({**state, "seconds": 0})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in line.items() if key not in TIMING_KEYS} for line in lines]
    result["journal but for times"] = "\n".join(json.dumps(line) for line in kept)
    trained = [line["step"] for line in lines if line["kind"] == "train"]
    result["every step once"] = str(trained == list(range(1, steps + 1)))
    return result


def compare(mode: str, store: Path, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run undisturbed and disturbed in one mode; print and return what was found."""
    print(f"{mode}:", flush=True)
    # A compiled graph is made anew in every process, so that nothing rests on a cache.
    cache = work / "inductor" if mode == "compiled" and not options.keep_cache else None
    calm, torn = work / f"{mode}-calm", work / f"{mode}-torn"
    began = time.monotonic()
    command = train_command(store, calm, options, mode)
    with calm.with_suffix(".log").open("ab") as log:
        subprocess.run(command, check=True, stdout=log, stderr=log, env=environment(cache))
    seconds = time.monotonic() - began
    lines = [json.loads(line) for line in (calm / "metrics.jsonl").read_text().splitlines()]
    step_time = lines[-1].get("seconds", lines[-2].get("seconds", 1.0)) / options.steps
    print(f"    undisturbed: {options.steps} steps in {seconds:.0f} s", flush=True)
    # On a busy machine each run may choose another number of threads, and so other bytes.
    with (calm / "settings.toml").open("rb") as file:
        options.set = [*options.set, f"run.threads={tomllib.load(file)['run']['threads']}"]
    done = disturb(train_command(store, torn, options, mode), torn, options, cache, step_time)
    one, other = content(calm, options.steps), content(torn, options.steps)
    equal = {name: one[name] == other[name] for name in one}
    equal["every step once"] = one["every step once"] == other["every step once"] == "True"
    for name, same in equal.items():
        shown = one[name][:16] if len(one[name]) == 64 else ""
        print(f"    {'equal    ' if same else 'DIFFERENT'}  {name}  {shown}", flush=True)
    return {
        "kills": options.kills, "killed_at_step": done.at,
        "killed_inside_a_checkpoint": done.inside_checkpoint,
        "last_loss": [line["loss"] for line in lines if line["kind"] == "train"][-1],
        "equal": equal,
    }  # fmt: skip


def main() -> None:
    """Compare in each mode; exit with 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", nargs="*", help="text; without it, documentation strings")
    parser.add_argument("--store", type=Path, help="a store that stands already")
    parser.add_argument("--work", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--mode", nargs="+", default=["eager", "compiled"])
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--words", type=int, default=4000)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--micro-batch-tokens", type=int, default=700)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the moments of the kills")
    parser.add_argument(
        "--keep-cache", action="store_true", help="let processes share compiled code"
    )
    parser.add_argument(
        "--set", action="append", default=[], help="a setting more, as for pretrain"
    )
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    import torch

    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        store = options.store or store_of(options.corpus, options.words, work)
        figures = {mode: compare(mode, store, work, options) for mode in options.mode}
    same = all(all(figure["equal"].values()) for figure in figures.values())
    machine = {
        "cores": os.cpu_count(), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "python": platform.python_version(), "processor": platform.machine(),
    }  # fmt: skip
    result = {"name": "resume", "ratios": {}, "figures": figures, "machine": machine}
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print("all equal, byte for byte" if same else "NOT equal")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
