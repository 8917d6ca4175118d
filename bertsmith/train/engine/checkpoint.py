"""Checkpoints: atomic directories with weights, optimizer state and checksums.

RUN/checkpoints/step-N/weights.safetensors    parameters under the model's own names
RUN/checkpoints/step-N/moments.safetensors    Adam's two moments, NAME.exp_avg, NAME.exp_avg_sq;
                                              removed when the run is finished
RUN/checkpoints/step-N/state.json             step, seconds, best held-out loss so far
RUN/checkpoints/step-N/checksums.json         SHA-256 of each file above; absent in version 0.1
RUN/checkpoints/step-N.damaged/               a checkpoint that failed its checksums
"""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from bertsmith.bundle import save_tensors
from bertsmith.errors import RunError
from bertsmith.files import atomic_directory, sha256_of_file, write_json
from bertsmith.progress import Progress

CHECKPOINTS_DIR = "checkpoints"
WEIGHTS_FILE, MOMENTS_FILE, STATE_FILE = "weights.safetensors", "moments.safetensors", "state.json"
CHECKSUMS_FILE, DAMAGED_SUFFIX = "checksums.json", ".damaged"
_MOMENTS = ("exp_avg", "exp_avg_sq")
#: What reading a damaged checkpoint, or one of another model, ends with.
_DAMAGE = (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError)


@dataclass(frozen=True)
class TrainingState:
    """Where a run stands after ``step`` steps.

    seconds: time spent training. best_step, best_loss: the best held-out evaluation so far
    (with the sign turned where more is better).
    """

    step: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_loss: float | None = None


def save(
    run: Path, state: TrainingState, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int
) -> Path:
    """Write a checkpoint and remove those that are neither among the last ``keep`` nor the best."""
    directory = run / CHECKPOINTS_DIR / f"step-{state.step}"
    with atomic_directory(directory) as new:
        save_tensors(_weights(model), new / WEIGHTS_FILE)
        save_tensors(_moments(model, optimizer), new / MOMENTS_FILE)
        write_json(new / STATE_FILE, asdict(state))
        checksums = {
            name: sha256_of_file(new / name) for name in (WEIGHTS_FILE, MOMENTS_FILE, STATE_FILE)
        }
        write_json(new / CHECKSUMS_FILE, checksums)
    steps = [step for step, _ in list_checkpoints(run)]
    for step in steps[:-keep]:
        if step != state.best_step:
            _remove(run / CHECKPOINTS_DIR / f"step-{step}")
    return directory


def remove_partial_checkpoints(run: Path) -> None:
    """Remove what a kill left half written or half removed; only the holder of the lock may."""
    for pattern in (".step-*.tmp", ".step-*.old"):
        for path in (run / CHECKPOINTS_DIR).glob(pattern):
            shutil.rmtree(path)


def _remove(directory: Path) -> None:
    """Remove a checkpoint so that a kill never leaves a part of it under its name."""
    aside = directory.with_name(f".{directory.name}.old")
    directory.replace(aside)
    shutil.rmtree(aside)


