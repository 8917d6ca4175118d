"""A default that changes changes what every stage makes: it is told, and a form is raised."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.plan import PrepareOptions
from bertsmith.lab import stage as stages
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
    facts = {
        name: {**asdict(PUBLIC_TASKS[name]), "facts": dict(PUBLIC_TASKS[name].fixed_settings)}
        for name in TASK_METRICS
    }
    return {
        **{kind: settings.model_dump(mode="json") for kind, settings in own.items()},
        "tasks": json.loads(json.dumps(facts, default=dict)),
    }


def test_defaults_are_those_that_results_were_made_with() -> None:
    """The hash of a stage has what is set, and not what is left to the defaults.

    Where this fails: if what is made is another thing now, raise ``KIND_VERSIONS`` of that kind in
    bertsmith/lab/stage.py, and the lab's results are made again. Then write the new defaults:
    `python -m tests.lab.test_forms`.
    """
    assert defaults() == json.loads(FILE.read_text())


def test_a_form_is_part_of_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of an older form are other results; kinds that never changed keep their hashes."""
    before = Stage("number", {"a": 1}).key
    monkeypatch.setitem(KIND_VERSIONS, "other", 2)
    assert Stage("number", {"a": 1}).key == before
    monkeypatch.setitem(KIND_VERSIONS, "number", 2)
    assert Stage("number", {"a": 1}).key != before


def test_results_of_an_older_pre_norm_are_not_todays(tmp_path: Path) -> None:
    """Its embeddings were not normalized then; all other runs keep their keys."""
    (tmp_path / "a.jsonl").write_text(TWO_DOCUMENTS)
    kit = StageFactory(SCALES["smoke"], Sources(english=tmp_path / "a.jsonl"), tmp_path)
    pre, post = (kit.baseline_run(0, model={"norm": norm}) for norm in ("pre", "post"))
    keys = [(own.key, _key_without_form(own)) for own in (pre, post)]
    assert keys[0][0] != keys[0][1]
    assert keys[1][0] == keys[1][1]


def _key_without_form(stage: Stage) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "_MODEL_FORMS", {})
        return Stage(stage.kind, stage.settings, stage.dependencies, stage.files).key


if __name__ == "__main__":
    FILE.write_text(json.dumps(defaults(), indent=1) + "\n")
