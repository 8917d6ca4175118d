"""Finds the model that continued pre-training starts from."""

from dataclasses import dataclass, replace
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
        objective: Value of ``data.objective`` with which it was trained.
        pair_objective: Value of ``data.pair_objective`` with which it was trained.
    """

    config: dict[str, Any]
    run_values: dict[str, Any]
    objective: str
    pair_objective: str

    def get_objectives(self, *, nsp: bool) -> dict[str, str]:
        """Return the data settings with which continued pre-training keeps the objectives.

        Args:
            nsp: Whether the run has sentence pairs.
        """
        objectives = {"objective": self.objective}
        return objectives | {"pair_objective": self.pair_objective} if nsp else objectives


def resolve_start_model(path: str, run: Path | None, store: Store) -> StartModel:
    """Return the start model; if it does not exist, the one in the settings of the run.

    A run with a checkpoint does not need its start model, so it can be resumed without it. A run
    that is resumed keeps its objectives, which were not those of the start model in version 0.2.

    Args:
        path: Path or name of the start model.
        run: Run directory, which may have no settings yet; None if no run is written.
        store: Token store.

    Raises:
        ModelError: If the start model and the settings do not exist, or the model is damaged.
        StoreError: If its tokenizer differs from the tokenizer of the store.
    """
    stored = None if run is None else _read_stored_start_model(run / SETTINGS_FILE)
    try:
        pinned_path = bundle.pin_model_path(path)
        directory = bundle.locate_model(pinned_path)
    except ModelError:
        if stored is None:
            raise
        return stored
    info, config, tokenizer = read_metadata(directory)
    store.check_tokenizer(tokenizer)
    start_id = bundle.compute_model_id(directory)
    run_values = {"start_from": str(pinned_path), "start_id": start_id}
    if stored is not None:
        return replace(stored, config=config.model_dump(), run_values=run_values)
    data = get_table(get_table(get_table(info, "provenance"), "settings"), "data")
    # Without a record of its training, a causal model can only be a left-to-right model.
    default_objective = "left-to-right" if config.attention == "causal" else "masked"
    return StartModel(
        config.model_dump(),
        run_values,
        data.get("objective", default_objective),
        data.get("pair_objective", "nsp"),
    )


def _read_stored_start_model(path: Path) -> StartModel | None:
    """Return the start model in the settings of a pre-training run; None if there is none."""
    if not path.exists():
        return None
    tables = read_stored_settings(path)
    if not get_table(tables, "run").get("start_from") or "data" not in tables:
        return None
    settings = PretrainSettings.parse(tables, str(path))
    run_values = settings.run.model_dump(include={"start_from", "start_id"})
    data = settings.data
    return StartModel(settings.model.model_dump(), run_values, data.objective, data.pair_objective)
