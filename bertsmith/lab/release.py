"""Writes the model of a pre-training run as a directory to publish.

In addition to the files of a model directory, it contains what a reader needs to judge and repeat
the training: the settings, a summary of the metrics, the loss curve and the results of the panel.
None of them contains a path of the training machine. The settings do not select its device, so that
a repeated training selects that of its own machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tomli_w

from bertsmith.bundle import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    compute_model_id,
    hash_model_files,
    load,
    locate_model,
)
from bertsmith.bundle.config import read_json
from bertsmith.bundle.directory import get_model_name
from bertsmith.bundle.metadata import read_info
from bertsmith.bundle.model_card import MODEL_CARD_FILE, Publication, build_model_card
from bertsmith.errors import ModelError, RunError, SettingsError
from bertsmith.files import atomic_directory, check_new_directory, write_atomic, write_json
from bertsmith.interop.huggingface import write_huggingface
from bertsmith.lab.panel.table import read_table
from bertsmith.settings import read_stored_settings
from bertsmith.train.engine import curve
from bertsmith.train.engine.metrics_log import METRICS_FILE, read_metrics
from bertsmith.train.engine.provenance import dump_settings
from bertsmith.train.engine.run_directory import (
    FINETUNING_TABLES,
    MACHINE_SETTINGS,
    MODEL_DIR,
    SETTINGS_FILE,
)
from bertsmith.train.pretraining.recipes import PretrainSettings

TRAINING_FILE: Final = "training.json"
#: In a subfolder, because files of results must not change the hash of the model directory.
PANEL_FILE: Final = "results/panel.json"
#: Settings of the table ``run`` that a release leaves out.
_MACHINE_SETTINGS: Final = (*MACHINE_SETTINGS, "world_size")
#: Keys of a metrics line that the summary of an evaluation leaves out.
_OMITTED_KEYS: Final = ("kind", "seconds")
#: Keys of panel.json that are published; the others identify files of the machine.
_PANEL_KEYS: Final = ("models", "seeds", "learning_rate", "results", "notes", "missing")


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """Contents of a released model directory.

    Attributes:
        license_id: License of the weights, as an identifier of the hub; empty if it is unknown.
        notes: Markdown file to include in the model card; None for no notes.
        panel: The panel.json of ``bertsmith lab panel`` with results of this model; None for none.
        dtype: The dtype of the stored weights: "bf16", "fp16" or "fp32".
    """

    license_id: str = ""
    notes: Path | None = None
    panel: Path | None = None
    dtype: str = "bf16"


def write_release(run: Path, model: Path, out: Path, options: ReleaseOptions) -> list[str]:
    """Write a model of a pre-training run to a directory to publish.

    Args:
        run: The run directory.
        model: The model of the run.
        out: A directory that is empty or does not exist.
        options: Contents of the directory.

    Returns:
        Notes for the user.

    Raises:
        BertsmithError: ``run`` is not a pre-training run, an input file is missing or damaged, or
            the panel has no results of this model.
    """
    check_new_directory(out)
    settings = _read_settings(run)
    if not (run / METRICS_FILE).is_file():
        raise RunError(
            f"{run}: has no {METRICS_FILE}, so it is not the folder of a run, but perhaps an "
            "exported or released model; give the folder that pretrain wrote"
        )
    step = _read_snapshot_step(model)
    metrics = [line for line in read_metrics(run) if step is None or line["step"] <= step]
    panel = None if options.panel is None else _read_panel(options.panel)
    text = "" if options.notes is None else _read_text(options.notes)
    training = _summarize_training(metrics)
    if step is not None:
        # Not every step has a line in the metrics log.
        training["steps"] = step
    started_from = _read_start_training(settings, [run.resolve()])
    if started_from is not None:
        training["started_from"] = started_from
    name = out.resolve().name
    with atomic_directory(out) as new:
        messages = write_huggingface(model, new, dtype=options.dtype)
        write_atomic(new / SETTINGS_FILE, tomli_w.dumps(_dump_portable_settings(settings)))
        write_json(new / TRAINING_FILE, training)
        if metrics:
            is_masked_lm = settings.data.objective == "masked"
            image = curve.render(metrics, name, is_masked_lm=is_masked_lm)
            write_atomic(new / curve.CURVE_FILE, image)
        panel_text = ""
        if panel is not None:
            panel_text = _describe_panel(panel, new, model, options)
            (new / PANEL_FILE).parent.mkdir()
            write_json(new / PANEL_FILE, panel, inline_numbers=True)
        publication = Publication(
            name=name,
            license_id=options.license_id,
            notes=text,
            minutes=training.get("minutes"),
            earlier_minutes=_sum_minutes(started_from),
            curve=curve.CURVE_FILE if metrics else "",
            panel=panel_text,
        )
        bundle = load(new)
        card = build_model_card(
            bundle.config, bundle.tokenizer, bundle.info, publication=publication
        )
        write_atomic(new / MODEL_CARD_FILE, card)
    return messages


def _read_settings(run: Path) -> PretrainSettings:
    """Return the settings of a pre-training run."""
    path = run / SETTINGS_FILE
    if not path.is_file():
        raise RunError(f"{run}: not a run directory (no {SETTINGS_FILE}); give the folder of a run")
    settings = _parse_settings(path)
    if settings is None:
        raise RunError(
            f"{run}: not a pre-training run; export its model with: bertsmith export --to hf"
        )
    return settings


def _parse_settings(path: Path) -> PretrainSettings | None:
    """Return the settings of a run; None if it is not a pre-training run."""
    tables = read_stored_settings(path)
    if any(name in tables for name in FINETUNING_TABLES):
        return None
    return PretrainSettings.parse(tables, str(path))


def _dump_portable_settings(settings: PretrainSettings) -> dict[str, Any]:
    """Return the settings of a run without paths and without those of the training machine."""
    tables = dump_settings(settings, exclude_none=True)
    run = {name: value for name, value in tables["run"].items() if name not in _MACHINE_SETTINGS}
    return {**tables, "run": run}


def _read_snapshot_step(model: Path) -> int | None:
    """Return the number of steps of a snapshot; None for the model of a finished run."""
    step: int | None = read_info(locate_model(model)).get("provenance", {}).get("step")
    return step


def _read_text(path: Path) -> str:
    """Return the content of a text file."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--notes {path}: cannot be read: {error}") from None


