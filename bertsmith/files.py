"""Atomic writing of files and directories, locks, JSON, and content hashes."""

import difflib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from bertsmith.errors import InputError, ModelError

#: Matches a list of numbers and nulls in indented JSON. The content of a string cannot match,
#: because JSON escapes line breaks.
_NUMBER_LIST = re.compile(r"\[\n\s+((?:(?:null|[-+.\deE]+),\s+)*(?:null|[-+.\deE]+))\s+\]")
#: Maximum number of names in a folder that are compared with that of a missing file.
_MAX_COMPARED_NAMES = 10_000


def check_new_directory(path: Path) -> None:
    """Raise an error if ``path`` exists and is not an empty directory, or has no name.

    Raises:
        InputError: See ``check_directory_name``.
        ModelError: The directory is not empty.
    """
    check_directory_name(path)
    is_empty_directory = path.is_dir() and not any(path.iterdir())
    if path.exists() and not is_empty_directory:
        raise ModelError(f"{path}: already exists and is not an empty folder; choose a new folder")


def check_directory_name(path: Path) -> None:
    """Raise InputError for a directory that ``atomic_directory`` cannot replace or create.

    This is ``.``, a mount point, or a directory whose parent is a file or not writable.
    """
    if path.name in ("", ".."):
        raise InputError(f"{path}: not the name of a new folder; choose a name, such as my-model")
    if path.resolve().is_mount():
        raise InputError(
            f"{path}: a mount point, which cannot be replaced by a new folder; choose a folder in "
            f"it, such as {path / 'my-model'}"
        )
    parent = next(parent for parent in path.absolute().parents if parent.exists())
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        problem = "this folder is not writable" if parent.is_dir() else "this is a file"
        raise InputError(f"{path}: cannot be created: {parent}: {problem}; choose another folder")


