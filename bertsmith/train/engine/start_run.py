"""Starts or resumes a fine-tuning run in one or several processes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from bertsmith.progress import NullProgress, Progress
from bertsmith.runtime.process_group import join_process_group
from bertsmith.settings import SettingsType
from bertsmith.train.engine.finetuning_run import (
    FinetuneResult,
    RunContext,
    open_run,
    set_start_id,
)
from bertsmith.train.engine.run_device import check_norm, check_same_settings, set_world_size
from bertsmith.train.engine.run_directory import check_run_directory, create_and_lock_run
from bertsmith.train.engine.threads import restore_torch_settings

Inputs = TypeVar("Inputs")


def start_run(
    run: Path,
    table: str,
    overrides: Mapping[str, Any],
    load: Callable[[], tuple[SettingsType, Inputs]],
    train: Callable[[SettingsType, Inputs, RunContext], FinetuneResult],
    progress: Progress | None,
) -> FinetuneResult:
    """Load the settings and data of a run, lock its directory and train, unless it is finished.

    Args:
        run: Run directory.
        table: The settings table with the data files, such as "embedding".
        overrides: The settings that the user has set.
        load: Returns the settings, and the start model and the examples.
        train: Trains or resumes the run with the stored settings, or those of ``load`` if the run
            is new.
        progress: Receives log messages and progress.

    Raises:
        BertsmithError: If the arguments or the data are invalid.
    """
    with join_process_group() as processes:
        if progress is None or not processes.is_main:
            progress = NullProgress()
        if processes.is_main:
            check_run_directory(run)
        settings, inputs = load()
        settings = set_world_size(set_start_id(settings), processes)
        values: Any = settings
        check_norm(values.model, processes)
        check_same_settings(settings, processes)
        with (
            create_and_lock_run(run, is_main=processes.is_main),
            restore_torch_settings(values.run.threads),
        ):
            stored_settings, finished_result = processes.run_on_main(
                lambda: open_run(run, settings, overrides, progress, table)
            )
            if finished_result is not None:
                return finished_result
            context = RunContext(run, processes, progress, is_new=stored_settings is None)
            return train(stored_settings or settings, inputs, context)
