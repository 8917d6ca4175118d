"""Tests that results of older code or other default settings are not reused."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.plan import PrepareOptions
from bertsmith.lab.scale import SCALES
from bertsmith.lab.sources import Sources
from bertsmith.lab.stage import KIND_VERSIONS, Stage
from bertsmith.lab.stages import TASK_METRICS, StageFactory
from bertsmith.model.config import ModelConfig
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.text.corpus import CorpusOptions
from bertsmith.text.vocabulary import VocabularyOptions
from bertsmith.train.finetuning.settings import FinetuneSettings
from bertsmith.train.pretraining.recipes import PretrainSettings
from tests.lab.helpers import TWO_DOCUMENTS

DEFAULTS_FILE = Path(__file__).with_name("defaults.json")


def collect_defaults() -> dict[str, Any]:
    """Return the default settings of each kind of stage, which are not part of a stage's key."""
    model = ModelConfig(vocab_size=1)
    settings = {
        "text": CorpusOptions(),
        "vocabulary": VocabularyOptions(),
        "store": PrepareOptions(),
        "pretrain": PretrainSettings(model=model),
        "finetune": FinetuneSettings(model=model),
    }
    tasks = {
        name: {
            **asdict(PUBLIC_TASKS[name]),
            "fixed_settings": dict(PUBLIC_TASKS[name].fixed_settings),
        }
        for name in TASK_METRICS
    }
    return {
        **{kind: defaults.model_dump(mode="json") for kind, defaults in settings.items()},
        "tasks": json.loads(json.dumps(tasks, default=dict)),
    }


def test_defaults_have_not_changed() -> None:
    """The defaults are those of the stored results.

    If a changed default changes results, increase the version in ``KIND_VERSIONS``
    (bertsmith/lab/stage.py), so that stages of this kind run again. Then store the new defaults
    with `python -m tests.lab.test_versions`.
    """
    assert collect_defaults() == json.loads(DEFAULTS_FILE.read_text())


def test_version_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new version of a kind changes the keys of its stages, but not those of other kinds."""
    key = Stage("number", {"a": 1}).key
    monkeypatch.setitem(KIND_VERSIONS, "other", 2)
    assert Stage("number", {"a": 1}).key == key
    monkeypatch.setitem(KIND_VERSIONS, "number", 2)
    assert Stage("number", {"a": 1}).key != key


def test_results_of_changed_settings_are_not_reused(tmp_path: Path) -> None:
    """Each setting whose results have changed increases the version in the key of a run."""
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    factory = StageFactory(SCALES["smoke"], Sources(english=tmp_path / "a.jsonl"), tmp_path)
    expected = {
        ("post", "random"): None,
        ("pre", "random"): 2,
        ("post", "cross-segment-heads"): 2,
        ("pre", "match-heads"): 3,
    }
    for (norm, initialization), version in expected.items():
        run = factory.create_baseline_run(
            0, model={"norm": norm}, run={"initialization": initialization}
        )
        assert (run._version(), run.key != _key_without_version(run)) == (version, bool(version))
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(KIND_VERSIONS, "pretrain", 2)
            assert Stage(run.kind, run.settings, run.dependencies, run.files).key != run.key
    model = Stage("untrained-model", {"initialization": "match-heads", "model": {"norm": "pre"}})
    assert model._version() == 2


def _key_without_version(stage: Stage) -> str:
    """Return the key that the stage would have in its first version."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "_version", lambda _: None)
        return Stage(stage.kind, stage.settings, stage.dependencies, stage.files).key


if __name__ == "__main__":
    DEFAULTS_FILE.write_text(json.dumps(collect_defaults(), indent=1) + "\n")
