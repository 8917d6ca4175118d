"""Training in several processes: torchrun, kills, signals, and other numbers of processes."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bertsmith import bundle
from bertsmith.errors import SettingsError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.train.engine import start_run
from bertsmith.train.engine.checkpoint import list_checkpoints
from bertsmith.train.engine.metrics_log import TIMING_KEYS, read_metrics
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.pretraining.pretrain import pretrain
from bertsmith.train.reranking.finetune import finetune_reranker
from tests.model.examples import make_prime_size_config
from tests.train.conftest import WORDS, RecordingProgress, make_assignments, make_tokenizer
from tests.train.embedding.conftest import make_rows, write_rows

STEPS = 12
#: A process that torchrun starts twice. It first plans and fine-tunes. In the pre-training run of
#: the first attempt, process 1 kills itself in step 5. In that of the second attempt, process 0
#: sends SIGTERM to torchrun in step 9, and waits until torchrun has sent it to process 0. Until
#: process 0 prints that process 1 has ended, it receives SIGTERM several times, as from torchrun.
PROGRAM = """
import json, os, signal, sys, time
from bertsmith.cli import error_messages
from bertsmith.cli.main import main
from bertsmith.runtime import process_group
from bertsmith.train.engine import loop

take_step = loop.take_step
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]

def take_step_and_send_signal(*arguments, step, **options):
    if sys.argv[1] == "finetune":
        return take_step(*arguments, step=step, **options)
    if (attempt, rank, step + 1) == ("0", "1", 5):
        os.kill(os.getpid(), signal.SIGKILL)
    if (attempt, rank, step + 1) == ("1", "0", 9):
        os.kill(os.getppid(), signal.SIGTERM)
        signals = signal.getsignal(signal.SIGTERM).__self__
        while signals.received is None:
            time.sleep(0.01)
    return take_step(*arguments, step=step, **options)

def send_signal_before(function):
    def send_signal_and_call(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*arguments)
    return send_signal_and_call

process_group._is_first_failure = send_signal_before(process_group._is_first_failure)
error_messages.explain_error = send_signal_before(error_messages.explain_error)
loop.take_step = take_step_and_send_signal
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["bertsmith", *arguments]
    try:
        main()
    except SystemExit as system_exit:
        if system_exit.code:
            raise
"""

#: A process of a run with a time budget, whose clock advances by 30 s per step in process 0, and by
#: 7 s in process 1. In the first attempt, process 1 kills itself in step 6. Each process logs the
#: learning rate and a hash of the tokens of each step.
BUDGET_PROGRAM = """
import hashlib, json, os, signal, sys
from bertsmith.cli.main import main
from bertsmith.train.engine import loop, run_clock
from bertsmith.train.pretraining import pretrain

take_step = loop.take_step
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
log = open(os.path.join(sys.argv.pop(1), f"steps-{rank}.jsonl"), "a")
now = [0.0]

def take_timed_step(loss_fn, micro_batches, *arguments, step, lr, **options):
    if (attempt, rank, step + 1) == ("0", "1", 6):
        os.kill(os.getpid(), signal.SIGKILL)
    tokens = b"".join(batch.packed.ids.numpy().tobytes() for batch in micro_batches)
    sizes = [batch.num_sequences for batch in micro_batches]
    line = [attempt, step + 1, lr, sum(sizes), hashlib.sha256(tokens).hexdigest()]
    log.write(json.dumps(line) + "\\n")
    log.flush()
    pending = take_step(loss_fn, micro_batches, *arguments, step=step, lr=lr, **options)
    now[0] += 30.0 if rank == "0" else 7.0
    return pending

class FakeClock(run_clock.RunClock):
    def __init__(self, run, start_time):
        super().__init__(run, 0.0, clock=lambda: now[0])

loop.take_step = take_timed_step
pretrain.RunClock = FakeClock
sys.argv[0] = "bertsmith"
main()
"""


def _make_options() -> list[str]:
    """Return settings with which each batch has two micro-batches of similar size.

    The next-sentence head has no gradients and no moments in the first half of the run.
    """
    return make_assignments(
        run__micro_batch_tokens=64,
        run__eval_every=6,
        checkpoint__steps=3,
        checkpoint__keep_optimizer="true",
        model__attention_dropout=0.1,
        schedule__causal_fraction=0.5,
    )


def _make_finetuning_data(folder: Path, **model_settings: Any) -> tuple[Path, Path]:
    """Write a model and a table of labeled texts, and return their paths."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = make_prime_size_config(vocab_size=tokenizer.vocab_size, dropout=0.0, **model_settings)
    bundle.save(folder / "start", BertForPreTraining(config), tokenizer, {})
    rng = np.random.default_rng(0)
    lines = []
    for number in range(67):
        text = " ".join(rng.choice(WORDS, rng.integers(2, 9)))
        lines.append(json.dumps({"text": text, "label": "ab"[number % 2]}))
    (folder / "table.jsonl").write_text("\n".join(lines) + "\n")
    return folder / "start", folder / "table.jsonl"


