"""The command ``mine``."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import SENTENCES, RunCli


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 30 lines."""
    path = tmp_path_factory.mktemp("corpus") / "lines.txt"
    path.write_text("\n".join(f"{SENTENCES[n % 3]} {n}" for n in range(30)) + "\n")
    return path


def test_mine_and_train(run_cli: RunCli, model: Path, lines: Path, tmp_path: Path) -> None:
    """Mined negatives train an embedding model and a reranker without naming columns."""
    index, out = tmp_path / "lines.index", tmp_path / "triplets.jsonl"
    assert run_cli("embed", model, lines, "--out", index).status == 0
    table = tmp_path / "pairs.csv"
    rows = [f"the river {n},{line.replace(',', '')}"
            for n, line in enumerate(lines.read_text().splitlines()[:9])]  # fmt: skip
    table.write_text("\n".join(["question,answer", *rows]) + "\n")
    command = ["mine", index, "--data", table, "--text", "question", "--pair", "answer"]
    completed = run_cli(*command, "--out", out, "--negatives", "2", "--relative-margin", "0")
    assert completed.status == 0, completed.err
    assert "negatives for " in completed.out
    assert "candidates not used: too similar" in completed.out
    assert f"wrote {out}" in completed.err
    mined = [json.loads(line) for line in out.read_text().splitlines()]
    assert mined
    assert all(1 <= len(row["negatives"]) <= 2 for row in mined)
    completed = run_cli(*command, "--out", tmp_path / "b.csv", "--json", "--relative-margin", "0")
    counts = json.loads(completed.out)
    assert (counts["num_pairs"], counts["examples"]["num_used"]) == (9, 9)
    assert counts["num_negatives"] == counts["num_rows"]
    for command_name in ("embed", "rerank"):
        completed = run_cli(
            "finetune", command_name, "--model", model, "--data", out, "--epochs", "1",
            "--batch-size", "4", "--set", "run.threads=1", "--out", tmp_path / command_name,
        )  # fmt: skip
        assert completed.status == 0, completed.err


def test_mistakes_are_explained(run_cli: RunCli, model: Path, lines: Path, tmp_path: Path) -> None:
    """A mistake exits with status 2 and a message."""
    index = tmp_path / "lines.index"
    assert run_cli("embed", model, lines, "--out", index).status == 0
    out, pairs = tmp_path / "out.jsonl", tmp_path / "pairs.csv"
    pairs.write_text("query,positive\na,b\n")
    json_lines = tmp_path / "pairs.jsonl"
    json_lines.write_text('{"query": "a", "positive": "b"}\n')
    for options, message in [
        (["no.index", "--data", pairs, "--out", out], "no.index: does not exist; make an index"),
        ([index, "--data", lines, "--out", out], "name the columns: --text for the query"),
        ([index, "--data", "no.csv", "--out", out], "no.csv: no such file"),
        ([index, "--data", tmp_path, "--out", out], "this is a folder; give a file"),
        ([index, "--data", lines, "--out", lines], "this file exists already"),
        (
            [index, "--data", json_lines, "--out", out, "--delimiter", ";"],
            f"delimiter: has no effect on {json_lines}; remove it",
        ),
        ([index, "--data", lines, "--out", out, "--skip", "50"], "candidates is 50 and skip"),
        ([index, "--data", lines, "--out", out, "--sampling", "best"], "'best'"),
    ]:
        completed = run_cli("mine", *options)
        assert (completed.status, message in completed.err) == (2, True), completed.err
    assert not out.exists()
