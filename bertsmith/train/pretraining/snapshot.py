"""A checkpoint on the way of a pre-training run, as a model directory of its own.

It never trains.
"""

from pathlib import Path

from bertsmith import bundle
from bertsmith.bundle.metadata import read_metadata
from bertsmith.data.store import Store
from bertsmith.errors import RunError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.settings import read_toml
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.train.finetuning.settings import FinetuneSettings
from bertsmith.train.pretraining.pretrain import MODEL_DIR
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.session import build_checkpoint_provenance


def write_snapshot(run: Path, step: int, out: Path) -> None:
    """Write the model of ``run`` as it was after ``step`` steps, whole or not at all.

    Raises RunError where the run has no such checkpoint, StoreError where its model is not made yet
    and its store is not there.
    """
    settings = PretrainSettings.parse(read_toml(run / SETTINGS_FILE), str(run / SETTINGS_FILE))
    known = dict(checkpoint.list_checkpoints(run))
    if step not in known:
        there = ", ".join(map(str, known)) or "none"
        raise RunError(
            f"{run}: no checkpoint of step {step}; there: {there}. checkpoint.keep says how many "
            "of the last ones stay"
        )
    model = BertForPreTraining(settings.model)
    checkpoint.load_weights(known[step], model)
    finished = run / MODEL_DIR
    words = Tokenizer.load(finished) if finished.exists() else _of_store(settings)
    bundle.save(out, model, words, build_checkpoint_provenance(settings, step))


def write_latest_snapshot(run: Path, out: Path) -> tuple[int, int]:
    """Write the model of the newest intact checkpoint; return its step and the run's steps.

    Raises RunError where no checkpoint can be read.
    """
    is_tuning = "task" in read_toml(run / SETTINGS_FILE)
    write = _write_tuned if is_tuning else write_snapshot
    reasons = []
    for step, _ in reversed(checkpoint.list_checkpoints(run)):
        try:
            write(run, step, out)
        except RunError as error:
            reasons.append(f"\n  {error}")
            continue
        return step, int(read_toml(run / SETTINGS_FILE)["schedule"]["steps"])
    raise RunError(f"{run}: no checkpoint of this run can be read:{''.join(reasons)}")


def _write_tuned(run: Path, step: int, out: Path) -> None:
    settings = FinetuneSettings.parse(read_toml(run / SETTINGS_FILE), str(run / SETTINGS_FILE))
    task = settings.task
    head = bundle.HeadConfig(task.kind, tuple(task.labels))
    model = head.build_model(settings.model, settings.features)
    checkpoint.load_weights(dict(checkpoint.list_checkpoints(run))[step], model)
    _, _, words = read_metadata(bundle.locate_model(settings.run.start_from))
    info = {"task": task.name, "provenance": settings.model_dump(mode="json"), "step": step}
    bundle.save_fine_tuned(out, model, words, head, info)


def _of_store(settings: PretrainSettings) -> Tokenizer:
    return Store.open(settings.run.data).load_tokenizer()
