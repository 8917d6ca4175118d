"""The directory of a run: its settings file and its lock."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from bertsmith.errors import RunError
from bertsmith.files import hold_lock, write_atomic
from bertsmith.progress import Progress
from bertsmith.settings import Settings, get_table, read_stored_settings

SETTINGS_FILE, LOCK_FILE = "settings.toml", ".lock"
#: Settings that may change when a run is resumed, because they do not affect the weights.
_MUTABLE_KEYS = (
    "checkpoint.every", "checkpoint.keep", "checkpoint.keep_optimizer",
    "run.log_every", "run.log_grad_norms", "run.tensorboard",
)  # fmt: skip
#: The path of the store, which may have moved: ``run.store_id`` identifies it.
_STORE_KEY = "run.store_path"
#: Settings that a time budget (schedule.minutes) determines before the first step.
_BUDGET_KEYS = ("run.eval_every", "run.max_eval_sequences", "schedule.min_steps")
#: Prefixes of settings that a run stores only if the user has set them.
_USER_SET_PREFIXES = ("task.", "features", "run.num_frozen_layers", "run.patience")
#: Two lists with more items than this are not printed in full, but only this many differences.
_MAX_LIST_ITEMS, _MAX_CHANGES = 12, 3
SettingsType = TypeVar("SettingsType", bound=Settings)


def check_run_directory(run: Path) -> None:
    """Raise RunError if ``run`` is a file, not writable, or a directory with other files."""
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
    # A killed process may have left the lock and the temporary file of the settings.
    temporary_prefix = f".{SETTINGS_FILE}."
    for path in run.iterdir():
        if path.name != LOCK_FILE and not path.name.startswith(temporary_prefix):
            raise RunError(
                f"{run}: this directory has other files and no {SETTINGS_FILE} of a run; "
                "give --out a new directory"
            )


def load_run_settings(
    run: Path,
    settings: SettingsType,
    user_values: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> SettingsType | None:
    """Return the settings stored in ``run``, or None if it has none yet.

    Settings of the user that do not affect the weights replace the stored ones, also in the file.

    Args:
        run: Run directory.
        settings: The settings of the current command.
        user_values: Those of them that the user has set, as nested tables.
        progress: Where changed settings are logged.

    Raises:
        RunError: If other stored settings differ; the message lists all differences.
    """
    path = run / SETTINGS_FILE
    if not path.exists():
        return None
    stored = type(settings).parse(read_stored_settings(path), str(path))
    stored_values = stored.model_dump()
    budget_keys = _BUDGET_KEYS if stored_values["schedule"]["minutes"] is not None else ()
    differences, changes = [], {}
    for key, old, new in _find_differences(stored_values, settings.model_dump()):
        table, _, name = key.partition(".")
        is_set_by_user = name in get_table(user_values or {}, table)
        change = f"{key}: {_describe_change(old, new)}"
        if key == _STORE_KEY or (key in _MUTABLE_KEYS and is_set_by_user):
            changes[key] = new
            if progress is not None:
                progress.log(f"{run}: {change}; using the new value")
        elif key in budget_keys and is_set_by_user and progress is not None:
            progress.log(
                f"{run}: {change}; using the value in the run, which the time budget determined"
            )
        elif key not in (*_MUTABLE_KEYS, *budget_keys):
            differences.append(f"  {change}")
    if differences:
        raise RunError(
            f"{run}: this run was started with other settings:\n" + "\n".join(differences) + "\n"
            "repeat the original command to resume it, or give --out another directory to start a "
            "new run; to train a finished model further, start a new run from it: "
            "--from RUN --out NEW (pretrain), --model RUN --out NEW (finetune)"
        )
    if not changes:
        return stored
    for key, value in changes.items():
        table, _, name = key.partition(".")
        stored_values[table][name] = value
    changed = type(settings).parse(stored_values, str(path))
    write_atomic(path, changed.to_toml())
    return changed


def _describe_change(old: Any, new: Any) -> str:
    """Return the stored and the new value; of long lists only the differences."""
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
        index = next(i for i, item in enumerate(old) if item != new[i])
        parts.append(f"the order differs from item {index + 1:,} on")
    return "; ".join(parts)


def _find_differences(
    stored: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """Return (key, stored value, new value) of all differences."""
    differences: list[tuple[str, Any, Any]] = []
    for name, new_value in new.items():
        old_value, key = stored.get(name), prefix + name
        if isinstance(new_value, dict):
            differences += _find_differences(old_value or {}, new_value, f"{key}.")
        elif new_value is None and old_value is not None and key.startswith(_USER_SET_PREFIXES):
            # A run never fills in these settings, so the user has set the stored value.
            differences.append((key, old_value, new_value))
        elif new_value not in (None, "auto", old_value):
            differences.append((key, old_value, new_value))
    return differences


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold the lock of a run, so that no other process writes to it.

    Raises:
        RunError: If another process holds the lock.
    """
    error = RunError(f"{run}: another process is training here; wait for it, or stop it")
    with hold_lock(run / LOCK_FILE, error=error):
        yield
