"""A default that changes changes what every stage makes: it is told, and a form is raised."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.plan import PrepareOptions
from bertsmith.lab.kit import METRICS
from bertsmith.lab.stages import FORMS, Stage
from bertsmith.model.config import ModelConfig
from bertsmith.tasks.public import TASKS
from bertsmith.text.corpus import CorpusOptions
from bertsmith.text.learning import VocabularyOptions
from bertsmith.train.recipe import PretrainSettings
from bertsmith.train.tunesettings import FinetuneSettings

FILE = Path(__file__).with_name("defaults.json")


def defaults() -> dict[str, Any]:
    """Return what each kind of stage takes where its settings, which its hash has, say nothing."""
    model = ModelConfig(vocab_size=1)
    own = {
        "text": CorpusOptions(),
        "words": VocabularyOptions(),
        "store": PrepareOptions(),
        "pretrain": PretrainSettings(model=model),
        "finetune": FinetuneSettings(model=model),
    }
    # What tasks that are known by name bring with them.
    facts = {name: {**asdict(TASKS[name]), "facts": dict(TASKS[name].facts)} for name in METRICS}
    return {
        **{kind: settings.model_dump(mode="json") for kind, settings in own.items()},
        "tasks": json.loads(json.dumps(facts, default=dict)),
    }


def test_defaults_are_those_that_results_were_made_with() -> None:
    """The hash of a stage has what is set, and not what is left to the defaults.

    Where this fails: if what is made is another thing now, raise ``FORMS`` of that kind in
    bertsmith/lab/stages.py, and the lab's results are made again. Then write the new defaults:
    `python -m tests.lab.test_forms`.
    """
    assert defaults() == json.loads(FILE.read_text())


def test_a_form_is_part_of_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of an older form are other results; kinds that never changed keep their hashes."""
    before = Stage("number", {"a": 1}).key
    monkeypatch.setitem(FORMS, "other", 2)
    assert Stage("number", {"a": 1}).key == before
    monkeypatch.setitem(FORMS, "number", 2)
    assert Stage("number", {"a": 1}).key != before


if __name__ == "__main__":
    FILE.write_text(json.dumps(defaults(), indent=1) + "\n")
