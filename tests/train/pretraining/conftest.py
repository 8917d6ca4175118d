"""Fixtures for the settings of pre-training runs."""

from pathlib import Path
from typing import Any

import pytest

from bertsmith.data.store import Store
from bertsmith.train.pretraining.resolve import (
    Overrides,
    resolve_settings,
)


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
