"""A checkpoint on the way of a pre-training run, as a model directory of its own.

It never trains.
"""

from pathlib import Path

from bertsmith import bundle
from bertsmith.data.store import Store
from bertsmith.errors import RunError
from bertsmith.model.bert import PreTrainingModel
from bertsmith.settings import read_toml
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train import checkpoint
from bertsmith.train.place import FILE
from bertsmith.train.pretrain import MODEL
from bertsmith.train.recipe import PretrainSettings
from bertsmith.train.session import provenance_on_the_way


def snapshot(run: Path, step: int, out: Path) -> None:
    """Write the model of ``run`` as it was after ``step`` steps, whole or not at all.

    Raises RunError where the run has no such checkpoint, StoreError where its model is not made yet
    and its store is not there.
    """
    settings = PretrainSettings.parse(read_toml(run / FILE), str(run / FILE))
    known = dict(checkpoint.found(run))
    if step not in known:
        there = ", ".join(map(str, known)) or "none"
        raise RunError(
            f"{run}: no checkpoint of step {step}; there: {there}. checkpoint.keep says how many "
            "of the last ones stay"
        )
    model = PreTrainingModel(settings.model)
    checkpoint.load_weights(known[step], model)
    finished = run / MODEL
    words = Tokenizer.load(finished) if finished.exists() else _of_store(settings)
    bundle.save(out, model, words, provenance_on_the_way(settings, step))


def _of_store(settings: PretrainSettings) -> Tokenizer:
    return Store.open(settings.run.data).tokenizer()
