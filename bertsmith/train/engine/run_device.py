"""Records the device, precision, attention kernel and threads of a run in its settings."""

from typing import Any, TypeVar

import torch

from bertsmith.runtime.device import Machine
from bertsmith.settings import Settings

SettingsType = TypeVar("SettingsType", bound=Settings)


def needs_machine(settings: Settings) -> bool:
    """Return whether device, precision or attention kernel of a run are not selected yet."""
    run: Any = settings.model_dump()["run"]
    return "auto" in (run["device"], run["precision"], run["attention_kernel"])


def record_machine(settings: SettingsType, machine: Machine) -> SettingsType:
    """Return the settings of a run with the device, precision, kernel and threads that it uses."""
    values = settings.model_dump()
    values["run"] |= {
        "device": str(machine.device),
        "precision": machine.precision,
        "attention_kernel": machine.kernel,
        "threads": torch.get_num_threads(),
    }
    return type(settings).parse(values, "the settings")
