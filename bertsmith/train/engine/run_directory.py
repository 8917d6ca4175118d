"""The directory of a run: its settings file and its lock."""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from bertsmith.errors import RunError
from bertsmith.files import hold_lock, write_atomic
from bertsmith.progress import NullProgress, Progress
from bertsmith.settings import SettingsType, get_table, read_stored_settings

SETTINGS_FILE, LOCK_FILE = "settings.toml", ".lock"
#: The model directory of a run.
MODEL_DIR = "model"
#: Settings tables of fine-tuning and distillation runs, one of which each of them has.
FINETUNING_TABLES: Final = ("task", "embedding", "reranking", "distill")
#: Settings that the user may change when a run is resumed, because they do not affect the weights.
_MUTABLE_KEYS = (
    "checkpoint.steps", "checkpoint.minutes", "checkpoint.asynchronous", "checkpoint.keep",
    "checkpoint.keep_optimizer",
    "run.log_every", "run.log_grad_norms", "run.tensorboard",
)  # fmt: skip
#: The number of threads may change as well, which changes the weights by rounding.
_THREADS_KEY = "run.threads"
#: Paths that may change -> the setting that identifies their content.
ID_KEYS = {"run.store_path": "run.store_id", "run.start_from": "run.start_id"}
#: Settings that a run with a time budget (schedule.minutes) determines before the first step.
_BUDGET_KEYS = ("run.eval_every", "run.max_eval_sequences", "schedule.min_steps")
#: Settings of the table ``run`` that depend on the machine. They are selected again when a run
#: moves to another device.
MACHINE_SETTINGS: Final = (
    "device", "precision", "attention_kernel", "threads", "compile", "micro_batch_tokens",
)  # fmt: skip
#: Prefixes of settings that a run does not set itself: only the user sets them.
_USER_SET_PREFIXES = (
    "data.", "schedule.phase2_max_seqlen", "task.", "embedding.", "reranking.", "distill.",
    "features", "run.num_frozen_layers", "run.patience",
)  # fmt: skip
#: The stored and the new value of a list are printed in full if they have at most this many items
#: in total.
_MAX_LIST_ITEMS = 12
#: Maximum number of added and of removed items that are printed of longer lists.
_MAX_CHANGES = 3


def check_run_directory(run: Path) -> None:
    """Raise RunError if ``run`` cannot be the directory of a new run or of a run to resume.

    The directory of a new run must be writable and have no other files.
    """
    if run.exists() and not run.is_dir():
        raise RunError(f"{run}: this is a file; give --out a new directory")
    if not run.exists():
        ancestor = next(parent for parent in run.absolute().parents if parent.exists())
        if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
            reason = "this directory is not writable" if ancestor.is_dir() else "this is a file"
            raise RunError(f"{run}: {ancestor}: {reason}; give --out another directory")
        return
    if (run / SETTINGS_FILE).exists():
        return
    # A process killed at its start may have left a lock and a temporary settings file.
    temporary_prefix = f".{SETTINGS_FILE}."
    for path in run.iterdir():
        if path.name != LOCK_FILE and not path.name.startswith(temporary_prefix):
            raise RunError(
                f"{run}: this directory has other files, but no {SETTINGS_FILE} of a run; "
                "give --out a new directory"
            )


def load_run_settings(
    run: Path,
    settings: SettingsType,
    user_values: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    *,
    is_device_available: Callable[[str], bool] = lambda _: True,
    accepted_defaults: Mapping[str, Collection[Any]] | None = None,
) -> SettingsType | None:
    """Return the settings stored in ``run``, or None if it has none yet.

    Values that the user has set and that do not affect the weights replace the stored values. If
    the stored device is not available, or the user has set another one, the device, precision,
    attention kernel, threads, torch.compile and micro-batch size of the new command replace the
    stored ones. The changed settings are written to the file, too.

    Args:
        run: Run directory.
        settings: The settings of the current command.
        user_values: The settings that the user has set, as nested tables.
        progress: Receives a log message about each changed setting.
        is_device_available: Returns whether this machine has a device.
        accepted_defaults: Other default values of settings, by key: those on other machines and of
            earlier versions. A stored value among them is kept, unless the user has set the
            setting.

    Raises:
        RunError: If settings that affect the weights differ; the message lists all differences.
    """
    progress = NullProgress() if progress is None else progress
    path = run / SETTINGS_FILE
    if not path.exists():
        return None
    stored = type(settings).parse(read_stored_settings(path), str(path))
    stored_values = stored.model_dump()
    new_values = settings.model_dump()
    messages = [
        _move_to_device(stored_values["run"], new_values["run"], is_device_available),
        _change_world_size(stored_values["run"], new_values["run"]),
    ]
    for message in filter(None, messages):
        progress.log(f"{run}: {message}")
    budget_keys = _BUDGET_KEYS if stored_values["schedule"]["minutes"] is not None else ()
    differences, changes = [], {}
    for key, old, new in find_differences(stored_values, new_values):
        table, _, name = key.partition(".")
        is_set_by_user = name in get_table(user_values or {}, table)
        change = f"{key}: {_describe_change(old, new)}"
        if key in ID_KEYS.values():
            change += " (hash of the files)"
        is_moved = key in ID_KEYS and _has_same_id(ID_KEYS[key], stored_values, new_values)
        if is_moved or (key in (*_MUTABLE_KEYS, _THREADS_KEY) and is_set_by_user):
            changes[key] = new
            effect = "; the result will differ by rounding" if key == _THREADS_KEY else ""
            progress.log(f"{run}: {change}; using the new value{effect}")
        elif key in budget_keys and is_set_by_user:
            progress.log(
                f"{run}: {change}; using the value in the run, which the time budget determined"
            )
        elif not is_set_by_user and old in (accepted_defaults or {}).get(key, ()):
            if old is not None:
                progress.log(f"{run}: {change}; using the value in the run")
        elif key not in (*_MUTABLE_KEYS, *budget_keys):
            differences.append(f"  {change}")
    if differences:
        raise RunError(
            f"{run}: this run was started with other settings:\n" + "\n".join(differences) + "\n"
            "repeat the original command to resume it, or give --out another directory to start a "
            "new run; to train a finished model further, start a new run from it: "
            "--from RUN --out NEW (pretrain), --model RUN --out NEW (finetune)"
        )
    if not changes and not any(messages):
        return stored
    for key, value in changes.items():
        table, _, name = key.partition(".")
        stored_values[table][name] = value
    changed = type(settings).parse(stored_values, str(path))
    write_atomic(path, changed.to_toml())
    return changed


