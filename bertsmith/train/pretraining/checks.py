"""Checks of the arguments of ``pretrain``; importing them loads no torch.

They repeat what the run itself checks, so that a mistake is reported at once and not seconds later.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bertsmith.data.store import Store
from bertsmith.train.engine.run_directory import check_run_directory
from bertsmith.train.pretraining.resolve import Overrides, resolve_run_settings


def check_pretraining(
    data: Path, out: Path | None, lengths: Mapping[str, float | None], overrides: Mapping[str, Any]
) -> None:
    """Raise a BertsmithError if ``pretrain`` cannot begin with these arguments.

    lengths: steps, epochs and minutes. wishes: keywords of ``Overrides``.
    """
    if out is not None:
        check_run_directory(out)
    resolve_run_settings(Overrides(data=data, **overrides), Store.open(data), lengths)
