"""Finds the model that continued pre-training starts from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertsmith import bundle
from bertsmith.bundle.metadata import read_metadata
from bertsmith.data.store import Store
from bertsmith.errors import ModelError
from bertsmith.settings import get_table, read_stored_settings
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.train.pretraining.recipes import PretrainSettings


@dataclass(frozen=True)
class StartModel:
    """The model that continued pre-training starts from.

    Attributes:
        config: Its config.
        run_values: The settings ``run.start_from`` and ``run.start_id``.
    """

    config: dict[str, Any]
    run_values: dict[str, Any]


def resolve_start_model(path: str, run: Path | None, store: Store) -> StartModel:
    """Return the start model; if it does not exist, the one in the settings of the run.

    A run with a checkpoint does not need its start model, so it can be resumed without it.

    Args:
        path: Path or name of the start model.
        run: Run directory, which may have no settings yet; None if no run is written.
        store: Token store.

    Raises:
        ModelError: If the start model and the settings do not exist, or the model is damaged.
        StoreError: If its tokenizer differs from the tokenizer of the store.
    """
    try:
        pinned_path = bundle.pin_model_path(path)
        directory = bundle.locate_model(pinned_path)
    except ModelError:
        stored = None if run is None else _read_stored_start_model(run / SETTINGS_FILE)
        if stored is None:
            raise
        return stored
    _, config, tokenizer = read_metadata(directory)
    store.check_tokenizer(tokenizer)
    start_id = bundle.hash_model_files(directory)[:16]
    run_values = {"start_from": str(pinned_path), "start_id": start_id}
    return StartModel(config.model_dump(), run_values)


def _read_stored_start_model(path: Path) -> StartModel | None:
    """Return the start model in the settings of a pre-training run; None if there is none."""
    if not path.exists():
        return None
    tables = read_stored_settings(path)
    if not get_table(tables, "run").get("start_from") or "data" not in tables:
        return None
    settings = PretrainSettings.parse(tables, str(path))
    run_values = settings.run.model_dump(include={"start_from", "start_id"})
    return StartModel(settings.model.model_dump(), run_values)