def _summarize_training(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the number of steps, the duration and all evaluations of a run."""
    training = [line for line in metrics if line["kind"] == "train"]
    summary: dict[str, Any] = {}
    if training:
        summary["steps"] = training[-1]["step"]
        # Only runs with --minutes log the time of the whole command; others log that of training.
        seconds = training[-1].get("elapsed_seconds", training[-1].get("seconds"))
        if seconds is not None:
            summary["minutes"] = round(seconds / 60, 1)
        summary["final_training_loss"] = training[-1]["loss"]
    summary["evaluations"] = [
        {key: value for key, value in line.items() if key not in _OMITTED_KEYS}
        for line in metrics
        if line["kind"] == "heldout"
    ]
    return summary


def _read_start_training(
    settings: PretrainSettings, later_runs: Sequence[Path]
) -> dict[str, Any] | None:
    """Return the name, training and settings of the model that a run started from.

    Args:
        settings: The settings of the run.
        later_runs: The directories of the run and of those that continue it. A start model in one
            of them was overwritten since, and is ignored.

    Returns:
        None if the run started from new weights, or from a model whose training is not known. It is
        not known either if another model is in the folder of the start model now.
    """
    if settings.run.start_from is None:
        return None
    start_model = Path(settings.run.start_from)
    start_run = _find_run(start_model)
    if start_run in later_runs or not _is_unchanged(start_model, settings.run.start_id):
        return None
    if start_run is None:
        training = _read_released_training(start_model)
    else:
        training = _read_run_training(start_run, later_runs)
    return None if training is None else {"name": get_model_name(start_model), **training}


def _is_unchanged(model: Path, start_id: str | None) -> bool:
    """Return whether a model has the hash that was recorded when a run started from it."""
    try:
        return start_id in (None, compute_model_id(model))
    except ModelError:
        return False


def _find_run(model: Path) -> Path | None:
    """Return the run directory at a path or of RUN/model; None for other model directories."""
    for directory in (model, model.parent) if model.name == MODEL_DIR else (model,):
        if all((directory / name).is_file() for name in (SETTINGS_FILE, METRICS_FILE)):
            return directory
    return None


def _read_run_training(run: Path, later_runs: Sequence[Path]) -> dict[str, Any] | None:
    """Return the training and settings of a run; None if it is not a pre-training run."""
    settings = _parse_settings(run / SETTINGS_FILE)
    if settings is None:
        return None
    training = _summarize_training(read_metrics(run))
    training["settings"] = _dump_portable_settings(settings)
    started_from = _read_start_training(settings, (*later_runs, run))
    return training if started_from is None else {**training, "started_from": started_from}


def _read_released_training(model: Path) -> dict[str, Any] | None:
    """Return the training and settings in the directory of a released model.

    The result is None if the directory has no summary of the training. A file of the same name
    from another program is not a summary.
    """
    try:
        training = read_json(model / TRAINING_FILE)
    except ModelError:
        return None
    if not _is_training_summary(training):
        return None
    if (model / SETTINGS_FILE).is_file():
        training["settings"] = read_stored_settings(model / SETTINGS_FILE)
    return training


def _is_training_summary(value: Any) -> bool:
    """Return whether a value has the form of the result of ``_summarize_training``."""
    if not isinstance(value, dict) or not isinstance(value.get("evaluations"), list):
        return False
    has_minutes = isinstance(value.get("minutes", 0.0), int | float)
    return has_minutes and (
        "started_from" not in value or _is_training_summary(value["started_from"])
    )


def _sum_minutes(training: Mapping[str, Any] | None) -> float:
    """Return the minutes of a training and of those that it started from."""
    if training is None:
        return 0.0
    minutes: float = training.get("minutes", 0.0)
    return minutes + _sum_minutes(training.get("started_from"))


def _read_panel(path: Path) -> dict[str, Any]:
    """Return the content of a panel.json without its names of files."""
    if not path.is_file():
        raise SettingsError(f"--panel {path}: no such file; give the panel.json of a panel")
    data = read_json(path)
    missing = [key for key in _PANEL_KEYS if key not in data]
    if missing:
        raise SettingsError(
            f"--panel {path}: not a panel ({missing[0]!r} is missing); give the panel.json that "
            "bertsmith lab panel has written"
        )
    panel = {key: data[key] for key in _PANEL_KEYS}
    panel["models"] = [
        {key: value for key, value in model.items() if key != "path"} for model in data["models"]
    ]
    return panel


def _describe_panel(
    panel: Mapping[str, Any], released: Path, model: Path, options: ReleaseOptions
) -> str:
    """Return the table of the panel with its notes as Markdown.

    Args:
        panel: The results.
        released: The directory of the released model.
        model: The model of the run, before its weights are rounded.
        options: The path of the panel, and the dtype of the released weights.

    Raises:
        ModelError: The panel has no results of either model.
    """
    notes = list(panel["notes"])
    hashes = [entry["hash"] for entry in panel["models"] if "hash" in entry]
    if not any(map(hash_model_files(released).startswith, hashes)):
        if not any(map(hash_model_files(locate_model(model)).startswith, hashes)):
            raise ModelError(
                f"--panel {options.panel}: no results of this model (its {CONFIG_FILE}, "
                f"{WEIGHTS_FILE} or tokenizer differ from those of the panel's models); run "
                f"bertsmith lab panel on {model}, or on the released directory"
            )
        if options.dtype != "fp32":
            notes.append(f"Measured before the weights were rounded to {options.dtype}.")
    try:
        table = read_table(panel)
    except (KeyError, TypeError) as error:
        raise SettingsError(f"--panel {options.panel}: damaged: {error!r} is missing") from None
    return "\n\n".join([table.to_markdown(), *notes])
