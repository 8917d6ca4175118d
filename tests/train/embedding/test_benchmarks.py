"""The benchmarks of embedding models, on small data."""

import json
from pathlib import Path
from typing import Any

import embedding_memory
import late_interaction
import pytest
import sts

from tests.train.embedding.conftest import WriteTable, make_rows


def test_finished_seeds_are_not_repeated(
    start_model: Path,
    write_table: WriteTable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With --runs, a further seed runs alone; other settings run again, without datasets."""
    table = write_table("train.jsonl", make_rows("scored_pairs", 24))
    arguments = [
        "--model", str(start_model), "--train", str(table), "--test", str(table), "--batch-size",
        "12", "--max-seqlen", "32", "--runs", str(tmp_path / "runs.jsonl"),
        "--json", str(tmp_path / "result.json"), "--epochs", "1",
    ]  # fmt: skip
    monkeypatch.setattr(sts, "find_spec", lambda _name: None)
    with pytest.raises(SystemExit, match="needs the package datasets"):
        sts.main(arguments)
    seeds: list[int] = []
    run_bertsmith = sts.run_bertsmith

    def record(options: Any, train: Path, test: Path, seed: int) -> dict[str, Any]:
        seeds.append(seed)
        return run_bertsmith(options, train, test, seed)

    monkeypatch.setattr(sts, "run_bertsmith", record)
    arguments.append("--bertsmith-only")
    for options in (["--seeds", "1"], ["--seeds", "2"], ["--seeds", "1", "--lr", "1e-3"]):
        sts.main([*arguments, *options])
    assert seeds == [0, 1, 0]
    runs = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    figures = json.loads((tmp_path / "result.json").read_text())["figures"]
    assert figures["bertsmith, seed 0: spearman"] == runs[2]["result"]["spearman"]
    assert len(runs) == 3


def test_memory_is_measured(tmp_path: Path) -> None:
    """Each part reports its peak memory; an existing index is mined."""
    for part, options, expected in (
        ("batch", ["--batch-size", "40"], {"pairs": 40}),
        ("index", ["--folder", str(tmp_path / "f"), "--lines", "300"], {"lines": 300}),
        ("mine", ["--folder", str(tmp_path / "f"), "--queries", "5"], {"negatives": 15}),
    ):
        out = tmp_path / f"{part}.json"
        embedding_memory.main([part, "--json", str(out), *options])
        figures = json.loads(out.read_text())["figures"]
        assert figures.items() >= expected.items()
        assert 0.05 < figures["peak memory, GiB"] < 64


def test_late_interaction_is_compared_with_single_vectors(
    start_model: Path, tmp_path: Path
) -> None:
    """Questions that are a paragraph find it in all variants; int8 hardly changes the scores."""
    texts = [row["text"] for row in make_rows("texts", 20)]
    paragraphs = [{"context": text, "qas": [{"question": text}]} for text in texts]
    data = {"data": [{"paragraphs": paragraphs}]}
    (tmp_path / "squad.json").write_text(json.dumps(data))
    out = tmp_path / "result.json"
    late_interaction.main(
        ["--model", str(start_model), "--squad", str(tmp_path / "squad.json"), "--candidates", "5",
         "--json", str(out)]
    )  # fmt: skip
    figures = json.loads(out.read_text())["figures"]
    ndcg = [value for name, value in figures.items() if name.endswith("ndcg@10")]
    assert len(ndcg) == 4
    assert min(ndcg) > 0.9
