"""Checks the arguments of ``pretrain`` before a run starts; does not import torch.

The run itself repeats these checks. Here they report a mistake before torch is loaded.
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
    """Raise a BertsmithError if ``pretrain`` would reject these arguments.

    Args:
        data: Token store.
        out: Run directory; None if nothing is written.
        lengths: Steps, epochs and minutes; None for those that are not set.
        overrides: Keyword arguments of ``Overrides``.
    """
    if out is not None:
        check_run_directory(out)
    resolve_run_settings(Overrides(data=data, **overrides), Store.open(data), lengths)
