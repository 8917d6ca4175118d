"""Writes a checkpoint of a pre-training run as a model directory."""

from pathlib import Path

from bertsmith import bundle
from bertsmith.data.store import Store
from bertsmith.errors import RunError, StoreError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.settings import read_stored_settings
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.train.engine import checkpoint
from bertsmith.train.engine.run_directory import MODEL_DIR, SETTINGS_FILE
from bertsmith.train.pretraining.provenance import build_checkpoint_provenance
from bertsmith.train.pretraining.recipes import PretrainSettings
from bertsmith.train.pretraining.resolve import compute_store_id


def write_snapshot(run: Path, step: int, out: Path) -> None:
    """Write the model of a pre-training run after ``step`` steps to ``out``, atomically.

    The tokenizer is copied from the run's model directory, or from its store if the run is not
    finished.

    Raises:
        RunError: If the run has no checkpoint of this step.
        StoreError: If the run is not finished and its store is missing.
    """
    settings = PretrainSettings.parse(
        read_stored_settings(run / SETTINGS_FILE), str(run / SETTINGS_FILE)
    )
    checkpoints = dict(checkpoint.list_checkpoints(run))
    if step not in checkpoints:
        steps = ", ".join(map(str, checkpoints)) or "none"
        raise RunError(
            f"{run}: no checkpoint of step {step}; available: {steps}. Set checkpoint.keep to keep "
            "more checkpoints"
        )
    model = BertForPreTraining(settings.model)
    checkpoint.load_weights(checkpoints[step], model)
    model_directory = run / MODEL_DIR
    if model_directory.exists():
        tokenizer = Tokenizer.load(model_directory)
    else:
        store = Store.open(settings.run.store_path)
        if settings.run.store_id and compute_store_id(store) != settings.run.store_id:
            raise StoreError(
                f"{store.path}: this is not the store with which {run} was started, so its "
                "vocabulary may differ; restore that store"
            )
        tokenizer = store.load_tokenizer()
    bundle.save(out, model, tokenizer, build_checkpoint_provenance(settings, step))
