"""Fixtures for pre-training runs and their settings."""

from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.store import Store
from bertsmith.train.pretraining.pretrain import pretrain
from bertsmith.train.pretraining.resolve import (
    Overrides,
    resolve_settings,
)
from tests.train.conftest import make_assignments


@pytest.fixture(scope="session")
def opened_store(store: Path) -> Store:
    """The opened store of the fixture ``store``."""
    return Store.open(store)


@pytest.fixture
def resolve(opened_store: Store) -> Any:
    """A function that returns the settings for fields of ``Overrides``."""
    return lambda **overrides: resolve_settings(
        Overrides(data=opened_store.path, **overrides), opened_store
    )


@pytest.fixture(scope="module")
def finished_run(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of eight steps."""
    out = tmp_path_factory.mktemp("runs") / "finished"
    pretrain(store, out, steps=8, assignments=make_assignments(run__eval_every=4))
    return out
