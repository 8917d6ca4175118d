"""Rejects settings of the user that have no effect in a run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bertsmith.errors import SettingsError
from bertsmith.settings import get_table, load_user_settings, merge_settings
from bertsmith.train.engine.schedule import ScheduleSettings
from bertsmith.train.engine.settings import OptimSettings

#: Settings that a run computes itself.
_COMPUTED_SETTINGS: Final = ("run.store_path", "run.store_id", "run.start_id", "run.world_size")
#: Nested values of settings by table and name.
Values = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Rule:
    """A condition under which some settings have no effect.

    Attributes:
        names: The settings, such as "optim.muon_momentum".
        is_unused: Returns whether they have no effect in a run with these values.
        reason: Why they have no effect.
        solution: What to do instead.
    """

    names: tuple[str, ...]
    is_unused: Callable[[Values], bool]
    reason: str
    solution: str


#: Rules of pre-training and fine-tuning.
COMMON_RULES: Final = (
    Rule(
        ("schedule.decay_fraction",),
        lambda values: values["schedule"]["decay"] == "linear",
        "schedule.decay is 'linear'",
        "set schedule.decay=trapezoidal",
    ),
    Rule(
        ("schedule.min_steps",),
        lambda values: values["schedule"]["steps"] is not None,
        "the run has a fixed number of steps",
        "give --epochs",
    ),
    Rule(
        ("optim.muon_lr_factor", "optim.muon_momentum", "optim.muon_iterations"),
        lambda values: values["optim"]["optimizer"] == "adamw",
        "optim.optimizer is 'adamw'",
        "set optim.optimizer=muon",
    ),
)


def _create_validation_rule(table: str) -> Rule:
    """Return the rule for the settings of examples that a run holds out of its training data."""
    return Rule(
        # Rerankers have a maximum number of queries, the others one of examples.
        (
            f"{table}.validation_fraction",
            f"{table}.max_validation_examples",
            f"{table}.max_validation_queries",
        ),
        lambda values: bool(values.get(table, {}).get("validation_files")),
        "the validation examples are in files of their own",
        "remove --dev",
    )


#: Rules of fine-tuning and distillation; ``check_loss_settings`` checks the settings of a loss.
_FINETUNING_RULES: Final = (
    *COMMON_RULES,
    *map(_create_validation_rule, ("embedding", "reranking", "distill")),
    Rule(
        ("distill.temperature",),
        lambda values: values["distill"].get("hard_weight") == 1,
        "distill.hard_weight is 1, so the outputs of the teacher have no weight",
        "set a lower distill.hard_weight",
    ),
)


def check_assignments(overrides: Mapping[str, Any], assignments: Sequence[str]) -> None:
    """Raise SettingsError if an assignment has no effect in a fine-tuning or distillation run.

    Only assignments are checked, because other values can be complete lists of settings.

    Args:
        overrides: All settings of the user, including the assignments.
        assignments: Settings as "section.name=value".
    """
    names = list_names(load_user_settings(None, None, assignments))
    reject_computed_settings(names)
    defaults = {"optim": OptimSettings().model_dump(), "schedule": ScheduleSettings().model_dump()}
    check_rules(names, merge_settings(defaults, overrides), _FINETUNING_RULES)


def reject_computed_settings(names: Collection[str]) -> None:
    """Raise SettingsError if the user has set a setting that the run computes."""
    for name in _COMPUTED_SETTINGS:
        if name in names:
            raise SettingsError(f"{name} cannot be set, because the run computes it; leave it out")


def check_rules(names: Collection[str], values: Values, rules: Sequence[Rule]) -> None:
    """Raise SettingsError if a setting has no effect.

    Args:
        names: The settings that the user has set.
        values: The values of all settings to which the rules refer.
        rules: The rules.
    """
    for rule in rules:
        for name in rule.names:
            if name in names and rule.is_unused(values):
                raise SettingsError(
                    f"{name} has no effect because {rule.reason}; {rule.solution} or leave out "
                    f"{name}"
                )


def list_names(values: Mapping[str, Any]) -> list[str]:
    """Return the names of nested settings, such as "optim.lr"."""
    return [f"{table}.{name}" for table in values for name in get_table(values, table)]
