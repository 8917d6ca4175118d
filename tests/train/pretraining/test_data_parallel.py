"""Pre-training in several processes: torchrun, kills, signals, and other numbers of processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.engine.metrics_log import TIMING_KEYS, read_metrics
from bertsmith.train.pretraining.pretrain import pretrain
from tests.train.conftest import RecordingProgress, make_assignments

STEPS = 12
#: A process that torchrun starts twice. Process 1 kills itself in step 5 of the first attempt. In
#: the second attempt, process 0 sends SIGTERM to torchrun in step 9, and waits until torchrun has
#: sent it to process 0.
PROGRAM = """
import os, signal, time
from bertsmith.cli.main import main
from bertsmith.train.engine import loop

take_step = loop.take_step
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]

def take_step_and_send_signal(*arguments, step, **options):
    if (attempt, rank, step + 1) == ("0", "1", 5):
        os.kill(os.getpid(), signal.SIGKILL)
    if (attempt, rank, step + 1) == ("1", "0", 9):
        os.kill(os.getppid(), signal.SIGTERM)
        signals = signal.getsignal(signal.SIGTERM).__self__
        while signals.received is None:
            time.sleep(0.01)
    return take_step(*arguments, step=step, **options)

loop.take_step = take_step_and_send_signal
main()
"""


def _make_options() -> list[str]:
    """Return settings with which each batch has two micro-batches of similar size.

    The next-sentence head has no gradients and no moments in the first half of the run.
    """
    return make_assignments(
        run__micro_batch_tokens=64,
        run__eval_every=6,
        checkpoint__every=3,
        checkpoint__keep_optimizer="true",
        model__attention_dropout=0.1,
        schedule__causal_fraction=0.5,
    )


def _read_numbers(run: Path) -> list[dict[str, float]]:
    """Return the lines of the metrics log without times and names."""
    return [
        {key: value for key, value in line.items() if key not in (*TIMING_KEYS, "kind")}
        for line in read_metrics(run)
    ]


@pytest.mark.slow
def test_killed_parallel_run_continues_in_another_number_of_processes(
    store: Path, tmp_path: Path
) -> None:
    """A run of 2 processes that is killed, restarted, stopped and resumed by 1 is reproducible.

    Its weights are those of a run in a single process: the processes compute the same micro-batches
    with the same dropout masks, and the sum of two gradients does not depend on their order.
    torchrun restarts the killed run. SIGTERM to torchrun saves one checkpoint. Each message is
    printed once.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run = tmp_path / "parallel"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", str(program), "pretrain"]
    command += ["--data", str(store), "--out", str(run), "--steps", str(STEPS)]
    command += [part for option in _make_options() for part in ("--set", option)]
    launched = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert launched.stderr.count("parameters on") == 2, launched.stderr
    assert launched.stderr.count("2 processes with 1 of") == 2
    assert launched.stderr.count("error: another process of this run has ended unexpectedly") == 1
    assert launched.stderr.count("resuming from step 3") == 1
    assert launched.stderr.count("stopped after step 9 of 12 and saved a checkpoint") == 1
    assert launched.stdout == ""
    assert [step for step, _ in list_checkpoints(run)] == [6, 9]
    assert not (run / "model").exists()

    progress = RecordingProgress()
    options = _make_options()
    pretrain(store, run, steps=STEPS, assignments=options, progress=progress)
    assert any("2 processes in the run, 1 now" in message for message in progress.messages)
    assert "resuming from step 9 of 12" in progress.messages
    single = tmp_path / "single"
    pretrain(store, single, steps=STEPS, assignments=options)
    for name in ("model/model.safetensors", f"checkpoints/step-{STEPS}/moments.safetensors"):
        assert (run / name).read_bytes() == (single / name).read_bytes(), name
    for line, expected in zip(_read_numbers(run), _read_numbers(single), strict=True):
        assert line == pytest.approx(expected, rel=1e-6)
