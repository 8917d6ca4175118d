"""The loss curve of a run."""

from pathlib import Path

import pytest

from bertsmith.files import dump_json
from bertsmith.train.engine.curve import CURVE_FILE, draw


@pytest.mark.parametrize("title", ["run: 2 layers", "r$x^{$: 2 layers", "\\frac $", "n\udcff"])
def test_any_run_name_can_be_the_title(tmp_path: Path, title: str) -> None:
    """Dollar signs and invalid characters in the name of a run do not prevent the drawing."""
    pytest.importorskip("matplotlib")
    lines = [
        {"step": 1, "kind": "train", "mlm_loss": 2.0},
        {"step": 1, "kind": "heldout", "mlm_loss": 2.0, "unigram_entropy": 3.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(dump_json(line) + "\n" for line in lines))
    draw(tmp_path, title)
    assert (tmp_path / CURVE_FILE).read_bytes().startswith(b"\x89PNG")
