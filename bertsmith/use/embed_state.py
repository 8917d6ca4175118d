"""The state of an unfinished ``embed_lines``, from which a later call continues."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from bertsmith.compatibility import upgrade_embedding_state
from bertsmith.errors import InputError
from bertsmith.files import hold_lock, parse_json, sync, write_json
from bertsmith.use.table_input import TextRow
from bertsmith.use.table_output import to_json_line

STATE_FILE, DATA_FILE = "state.json", "data"
#: The index without the added lines, while it is replaced.
_PREVIOUS_FILE = "previous"


@dataclass(frozen=True)
class RunState:
    """The state of an unfinished run. The field names are the keys of ``state.json``.

    Attributes:
        settings: The model, the settings of the vectors, and the column of a table.
        num_lines: Number of lines written so far.
        lines_sha256: SHA-256 of these lines, in hexadecimal.
        position: Position of the writer after these lines; see ``VectorWriter.commit``.
        num_truncated: How many of these lines were truncated.
        num_indexed_lines: Number of lines of the index to which the run adds lines, 0 for a new
            file.
        index_sha256: SHA-256 of these lines, in hexadecimal; "" for a new file.
        is_complete: Whether the index with the added lines is complete, and replaces the other.
    """

    settings: dict[str, Any]
    num_lines: int = 0
    lines_sha256: str = hashlib.sha256().hexdigest()
    position: int = 0
    num_truncated: int = 0
    num_indexed_lines: int = 0
    index_sha256: str = ""
    is_complete: bool = False


def get_partial_dir(out: Path) -> Path:
    """Return the directory for unfinished output."""
    return out.with_name(f"{out.name}.partial")


@contextmanager
def lock_partial_dir(out: Path, *, replaces_output: bool = False) -> Iterator[Path]:
    """Create and lock the directory for unfinished output.

    If the block fails before any line is written, the directory is removed.

    Args:
        out: The output.
        replaces_output: Whether the output exists and is replaced.
    """
    if not replaces_output and (out.exists() or out.is_symlink()):
        raise InputError(f"{out}: already exists; choose another name or remove it")
    partial = get_partial_dir(out)
    with convert_write_errors(partial):
        partial.mkdir(parents=True, exist_ok=True)
    error = InputError(f"{partial}: another process is writing to it; wait until it has finished")
    with hold_lock(partial, error=error):
        try:
            yield partial
        except BaseException:
            _remove_if_empty(partial)
            raise


def _remove_if_empty(partial: Path) -> None:
    """Remove the directory of a run that has not written any lines."""
    with suppress(InputError, OSError):
        state = read_state(partial)
        if state is None:
            # rmdir fails if the directory contains any files.
            partial.rmdir()
        elif not state.num_lines:
            shutil.rmtree(partial)


def read_state(partial: Path) -> RunState | None:
    """Read the state of an unfinished run; return None if there is no state file.

    If the written lines are missing, the state has no lines.

    Raises:
        InputError: The file is damaged.
    """
    try:
        fields = dict(parse_json((partial / STATE_FILE).read_text(encoding="utf-8")))
        state = RunState(**upgrade_embedding_state(fields))
        if state.is_complete:
            return state
        # A run that is killed when its output is complete leaves its state. Parts of Parquet are in
        # a directory whose name starts with that of the file.
        has_data = any(partial.glob(f"{DATA_FILE}*"))
        return state if has_data else RunState(state.settings)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise InputError(
            f"{partial / STATE_FILE}: this file is damaged; remove {partial} and start again"
        ) from None


def load_or_create_state(
    partial: Path, settings: dict[str, Any], num_indexed_lines: int = 0, index_sha256: str = ""
) -> RunState:
    """Load the state of an unfinished run, or create the state of a new run.

    Args:
        partial: The directory of the run.
        settings: Settings of the run; see ``RunState``.
        num_indexed_lines: Number of lines of the index to which the run adds lines; see
            ``RunState``.
        index_sha256: Hash of these lines.

    Raises:
        InputError: The directory contains unrelated files, the run has other settings, or the index
            has changed.
    """
    state = read_state(partial)
    if state is None and any(
        not file.name.startswith(f".{STATE_FILE}") for file in partial.iterdir()
    ):
        raise InputError(f"{partial}: this directory contains unrelated files; remove {partial}")
    if state is None or not state.num_lines:
        # Nothing is written yet, so the settings may differ.
        state = RunState(
            settings,
            position=num_indexed_lines,
            num_indexed_lines=num_indexed_lines,
            index_sha256=index_sha256,
        )
        with convert_write_errors(partial):
            write_json(partial / STATE_FILE, asdict(state))
        return state
    if state.index_sha256 != index_sha256:
        raise InputError(
            f"{partial}: the index has changed since this unfinished run started; remove {partial}"
        )
    # Version 0.2 did not store the column.
    old_settings = {"text_column": settings["text_column"], **state.settings}
    changed = describe_changed_settings(old_settings, settings)
    if changed:
        raise InputError(
            f"{partial}: this unfinished run was started with a different {changed}; use the same "
            f"values, or remove {partial}"
        )
    return replace(state, settings=settings)


def describe_changed_settings(
    recorded_settings: Mapping[str, Any], settings: Mapping[str, Any]
) -> str:
    """Return the names of settings that differ, for a message; the model may have been moved."""
    names = {"model_sha256": "model", "fast": "value of --fast"}
    return ", ".join(
        names.get(name, name.replace("_", " "))
        for name, value in settings.items()
        if name != "model_path" and recorded_settings.get(name) != value
    )


@contextmanager
def convert_write_errors(partial: Path) -> Iterator[None]:
    """Convert an OSError, such as a full disk, to an InputError that says how to continue."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or partial}: cannot be written: {error.strerror or error}; fix this "
            "and run the same command again, which continues after the saved lines"
        ) from error


def hash_lines(lines_hash: "hashlib._Hash", lines: Iterable[str | TextRow]) -> int:
    """Update the hash with lines, or table rows with all their columns; return their number."""
    num_lines = 0
    for line in lines:
        text = line if isinstance(line, str) else to_json_line(line.cells)
        lines_hash.update(text.encode() + b"\n")
        num_lines += 1
    return num_lines


def skip_finished_lines(
    lines: Iterator[str | TextRow], lines_hash: "hashlib._Hash", state: RunState, partial: Path
) -> None:
    """Skip the lines that are already written.

    Raises:
        InputError: The skipped lines are not the ones that were written.
    """
    num_skipped = hash_lines(lines_hash, islice(lines, state.num_lines))
    if num_skipped < state.num_lines or lines_hash.hexdigest() != state.lines_sha256:
        raise InputError(
            f"{partial}: the first {state.num_lines:,} lines differ from those already embedded; "
            f"give the same file, or remove {partial}"
        )


def replace_output(out: Path, partial: Path, state: RunState) -> None:
    """Replace the index to which a run has added lines; a killed call is continued by the next run.

    Args:
        out: The index.
        partial: The directory of the run, with the new index.
        state: The state of the run after all lines.
    """
    write_json(partial / STATE_FILE, asdict(replace(state, is_complete=True)))
    finish_replacement(out, partial)


def finish_replacement(out: Path, partial: Path) -> None:
    """Continue a replacement; see ``replace_output``."""
    new, previous = partial / DATA_FILE, partial / _PREVIOUS_FILE
    if new.exists():
        if out.exists():
            out.replace(previous)
        new.replace(out)
        sync(out.parent)
    shutil.rmtree(previous, ignore_errors=True)