def _has_same_id(key: str, stored: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether the setting ``key``, such as run.store_id, has the same value in both."""
    table, _, name = key.partition(".")
    value = stored[table].get(name)
    return value is not None and value == new[table].get(name)


def _move_to_device(
    stored: dict[str, Any], new: Mapping[str, Any], is_device_available: Callable[[str], bool]
) -> str | None:
    """Replace the stored machine settings of a run that continues on another device.

    Args:
        stored: The stored table "run", which is changed in place.
        new: The table "run" of the current command.
        is_device_available: Returns whether this machine has a device.

    Returns:
        A message; None if the run continues on the stored device.
    """
    old_device, new_device = stored["device"], new["device"]
    if new_device == "auto" and not is_device_available(old_device):
        reason = f"the device {old_device} of this run is not available here"
    elif new_device not in ("auto", old_device):
        # The stored device is "auto" if a process was killed before it recorded the new device.
        reason = f"run.device: {_describe_change(old_device, new_device)}"
    else:
        return None
    stored.update({key: new[key] for key in MACHINE_SETTINGS if key in new})
    return (
        f"{reason}; device, precision, attention kernel, threads, torch.compile and the size of "
        "micro-batches are selected again, so the result will differ from that of an unmoved run, "
        "by rounding and, with dropout, by the dropout masks"
    )


def _change_world_size(stored: dict[str, Any], new: Mapping[str, Any]) -> str | None:
    """Replace the stored number of processes and of threads, if another number continues the run.

    Args:
        stored: The stored table "run", which is changed in place.
        new: The table "run" of the current command.

    Returns:
        A message; None if the number of processes is the stored one.
    """
    old_size, new_size = stored.get("world_size"), new.get("world_size")
    if old_size == new_size:
        return None
    stored.update(world_size=new_size, threads=new["threads"])
    return (
        f"{old_size or 1} processes in the run, {new_size or 1} now; the number of threads is "
        "selected again, and the result will differ by rounding, or by the dropout masks if the "
        "micro-batches differ"
    )


def _describe_change(old: Any, new: Any) -> str:
    """Return a text with the stored and the new value, or with the differences of long lists."""
    if not (isinstance(old, list) and isinstance(new, list)):
        return f"{old!r} in the run, {new!r} now"
    if len(old) + len(new) <= _MAX_LIST_ITEMS:
        return f"{old!r} in the run, {new!r} now"
    parts = [f"{len(old):,} items in the run, {len(new):,} now"]
    for label, items, others in (("only in the run", old, new), ("only now", new, old)):
        changes = [item for item in items if item not in set(others)]
        if changes:
            num_hidden = len(changes) - _MAX_CHANGES
            suffix = f" and {num_hidden:,} more" if num_hidden > 0 else ""
            parts.append(f"{label}: {', '.join(map(repr, changes[:_MAX_CHANGES]))}{suffix}")
    if len(parts) == 1:
        pairs = enumerate(zip(old, new, strict=False))
        index = next((i for i, (a, b) in pairs if a != b), min(len(old), len(new)))
        parts.append(f"the items differ from item {index + 1:,} on")
    return "; ".join(parts)


def find_differences(
    stored: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """Return (key, stored value, new value) of each setting with a new value.

    New values that are None or "auto" are not set, and do not count as different.
    """
    differences: list[tuple[str, Any, Any]] = []
    for name, new_value in new.items():
        old_value = stored.get(name)
        key = prefix + name
        if isinstance(new_value, dict):
            old_values = old_value or {}
            # For example a validation file that is not given again.
            is_set_by_user = key.startswith(_USER_SET_PREFIXES)
            missing_values = dict.fromkeys(old_values) if is_set_by_user else {}
            differences += find_differences(old_values, missing_values | new_value, f"{key}.")
        elif new_value is None and old_value is not None and key.startswith(_USER_SET_PREFIXES):
            # A run does not set these settings itself, so the user has set the stored value.
            differences.append((key, old_value, new_value))
        elif new_value not in (None, "auto", old_value):
            differences.append((key, old_value, new_value))
    return differences


@contextmanager
def create_and_lock_run(run: Path, *, is_main: bool) -> Iterator[None]:
    """Create a run directory and hold its lock, if this is the main process of the run."""
    if not is_main:
        yield
        return
    run.mkdir(parents=True, exist_ok=True)
    with lock_run(run):
        yield


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold the lock of a run while the block runs, so that no other process writes to the run.

    If the block fails before it has written anything, the directory is removed.

    Raises:
        RunError: If another process holds the lock.
    """
    error = RunError(f"{run}: another process is training here; wait until it ends, or stop it")
    with hold_lock(run / LOCK_FILE, error=error):
        try:
            yield
        except BaseException:
            # Some directories, such as a mount point, cannot be removed.
            with suppress(OSError):
                if [path.name for path in run.iterdir()] == [LOCK_FILE]:
                    (run / LOCK_FILE).unlink()
                    run.rmdir()
            raise
