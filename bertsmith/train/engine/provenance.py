"""The provenance of a trained model, which bertsmith.json records.

Models are published with their bertsmith.json, so it contains no directories of the training
machine: only names of files and folders. The run's settings.toml has the full paths.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bertsmith.bundle.directory import get_model_name
from bertsmith.settings import Settings

#: Settings that are the directory of a model, or the path of a file or folder.
_MODEL_SETTINGS: Final = ("start_from", "teacher")
_PATH_SETTINGS: Final = ("store_path", "train_file")


def dump_settings(settings: Settings, *, exclude_none: bool = False) -> dict[str, Any]:
    """Return the settings of a run as JSON values, with names instead of paths.

    Args:
        settings: All settings of a run.
        exclude_none: Whether to leave out settings without a value.
    """
    tables = settings.model_dump(mode="json", exclude_none=exclude_none)
    # An optional table is None.
    return {name: table and remove_directories(table) for name, table in tables.items()}


def remove_directories(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a settings table with names instead of paths."""
    changed = dict(table)
    for name, value in table.items():
        if not value:
            continue
        if name in _MODEL_SETTINGS:
            changed[name] = get_model_name(Path(value))
        elif name in _PATH_SETTINGS:
            changed[name] = Path(value).name
        elif name == "train_files":
            changed[name] = [Path(file).name for file in value]
        elif name == "validation_files":
            changed[name] = {key: Path(file).name for key, file in value.items()}
    return changed