def list_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a run, (step, directory), in the order of their steps."""
    names = [path for path in (run / CHECKPOINTS_DIR).glob("step-*") if path.name[5:].isdigit()]
    return sorted((int(path.name[5:]), path) for path in names)


def remove_optimizer_state(run: Path, progress: Progress) -> None:
    """Remove the optimizer state of a finished run, and its damaged checkpoints.

    The weights stay: model directories of earlier steps are made from them.
    """
    damaged = [*(run / CHECKPOINTS_DIR).glob(f"step-*{DAMAGED_SUFFIX}")]
    moments = [
        path
        for _, directory in list_checkpoints(run)
        if (path := directory / MOMENTS_FILE).exists()
    ]
    files = moments + [path for directory in damaged for path in directory.iterdir()]
    size = sum(path.stat().st_size for path in files)
    for path in moments:
        path.unlink()
    for directory in damaged:
        shutil.rmtree(directory)
    if files:
        progress.log(
            f"removed the optimizer state of this finished run ({size / 1e6:,.1f} MB); "
            "checkpoint.keep_optimizer=true keeps it"
        )


def resume(
    run: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    progress: Progress,
    is_finished: Callable[[TrainingState], bool] | None = None,
) -> TrainingState:
    """Restore the newest intact checkpoint of ``run``; the state of step 0 if there is none yet.

    is_finished: whether a run with that state takes no further step and needs no optimizer state.
    Newer, damaged checkpoints are logged and renamed to step-N.damaged, so that a new checkpoint
    can take their name. Raises RunError, and renames nothing, if no checkpoint can be restored.
    """
    stored = list_checkpoints(run)
    errors: list[tuple[Path, RunError]] = []
    for _, directory in reversed(stored):
        try:
            state = restore(directory, model, optimizer, is_finished)
        except RunError as error:
            errors.append((directory, error))
            continue
        for damaged, reason in errors:
            progress.log(f"{reason}; kept as {damaged.name}{DAMAGED_SUFFIX}")
            _set_aside(damaged)
        return state
    if not stored:
        return TrainingState()
    reasons = "".join(f"\n  {error}" for _, error in errors)
    raise RunError(
        f"{run}: no checkpoint of this run can be restored:{reasons}\nrestore one from a "
        f"backup, or remove {run / CHECKPOINTS_DIR} to train again from the first step"
    )


def _set_aside(directory: Path) -> None:
    """Rename a damaged checkpoint; an older damaged one of the same step is replaced."""
    target = directory.with_name(directory.name + DAMAGED_SUFFIX)
    if target.exists():
        shutil.rmtree(target)
    directory.replace(target)


def restore(
    directory: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    is_finished: Callable[[TrainingState], bool] | None = None,
) -> TrainingState:
    """Load a checkpoint into model and optimizer; RunError if it is damaged or does not fit.

    The optimizer state of a finished run may be missing; see ``resume``.
    """
    try:
        _verify(directory, (STATE_FILE, WEIGHTS_FILE))
        state = TrainingState(**json.loads((directory / STATE_FILE).read_text(encoding="utf-8")))
        if (directory / MOMENTS_FILE).exists() or is_finished is None or not is_finished(state):
            _restore_optimizer(directory, model, optimizer, state.step)
        _load(directory, model)
    except _DAMAGE as error:
        raise RunError(f"{directory}: this checkpoint cannot be read: {error}") from None
    return state


def _restore_optimizer(
    directory: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    if not (directory / MOMENTS_FILE).exists():
        raise ValueError(
            f"{MOMENTS_FILE} is missing; a finished run has removed it (checkpoint.keep_optimizer keeps "
            "it), and its model can be trained further by a new run"
        )
    _verify(directory, (MOMENTS_FILE,))
    moments = load_file(directory / MOMENTS_FILE)
    for name, parameter in _trained(model):
        entry: dict[str, Tensor] = {
            kind: moments[f"{name}.{kind}"].to(parameter.device) for kind in _MOMENTS
        }
        # Fused Adam keeps its count as a float32 on the parameter's device.
        entry["step"] = torch.tensor(float(step), device=parameter.device)
        optimizer.state[parameter] = entry


def load_weights(directory: Path, model: nn.Module) -> None:
    """Load the weights of a checkpoint alone; RunError if it is damaged or does not fit."""
    try:
        _verify(directory, (WEIGHTS_FILE,))
        _load(directory, model)
    except _DAMAGE as error:
        raise RunError(f"{directory}: this checkpoint cannot be read: {error}") from None


def load_best(run: Path, step: int, model: nn.Module) -> None:
    """Load the weights of the best evaluation, at ``step``; RunError if they cannot be read."""
    directory = run / CHECKPOINTS_DIR / f"step-{step}"
    try:
        load_weights(directory, model)
    except RunError as error:
        raise RunError(
            f"{error}\nit holds the best weights of this run; restore it from a backup, or remove "
            f"{run / CHECKPOINTS_DIR} to train again from the first step"
        ) from None


def _verify(directory: Path, names: Sequence[str]) -> None:
    """Raise ValueError if a file has changed since it was written.

    Checkpoints of version 0.1 have no checksums and are not verified.
    """
    path = directory / CHECKSUMS_FILE
    if not path.exists():
        return
    checksums = json.loads(path.read_text(encoding="utf-8"))
    for name in names:
        if sha256_of_file(directory / name) != checksums[name]:
            raise ValueError(f"{name} does not match its checksum")


@torch.no_grad()
def _load(directory: Path, model: nn.Module) -> None:
    weights = load_file(directory / WEIGHTS_FILE)
    for name, own in _kept(model):
        own.copy_(weights[name])


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def _kept(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters, and what else a model remembers, such as batch norm's statistics."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: own.detach().cpu().contiguous() for name, own in _kept(model)}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        f"{name}.{kind}": optimizer.state[parameter][kind].cpu().contiguous()
        for name, parameter in _trained(model)
        for kind in _MOMENTS
    }
