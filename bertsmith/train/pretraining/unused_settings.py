"""Rejects settings of the user that have no effect in a pre-training run."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bertsmith.errors import SettingsError
from bertsmith.model.config import ModelConfig
from bertsmith.settings import (
    get_table,
    load_user_settings,
    merge_settings,
    read_stored_settings,
)
from bertsmith.train.engine.schedule import LENGTH_SETTINGS
from bertsmith.train.engine.unused_settings import (
    COMMON_RULES,
    Rule,
    check_rules,
    list_names,
    reject_computed_settings,
)
from bertsmith.train.pretraining.recipes import PretrainSettings

_RULES: Final = (
    *COMMON_RULES,
    Rule(
        ("schedule.phase2_fraction",),
        lambda values: values["schedule"]["phase2_max_seqlen"] is None,
        "the run has no second phase",
        "set schedule.phase2_max_seqlen",
    ),
    Rule(
        ("schedule.batch_ramp_fraction",),
        lambda values: values["data"]["initial_batch_size"] is None,
        "the batch size is constant",
        "set data.initial_batch_size",
    ),
    Rule(
        ("data.pair_objective",),
        lambda values: not values["data"]["nsp"],
        "data.nsp is false",
        "set data.nsp=true",
    ),
    Rule(
        (
            "data.masking_rate",
            "data.mask_replace_prob",
            "data.random_replace_prob",
            "data.whole_word_masking",
            "data.max_predictions_per_seq",
        ),
        lambda values: values["data"]["objective"] == "left-to-right",
        "data.objective is 'left-to-right', which has no masks",
        "set data.objective=masked",
    ),
)


def check_unused_settings(
    settings: PretrainSettings,
    config: Path | str | None,
    values: Mapping[str, Any] | None,
    assignments: Sequence[str],
    options: Mapping[str, float],
) -> None:
    """Raise SettingsError if the user has set a setting that has no effect.

    A value of ``config`` or ``values`` that is the default is accepted, because both can be
    complete lists of settings. The settings.toml of another run is not checked.

    Args:
        settings: Settings of a new run.
        config: TOML file with settings.
        values: Nested settings.
        assignments: Settings as "section.name=value".
        options: The option for the length of the run, such as {"steps": 7}; empty without one.
    """
    assigned_values = load_user_settings(None, None, assignments)
    new_values = load_user_settings(None, values, assignments)
    _check_lengths(get_table(new_values, "schedule"), options)
    file_values = {} if config is None else read_stored_settings(Path(config))
    if get_table(file_values, "run").get("store_id"):
        file_values = {}
    names = {
        *list_names(assigned_values),
        *_list_changed_names(merge_settings(file_values, new_values)),
    }
    reject_computed_settings(names)
    check_rules(names, settings.model_dump(), _RULES)


def _check_lengths(schedule: Mapping[str, Any], options: Mapping[str, float]) -> None:
    """Raise SettingsError if the user has set several lengths of the run.

    Args:
        schedule: The user's settings in the table schedule, except for those in a file.
        options: The option for the length.
    """
    lengths = {name: schedule[name] for name in LENGTH_SETTINGS if schedule.get(name) is not None}
    for name, value in lengths.items():
        for option, number in options.items():
            if (name, value) != (option, number):
                raise SettingsError(
                    f"schedule.{name} has no effect because --{option} sets the length of the run; "
                    "leave out one of them"
                )
        if "steps" in lengths and name != "steps":
            raise SettingsError(
                f"schedule.{name} has no effect because schedule.steps sets the length of the run; "
                "leave out one of them"
            )


def _list_changed_names(values: Mapping[str, Any]) -> Collection[str]:
    """Return the names of settings whose value is not the default."""
    defaults = PretrainSettings(model=ModelConfig(vocab_size=1)).model_dump()
    return [
        f"{table}.{name}"
        for table in values
        for name, value in get_table(values, table).items()
        if value != defaults[table].get(name)
    ]