def test_batch_norm_needs_a_single_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tuning on a task and of a reranker reject batch norm before they write anything.

    Embedding models cannot have batch norm at all.
    """

    @contextmanager
    def join() -> Iterator[ProcessGroup]:
        yield ProcessGroup(0, 2)

    monkeypatch.setattr(start_run, "join_process_group", join)
    model, table = _make_finetuning_data(tmp_path, norm="batch")
    pairs = write_rows(tmp_path / "pairs.jsonl", make_rows("pairs", 8))
    out = tmp_path / "out"
    error = "model.norm is 'batch', whose statistics would differ between the 2 processes"
    with pytest.raises(SettingsError, match=error):
        finetune("classify", model, out, data=table)
    with pytest.raises(SettingsError, match=error):
        finetune_reranker(model, out, data=pairs)
    assert not out.exists()


def _build_finetune_arguments(start_model: Path, table: Path, out: Path) -> list[str]:
    """Return a fine-tuning command with several micro-batches per process and step.

    It has no dropout, because a single process has other micro-batches.
    """
    arguments = ["finetune", "classify", "--model", str(start_model), "--data", str(table)]
    arguments += ["--out", str(out), "--batch-size", "16", "--epochs", "2", "--lr", "1e-3"]
    settings = ["model.dropout=0", "model.attention_dropout=0", "run.threads=1", "run.device=cpu"]
    for setting in (*settings, "run.precision=fp32", "run.micro_batch_tokens=64"):
        arguments += ["--set", setting]
    return arguments


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
    ``--plan`` estimates a run of both processes. torchrun restarts the killed run. SIGTERM to
    torchrun saves one checkpoint. Each message is printed once.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    run, fine_tuned_run = tmp_path / "parallel", tmp_path / "fine-tuned"
    start_model, table = _make_finetuning_data(tmp_path)
    arguments = ["pretrain", "--data", str(store), "--out", str(run), "--steps", str(STEPS)]
    arguments += [part for option in _make_options() for part in ("--set", option)]
    finetune_arguments = _build_finetune_arguments(start_model, table, fine_tuned_run)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", str(program)]
    plan_arguments = [*arguments, "--plan"]
    command += [json.dumps([plan_arguments, finetune_arguments, arguments])]
    launched = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert launched.stderr.count("parameters on") == 2, launched.stderr
    plans = [line for line in launched.stdout.splitlines() if line.startswith("machine ")]
    assert len(plans) == 2
    assert all("2 processes with 1 of" in line for line in plans)
    assert launched.stderr.count("2 processes with 1 of") == 3
    assert launched.stderr.count("this run is already finished") == 1
    _assert_equals_single_finetuning(fine_tuned_run, launched.stdout)
    message = "error: another process of this run has ended unexpectedly"
    assert launched.stderr.count(message) == 1, launched.stderr
    assert launched.stderr.count("resuming from step 3") == 1, launched.stderr
    assert launched.stderr.count("stopped after step 9 of 12 and saved a checkpoint") == 1
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


def _assert_equals_single_finetuning(run: Path, stdout: str) -> None:
    """Check that fine-tuning in 2 processes, started twice, equals that in one up to rounding."""
    assert stdout.count("held out (7 examples)") == 2, stdout
    arguments = _build_finetune_arguments(run.parent / "start", run.parent / "table.jsonl", run)
    single = run.with_name("single-fine-tuned")
    assignments = [arguments[i + 1] for i, part in enumerate(arguments) if part == "--set"]
    values = {"task": {"batch_size": 16}, "schedule": {"epochs": 2.0}, "optim": {"lr": 1e-3}}
    finetune(
        "classify", run.parent / "start", single, data=run.parent / "table.jsonl", values=values,
        assignments=assignments,
    )  # fmt: skip
    for line, expected in zip(_read_numbers(run), _read_numbers(single), strict=True):
        assert line == pytest.approx(expected, rel=1e-4)
    weights = load_file(single / "model/model.safetensors")
    for name, tensor in load_file(run / "model/model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_processes_share_the_time_of_process_0(store: Path, tmp_path: Path) -> None:
    """A run of 2 processes with a time budget ends when the clock of process 0 says so.

    Both processes have the same learning rate and the same batches in each step, although the batch
    size, the masking rate, the objective and the length of the sequences depend on the time. A
    killed and restarted run continues with the used time.
    """
    program, run = tmp_path / "program.py", tmp_path / "run"
    program.write_text(BUDGET_PROGRAM)
    options = make_assignments(
        run__micro_batch_tokens=64,
        run__eval_every=100,
        run__max_eval_sequences=4,
        checkpoint__steps=2,
        data__initial_batch_size=2,
        data__batch_size=8,
        data__final_masking_rate=0.3,
        schedule__causal_fraction=0.3,
        schedule__phase2_max_seqlen=48,
        schedule__phase2_fraction=0.3,
        schedule__warmup_steps=0,
        schedule__min_steps=1,
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "1", str(program), str(tmp_path)]
    command += ["pretrain", "--data", str(store), "--out", str(run), "--minutes", "10"]
    command += [part for option in options for part in ("--set", option)]
    launched = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert launched.returncode == 0, launched.stderr
    assert "resuming from step 4" in launched.stderr
    main, other = (
        [json.loads(line) for line in (tmp_path / f"steps-{rank}.jsonl").read_text().splitlines()]
        for rank in (0, 1)
    )
    # Process 0 has started step 6 of the first attempt, in which process 1 was killed.
    assert [line[:2] for line in other[:5]] == [["0", step] for step in range(1, 6)]
    assert [line for line in main if line[:2] != ["0", 6]] == other
    num_steps = other[-1][1]
    assert [step for attempt, step, *_ in other if attempt == "1"] == [*range(5, num_steps + 1)]
    assert (other[0][3], other[-1][3]) == (2, 8)
    lines = [line for line in read_metrics(run) if line["kind"] == "train"]
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    # The budget is 600 s, and the time for saving the model is estimated from the real duration.
    assert 18 <= num_steps <= 20
    peak_lr = lines[0]["lr"]
    for line in lines:
        # The restarted run continues from the time of step 4 or 5.
        expected = peak_lr * (1 - 30 * (line["step"] - 1) / 600)
        assert line["lr"] == pytest.approx(expected, abs=0.06 * peak_lr)
