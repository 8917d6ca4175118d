"""The directory of a run: what may stand there already, and that one process works in it.

It never knows what is trained.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from bertsmith.errors import RunError
from bertsmith.settings import Settings, read_toml

SETTINGS_FILE, LOCK_FILE = "settings.toml", ".lock"
#: Settings that may differ when a run is taken up again: they change nothing that is learnt.
#: A store may have moved: ``run.store`` tells whether it is the same one.
_FREE = ("checkpoint.keep", "checkpoint.keep_optimizer", "run.tensorboard", "run.data")
#: Settings that a time budget (schedule.minutes) resolves before the first step.
_BUDGETED = ("run.eval_every", "run.eval_sequences", "schedule.min_steps")
#: Settings that stand in the file only if they were asked for.
_SAID = ("task.", "features", "run.freeze", "run.patience")
#: Items of lists that are shown whole, and that are named of longer ones.
_LISTED, _NAMED = 12, 3
Chosen = TypeVar("Chosen", bound=Settings)


def check_run_directory(run: Path) -> None:
    """Raise RunError where no run can stand: at a file, or among files of somebody else."""
    if run.exists() and not run.is_dir():
        raise RunError(f"{run}: this is a file; give --out a new directory")
    if not run.exists():
        above = next(parent for parent in run.absolute().parents if parent.exists())
        if not above.is_dir() or not os.access(above, os.W_OK):
            what = "no directory can be made in it" if above.is_dir() else "this is a file"
            raise RunError(f"{run}: {above}: {what}; give --out another place")
        return
    if (run / SETTINGS_FILE).exists():
        return
    # A kill may have left the lock, and the settings under their temporary name.
    if any(
        item.name != LOCK_FILE and not item.name.startswith(f".{SETTINGS_FILE}.")
        for item in run.iterdir()
    ):
        raise RunError(
            f"{run}: there are files here, but no {SETTINGS_FILE} of a run; give --out a new directory"
        )


def load_run_settings(run: Path, settings: Chosen) -> Chosen | None:
    """Return the settings that stand in ``run``, or None if there are none yet.

    Raises RunError if they say something else than is wished now, naming each difference.
    """
    path = run / SETTINGS_FILE
    if not path.exists():
        return None
    stored = type(settings).parse(read_toml(path), str(path))
    before = stored.model_dump()
    has_budget = before["schedule"]["minutes"] is not None
    free = (*_FREE, *_BUDGETED) if has_budget else _FREE
    differences = [
        f"  {key}: {_describe_change(was, now)}"
        for key, was, now in _differences(before, settings.model_dump())
        if key not in free
    ]
    if differences:
        raise RunError(
            f"{run}: this run was begun with other settings:\n" + "\n".join(differences) + "\n"
            "give the same command to go on with it, or --out another directory for a new run; "
            "a finished model is trained further in a new run: --from RUN --out NEW (pretrain), "
            "--model RUN --out NEW (finetune)"
        )
    return stored


def _describe_change(before: Any, after: Any) -> str:
    """Return both values, of long lists only what differs."""
    if not (isinstance(before, list) and isinstance(after, list)):
        return f"{before!r} there, {after!r} now"
    if len(before) + len(after) <= _LISTED:
        return f"{before!r} there, {after!r} now"
    parts = [f"{len(before):,} there, {len(after):,} now"]
    for text, items, others in (("only there", before, after), ("only now", after, before)):
        only = [item for item in items if item not in set(others)]
        if only:
            more = f" and {len(only) - _NAMED:,} more" if len(only) > _NAMED else ""
            parts.append(f"{text}: {', '.join(map(repr, only[:_NAMED]))}{more}")
    if len(parts) == 1:
        place = next(number for number, item in enumerate(before) if item != after[number])
        parts.append(f"in another order, from number {place + 1:,} on")
    return "; ".join(parts)


def _differences(
    stored: Mapping[str, Any], wished: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    result: list[tuple[str, Any, Any]] = []
    for key, now in wished.items():
        was, name = stored.get(key), prefix + key
        if isinstance(now, dict):
            result += _differences(was or {}, now, f"{name}.")
        elif now is None and was is not None and name.startswith(_SAID):
            # The run does not fill these in by itself: somebody said so, and now does not.
            result.append((name, was, now))
        elif now not in (None, "auto", was):
            result.append((name, was, now))
    return result


@contextmanager
def lock_run(run: Path) -> Iterator[None]:
    """Hold the run's lock: two processes in one directory would spoil each other's files."""
    with (run / LOCK_FILE).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{run}: another process is training here; wait for it, or stop it"
            ) from None
        yield
