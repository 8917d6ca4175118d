"""Fixtures of the lab tests."""

from pathlib import Path

import pytest

from bertsmith.runtime import device


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output directory that all slow tests share, so that common stages run once."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(autouse=True)
def skip_peak_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the peak matrix-multiplication speed, which takes time."""
    monkeypatch.setattr(device, "measure_peak_macs_per_second", lambda _: 1e9)
