"""Checks of the arguments of ``finetune``; importing them loads no torch.

They repeat what the run itself checks, so that a mistake is reported at once and not seconds later.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.bundle.directory import locate_model, pin_model_path
from bertsmith.settings import user_settings
from bertsmith.train.engine.run_directory import check_run_directory
from bertsmith.train.finetuning.settings import check_files_exist, resolve_settings


def check_finetuning(
    task: str,
    model: Path,
    data: Path | None,
    out: Path | None,
    config: Path | None,
    assignments: Sequence[str],
    values: Mapping[str, Any],
) -> None:
    """Raise a BertsmithError if ``finetune`` cannot begin with these arguments.

    out: the folder of a single run; None for one that holds several.
    """
    if out is not None:
        check_run_directory(out)
    given = user_settings(config, values, assignments)
    locate_model(model)
    settings = resolve_settings(task, pin_model_path(model), data, given)
    check_files_exist(settings.task)
