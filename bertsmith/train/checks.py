"""Checks of a training command's arguments; importing them loads no torch.

They repeat what the run itself checks, so that a mistake is reported at once and not seconds later.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bertsmith.bundle.directory import locate, pinned
from bertsmith.data.store import Store
from bertsmith.settings import wished
from bertsmith.train.place import check_place
from bertsmith.train.resolve import Wishes, resolve_run
from bertsmith.train.tunesettings import check_files, resolve_settings


def check_pretraining(
    data: Path, out: Path | None, lengths: Mapping[str, float | None], wishes: Mapping[str, Any]
) -> None:
    """Raise a BertsmithError if ``pretrain`` cannot begin with these arguments.

    lengths: steps, epochs and minutes. wishes: keywords of ``Wishes``.
    """
    if out is not None:
        check_place(out)
    resolve_run(Wishes(data=data, **wishes), Store.open(data), lengths)


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
