"""The command ``similar``."""

import json
import re
from pathlib import Path

import numpy as np

from tests.cli.conftest import SENTENCES, RunCli


def test_similar_prints_distances(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """Each occurrence gets a row with its distances, as text, as JSON and in a plot."""
    file = tmp_path / "lines.txt"
    plot = tmp_path / "ferry.png"
    file.write_text("\n".join([*SENTENCES[:2], "강의 ferry $5 $6"]))
    completed = run_cli("similar", model, file, "--word", "ferry", "--layer", -2, "--plot", plot)
    assert completed.status == 0, completed.err
    assert f"wrote {plot}" in completed.err
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = [row.strip().split("\t") for row in completed.out.splitlines()]
    assert [row[:2] for row in rows] == [
        ["1", "The [ferry] crossed the river twice…"],
        ["2", "…ch the ice had held the [ferry] fast."],
        ["3", "강의 [ferry] $5 $6"],
    ]
    options = ("--word", "ferry", "--layer", -2, "--json")
    report = json.loads(run_cli("similar", model, *options, stdin=file.read_bytes()).out)
    # Four decimals are printed.
    distances = [[float(cell) for cell in row[2:]] for row in rows]
    np.testing.assert_allclose(distances, report["distances"], rtol=0, atol=6e-5)


def test_similar_rejects_or_skips_lines_without_the_word(run_cli: RunCli, model: Path) -> None:
    """A line without the word is an error; with --skip-invalid, it is skipped and counted."""
    similar = ("similar", model, "--word", "ferry")
    completed = run_cli(*similar, stdin=b"ferry\nriver\n")
    assert completed.status == 2
    assert "text 2: the word 'ferry' is not in 'river'" in completed.err
    completed = run_cli(*similar, "--skip-invalid", stdin=b"ferry\nriver\nferry\n")
    assert "skipped 1 line without the word 'ferry'" in completed.err


def test_similar_prints_extremes_of_many_distances(run_cli: RunCli, model: Path) -> None:
    """Of many occurrences, only the distances to the nearest and the farthest are printed."""
    texts = b"the ferry\na ferry\n" * 10
    completed = run_cli("similar", model, "--word", "ferry", stdin=texts)
    # The texts "a ferry" have even numbers; rounding decides which of them is the farthest.
    assert re.fullmatch(
        r"  1\tthe \[ferry\]\t0\.0000 to 3\t0\.\d{4} to (2|4|20)", completed.out.splitlines()[0]
    )
    assert "20 occurrences; --json prints all distances" in completed.err
