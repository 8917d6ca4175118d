"""Checkpoints: atomic directories with weights, optimizer state and checksums.

RUN/checkpoints/step-N/weights.safetensors    parameters and buffers under the model's own names
RUN/checkpoints/step-N/average.safetensors    averaged weights, with optim.average_fraction
RUN/checkpoints/step-N/moments.safetensors    Adam's moments as NAME.exp_avg and NAME.exp_avg_sq,
                                              and Muon's as NAME.momentum_buffer; NAME.step, only
                                              if a parameter was not trained in all steps; removed
                                              when the run is finished
RUN/checkpoints/step-N/state.json             the fields of TrainingState
RUN/checkpoints/step-N/checksums.json         SHA-256 of each file above; absent in version 0.1
RUN/checkpoints/step-N.damaged/               a checkpoint that failed its checksums
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bertsmith.bundle import save_tensors
from bertsmith.errors import RunError, is_out_of_memory
from bertsmith.files import atomic_directory, compute_file_sha256, write_json
from bertsmith.progress import Progress
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.train.engine.averaging import WeightAverage
from bertsmith.train.engine.optimizer import Optimizer, iter_moment_names
from bertsmith.train.engine.run_clock import ELAPSED_FILE
from bertsmith.train.engine.run_directory import MODEL_DIR

CHECKPOINTS_DIR = "checkpoints"
WEIGHTS_FILE, MOMENTS_FILE, STATE_FILE = "weights.safetensors", "moments.safetensors", "state.json"
AVERAGE_FILE = "average.safetensors"
CHECKSUMS_FILE, DAMAGED_SUFFIX = "checksums.json", ".damaged"
#: Names of Adam's step count and first moment in the state of a parameter.
_STEP, _FIRST_MOMENT = "step", "exp_avg"
#: Fields of ``TrainingState`` that are only stored if they are set.
_OPTIONAL_FIELDS = ("elapsed_seconds", "start_seconds", "remaining_seconds", "data_state")
#: Exceptions raised by reading a checkpoint that is damaged or belongs to another model.
_READ_ERRORS = (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True)
class TrainingState:
    """Progress of a run.

    Attributes:
        step: Completed steps.
        seconds: Time spent training.
        best_step: Step of the best held-out evaluation so far.
        best_loss: Selection metric of that evaluation, negated if higher is better.
        elapsed_seconds: Wall-clock time used by all processes of a run with a time budget.
        start_seconds: Value of ``elapsed_seconds`` at the first step.
        remaining_seconds: Time until the last step of a run with a time budget ends.
        data_state: Position in the training data, see ``Objective.data_state``.
    """

    step: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_loss: float | None = None
    elapsed_seconds: float | None = None
    start_seconds: float | None = None
    remaining_seconds: float | None = None
    data_state: Mapping[str, int] | None = None


@dataclass(frozen=True)
class CheckpointContent:
    """The content of a checkpoint, on the CPU.

    Attributes:
        state: Progress of the run.
        files: The tensors of each file.
        copied: Event after which a GPU has copied the tensors; None if they are already copied.
    """

    state: TrainingState
    files: Mapping[str, Mapping[str, Tensor]]
    copied: torch.cuda.Event | None = None


def collect_checkpoint(
    state: TrainingState,
    model: nn.Module,
    optimizer: Optimizer,
    average: WeightAverage | None = None,
    *,
    should_copy: bool = False,
) -> CheckpointContent:
    """Return the content of a checkpoint on the CPU.

    Args:
        state: Progress of the run.
        model: Model whose weights are saved.
        optimizer: Optimizer whose moments are saved.
        average: Averaged weights to save.
        should_copy: Whether training continues before the checkpoint is written. The tensors are
            then copied, from a GPU to page-locked memory, so that the CPU does not wait for it.
    """
    files = {
        WEIGHTS_FILE: _move_to_cpu(_named_tensors(model), should_copy=should_copy),
        MOMENTS_FILE: _move_to_cpu(_named_moments(model, optimizer), should_copy=should_copy),
    }
    if average is not None:
        files[AVERAGE_FILE] = _move_to_cpu(average.weights.items(), should_copy=should_copy)
    copied = None
    device = next(model.parameters()).device
    if should_copy and device.type == "cuda":
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # By default, an event is recorded on the current device, which can be another one.
        copied.record(torch.cuda.current_stream(device))
    return CheckpointContent(state, files, copied)


def save(
    run: Path,
    state: TrainingState,
    model: nn.Module,
    optimizer: Optimizer,
    keep: int,
    average: WeightAverage | None = None,
) -> Path:
    """Collect the content of a checkpoint and write it, see ``write``."""
    return write(run, collect_checkpoint(state, model, optimizer, average), keep)


def write(run: Path, content: CheckpointContent, keep: int) -> Path:
    """Write a checkpoint, and remove all others but the last ``keep`` and the best one.

    Returns:
        The directory of the new checkpoint.
    """
    if content.copied is not None:
        # In a new thread, the current device is GPU 0, where the wait could create a CUDA context.
        torch.cuda.set_device(content.copied.device)
        content.copied.synchronize()
    state = content.state
    directory = run / CHECKPOINTS_DIR / f"step-{state.step}"
    with atomic_directory(directory) as new:
        for name, tensors in content.files.items():
            save_tensors(_drop_step_counts(tensors, state.step), new / name)
        write_json(new / STATE_FILE, _to_fields(state))
        checksums = {path.name: compute_file_sha256(path) for path in sorted(new.iterdir())}
        write_json(new / CHECKSUMS_FILE, checksums)
    steps = [step for step, _ in list_checkpoints(run)]
    for step in steps[:-keep]:
        if step != state.best_step:
            _remove_checkpoint(run / CHECKPOINTS_DIR / f"step-{step}")
    return directory


def _to_fields(state: TrainingState) -> dict[str, Any]:
    """Return the content of state.json, without the optional fields that are not set."""
    fields = asdict(state)
    return {
        name: value for name, value in fields.items()
        if value is not None or name not in _OPTIONAL_FIELDS
    }  # fmt: skip


def remove_partial_files(run: Path) -> None:
    """Remove checkpoints, models and files that a killed process was writing or removing.

    The caller must hold the lock of the run.
    """
    checkpoints = run / CHECKPOINTS_DIR
    paths = [*checkpoints.glob(".step-*.tmp"), *checkpoints.glob(".step-*.old")]
    paths += run.glob(".*.tmp")
    if (run / MODEL_DIR).exists():
        # Without it, the replaced model would be the only one.
        paths += run.glob(f".{MODEL_DIR}.*.old")
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _remove_checkpoint(directory: Path) -> None:
    """Remove a checkpoint.

    It is renamed first, because a kill during the removal would leave an incomplete checkpoint.
    """
    renamed = directory.with_name(f".{directory.name}.old")
    directory.replace(renamed)
    shutil.rmtree(renamed)


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a run as (step, directory), sorted by step."""
    checkpoints = []
    for path in (run / CHECKPOINTS_DIR).glob("step-*"):
        step = path.name.removeprefix("step-")
        # The name of a damaged checkpoint has a suffix.
        if step.isdigit():
            checkpoints.append((int(step), path))
    return sorted(checkpoints)


