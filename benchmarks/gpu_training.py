"""Measures training steps of a session: speed, memory and a profile of the GPU."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from bertsmith.data.store import Store
from bertsmith.model.config import ModelConfig, get_size_preset
from bertsmith.model.ops.dropout import DropoutSeed
from bertsmith.model.packed import pack_sequences
from bertsmith.model.task_models import BertForSequenceClassification
from bertsmith.runtime import device
from bertsmith.runtime.device import Machine
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.checkpoint import TrainingState
from bertsmith.train.engine.checkpoint_writer import CheckpointWriter
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.engine.step import PendingStep, take_step
from bertsmith.train.pretraining.objective import PretrainingObjective
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session

#: Steps after the first one that are not measured.
WARMUP_STEPS = 4
#: Number of steps in a profile, and of kernels that are listed.
PROFILE_STEPS, NUM_KERNELS = 5, 15
#: Names of profiler events for which the CPU waits for the GPU.
SYNCHRONIZATIONS = (
    "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize",
    "aten::_local_scalar_dense",
)  # fmt: skip


def open_session(store: Path, size: str, settings: Sequence[str]) -> Session:
    """Return the session of a run with these settings."""
    overrides = Overrides(
        data=store, size=size, assignments=settings, cuda=torch.cuda.is_available()
    )
    opened_store = Store.open(store)
    return Session(resolve_settings(overrides, opened_store), opened_store)


class StepRunner:
    """Takes training steps as the training loop does, without evaluations and checkpoints.

    Attributes:
        session: The run.
        objective: Its data and losses.
        wait_seconds: Time spent waiting for batches.
        num_tokens: Number of tokens of all steps.
        num_macs: Number of multiply-accumulates of all steps.
    """

    def __init__(self, session: Session) -> None:
        """Start at the first batch of the run."""
        self.session = session
        self.objective: PretrainingObjective = session.build_objective(StepDuration(10**6))
        self._batches: Iterator[list[Any]] = self.objective.iter_batches(0)
        self._step = 0
        self._pending: PendingStep | None = None
        self.reset_counts()
        session.model.train()

    def reset_counts(self) -> None:
        """Set all counts to 0."""
        self.wait_seconds = self.num_macs = 0.0
        self.num_tokens = 0

    def run(self, num_steps: int) -> float:
        """Take steps and wait for the last one; return the seconds."""
        start = time.perf_counter()
        for _ in range(num_steps):
            self._take_step()
        self._read()
        device.synchronize(self.session.machine)
        return time.perf_counter() - start

    def _read(self) -> None:
        """Read the result of the last step."""
        if self._pending is not None:
            self._pending.read()
        self._pending = None

    def _take_step(self) -> None:
        """Take a step, and read the result of the previous one."""
        start = time.perf_counter()
        batch = next(self._batches)
        self.wait_seconds += time.perf_counter() - start
        session = self.session
        pending = take_step(
            self.objective.compute_losses,
            batch,
            session.model,
            session.optimizer,
            session.machine,
            step=self._step,
            seed=0,
            lr=1e-4,
            max_grad_norm=1.0,
            describe_batch=self.objective.describe_batch,
            previous=self._pending,
        )
        self._read()
        self._pending = pending
        self._step += 1
        self.num_tokens += self.objective.count_tokens(batch)
        self.num_macs += self.objective.count_macs(batch)


def measure(session: Session, num_steps: int) -> tuple[StepRunner, dict[str, Any]]:
    """Time training steps of a session.

    Returns:
        The runner, for further measurements; and the seconds of the first step (with compilation),
        milliseconds per step, tokens per second, share of the peak matmul speed, share of the time
        spent waiting for data, and peak memory in GiB.
    """
    machine = session.machine
    if machine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(machine.device)
    runner = StepRunner(session)
    first_seconds = runner.run(1)
    runner.run(WARMUP_STEPS)
    peak = device.measure_peak_macs_per_second(machine, seconds=0.3)
    runner.reset_counts()
    seconds = runner.run(num_steps)
    return runner, {
        "first_step_seconds": first_seconds,
        "step_milliseconds": 1e3 * seconds / num_steps,
        "tokens_per_second": runner.num_tokens / seconds,
        "tokens_per_step": runner.num_tokens / num_steps,
        "mfu": runner.num_macs / seconds / peak,
        "data_wait_share": runner.wait_seconds / seconds,
        "peak_memory_gib": device.get_peak_memory_bytes(machine) / 2**30,
        "kernel": machine.kernel,
        "precision": machine.precision,
        "compiled": bool(session.settings.run.compile),
        "static_shapes": session.has_static_shapes,
    }


def profile_steps(runner: StepRunner) -> dict[str, Any]:
    """Profile some steps.

    Returns:
        Share of the time in which the GPU is busy, synchronizations per step, and the kernels that
        take most time, with their share of the kernel time. On the CPU, operators instead of
        kernels.
    """
    is_cuda = runner.session.machine.device.type == "cuda"
    activities = [ProfilerActivity.CPU]
    if is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        seconds = runner.run(PROFILE_STEPS)
    kernels: Counter[str] = Counter()
    synchronizations: Counter[str] = Counter()
    for event in profiler.key_averages():
        if event.key in SYNCHRONIZATIONS:
            synchronizations[event.key] += event.count
        if not is_cuda:
            kernels[event.key[:100]] += event.self_cpu_time_total
        # The rows of operators and annotations have the time of their kernels again.
        elif event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.key[:100]] += event.self_device_time_total
    total = sum(kernels.values())
    result: dict[str, Any] = {
        "synchronizations_per_step": {
            name: count / PROFILE_STEPS for name, count in synchronizations.items()
        },
        "top": {name: value / total for name, value in kernels.most_common(NUM_KERNELS)},
    }
    if is_cuda:
        result["gpu_busy_share"] = total / 1e6 / seconds
    return result


def run_and_catch(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a function, or its error if memory is exhausted."""
    try:
        return function()
    except torch.OutOfMemoryError as error:
        return {"error": str(error).partition("\n")[0]}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def measure_classifier(
    machine: Machine, size: str, num_steps: int, *, is_compiled: bool
) -> dict[str, float]:
    """Time forward and backward passes of a classifier on batches of 32 texts of 8 to 128 tokens.

    A compiled model has dynamic shapes, because the batches have different numbers of tokens.

    Returns:
        The seconds of the first pass (with compilation), and the mean milliseconds of the others.
    """
    torch.manual_seed(0)
    config = ModelConfig.parse({"vocab_size": 1000, **get_size_preset(size)}, size)
    model = BertForSequenceClassification(config, 2, machine.kernel).to(machine.device).train()
    forward: Any = torch.compile(model, dynamic=True) if is_compiled else model
    generator = torch.Generator().manual_seed(0)
    seconds = []
    for number in range(num_steps + 1):
        lengths = torch.randint(8, 129, (32,), generator=generator).tolist()
        texts = [([5 + number % 2] * length, [0] * length) for length in lengths]
        batch = pack_sequences(texts).to(machine.device)
        device.synchronize(machine)
        start = time.perf_counter()
        with machine.autocast():
            outputs = forward(batch, None, DropoutSeed(torch.tensor(number)))
        outputs.float().square().mean().backward()
        device.synchronize(machine)
        seconds.append(time.perf_counter() - start)
    return {
        "first_pass_seconds": seconds[0],
        "milliseconds_per_pass": 1e3 * sum(seconds[1:]) / num_steps,
    }


