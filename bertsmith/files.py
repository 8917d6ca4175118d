"""Files that appear whole or not at all, and the hashes that name their content.

It never knows what is in a file.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bertsmith.errors import InputError, ModelError

#: A list of numbers and nulls as indented JSON has it; no text has a line break of its own there.
_NUMBERS = re.compile(r"\[\n\s+((?:(?:null|[-+.\deE]+),\s+)*(?:null|[-+.\deE]+))\s+\]")


def check_new_directory(folder: Path) -> None:
    """Raise ModelError unless ``folder`` is not there yet, or is empty: nothing is written over."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ModelError(f"{folder}: something is there already; choose a new folder")


def check_new_file(out: Path) -> None:
    """Raise QuestionError where something is in the way of a file."""
    if out.exists() or out.is_symlink():
        raise InputError(f"{out}: this file exists already; choose another name, or remove it")
    if not out.parent.is_dir():
        raise InputError(f"{out}: there is no folder {out.parent}; make it first")


def sync(path: Path) -> None:
    """Flush a file or directory to the disk (fsync), so that a power cut cannot undo a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def add_error_filename(path: Path) -> Iterator[None]:
    """Add ``path`` to an OSError from the block that names no file, as a failed write does not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a file under a temporary name, fsync it, and rename it into place."""
    data = content.encode() if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with add_error_filename(path), temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def parse_json(text: str | bytes) -> Any:
    """Return what JSON says. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dump_json(value: Any, indent: int | None = None) -> str:
    """Return ``value`` as JSON; what is not finite becomes null, since JSON knows no NaN."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def restore_nan(read: Mapping[str, Any]) -> dict[str, Any]:
    """Return named figures as they were before ``dump_json``: null is NaN again."""
    return {name: math.nan if value is None else value for name, value in read.items()}


def write_json(path: Path, value: Any, *, inline_numbers: bool = False) -> None:
    """Write ``value`` as indented UTF-8 JSON, whole or not at all.

    ``inline_numbers``: a list of numbers takes a line, not a line each.
    """
    text = dump_json(value, indent=2)
    if inline_numbers:
        text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", text)
    write_atomic(path, text + "\n")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary directory that takes the place of ``path`` when the block ends well.

    An older directory at ``path`` is set aside first and removed last; after an error it stands
    as it stood.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    aside = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            sync(file)
        sync(temporary)
        if path.exists():
            path.replace(aside)
        try:
            temporary.replace(path)
        except OSError:
            if aside.exists():
                aside.replace(path)
            raise
        sync(path.parent)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        # The temporary name means nothing to a user, and a failed write has no name at all.
        named = error.filename
        inside = isinstance(named, str) and Path(named).is_relative_to(temporary)
        if error.errno is not None and (inside or named is None):
            error.filename = str(path)
        raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
