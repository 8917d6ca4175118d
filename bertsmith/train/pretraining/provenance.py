"""The provenance of a pre-trained model, which bertsmith.json records.

As in ``engine.provenance``, it contains no directories of the training machine.
"""

import platform
from pathlib import Path
from typing import Any

import torch

from bertsmith.train.engine.provenance import dump_settings
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.session import Session


def build_checkpoint_provenance(settings: PretrainSettings, step: int) -> dict[str, Any]:
    """Return the provenance for bertsmith.json of the model after ``step`` steps of a run."""
    return {
        "task": "pretraining",
        "recipe": settings.run.recipe,
        "provenance": {"settings": dump_settings(settings, exclude_none=True), "step": step},
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
            "settings": dump_settings(settings, exclude_none=True),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "heldout_metrics": heldout,
    }
