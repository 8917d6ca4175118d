"""The table of a panel: one row for each measure, and one column for each model."""

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from bertsmith.lab.panel.cells import CellKey, PanelOptions
from bertsmith.lab.panel.models import PanelModel
from bertsmith.lab.panel.tasks import BATCH_SIZE, TASKS, Measure, PanelTask
from bertsmith.lab.report import Table, format_mean_std
from bertsmith.lab.verdict import select_finite
from bertsmith.plurals import count_noun

_TITLE = "Panel: mean ± standard deviation over the seeds, on validation sets"
#: The results of the cells, None for missing results.
CellResults = Mapping[CellKey, Mapping[str, Any] | None]


def get_values(
    results: CellResults, model: PanelModel, task: PanelTask, measure: Measure
) -> list[float | None]:
    """Return the values of a measure, one for each seed.

    Returns:
        None for missing results. NaN if the run diverged or the measure is undefined.
    """
    values: list[float | None] = []
    for key, result in results.items():
        if key.model == model.label and key.task == task.name:
            if result is None:
                values.append(None)
                continue
            # Values that are not finite are null in JSON.
            value = None if "diverged" in result else result["metrics"][measure.key]
            values.append(math.nan if value is None else float(value))
    return values


def read_table(data: Mapping[str, Any]) -> Table:
    """Return the table with means and standard deviations over the seeds.

    Args:
        data: The content of panel.json.

    Raises:
        KeyError: A key is missing.
    """
    names = [model["name"] for model in data["models"]]
    results = data["results"]
    tasks = [task for name, task in TASKS.items() if any(name in results[model] for model in names)]
    rows = [
        (measure.label,
         *(format_mean_std(_read_values(data, name, task, measure)) for name in names))
        for task in tasks for measure in task.measures
    ]  # fmt: skip
    return Table(_TITLE, ("measure", *names), rows)


def _read_values(
    data: Mapping[str, Any], model: str, task: PanelTask, measure: Measure
) -> list[float | None]:
    """Return the values of a measure in panel.json, as ``get_values`` does.

    In JSON, NaN and missing results are both null. Only the latter are listed as missing.
    """
    values = data["results"][model][task.name][measure.key]["values"]
    return [
        math.nan
        if value is None and CellKey(model, task.name, seed).describe() not in data["missing"]
        else value
        for seed, value in enumerate(values)
    ]


def build_json(
    results: CellResults, models: Sequence[PanelModel], tasks: Sequence[PanelTask]
) -> dict[str, Any]:
    """Return the unrounded values: by model, task and measure, with mean and standard deviation."""
    return {
        model.label: {
            task.name: {
                measure.key: _summarize(get_values(results, model, task, measure))
                for measure in task.measures
            }
            for task in tasks
        }
        for model in models
    }


def _summarize(values: Sequence[float | None]) -> dict[str, Any]:
    """Return the values of the seeds, their mean and their standard deviation."""
    finite = select_finite(values)
    return {
        "values": list(values),
        "mean": mean(finite) if finite else None,
        "std": stdev(finite) if len(finite) > 1 else None,
    }


def build_notes(
    results: CellResults,
    models: Sequence[PanelModel],
    tasks: Sequence[PanelTask],
    options: PanelOptions,
) -> list[str]:
    """Return the lines below the table: settings, and properties of the results."""
    seeds = count_noun(options.num_seeds, "seed")
    notes = []
    finetuned = [task for task in tasks if task.evaluation == "finetune"]
    if finetuned:
        epochs = ", ".join(f"{task.name} {task.epochs:g}" for task in finetuned)
        notes.append(
            f"Fine-tuning: {seeds}, learning rate {options.learning_rate:g}, batch size "
            f"{BATCH_SIZE}, linear decay, last epoch; epochs: {epochs}."
        )
    notes += [
        f"Frozen features: {seeds}, logistic regression on the last layer, trained on "
        f"{task.max_train_examples:,} examples."
        for task in tasks
        if task.evaluation == "probe"
    ]
    notes += _note_held_out(results, models, options)
    notes += _note_minimal_pairs(results)
    if any(model.is_untrained for model in models):
        notes.append(
            "Untrained models have the initialization in their name, or random weights, with "
            "another seed in each run. Their output bias is not initialized from token frequencies."
        )
    notes += [f"{model.label}: no masked-LM head." for model in models if not model.has_mlm_head]
    return notes


def _note_held_out(
    results: CellResults, models: Sequence[PanelModel], options: PanelOptions
) -> list[str]:
    """Return notes on the sentences of the held-out text, [UNK] and skipped sentences."""
    held_out = {key.model: result for key, result in results.items()
                if key.task == "held-out" and result is not None}  # fmt: skip
    if not held_out:
        return []
    notes = [f"Held-out text: at most {options.num_sentences:,} sentences, scored one by one."]
    for model in models:
        result = held_out.get(model.label)
        if result is None or model.is_untrained:
            continue
        if unknown_share := result["metrics"]["unknown_share"]:
            notes.append(
                f"{model.label}: {unknown_share:.2%} of the held-out tokens are [UNK], so "
                "bits per character are not exact."
            )
        if num_skipped := result["num_skipped"]:
            sentences = count_noun(num_skipped, "held-out sentence is", "held-out sentences are")
            notes.append(f"{model.label}: {sentences} too long for the model and left out.")
    return notes


def _note_minimal_pairs(results: CellResults) -> list[str]:
    """Return a note on the number of minimal pairs."""
    for key, result in results.items():
        if key.task == "minimal-pairs" and result is not None:
            files = count_noun(len(result["files"]), "file")
            pairs = count_noun(result["num_pairs"], "pair")
            return [f"Minimal pairs: mean of {files}, {pairs}."]
    return []