def measure_checkpoints(
    session: Session, folder: Path, num_steps: int
) -> Iterator[tuple[str, float | bool]]:
    """Yield the names and values of measurements of checkpoints.

    One checkpoint is written at once, two by a thread while steps are taken. The first of them
    allocates page-locked memory.
    """
    runner = StepRunner(session)
    runner.run(1 + WARMUP_STEPS)
    start = time.perf_counter()
    path = checkpoint.save(folder, TrainingState(step=1), session.model, session.optimizer, 1)
    yield "seconds", time.perf_counter() - start
    yield "gigabytes", sum(file.stat().st_size for file in path.iterdir()) / 1e9
    yield "step_seconds", runner.run(num_steps) / num_steps
    writer = CheckpointWriter(folder, 1, is_asynchronous=True)
    for step, name in ((2, "first"), (3, "second")):
        weights = {key: value.detach().clone() for key, value in session.model.named_parameters()}
        start = time.perf_counter()
        writer.save(TrainingState(step=step), session.model, session.optimizer)
        yield f"{name}_copy_seconds", time.perf_counter() - start
        yield f"step_seconds_during_{name}_write", runner.run(num_steps) / num_steps
        writer.wait()
        yield f"{name}_write_seconds", writer.pop_seconds() or 0.0
        path = folder / checkpoint.CHECKPOINTS_DIR / f"step-{step}" / checkpoint.WEIGHTS_FILE
        saved = load_file(path)
        is_equal = all(torch.equal(saved[key], value.cpu()) for key, value in weights.items())
        yield f"{name}_weights_are_equal", is_equal
