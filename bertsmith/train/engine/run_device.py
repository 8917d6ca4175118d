"""Records the device, precision, attention kernel and threads of a run in its settings.

Also checks that all processes of a run have the same settings.
"""

from typing import Any

import torch

from bertsmith.errors import SettingsError
from bertsmith.model.config import ModelConfig
from bertsmith.runtime.device import Machine
from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.settings import Settings, SettingsType
from bertsmith.train.engine.run_directory import ID_KEYS, find_differences


def needs_machine(settings: Settings) -> bool:
    """Return whether device, precision, kernel or threads of a run are not selected yet."""
    run: Any = settings.model_dump()["run"]
    is_auto = "auto" in (run["device"], run["precision"], run["attention_kernel"])
    return is_auto or run["threads"] is None


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


def set_world_size(settings: SettingsType, processes: ProcessGroup) -> SettingsType:
    """Return the settings of a run with the number of its processes; None if there is one."""
    world_size = processes.world_size if processes.world_size > 1 else None
    values: Any = settings
    run = values.run.model_copy(update={"world_size": world_size})
    return settings.model_copy(update={"run": run})


def check_norm(config: ModelConfig, processes: ProcessGroup) -> None:
    """Raise SettingsError if several processes cannot train a model, because of its batch norm."""
    if processes.world_size > 1 and config.norm == "batch":
        raise SettingsError(
            "model.norm is 'batch', whose statistics would differ between the "
            f"{processes.world_size} processes; train in one process, or use another norm"
        )


def check_same_settings(settings: Settings, processes: ProcessGroup) -> None:
    """Raise SettingsError if this process has other settings than the main process.

    The paths of the store and the start model may differ, because hashes identify them.
    """
    main_settings = processes.broadcast(settings)
    differences = [
        f"  {key}: {old!r} in process 0, {new!r} in process {processes.rank}"
        for key, old, new in find_differences(main_settings.model_dump(), settings.model_dump())
        if key not in ID_KEYS
    ]
    if differences:
        raise SettingsError(
            "the processes have different settings:\n" + "\n".join(differences) + "\n"
            "start all of them with the same command and the same files"
        )