def remove_optimizer_state(run: Path, progress: Progress) -> None:
    """Remove the optimizer state and the damaged checkpoints of a finished run.

    The weights remain, because the models of earlier steps can still be exported from them.
    """
    damaged_directories = list((run / CHECKPOINTS_DIR).glob(f"step-*{DAMAGED_SUFFIX}"))
    all_moments_files = [directory / MOMENTS_FILE for _, directory in list_checkpoints(run)]
    moments_files = [path for path in all_moments_files if path.exists()]
    damaged_files = [path for directory in damaged_directories for path in directory.iterdir()]
    num_bytes = sum(path.stat().st_size for path in moments_files + damaged_files)
    for path in moments_files:
        path.unlink()
    for directory in damaged_directories:
        shutil.rmtree(directory)
    removed = ["the optimizer state"] if moments_files else []
    removed += ["the damaged checkpoints"] if damaged_files else []
    if removed:
        progress.log(
            f"removed {' and '.join(removed)} of this finished run ({num_bytes / 1e6:,.1f} MB); "
            "set checkpoint.keep_optimizer=true to keep everything"
        )


def resume(
    run: Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: Progress,
    is_finished: Callable[[TrainingState], bool] | None = None,
    average: WeightAverage | None = None,
) -> TrainingState:
    """Restore the newest intact checkpoint of ``run``.

    Damaged checkpoints that are newer than it are logged and renamed to step-N.damaged, which makes
    the name step-N free for a new checkpoint.

    Args:
        run: Run directory.
        model: Model to load the weights into.
        optimizer: Optimizer to load the moments into.
        progress: Where damaged checkpoints are logged.
        is_finished: Returns whether a run with the given state is finished, so that it needs no
            optimizer state.
        average: Average of the weights to restore; None without averaging.

    Returns:
        The restored state; the state of step 0 if the run has no checkpoint.

    Raises:
        RunError: If checkpoints exist but none can be restored. No checkpoint is renamed then.
    """
    checkpoints = list_checkpoints(run)
    errors: list[tuple[Path, RunError]] = []
    for _, directory in reversed(checkpoints):
        try:
            state = restore(directory, model, optimizer, is_finished, average)
        except RunError as error:
            errors.append((directory, error))
            continue
        for damaged, reason in errors:
            progress.log(f"{reason}; kept as {damaged.name}{DAMAGED_SUFFIX}")
            _mark_damaged(damaged)
        return state
    if not checkpoints:
        return TrainingState()
    reasons = "".join(f"\n  {error}" for _, error in errors)
    raise RunError(
        f"{run}: no checkpoint of this run can be restored:{reasons}\nrestore one from a "
        f"backup, or {_explain_restart(run)}"
    )


