"""A killed and resumed run ends with the same bytes: weights, moments and metrics log."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from resume import build_environment, collect_run_contents

from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.pretraining.pretrain import pretrain
from tests.train.conftest import make_assignments, make_store

STEPS = 14
#: Program that runs a command of bertsmith and kills itself after logging a given step. A kill from
#: another process could hit another step.
SELF_KILLING_PROGRAM = """
import os, signal, sys
from bertsmith.cli.main import main
from bertsmith.train.engine.metrics_log import MetricsLog

last_step = int(sys.argv.pop(1))
write = MetricsLog.write

def write_and_kill(self, line):
    write(self, line)
    if line["step"] == last_step:
        os.kill(os.getpid(), signal.SIGKILL)

MetricsLog.write = write_and_kill
main()
"""

#: Program that kills itself while a thread writes the checkpoint of step 6: its weights are
#: written, its moments are not, and training has started step 9.
KILLED_WRITE_PROGRAM = """
import os, signal, threading
from bertsmith.cli.main import main
from bertsmith.train.engine import checkpoint, loop

is_training = threading.Event()
save_tensors, take_step = checkpoint.save_tensors, loop.take_step

def save_and_kill(tensors, path):
    if "step-6." in str(path) and path.name == checkpoint.MOMENTS_FILE:
        if is_training.wait(60):
            os.kill(os.getpid(), signal.SIGKILL)
    save_tensors(tensors, path)

def take_step_and_report(*arguments, step, **options):
    if step == 8:
        is_training.set()
    return take_step(*arguments, step=step, **options)

