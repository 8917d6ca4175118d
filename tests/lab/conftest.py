"""A folder in which all experiments run at smoke, so that what they share is made once.

It never knows what is tested.
"""

from pathlib import Path

import pytest

from bertsmith.runtime import device


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of results."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the machine's ceiling: a part of a second in each of some hundred runs."""
    monkeypatch.setattr(device, "measure_peak_macs", lambda _: 1e9)
