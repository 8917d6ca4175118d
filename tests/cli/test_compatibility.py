"""Models and indexes written by version 0.1 still give the same predictions."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import RunCli

FIXTURES = Path(__file__).parent / "fixtures" / "v0.1"
#: Fields of ``predict --json`` in version 0.1 -> the current fields.
RENAMED_FIELDS = {
    "cut_off": "truncated",
    "null_score": "null_score_diff",
    "best": "best_index",
    "ending": "best_ending",
    "column": "best_column",
}
EXPECTED_PREDICTIONS = [
    json.loads(line) for line in (FIXTURES / "expected.jsonl").read_text().splitlines()
]


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """A copy of the artifacts of version 0.1, with the paths in them adapted."""
    folder = tmp_path / "v0.1"
    shutil.copytree(FIXTURES, folder)
    for pattern in ("settings.toml", "index.json"):
        for file in folder.rglob(pattern):
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace("@ROOT@", str(folder)), encoding="utf-8")
    return folder


def assert_contains(actual: Any, expected: Any) -> None:
    """Assert that ``actual`` has the values that version 0.1 printed; it may have more fields."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict)
        for name, value in expected.items():
            assert_contains(actual[RENAMED_FIELDS.get(name, name)], value)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_contains(actual_item, expected_item)
    elif isinstance(expected, float):
        assert actual == pytest.approx(expected, rel=1e-4, abs=1e-5)
    else:
        assert actual == expected


@pytest.mark.parametrize("path_type", ["model", "run"])
@pytest.mark.parametrize(
    "expected",
    EXPECTED_PREDICTIONS,
    ids=[f"{case['model']}-{len(case['text'])}" for case in EXPECTED_PREDICTIONS],
)
def test_fine_tuned_models_of_version_0_1_predict_the_same(
    expected: dict[str, Any], path_type: str, run_cli: RunCli, artifacts: Path
) -> None:
    """A run directory and its model directory give the predictions of version 0.1."""
    model = artifacts / expected["model"]
    if path_type == "model":
        model /= "model"
    completed = run_cli("predict", model, expected["text"], "--json", "--device", "cpu")
    assert completed.status == 0, completed.err
    assert_contains(json.loads(completed.out), expected["prediction"])


def test_index_of_version_0_1_finds_the_same_lines(run_cli: RunCli, artifacts: Path) -> None:
    """Searching an index of version 0.1 finds the same lines."""
    options = ("--top", 3, "--json", "--device", "cpu")
    completed = run_cli("search", artifacts / "lines.index", "ba be no fi", *options)
    assert completed.status == 0, completed.err
    assert_contains(json.loads(completed.out), json.loads((FIXTURES / "search.json").read_text()))


@pytest.mark.parametrize("name", ["base", "tag", "features", "seeds", "lines.index"])
def test_inspect_describes_artifacts_of_version_0_1(
    name: str, run_cli: RunCli, artifacts: Path
) -> None:
    """``inspect`` describes each kind of artifact."""
    completed = run_cli("inspect", artifacts / name)
    assert completed.status == 0, completed.err
    assert completed.out
