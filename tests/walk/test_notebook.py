"""The notebooks of examples/, executed anew, and what stands in them as they are committed.

These tests know no API: what they run is what a reader would run.
"""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = ("sentiment.ipynb",)


def read(root: Path, name: str) -> Any:
    """Return a notebook as it is committed."""
    text = (root / "examples" / name).read_text(encoding="utf-8")
    return nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]


def code(notebook: Any) -> list[Any]:
    """Return the cells of code."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cell: Any) -> str:
    """Return the text that a cell shows."""
    outputs = cell.outputs
    return "".join(
        one.get("text", "") or one.data.get("text/markdown", "") or one.data.get("text/plain", "")
        for one in outputs
    )


def test_every_notebook_is_known(root: Path) -> None:
    """None in the folder is left out here."""
    assert {path.name for path in (root / "examples").glob("*.ipynb")} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_outputs_are_those_of_one_execution(root: Path, name: str) -> None:
    """Cells in their order, without an error or a word on stderr, and no machine's path."""
    notebook = read(root, name)
    nbformat.validate(notebook)
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr"
            assert not any(place in str(output) for place in ("/tmp", "/home", "/root", "/Users"))


@pytest.mark.slow
def test_sentiment_goes_all_the_way(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executed in an empty folder, it ends with a classifier that understands "not"."""
    monkeypatch.setenv("PYTHONPATH", str(root))
    notebook = read(root, "sentiment.ipynb")
    for cell in code(notebook):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    text = [shown(cell) for cell in code(notebook)]
    (predicted,) = [one for one in text if "| review | mood |" in one]
    moods = [line.split(" | ")[1] for line in predicted.splitlines()[2:6]]
    assert moods == ["good", "bad", "bad", "good"]
    (held_out,) = [one for one in text if one.startswith("held out")]
    assert "80 reviews" in held_out
    assert list(tmp_path.iterdir()) == [], "what it makes stands in a temporary folder"
