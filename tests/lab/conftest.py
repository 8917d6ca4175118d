"""Fixtures of the lab tests."""

from pathlib import Path

import pytest

from bertsmith.data import prepare
from bertsmith.runtime import device
from bertsmith.train.engine import curve


@pytest.fixture(scope="session")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an output directory that all slow tests share, so that common stages run once."""
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(autouse=True)
def skip_peak_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the measurement of the peak matrix-multiplication speed, which takes time."""
    monkeypatch.setattr(device, "measure_peak_macs_per_second", lambda _: 1e9)


@pytest.fixture
def skip_slow_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no loss curves, and start one worker for each store."""
    monkeypatch.setattr(curve, "draw", lambda run, _, **__: run / curve.CURVE_FILE)
    monkeypatch.setattr(prepare, "_count_cores", lambda: 1)
