"""Models and indexes written by version 0.1 still give the same answers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run

FIXTURES = Path(__file__).parent / "fixtures" / "v0.1"
EXPECTED = [json.loads(line) for line in (FIXTURES / "expected.jsonl").read_text().splitlines()]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A copy of the fixtures, with the paths in them replaced by the copy's."""
    folder = tmp_path / "v0.1"
    shutil.copytree(FIXTURES, folder)
    for pattern in ("settings.toml", "index.json"):
        for file in folder.rglob(pattern):
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace("@ROOT@", str(folder)), encoding="utf-8")
    return folder


def assert_contains(actual: Any, expected: Any) -> None:
    """Check that all expected values are there; later versions may have added fields."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        for name, value in expected.items():
            assert_contains(actual[name], value)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_contains(one, other)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
    else:
        assert actual == expected


@pytest.mark.parametrize("place", ["model", "run"])
@pytest.mark.parametrize(
    "case", EXPECTED, ids=[f"{case['model']}-{len(case['text'])}" for case in EXPECTED]
)
def test_fine_tuned_models_of_version_0_1(
    case: dict[str, Any], place: str, run: Run, old: Path
) -> None:
    """A run and its model directory give the predictions that version 0.1 printed."""
    model = old / case["model"]
    if place == "model":
        model /= "model"
    done = run("predict", model, case["text"], "--json", "--device", "cpu")
    assert done.status == 0, done.err
    assert_contains(json.loads(done.out), case["prediction"])


def test_index_of_version_0_1(run: Run, old: Path) -> None:
    """An index of embedded lines finds the same lines."""
    question = "ba be no fi"
    done = run("search", old / "lines.index", question, "--top", 3, "--json", "--device", "cpu")
    assert done.status == 0, done.err
    assert_contains(json.loads(done.out), json.loads((FIXTURES / "search.json").read_text()))


@pytest.mark.parametrize("name", ["base", "tag", "features", "seeds", "lines.index"])
def test_inspect_describes_artifacts_of_version_0_1(name: str, run: Run, old: Path) -> None:
    """``inspect`` describes each kind of artifact."""
    done = run("inspect", old / name)
    assert done.status == 0, done.err
    assert done.out
