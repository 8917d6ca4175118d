"""Settings of the user that have no effect are errors."""

from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.store import Store
from bertsmith.errors import SettingsError
from bertsmith.lab.recipe import add_recipe_defaults
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.train.pretraining.recipes import PretrainSettings, resolve_steps
from bertsmith.train.pretraining.resolve import Overrides, resolve_run_settings

LEFT_TO_RIGHT = ("data.objective=left-to-right", "model.attention=causal", "data.nsp=false")


@pytest.fixture
def resolve_run(opened_store: Store) -> Any:
    """A function that returns the settings of a run; its arguments are those of ``pretrain``."""

    def resolve(
        steps: int | None = None, minutes: float | None = None, **overrides: Any
    ) -> PretrainSettings:
        arguments = Overrides(data=opened_store.path, **overrides)
        return resolve_run_settings(arguments, opened_store, {"steps": steps, "minutes": minutes})

    return resolve


@pytest.mark.parametrize(
    ("assignments", "reason", "solution"),
    [
        ("schedule.phase2_fraction=0.2", "no second phase", "set schedule.phase2_max_seqlen"),
        ("schedule.batch_ramp_fraction=0.3", "is constant", "set data.initial_batch_size"),
        ("schedule.decay_fraction=0.2", "'linear'", "set schedule.decay=trapezoidal"),
        ("schedule.min_steps=9", "a fixed number of steps", "give --epochs"),
        ("optim.muon_momentum=0.9,optim.optimizer=adamw", "'adamw'", "set optim.optimizer=muon"),
        ("optim.muon_iterations=4,optim.optimizer=adamw", "'adamw'", "set optim.optimizer=muon"),
        ("optim.muon_lr_factor=2.0,optim.optimizer=adamw", "'adamw'", "set optim.optimizer=muon"),
        ("data.pair_objective=nsp,data.nsp=false", "data.nsp is false", "set data.nsp=true"),
        ("data.masking_rate=0.15", "no masks", "set data.objective=masked"),
        ("data.mask_replace_prob=0.7", "no masks", "set data.objective=masked"),
        ("data.random_replace_prob=0.2", "no masks", "set data.objective=masked"),
        ("data.whole_word_masking=true", "no masks", "set data.objective=masked"),
        ("data.max_predictions_per_seq=9", "no masks", "set data.objective=masked"),
    ],
)
def test_setting_without_effect_is_an_error(
    resolve_run: Any, tmp_path: Path, assignments: str, reason: str, solution: str
) -> None:
    """The error says why, and what to set; a run that exists can be resumed with the setting."""
    names = assignments.split(",")
    if reason == "no masks":
        names += LEFT_TO_RIGHT
    name = names[0].partition("=")[0]
    with pytest.raises(SettingsError) as caught:
        resolve_run(steps=9, assignments=names)
    message = str(caught.value)
    assert message.startswith(f"{name} has no effect because ")
    assert reason in message
    assert message.endswith(f"; {solution} or leave out {name}")
    (tmp_path / SETTINGS_FILE).touch()
    resolve_run(steps=9, assignments=names, out=tmp_path)


@pytest.mark.parametrize(
    "assignments",
    [
        "schedule.phase2_fraction=0.2,schedule.phase2_max_seqlen=256",
        "schedule.batch_ramp_fraction=0.3,data.initial_batch_size=2",
        "schedule.decay_fraction=0.3,schedule.decay=trapezoidal",
        "schedule.min_steps=9,schedule.minutes=3.0",
        "schedule.min_steps=9,schedule.epochs=2.0",
        "schedule.min_steps=9",
        "optim.muon_momentum=0.9",
        "data.pair_objective=nsp",
        "data.masking_rate=0.15",
    ],
)
def test_setting_with_an_effect_is_accepted(resolve_run: Any, assignments: str) -> None:
    """The settings are accepted where they have an effect."""
    resolve_run(assignments=assignments.split(","))


@pytest.mark.parametrize(
    "name", ["run.store_path", "run.store_id", "run.start_id", "run.world_size"]
)
def test_computed_settings_cannot_be_set(resolve_run: Any, name: str) -> None:
    """A setting that the run computes is an error, instead of being replaced or stored."""
    with pytest.raises(SettingsError, match=f"{name} cannot be set, because the run computes it"):
        resolve_run(assignments=[f"{name}=2" if name == "run.world_size" else f"{name}=abc"])


def test_length_is_set_once(resolve_run: Any, tmp_path: Path) -> None:
    """Another length than that of the option is an error, but an option may replace a file's."""
    for assignment, options in (
        ("schedule.steps=7", {"steps": 9}),
        ("schedule.epochs=7.0", {"steps": 9}),
        ("schedule.minutes=7.0", {"steps": 9}),
        ("schedule.steps=7", {"minutes": 9.0}),
    ):
        (option,) = options
        with pytest.raises(SettingsError, match=f"because --{option} sets the length of the run;"):
            resolve_run(assignments=[assignment], **options)
    with pytest.raises(SettingsError, match=r"schedule\.epochs has no effect because schedule\.st"):
        resolve_run(assignments=["schedule.steps=7", "schedule.epochs=7.0"])
    assert resolve_run(assignments=["schedule.steps=7"], steps=7).schedule.steps == 7
    config = tmp_path / "run.toml"
    config.write_text("[schedule]\nsteps = 7\n")
    assert resolve_run(config=config, steps=9).schedule.steps == 9


def test_complete_lists_of_settings_are_accepted(resolve_run: Any, tmp_path: Path) -> None:
    """A settings file and nested values may have defaults without effect, but no other values."""
    config = tmp_path / SETTINGS_FILE
    text = resolve_steps(resolve_run(steps=9), 9).to_toml()
    config.write_text(text.replace("phase2_fraction = 0.1", "phase2_fraction = 0.2"))
    resolve_run(config=config)
    template = "".join(line for line in text.splitlines(True) if not line.startswith("store_"))
    config.write_text(template)
    resolve_run(config=config)
    config.write_text(template.replace("phase2_fraction = 0.1", "phase2_fraction = 0.2"))
    with pytest.raises(SettingsError, match=r"schedule\.phase2_fraction has no effect"):
        resolve_run(config=config)
    # The settings of a left-to-right run of the lab.
    values: dict[str, Any] = {"data": {"objective": "left-to-right", "nsp": False}}
    values = add_recipe_defaults("fast", values | {"model": {"attention": "causal"}})
    assert values["data"]["masking_rate"] == 0.15
    resolve_run(values=values)
    values["data"]["masking_rate"] = 0.2
    with pytest.raises(SettingsError, match=r"data\.masking_rate has no effect"):
        resolve_run(values=values)
