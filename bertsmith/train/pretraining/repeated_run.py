"""The settings of a new run that repeats another run, whose settings.toml the user gives.

A settings.toml contains values that the run has computed, for its store, machine and length, and
values that follow from others. The new run computes them itself if it differs in what they depend
on.
"""

from collections.abc import Mapping
from typing import Any

from bertsmith.settings import get_table
from bertsmith.train.engine.duration import get_default_interval
from bertsmith.train.engine.finetuning_overrides import MUTABLE_MODEL_FIELDS
from bertsmith.train.engine.run_directory import MACHINE_SETTINGS
from bertsmith.train.pretraining.recipes import DEFAULT_RECIPE, RunSettings, get_recipe_defaults

#: Settings, as table and name, whose default the recipe derives from the model and the objective.
_DERIVED_DEFAULTS = (
    ("model", "feed_forward"),
    ("model", "init_range"),
    ("optim", "lr"),
    ("run", "initialization"),
)


def drop_computed_values(
    settings: Mapping[str, Any],
    new_values: Mapping[str, Any],
    store_id: str,
    *,
    start_from: str | None,
    has_cuda: bool,
) -> dict[str, Any]:
    """Return the settings of another run without the values that do not suit the new run.

    Removed are the start model, which is an argument; the store; the vocabulary size of another
    store; what the recipe has derived from the model and the objective, such as the default
    learning rate; the device and what depends on it, if the run was on a GPU and there is none;
    the config of a start model (except for the dropout rates); default intervals; the number of
    processes and their threads; and the number of steps if epochs are set. If the run had a time
    budget and is finished, the time budget is removed, and the new run has the same number of
    steps. Values that depend on settings with a new value are removed too.

    Args:
        settings: The settings in the other run's settings.toml.
        new_values: The settings that the user gives in addition.
        store_id: The value of ``run.store_id`` of the new run.
        start_from: The start model of the new run.
        has_cuda: Whether a CUDA device is available.
    """
    tables = {name: get_table(settings, name) for name in settings}
    for name in ("run", "data", "optim", "schedule", "model", "checkpoint"):
        tables.setdefault(name, {})
    run, data, schedule = tables["run"], tables["data"], tables["schedule"]
    is_continued = bool(run.pop("start_from", None))
    run.pop("start_id", None)
    run.pop("store_path", None)
    if run.pop("world_size", None) is not None:
        # A process of torchrun has fewer threads than a single process would have.
        run.pop("threads", None)
    if str(run.get("device", "")).startswith("cuda") and not has_cuda:
        for name in MACHINE_SETTINGS:
            run.pop(name, None)
    if run.pop("store_id") != store_id:
        tables["model"].pop("vocab_size", None)
    # TOML has no None, so a setting that is missing in the file was None, or did not exist yet.
    run.setdefault("dropout", None)
    schedule.setdefault("phase2_max_seqlen", None)
    schedule.setdefault("neighbor_bias_steps", 0)
    tables["optim"].setdefault("optimizer", "adamw")
    _drop_recipe_defaults(tables, is_continued=is_continued)
    _drop_replaced_data_settings(tables, new_values)
    if start_from is not None:
        # The start model has its own config and objective. Its attention is trained, and needs no
        # bias.
        if not is_continued:
            data.pop("objective", None)
            schedule.pop("neighbor_bias_steps", None)
        tables["model"] = {
            name: value for name, value in tables["model"].items() if name in MUTABLE_MODEL_FIELDS
        }
    _drop_values_of_length(tables)
    return tables


def _drop_replaced_data_settings(
    tables: dict[str, dict[str, Any]], new_values: Mapping[str, Any]
) -> None:
    """Remove the data settings of a run that depend on settings with a new value of the user.

    Also removes ``model.nsp``, because ``data.nsp`` determines it.

    Args:
        tables: Settings of the run, changed in place.
        new_values: Settings of the user for the new run.
    """
    data, schedule = tables["data"], tables["schedule"]
    new_data, new_schedule = get_table(new_values, "data"), get_table(new_values, "schedule")
    nsp = tables["model"].pop("nsp", None)
    if nsp is not None:
        data.setdefault("nsp", nsp)
    if "pair_objective" in new_data:
        data.pop("nsp", None)
    elif new_data.get("nsp") is False:
        data.pop("pair_objective", None)
    is_causal = new_data.get("objective") == "left-to-right"
    if "masking_rate" in new_data or is_causal:
        # A masking rate of the user is constant, and left to right, nothing is masked.
        data.pop("final_masking_rate", None)
    data.setdefault("final_masking_rate", None)
    if is_causal or new_schedule.get("causal_fraction"):
        schedule["neighbor_bias_steps"] = 0
    batch_size, initial = new_data.get("batch_size"), data.get("initial_batch_size")
    if isinstance(batch_size, int) and isinstance(initial, int) and initial > batch_size:
        del data["initial_batch_size"]


def _drop_recipe_defaults(tables: dict[str, dict[str, Any]], *, is_continued: bool) -> None:
    """Remove the values that the recipe has derived from the model and the objective.

    The new run derives them again, from its own model and objective. A value of the user that
    equals the default counts as the default.

    Args:
        tables: Settings of the run, changed in place.
        is_continued: Whether the run started from a trained model.
    """
    # With the derived values of the model, get_recipe_defaults would return these as the defaults.
    model = {
        name: value
        for name, value in tables["model"].items()
        if ("model", name) not in _DERIVED_DEFAULTS
    }
    width = model.get("width")
    if type(width) is not int or width <= 0:
        # The parser of the settings reports invalid values later.
        return
    nsp = tables["data"].get("nsp", model.get("nsp"))
    recipe = tables["run"].get("recipe", DEFAULT_RECIPE)
    defaults = get_recipe_defaults(recipe, model, tables, nsp=bool(nsp), is_continued=is_continued)
    defaults["model"]["feed_forward"] = 4 * width
    for table, name in _DERIVED_DEFAULTS:
        default = get_table(defaults, table).get(name)
        if default is not None and tables[table].get(name) == default:
            del tables[table][name]


def _drop_values_of_length(tables: dict[str, dict[str, Any]]) -> None:
    """Remove the values that the length of a run determines, and all lengths except for one.

    Args:
        tables: Settings of the run, changed in place.
    """
    run, schedule = tables["run"], tables["schedule"]
    steps = schedule.get("steps")
    if type(steps) is int:
        interval = get_default_interval(steps)
        for table, name in ((run, "eval_every"), (tables["checkpoint"], "steps")):
            if table.get(name) == interval:
                del table[name]
    num_sequences = run.get("max_eval_sequences")
    is_reduced = type(num_sequences) is int and num_sequences < RunSettings().max_eval_sequences
    if schedule.get("minutes") is not None and is_reduced:
        # Probably for the time budget of that run.
        del run["max_eval_sequences"]
    if schedule.get("epochs") is not None:
        schedule.pop("steps", None)
    elif steps is not None:
        schedule.pop("minutes", None)
