"""Checks of the arguments of ``finetune``; importing them loads no torch.

They repeat what the run itself checks, so that a mistake is reported at once and not seconds later.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.bundle.directory import locate, pinned
from bertsmith.settings import wished
from bertsmith.train.engine.run_directory import check_place
from bertsmith.train.finetuning.settings import check_files, resolve_settings


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
        check_place(out)
    given = wished(config, values, assignments)
    locate(model)
    settings = resolve_settings(task, pinned(model), data, given)
    check_files(settings.task)