def _explain_restart(run: Path) -> str:
    """Return the advice how to train again from the first step."""
    paths = str(run / CHECKPOINTS_DIR)
    if (run / ELAPSED_FILE).exists():
        # Otherwise, the time budget would already be used.
        paths += f" and {run / ELAPSED_FILE}"
    return f"remove {paths} to train again from the first step"


def _mark_damaged(directory: Path) -> None:
    """Rename a damaged checkpoint to step-N.damaged, and replace an older one of that name."""
    target = directory.with_name(directory.name + DAMAGED_SUFFIX)
    if target.exists():
        shutil.rmtree(target)
    directory.replace(target)


def restore(
    directory: Path,
    model: nn.Module,
    optimizer: Optimizer,
    is_finished: Callable[[TrainingState], bool] | None = None,
    average: WeightAverage | None = None,
) -> TrainingState:
    """Load a checkpoint into model, optimizer and average, and return the state of the run.

    The optimizer state may be missing if ``is_finished`` returns true for the state of the run.

    Raises:
        RunError: If the checkpoint is damaged or belongs to another model.
    """
    try:
        _verify_checksums(directory, (STATE_FILE, WEIGHTS_FILE))
        fields = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
        state = TrainingState(**fields)
        has_moments = (directory / MOMENTS_FILE).exists()
        if has_moments or is_finished is None or not is_finished(state):
            _restore_optimizer(directory, model, optimizer, state.step)
        if average is not None:
            _verify_checksums(directory, (AVERAGE_FILE,))
            average.restore(load_file(directory / AVERAGE_FILE))
        _copy_weights(load_file(directory / WEIGHTS_FILE), model)
    except _READ_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise RunError(f"{directory}: this checkpoint cannot be read: {error}") from None
    return state


