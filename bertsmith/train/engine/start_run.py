"""Starts or resumes a fine-tuning run in one or several processes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime.process_group import ProcessGroup, join_process_group
from bertsmith.settings import Settings, SettingsType
from bertsmith.train.engine.finetuning_run import FinetuneResult, open_run
from bertsmith.train.engine.run_directory import check_run_directory, create_and_lock_run
from bertsmith.train.engine.threads import restore_torch_settings

Inputs = TypeVar("Inputs")
Inputs_contra = TypeVar("Inputs_contra", contravariant=True)
SettingsType_contra = TypeVar("SettingsType_contra", bound=Settings, contravariant=True)


class TrainFunction(Protocol[SettingsType_contra, Inputs_contra]):
    """Trains or resumes a run whose directory is locked."""

    def __call__(
        self,
        settings: SettingsType_contra,
        inputs: Inputs_contra,
        run: Path,
        processes: ProcessGroup,
        progress: Progress,
        *,
        is_new: bool,
    ) -> FinetuneResult:
        """Return the result of the run.

        Args:
            settings: Settings of the run: the stored ones if it is resumed.
            inputs: The start model and the examples.
            run: Run directory.
            processes: The processes of the run.
            progress: Receives log messages and progress, in the main process.
            is_new: Whether the run has no stored settings.
        """


def start_run(
    run: Path,
    table: str,
    overrides: Mapping[str, Any],
    load: Callable[[ProcessGroup], tuple[SettingsType, Inputs]],
    train: TrainFunction[SettingsType, Inputs],
    progress: Progress | None,
) -> FinetuneResult:
    """Load the settings and data of a run, lock its directory and train, unless it is finished.

    Args:
        run: Run directory.
        table: The settings table with the data files, such as "embedding".
        overrides: The settings that the user has set.
        load: Returns the settings, and the start model and the examples.
        train: Trains or resumes the run.
        progress: Receives log messages and progress.

    Raises:
        BertsmithError: If the arguments or the data are invalid.
    """
    with join_process_group() as processes:
        if progress is None or not processes.is_main:
            progress = NullProgress()
        if processes.is_main:
            check_run_directory(run)
        settings, inputs = load(processes)
        run_settings: Any = settings
        with (
            create_and_lock_run(run, is_main=processes.is_main),
            restore_torch_settings(run_settings.run.threads),
        ):
            stored_settings, finished_result = processes.run_on_main(
                lambda: open_run(run, settings, overrides, progress, table)
            )
            if finished_result is not None:
                return finished_result
            return train(
                stored_settings or settings,
                inputs,
                run,
                processes,
                progress,
                is_new=stored_settings is None,
            )
