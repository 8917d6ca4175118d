"""Settings that have no effect in a fine-tuning or distillation run are errors."""

from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import SettingsError
from bertsmith.train.distillation import settings as distillation
from bertsmith.train.embedding import settings as embedding
from bertsmith.train.finetuning import settings as finetuning
from bertsmith.train.reranking import settings as reranking

DEV = {"validation_files": {"dev": "dev.csv"}}


def read_overrides(kind: str, values: dict[str, Any], assignment: str) -> dict[str, Any]:
    """Read the settings of a run of a kind; ``kind`` is the settings table with the data."""
    if kind == "task":
        return finetuning.read_overrides("classify", None, None, values, [assignment])
    if kind == "distill":
        return distillation.read_overrides(None, values, [assignment], has_start_model=False)
    read = embedding.read_overrides if kind == "embedding" else reranking.read_overrides
    return read([Path("a.csv")], None, values, [assignment])


@pytest.mark.parametrize("kind", ["task", "embedding", "reranking", "distill"])
@pytest.mark.parametrize(
    ("assignment", "values", "reason"),
    [
        ("optim.muon_momentum=0.9", {"optim": {"optimizer": "muon"}}, "optim.optimizer is 'adamw'"),
        (
            "schedule.decay_fraction=0.5",
            {"schedule": {"decay": "trapezoidal"}},
            "schedule.decay is 'linear'",
        ),
    ],
)
def test_settings_of_other_optimizers_and_schedules_are_rejected(
    kind: str, assignment: str, values: dict[str, Any], reason: str
) -> None:
    """A setting that needs another setting is accepted only together with it."""
    with pytest.raises(SettingsError, match=f"has no effect because {reason}; set "):
        read_overrides(kind, {}, assignment)
    read_overrides(kind, values, assignment)


@pytest.mark.parametrize(
    ("kind", "assignment", "values"),
    [
        ("task", "schedule.min_steps=50", {"schedule": {"steps": 7}}),
        ("embedding", "embedding.validation_fraction=0.5", {"embedding": DEV}),
        ("embedding", "embedding.max_validation_examples=3", {"embedding": DEV}),
        ("reranking", "reranking.validation_fraction=0.5", {"reranking": DEV}),
        ("reranking", "reranking.max_validation_queries=5", {"reranking": DEV}),
        ("distill", "distill.validation_fraction=0.5", {"distill": DEV}),
        ("distill", "distill.temperature=9.0", {"distill": {"hard_weight": 1.0}}),
    ],
)
def test_settings_without_effect_are_rejected(
    kind: str, assignment: str, values: dict[str, Any]
) -> None:
    """The error names the setting; without the other settings, it has an effect."""
    name = assignment.partition("=")[0]
    with pytest.raises(SettingsError, match=f"{name} has no effect because .*leave out {name}"):
        read_overrides(kind, values, assignment)
    read_overrides(kind, {}, assignment)
