"""Checks the arguments of ``finetune`` before a run starts; does not import torch.

The run itself repeats these checks. Here they report a mistake before torch is loaded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.bundle.directory import locate_model, pin_model_path
from bertsmith.train.engine.run_directory import check_run_directory
from bertsmith.train.finetuning.settings import (
    check_files_exist,
    read_overrides,
    resolve_settings,
)


def check_finetuning(
    task: str,
    model: Path,
    data: Path | None,
    out: Path | None,
    config: Path | None,
    assignments: Sequence[str],
    values: Mapping[str, Any],
) -> None:
    """Raise a BertsmithError if ``finetune`` would reject these arguments.

    ``out`` is None for a sweep, whose directory holds several runs.
    """
    if out is not None:
        check_run_directory(out)
    overrides = read_overrides(task, data, config, values, assignments)
    locate_model(model)
    settings = resolve_settings(task, pin_model_path(model), data, overrides)
    check_files_exist(settings.task)
