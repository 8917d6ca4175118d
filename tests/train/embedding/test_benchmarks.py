"""The benchmarks of embedding models, on small data."""

import json
from pathlib import Path
from typing import Any

import embedding_memory
import pytest
import squad_retrieval
import sts

from bertsmith.bundle.fine_tuned import load_for_fine_tuning, save_fine_tuned
from bertsmith.train.reranking.finetune import HEAD as RERANKER_HEAD
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


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    """A file of SQuAD with 20 paragraphs; the question of each is its text."""
    texts = [row["text"] for row in make_rows("texts", 20)]
    paragraphs = [{"context": text, "qas": [{"question": text}]} for text in texts]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return path


def test_late_interaction_and_a_reranker_are_compared_with_single_vectors(
    start_model: Path, squad: Path, tmp_path: Path
) -> None:
    """Questions that are a paragraph find it in all variants; int8 hardly changes the scores.

    The reranker has random weights, but its five candidates include the paragraph.
    """
    model = load_for_fine_tuning(start_model, RERANKER_HEAD)
    save_fine_tuned(tmp_path / "reranker", model.model, model.tokenizer, RERANKER_HEAD, {})
    out = tmp_path / "result.json"
    squad_retrieval.main(
        ["--model", str(start_model), "--squad", str(squad), "--candidates", "5", "--reranker",
         str(tmp_path / "reranker"), "--json", str(out)]
    )  # fmt: skip
    figures = json.loads(out.read_text())["figures"]
    ndcg = {name: value for name, value in figures.items() if name.endswith("ndcg@10")}
    random_ndcg = ndcg.pop("reranker of the best 5: ndcg@10")
    assert len(ndcg) == 4
    assert min(ndcg.values()) > 0.9
    assert random_ndcg < min(ndcg.values())
    assert figures["reranker of the best 5: recall@10"] == 1


def test_questions_and_paragraphs_are_written_as_training_data(squad: Path, tmp_path: Path) -> None:
    """Each question has a row with its paragraph, which is a line of the other file."""
    squad_retrieval.main(["--squad", str(squad), "--write", str(tmp_path / "data")])
    lines = (tmp_path / "data" / "paragraphs.txt").read_text().splitlines()
    text = (tmp_path / "data" / "questions.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert len(lines) == len(rows) == 20
    assert all(row["query"] == row["document"] for row in rows)
    assert {row["document"] for row in rows} == set(lines)
