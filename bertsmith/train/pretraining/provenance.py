"""The provenance of a pre-trained model, which bertsmith.json records.

Models are published with their bertsmith.json, so it contains no directories of the training
machine: only names of files and folders. The run's settings.toml has the full paths.
"""

import platform
from pathlib import Path
from typing import Any

import torch

from bertsmith.bundle.directory import get_model_name
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.session import Session


def build_checkpoint_provenance(settings: PretrainSettings, step: int) -> dict[str, Any]:
    """Return the provenance for bertsmith.json of the model after ``step`` steps of a run."""
    return {
        "task": "pretraining",
        "recipe": settings.run.recipe,
        "provenance": {"settings": _dump_settings(settings), "step": step},
    }


def build_provenance(session: Session, heldout: dict[str, float]) -> dict[str, Any]:
    """Return the provenance for bertsmith.json of the final model of a run.

    Args:
        session: The run.
        heldout: Metrics of the last evaluation on held-out text.
    """
    settings = session.settings
    manifest = session.store.manifest
    return {
        "task": "pretraining",
        "recipe": settings.run.recipe,
        "provenance": {
            "sources": [Path(source.name).name for source in manifest.plan.sources],
            "documents": session.train_split.counts.documents,
            "tokens": session.train_split.counts.tokens,
            "language": manifest.plan.options.language,
            "settings": _dump_settings(settings),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "heldout_metrics": heldout,
    }


def _dump_settings(settings: PretrainSettings) -> dict[str, Any]:
    """Return the settings that have a value, with names instead of paths."""
    values = settings.model_dump(mode="json", exclude_none=True)
    run = values["run"]
    run["store_path"] = Path(run["store_path"]).name
    if "start_from" in run:
        run["start_from"] = get_model_name(Path(run["start_from"]))
    return values
