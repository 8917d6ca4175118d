"""Fixtures of the lab tests."""

from pathlib import Path

import pytest

from bertsmith.runtime import device


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output directory in which all slow tests share their stages."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(autouse=True)
def skip_peak_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the measurement of peak matrix-multiplication speed, which takes part of a second."""
    monkeypatch.setattr(device, "measure_peak_macs", lambda _: 1e9)
