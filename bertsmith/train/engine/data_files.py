"""Detects changes of the data files between the start of a fine-tuning run and its resumption."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from bertsmith.errors import RunError, TaskError
from bertsmith.files import compute_file_sha256
from bertsmith.settings import Settings, read_stored_settings
from bertsmith.train.engine.run_directory import SETTINGS_FILE


def hash_files(files: Iterable[Path]) -> str:
    """Return a truncated SHA-256 of the content of data files.

    Raises:
        TaskError: If a file cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            digest.update(compute_file_sha256(file).encode())
        except OSError as error:
            raise TaskError(f"{file}: cannot be read: {error.strerror}") from None
    return digest.hexdigest()[:16]


def check_files_unchanged(run: Path, settings: Settings, table: str) -> None:
    """Raise RunError if the content of the data files has changed since the run was started.

    Args:
        run: Run directory; a new one has no stored settings, and nothing is checked.
        settings: Settings of the current command, with the hash of the files.
        table: The settings table with the data files, such as "embedding". Its ``fingerprint`` is
            the result of ``hash_files``, and its ``list_files`` returns the files.
    """
    path = run / SETTINGS_FILE
    if not path.exists():
        return
    stored = getattr(type(settings).parse(read_stored_settings(path), str(path)), table)
    current = getattr(settings, table)
    files = current.list_files()
    if stored.list_files() == files and stored.fingerprint != current.fingerprint:
        raise RunError(
            f"{run}: the data files have changed since this run was started "
            f"({', '.join(map(str, files))}); restore them to resume it, or give --out another "
            "directory to start a new run"
        )