checkpoint.save_tensors, loop.take_step = save_and_kill, take_step_and_report
main()
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of random sentences of different lengths."""
    return make_store(tmp_path_factory.mktemp("resume"))


def _list_options(**changes: Any) -> list[str]:
    """Return the settings of a run whose last 4 steps have longer sequences."""
    settings: dict[str, Any] = {
        "model__attention_dropout": 0.1,
        "checkpoint__steps": 3,
        "run__eval_every": 5,
        "run__micro_batch_tokens": 64,
        "schedule__phase2_max_seqlen": 48,
        "schedule__phase2_fraction": 0.3,
        "checkpoint__keep_optimizer": "true",
    }
    return make_assignments(**settings | changes)


def _build_pretrain_command(store: Path, out: Path, **changes: Any) -> list[str]:
    """Return a command that pre-trains for STEPS steps, the last 4 with longer sequences."""
    options = _list_options(**changes)
    command = [sys.executable, "-m", "bertsmith", "pretrain", "--data", str(store)]
    command += ["--out", str(out), "--steps", str(STEPS)]
    return command + [part for option in options for part in ("--set", option)]


def _run_until_killed(command: list[str], run: Path, step: int, cache: Path | None) -> None:
    """Run ``command`` in a process that kills itself after logging ``step``."""
    arguments = command[command.index("pretrain") :]
    process = subprocess.run(
        [sys.executable, "-c", SELF_KILLING_PROGRAM, str(step), *arguments],
        capture_output=True,
        check=False,
        env=_build_process_environment(cache),
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert read_metrics(run)[-1]["step"] == step
    assert not (run / "model").exists()


def _build_process_environment(cache: Path | None) -> dict[str, str]:
    """Return environment variables, with ``cache`` as the cache of torch.compile."""
    if cache is None:
        return build_environment(None)
    return {**build_environment(None), "TORCHINDUCTOR_CACHE_DIR": str(cache)}


def _run_to_end(command: list[str], cache: Path | None) -> None:
    process = subprocess.run(
        command, capture_output=True, check=False, env=_build_process_environment(cache)
    )
    assert process.returncode == 0, process.stderr.decode()


def _assert_same_content(run: Path, other: Path) -> None:
    content_of_run = collect_run_contents(run, STEPS)
    content_of_other = collect_run_contents(other, STEPS)
    assert content_of_run.keys() == content_of_other.keys()
    for name in content_of_run:
        assert content_of_run[name] == content_of_other[name], name
    # Each step is logged exactly once.
    assert content_of_run["trained steps"] == json.dumps(list(range(1, STEPS + 1)))


@pytest.mark.slow
def test_killed_and_resumed_run_has_identical_content(store: Path, tmp_path: Path) -> None:
    """A run that is killed in all phases and resumed ends with the bytes of an unkilled run.

    The first 5 steps are left to right.
    """
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    changes = {"schedule__causal_fraction": 0.35}
    pretrain(store, uninterrupted, steps=STEPS, assignments=_list_options(**changes))
    command = _build_pretrain_command(store, killed, **changes)
    for step in (2, 7, 12):
        _run_until_killed(command, killed, step, None)
    _run_to_end(command, None)
    _assert_same_content(uninterrupted, killed)


def test_run_killed_in_an_asynchronous_write_has_identical_content(
    store: Path, tmp_path: Path
) -> None:
    """A run that is killed while a thread writes a checkpoint resumes from the one before.

    It ends with the bytes of an unkilled run whose checkpoints are written at once.
    """
    command = _build_pretrain_command(
        store, tmp_path / "killed", checkpoint__asynchronous="true", run__eval_every=20
    )
    arguments = command[command.index("pretrain") :]
    process = subprocess.run(
        [sys.executable, "-c", KILLED_WRITE_PROGRAM, *arguments],
        capture_output=True,
        check=False,
        env=build_environment(None),
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    checkpoints = tmp_path / "killed" / "checkpoints"
    assert [path.name for path in checkpoints.glob("step-*")] == ["step-3"]
    assert len(list(checkpoints.glob(".step-6*"))) == 1
    for run, is_asynchronous in (("killed", "true"), ("uninterrupted", "false")):
        options = _list_options(checkpoint__asynchronous=is_asynchronous, run__eval_every=20)
        pretrain(store, tmp_path / run, steps=STEPS, assignments=options)
    _assert_same_content(tmp_path / "uninterrupted", tmp_path / "killed")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on the CPU")
def test_compiled_killed_and_resumed_run_has_identical_content(store: Path, tmp_path: Path) -> None:
    """With torch.compile, a killed and resumed run also ends with the bytes of an unkilled run.

    The first steps have an attention bias, so that there are two graphs. The losses are those of
    eager mode.
    """
    uninterrupted, killed = tmp_path / "uninterrupted", tmp_path / "killed"
    cache = tmp_path / "cache"
    options: dict[str, Any] = {
        "run__compile": "true",
        "run__initialization": "match-heads",
        "schedule__neighbor_bias_steps": 5,
        # A micro-batch with a single example would need graphs of its own.
        "run__micro_batch_tokens": 4096,
    }
    _run_to_end(_build_pretrain_command(store, uninterrupted, **options), cache)
    command = _build_pretrain_command(store, killed, **options)
    _run_until_killed(command, killed, 8, cache)
    _run_to_end(command, cache)
    _assert_same_content(uninterrupted, killed)
    eager = _list_options(**options | {"run__compile": "false"})
    pretrain(store, tmp_path / "eager", steps=STEPS, assignments=eager)
    losses, eager_losses = (
        [line["loss"] for line in read_metrics(run) if line["kind"] == "train"]
        for run in (uninterrupted, tmp_path / "eager")
    )
    assert losses == pytest.approx(eager_losses, rel=1e-4)


def test_comparison_detects_differences(store: Path, tmp_path: Path) -> None:
    """The comparison of runs detects a changed bit of a weight and a changed metric in the log."""
    run = tmp_path / "run"
    pretrain(store, run, steps=1, assignments=make_assignments(checkpoint__keep_optimizer="true"))
    original = collect_run_contents(run, 1)
    weights_file = run / "checkpoints" / "step-1" / "weights.safetensors"
    data = bytearray(weights_file.read_bytes())
    data[-1] ^= 1
    weights_file.write_bytes(data)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[0]["loss"] += 1e-9
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    changed = collect_run_contents(run, 1)
    differences = {name for name in original if original[name] != changed[name]}
    assert differences == {"step-1/weights.safetensors", "metrics log without times"}
