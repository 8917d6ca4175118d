"""Rejects settings of the user that have no effect in a pre-training run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
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
from bertsmith.train.pretraining.recipes import PretrainSettings

#: Settings that a run sets itself.
_COMPUTED_SETTINGS: Final = ("run.store_path", "run.store_id", "run.start_id", "run.world_size")


@dataclass(frozen=True)
class _Rule:
    """A condition under which some settings have no effect.

    Attributes:
        names: The settings.
        is_unused: Returns whether they have no effect.
        reason: Why they have no effect.
        solution: What to do instead.
    """

    names: tuple[str, ...]
    is_unused: Callable[[PretrainSettings], bool]
    reason: str
    solution: str


_RULES: Final = (
    _Rule(
        ("schedule.phase2_fraction",),
        lambda settings: settings.schedule.phase2_max_seqlen is None,
        "the run has no second phase",
        "set schedule.phase2_max_seqlen",
    ),
    _Rule(
        ("schedule.batch_ramp_fraction",),
        lambda settings: settings.data.initial_batch_size is None,
        "the batch size is constant",
        "set data.initial_batch_size",
    ),
    _Rule(
        ("schedule.decay_fraction",),
        lambda settings: settings.schedule.decay == "linear",
        "schedule.decay is 'linear'",
        "set schedule.decay=trapezoidal",
    ),
    _Rule(
        ("schedule.min_steps",),
        lambda settings: settings.schedule.steps is not None,
        "the run has a fixed number of steps",
        "give --minutes or --epochs",
    ),
    _Rule(
        ("optim.muon_lr_factor", "optim.muon_momentum", "optim.muon_iterations"),
        lambda settings: settings.optim.optimizer == "adamw",
        "optim.optimizer is 'adamw'",
        "set optim.optimizer=muon",
    ),
    _Rule(
        ("data.pair_objective",),
        lambda settings: not settings.data.nsp,
        "data.nsp is false",
        "set data.nsp=true",
    ),
    _Rule(
        (
            "data.masking_rate",
            "data.mask_replace_prob",
            "data.random_replace_prob",
            "data.whole_word_masking",
            "data.max_predictions_per_seq",
        ),
        lambda settings: settings.data.objective == "left-to-right",
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
        *_list_names(assigned_values),
        *_list_changed_names(merge_settings(file_values, new_values)),
    }
    for name in _COMPUTED_SETTINGS:
        if name in names:
            raise SettingsError(f"{name} cannot be set, because the run computes it; leave it out")
    for rule in _RULES:
        for name in rule.names:
            if name in names and rule.is_unused(settings):
                raise SettingsError(
                    f"{name} has no effect because {rule.reason}; {rule.solution} or leave out "
                    f"{name}"
                )


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


def _list_names(values: Mapping[str, Any]) -> Collection[str]:
    """Return the names of settings, such as "optim.lr"."""
    return [f"{table}.{name}" for table in values for name in get_table(values, table)]


def _list_changed_names(values: Mapping[str, Any]) -> Collection[str]:
    """Return the names of settings whose value is not the default."""
    defaults = PretrainSettings(model=ModelConfig(vocab_size=1)).model_dump()
    return [
        f"{table}.{name}"
        for table in values
        for name, value in get_table(values, table).items()
        if value != defaults[table].get(name)
    ]