def _restore_optimizer(directory: Path, model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Load the moments, and set Adam's step count to the stored one or to ``step``."""
    if not (directory / MOMENTS_FILE).exists():
        raise ValueError(
            f"{MOMENTS_FILE} is missing, because the run was finished "
            "(checkpoint.keep_optimizer=true keeps it); to train its model further, start a new run"
        )
    _verify_checksums(directory, (MOMENTS_FILE,))
    moments = load_file(directory / MOMENTS_FILE)
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, moment_names in iter_moment_names(optimizer):
        name = names[parameter]
        step_count = float(moments.get(f"{name}.{_STEP}", step))
        if step_count == 0:
            optimizer.state.pop(parameter, None)
            continue
        entry: dict[str, Tensor] = {
            moment: moments[f"{name}.{moment}"].to(parameter.device) for moment in moment_names
        }
        if _FIRST_MOMENT in entry:
            # Fused Adam expects its step count as float32 on the parameter's device.
            entry[_STEP] = torch.tensor(step_count, device=parameter.device)
        optimizer.state[parameter] = entry


def broadcast(
    state: TrainingState,
    model: nn.Module,
    optimizer: Optimizer,
    average: WeightAverage | None,
    processes: ProcessGroup,
) -> TrainingState:
    """Copy the main process's weights, moments and averages to all processes; return its state.

    The other processes need no access to the run directory.
    """
    if processes.world_size == 1:
        return state
    tensors = [tensor for _, tensor in _named_tensors(model)]
    if average is not None:
        tensors += average.weights.values()
    parameters = [parameter for parameter, _ in iter_moment_names(optimizer)]
    all_names = [list(optimizer.state.get(parameter, ())) for parameter in parameters]
    state, all_names = processes.broadcast((state, all_names))
    for parameter, names in zip(parameters, all_names, strict=True):
        if names and not processes.is_main:
            optimizer.state[parameter] = {
                name: torch.zeros((), device=parameter.device)
                if name == _STEP
                else torch.zeros_like(parameter.detach())
                for name in names
            }
        tensors += [optimizer.state[parameter][name] for name in names]
    with torch.no_grad():
        processes.broadcast_tensors(tensors)
    return state


def load_weights(directory: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint for inference: the averaged weights, if it has them.

    Raises:
        RunError: If the checkpoint is damaged or belongs to another model.
    """
    try:
        _verify_checksums(directory, (WEIGHTS_FILE,))
        weights = load_file(directory / WEIGHTS_FILE)
        if (directory / AVERAGE_FILE).exists():
            _verify_checksums(directory, (AVERAGE_FILE,))
            weights |= load_file(directory / AVERAGE_FILE)
        _copy_weights(weights, model)
    except _READ_ERRORS as error:
        if is_out_of_memory(error):
            raise
        raise RunError(f"{directory}: this checkpoint cannot be read: {error}") from None


def load_best(run: Path, step: int, model: nn.Module) -> None:
    """Load the weights of the best evaluation, from the checkpoint of ``step``.

    Raises:
        RunError: If the checkpoint cannot be read.
    """
    directory = run / CHECKPOINTS_DIR / f"step-{step}"
    try:
        load_weights(directory, model)
    except RunError as error:
        raise RunError(
            f"{error}\nthis checkpoint holds the best weights of this run; restore it from a "
            f"backup, or {_explain_restart(run)}"
        ) from None


def _verify_checksums(directory: Path, names: Sequence[str]) -> None:
    """Raise ValueError if a file of a checkpoint does not match its checksum.

    Checkpoints of version 0.1 have no checksums and are not verified.
    """
    path = directory / CHECKSUMS_FILE
    if not path.exists():
        return
    checksums = json.loads(path.read_text(encoding="utf-8"))
    for name in names:
        if compute_file_sha256(directory / name) != checksums[name]:
            raise ValueError(f"{name} does not match its checksum")


@torch.no_grad()
def _copy_weights(weights: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy weights by name into the parameters and buffers of a model."""
    for name, tensor in _named_tensors(model):
        tensor.copy_(weights[name])


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each parameter and buffer, such as batch norm statistics."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _move_to_cpu(tensors: Iterable[tuple[str, Tensor]], *, should_copy: bool) -> dict[str, Tensor]:
    """Return tensors by name, on the CPU.

    Args:
        tensors: Name and value of each tensor.
        should_copy: Whether to copy tensors that are already on the CPU, and to copy others without
            waiting for the device. PyTorch then copies to page-locked memory.
    """
    return {
        name: tensor.detach()
        .to(
            "cpu",
            non_blocking=should_copy,
            copy=should_copy,
            memory_format=torch.contiguous_format,
        )
        .contiguous()
        for name, tensor in tensors
    }


def _named_moments(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield the name, such as NAME.exp_avg, and value of each moment and of Adam's step counts.

    A parameter that was not trained in any step has no moments and the step count 0.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, moment_names in iter_moment_names(optimizer):
        name = names[parameter]
        entry = optimizer.state.get(parameter)
        if not entry:
            yield f"{name}.{_STEP}", torch.tensor(0.0)
            continue
        if _STEP in entry:  # Muon has no step count.
            yield f"{name}.{_STEP}", entry[_STEP]
        for moment in moment_names:
            yield f"{name}.{moment}", entry[moment]


def _drop_step_counts(tensors: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
    """Return the tensors of a file without the step counts that are equal to ``step``.

    Step counts are only read here, because the CPU would wait for a GPU to copy them.
    """
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.endswith(f".{_STEP}") or float(tensor) != step
    }