def name_paths(paths: Sequence[Path]) -> list[str]:
    """Return a name for each path: its last part, or more parts if different paths have the same.

    Equal paths have the same name.
    """
    paths = [path.absolute() for path in paths]
    num_parts = 1
    while True:
        names = ["/".join(path.parts[-num_parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            return names
        num_parts += 1


def check_new_file(path: Path) -> None:
    """Raise InputError if ``path`` exists or its folder does not exist."""
    if path.exists() or path.is_symlink():
        raise InputError(f"{path}: this file exists already; choose another name, or remove it")
    if not path.parent.is_dir():
        raise InputError(f"{path}: there is no folder {path.parent}; create it first")


def describe_missing_path(path: Path, kind: str = "file") -> str:
    """Return an error message for a path that does not exist.

    Args:
        path: A path that does not exist.
        kind: What was expected, such as "file or folder".

    Returns:
        The path, the problem, and the most similar name in its folder or what to check.
    """
    try:
        hint = _suggest_path(path, has_folders="folder" in kind)
    except OSError:
        # The folder cannot be read, or the current folder was removed.
        hint = "check the path"
    return f"{path}: no such {kind}; {hint}"


def _suggest_path(path: Path, *, has_folders: bool) -> str:
    """Return the likely reason why a path does not exist, or what to check.

    Args:
        path: A path that does not exist.
        has_folders: Whether the path may be that of a folder.

    Raises:
        OSError: If the folder of the path, or the current folder, cannot be read.
    """
    if path.is_symlink():
        return f"this link points to {path.readlink()}, which does not exist"
    current_folder = "" if path.is_absolute() else f" (the current folder is {Path.cwd()})"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}{current_folder}"
    entries = islice(path.parent.iterdir(), _MAX_COMPARED_NAMES)
    names = [entry.name for entry in entries if has_folders or entry.is_file()]
    if matches := difflib.get_close_matches(path.name, names, n=1):
        return f"did you mean {path.parent / matches[0]}?"
    return f"check the path{current_folder}"


def sync(path: Path) -> None:
    """Flush a file or directory to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_open_file(file: BinaryIO, *, shared: bool = False) -> None:
    """Wait for the lock (flock) of an open file; closing the file releases the lock.

    Args:
        file: The open file.
        shared: Whether other processes may hold a shared lock at the same time.
    """
    fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)


@contextmanager
def hold_lock(
    path: Path, *, error: Exception | None = None, on_wait: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold the exclusive lock (flock) of a file or directory; a missing file is created.

    Args:
        path: The file or directory.
        error: Raised if another process holds the lock; None to wait until it is released.
        on_wait: Called before waiting, if another process holds the lock.
    """
    directory_flags = os.O_RDONLY | os.O_DIRECTORY
    file_flags = os.O_RDWR | os.O_CREAT
    descriptor = os.open(path, directory_flags if path.is_dir() else file_flags, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if error is not None:
                raise error from None
            if on_wait is not None:
                on_wait()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def add_error_filename(path: Path) -> Iterator[None]:
    """Set the file name of an OSError that has none, such as one raised by a failed write."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path. If the block writes a file to it, the file replaces ``path``.

    If ``path`` is a symbolic link, the file it refers to is replaced.
    """
    target = path.resolve() if path.is_symlink() else path
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    sync(target.parent)


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file atomically: write a temporary file, fsync it, and rename it to ``path``."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    with add_error_filename(path), atomic_file(path) as temporary:
        temporary.write_bytes(data)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError if it is invalid or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump_json(value: Any, indent: int | None = None, *, ensure_ascii: bool = False) -> str:
    """Return ``value`` as JSON; NaN and infinities become null."""
    return json.dumps(
        _replace_nonfinite(value), indent=indent, ensure_ascii=ensure_ascii, allow_nan=False
    )


def _replace_nonfinite(value: Any) -> Any:
    """Return a JSON value in which NaN and infinities are replaced by None."""
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def restore_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace None by NaN in metrics that were written by ``dump_json``."""
    return {name: math.nan if value is None else value for name, value in values.items()}


def write_json(path: Path, value: Any, *, inline_numbers: bool = False) -> None:
    """Write ``value`` atomically as indented JSON.

    Args:
        path: The file to write.
        value: A JSON value.
        inline_numbers: Whether to write each list of numbers on one line.
    """
    text = dump_json(value, indent=2)
    if inline_numbers:
        text = _NUMBER_LIST.sub(lambda match: f"[{' '.join(match[1].split())}]", text)
    write_atomic(path, text + "\n")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary directory that replaces ``path`` if the block succeeds.

    If the block or the replacement fails, an existing directory at ``path`` is unchanged. If
    ``path`` is a symbolic link, the directory it refers to is replaced.
    """
    target = path.resolve() if path.is_symlink() else path
    temporary_path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    previous_path = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary_path, ignore_errors=True)
        if previous_path.exists():
            # A process with the same id was killed while it replaced the directory.
            if target.exists():
                shutil.rmtree(previous_path)
            else:
                previous_path.replace(target)
        temporary_path.mkdir()
        yield temporary_path
        for file in sorted(temporary_path.rglob("*")):
            sync(file)
        sync(temporary_path)
        if target.exists():
            target.replace(previous_path)
        try:
            temporary_path.replace(target)
        except BaseException:
            if previous_path.exists():
                previous_path.replace(target)
            raise
        sync(target.parent)
        shutil.rmtree(previous_path, ignore_errors=True)
    except OSError as error:
        # Report ``path``: users do not know the temporary name, and a failed write has no name.
        filename = error.filename
        is_temporary = isinstance(filename, str) and Path(filename).is_relative_to(temporary_path)
        if error.errno is not None and (is_temporary or filename is None):
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(temporary_path, ignore_errors=True)


def write_directory_once(path: Path, write: Callable[[Path], None]) -> None:
    """Write a directory atomically unless it exists; wait while another process writes it.

    Args:
        path: The directory.
        write: Writes the content into an empty directory.
    """
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock(path.with_name(f".{path.name}.lock")):
        if not path.exists():
            with atomic_directory(path) as new:
                write(new)


def compute_file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's bytes in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
