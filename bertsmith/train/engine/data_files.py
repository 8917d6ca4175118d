"""Detects changes of the data files between the start of a fine-tuning run and its resumption."""

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from bertsmith.errors import RunError, TaskError
from bertsmith.files import compute_file_sha256
from bertsmith.settings import SettingsType, read_stored_settings
from bertsmith.train.engine.run_directory import SETTINGS_FILE


class DataFiles(Protocol):
    """Settings with data files and the hash of their content."""

    @property
    def fingerprint(self) -> str:
        """The result of ``hash_files``; empty before the files are hashed."""

    def list_files(self) -> list[Path]:
        """Return all data files."""


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


def check_files_unchanged(
    run: Path, settings: SettingsType, get_data_files: Callable[[SettingsType], DataFiles]
) -> None:
    """Raise RunError if the content of the data files has changed since the run was started.

    Args:
        run: Run directory; a new one has no stored settings, and nothing is checked.
        settings: Settings of the current command, with the hash of the files.
        get_data_files: Returns the part of the settings with the data files.
    """
    path = run / SETTINGS_FILE
    if not path.exists():
        return
    stored = get_data_files(type(settings).parse(read_stored_settings(path), str(path)))
    current = get_data_files(settings)
    files = current.list_files()
    if stored.list_files() == files and stored.fingerprint != current.fingerprint:
        raise RunError(
            f"{run}: the data files have changed since this run was started "
            f"({', '.join(map(str, files))}); restore them to resume it, or give --out another "
            "directory to start a new run"
        )
