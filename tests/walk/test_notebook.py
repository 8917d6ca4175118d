"""Tests that the notebooks in examples/ run, and that their committed outputs are complete."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = ("sentiment.ipynb",)


def read_notebook(root: Path, name: str) -> Any:
    """Return a committed notebook."""
    text = (root / "examples" / name).read_text(encoding="utf-8")
    # nbformat does not annotate this function.
    return nbformat.reads(text, as_version=4)  # type: ignore[no-untyped-call]


def get_code_cells(notebook: Any) -> list[Any]:
    """Return the code cells of a notebook."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def get_output_text(cell: Any) -> str:
    """Return the text of all outputs of a cell."""
    return "".join(
        output.get("text", "")
        or output.data.get("text/markdown", "")
        or output.data.get("text/plain", "")
        for output in cell.outputs
    )


def test_all_notebooks_are_listed(root: Path) -> None:
    """NOTEBOOKS contains every notebook in examples/."""
    assert {path.name for path in (root / "examples").glob("*.ipynb")} == set(NOTEBOOKS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_committed_outputs_are_from_one_clean_execution(root: Path, name: str) -> None:
    """The cells ran once, in order and without errors; outputs contain no absolute paths."""
    notebook = read_notebook(root, name)
    nbformat.validate(notebook)
    cells = get_code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr"
            assert not any(path in str(output) for path in ("/tmp", "/home", "/root", "/Users"))


@pytest.mark.slow
def test_sentiment_notebook_trains_a_working_classifier(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notebook trains a classifier that understands "not", and leaves no files behind."""
    monkeypatch.setenv("PYTHONPATH", str(root))
    notebook = read_notebook(root, "sentiment.ipynb")
    for cell in get_code_cells(notebook):
        cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    warnings = [
        output.text
        for cell in get_code_cells(notebook)
        for output in cell.outputs
        if output.get("name") == "stderr"
    ]
    assert not warnings, "the notebook prints warnings"
    outputs = [get_output_text(cell) for cell in get_code_cells(notebook)]
    (predictions,) = [text for text in outputs if "| review | mood |" in text]
    # Two header lines precede the four rows.
    moods = [row.split(" | ")[1] for row in predictions.splitlines()[2:6]]
    assert moods == ["good", "bad", "bad", "good"]
    (metrics,) = [text for text in outputs if text.startswith("validation accuracy")]
    assert "240 reviews" in metrics
    assert list(tmp_path.iterdir()) == [], "the notebook left files behind"
