"""Killed and resumed equals never killed, byte for byte: weights, moments and journal."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.resume import content, environment
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.pretraining.pretrain import pretrain
from tests.train.conftest import assignments, make_store

STEPS = 14
#: The program, killed by itself after the journal's line of a step: no other process has to be
#: quick enough to do so.
KILLED = """
import os, signal, sys
from bertsmith.cli.main import main
from bertsmith.train.engine.metrics_log import Journal

last, write = int(sys.argv.pop(1)), Journal.write

def killing(self, line):
    write(self, line)
    if line["step"] == last:
        os.kill(os.getpid(), signal.SIGKILL)

Journal.write = killing
main()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of random sentences of all lengths: batches are ragged."""
    return make_store(tmp_path_factory.mktemp("resume"))


def _command(store: Path, out: Path, **changes: Any) -> list[str]:
    chosen = assignments(
        model__attention_dropout=0.1, checkpoint__every=3, run__eval_every=5, run__micro_batch_tokens=64,
        schedule__long_length=48, schedule__long_share=0.3,
        checkpoint__keep_optimizer="true", **changes,
    )  # fmt: skip
    command = [sys.executable, "-m", "bertsmith", "pretrain", "--data", str(store)]
    command += ["--out", str(out), "--steps", str(STEPS)]
    return command + [part for one in chosen for part in ("--set", one)]


def _killed(command: list[str], run: Path, step: int, cache: Path | None) -> None:
    """Start the run in a process that kills itself when its journal has come to a step."""
    arguments = command[command.index("pretrain") :]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(step), *arguments],
        capture_output=True, check=False, env=_environment(cache),
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert read_metrics(run)[-1]["step"] == step
    assert not (run / "model").exists()


def _environment(cache: Path | None) -> dict[str, str]:
    if cache is None:
        return environment(None)
    return {**environment(None), "TORCHINDUCTOR_CACHE_DIR": str(cache)}


def _finished(command: list[str], cache: Path | None) -> None:
    done = subprocess.run(command, capture_output=True, check=False, env=_environment(cache))
    assert done.returncode == 0, done.stderr.decode()


def _equal(one: Path, other: Path) -> None:
    here, there = content(one, STEPS), content(other, STEPS)
    assert here.keys() == there.keys()
    for name in here:
        assert here[name] == there[name], name
    assert here["every step once"] == "True"


@pytest.mark.slow
def test_killed_and_resumed_equals_never_killed(store: Path, tmp_path: Path) -> None:
    """Killed in steps 2, 7 and 12 (before a checkpoint, between two, in the second phase)."""
    calm, torn = tmp_path / "calm", tmp_path / "torn"
    _finished(_command(store, calm), None)
    command = _command(store, torn)
    for step in (2, 7, 12):
        _killed(command, torn, step, None)
    _finished(command, None)
    _equal(calm, torn)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on the CPU")
def test_compiled_killed_and_resumed_equals_never_killed(store: Path, tmp_path: Path) -> None:
    """The same with torch.compile, though the resumed process first sees another batch."""
    calm, torn, cache = tmp_path / "calm", tmp_path / "torn", tmp_path / "cache"
    _finished(_command(store, calm, run__compile="true"), cache)
    command = _command(store, torn, run__compile="true")
    _killed(command, torn, 8, cache)
    _finished(command, cache)
    _equal(calm, torn)


def test_the_comparison_sees_a_difference(store: Path, tmp_path: Path) -> None:
    """One bit of a weight, or one figure of the journal, and two runs are told apart."""
    run = tmp_path / "run"
    pretrain(store, run, steps=1, assignments=assignments(checkpoint__keep_optimizer="true"))
    before = content(run, 1)
    path = run / "checkpoints" / "step-1" / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0]["loss"] += 1e-9
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    after = content(run, 1)
    different = {name for name in before if before[name] != after[name]}
    assert different == {"step-1/weights.safetensors", "journal but for times"}
