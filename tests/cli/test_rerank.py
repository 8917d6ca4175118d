"""The commands ``finetune rerank``, ``rerank``, ``search --rerank``, ``evaluate --reranking``."""

import json
import signal
from pathlib import Path

import pytest

from bertsmith.train.engine import loop, step
from bertsmith.use.rerank import rerank
from bertsmith.use.search import search
from tests.cli.conftest import SENTENCES, RunCli

OPTIONS = ["--batch-size", "8", "--epochs", "1", "--set", "run.threads=1",
           "--set", "run.precision=fp32"]  # fmt: skip
COLUMNS = ["--text", "q", "--pair", "d", "--score", "relevance"]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 20 queries with two documents each."""
    file = tmp_path_factory.mktemp("table") / "judged.csv"
    rows = [f"the river {n},{SENTENCES[n % 3].replace(',', '')} {n + k},{k}"
            for n in range(20) for k in range(2)]  # fmt: skip
    file.write_text("\n".join(["q,d,relevance", *rows]) + "\n")
    return file


@pytest.fixture(scope="module")
def reranker(model: Path, table: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained reranker."""
    from bertsmith.train.reranking.finetune import finetune_reranker

    run = tmp_path_factory.mktemp("reranker") / "run"
    columns = {"text": "q", "pair": "d", "score": "relevance"}
    values = {"reranking": {"columns": columns}, "schedule": {"steps": 2}, "run": {"threads": 1}}
    finetune_reranker(model, run, data=table, values=values)
    return run


def test_train_and_evaluate(run_cli: RunCli, model: Path, table: Path, tmp_path: Path) -> None:
    """A run prints its metrics and can be inspected; ``evaluate`` computes the same metrics."""
    command = ["finetune", "rerank", "--model", model, "--data", table, *COLUMNS, *OPTIONS,
               "--out", tmp_path / "run", "--dev", table, "--loss", "ranknet"]  # fmt: skip
    completed = run_cli(*command)
    assert completed.status == 0, completed.err
    assert completed.out.startswith("held out (20 queries): ndcg@10 ")
    assert "train: 40 read, 40 used" in completed.out
    assert "loss ranknet, batches of 8 queries, up to 43 tokens" in completed.err
    assert f"next: bertsmith rerank {tmp_path / 'run'}" in completed.err
    result = json.loads(run_cli(*command, "--json").out)
    assert "finished" in run_cli("inspect", tmp_path / "run").out
    evaluate = ["evaluate", tmp_path / "run", "--reranking", table, *COLUMNS]
    completed = run_cli(*evaluate)
    assert completed.status == 0, completed.err
    assert completed.out.startswith("evaluated 20 queries\nndcg@10 ")
    metrics = json.loads(run_cli(*evaluate, "--json").out)
    for name in ("ndcg@10", "mrr@10", "map", "examples"):
        assert metrics[name] == pytest.approx(result["metrics"][name], abs=1e-6)
    for options, message in [
        ([*evaluate, "--split", "dev"], "--split: not valid with --reranking"),
        ([*evaluate, "--metric", "f1"], "--metric: not valid with --reranking"),
        ([*evaluate, "--embeddings", table], "--reranking: not valid with --embeddings"),
        (["evaluate", model, "--reranking", table, *COLUMNS], "this model is not fine-tuned"),
        (["evaluate", model, "--reranking", "no.csv"], "no.csv: no such file"),
    ]:
        completed = run_cli(*options)
        assert (completed.status, message in completed.err) == (2, True), completed.err


def test_documents_are_ordered(run_cli: RunCli, reranker: Path, tmp_path: Path) -> None:
    """Documents come from arguments, a file or standard input, and have the scores of Python."""
    expected = rerank(reranker, "the river", SENTENCES)
    lines = [f"  {item.score:.4f}\t{item.index + 1}\t{item.text}\n" for item in expected]
    completed = run_cli("rerank", reranker, "the river", *SENTENCES)
    assert (completed.status, completed.out) == (0, "".join(lines)), completed.err
    text = "\n".join(SENTENCES)
    (tmp_path / "lines.txt").write_text(text)
    options = ["--documents", tmp_path / "lines.txt", "--top", "2"]
    assert run_cli("rerank", reranker, "the river", *options).out == "".join(lines[:2])
    command = ["rerank", reranker, "the river", "-", "--json", "--raw-scores"]
    results = run_cli(*command, stdin=text.encode()).out.splitlines()
    raw = rerank(reranker, "the river", SENTENCES, raw_scores=True)
    assert [json.loads(line) for line in results] == [
        {"index": item.index, "score": item.score, "text": item.text} for item in raw
    ]
    completed = run_cli("rerank", reranker, "the river", "the ferry " * 40)
    assert "1 printed document truncated with the query" in completed.err


def test_search_results_are_reordered(
    run_cli: RunCli, model: Path, reranker: Path, tmp_path: Path
) -> None:
    """``search --rerank`` prints the most relevant of the candidates, blank lines last."""
    (tmp_path / "lines.txt").write_text("\n".join([*SENTENCES, "", "the ice"]))
    index = tmp_path / "lines.index"
    assert run_cli("embed", model, tmp_path / "lines.txt", "--out", index).status == 0
    command = ["search", index, "the river", "--rerank", reranker]
    completed = run_cli(*command, "--json")
    assert completed.status == 0, completed.err
    hits = json.loads(completed.out)["hits"]
    expected = rerank(reranker, "the river", [*SENTENCES, "the ice"])
    assert [hit["text"] for hit in hits] == [*(item.text for item in expected), ""]
    assert [hit["relevance"] for hit in hits] == pytest.approx([*(i.score for i in expected), 0])
    completed = run_cli(*command, "--top", "1", "--candidates", "2")
    [similar] = search(index, ["the river"], 2)
    [[best]] = search(index, ["the river"], 1, reranker=reranker, candidates=2)
    assert best.text in [hit.text for hit in similar]
    row = (f"{best.relevance:.4f}", f"{best.cosine:.4f}", str(best.line), best.text)
    assert completed.out == "  " + "\t".join(row).rstrip() + "\n"
    for options, message in (
        (["--candidates", "2"], "--candidates: only valid"),
        (["--format", "lines"], "--format: only valid with -"),
        (["-"], "- reads all texts from standard input"),
    ):
        completed = run_cli("search", index, "the river", *options)
        assert (completed.status, message in completed.err) == (2, True)
    completed = run_cli(*command, "--late")
    assert (completed.status, "--rerank and --late exclude" in completed.err) == (2, True)
    completed = run_cli("search", index, "the river", "--late", "--top", "1", "--candidates", "2")
    [[best]] = search(index, ["the river"], 1, late=True, candidates=2)
    row = (f"{best.maxsim:.4f}", f"{best.cosine:.4f}", str(best.line), best.text)
    assert completed.out == "  " + "\t".join(row).rstrip() + "\n"


def test_stopped_run_is_continued_by_the_same_command(
    run_cli: RunCli, model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM saves a checkpoint and exits with its status."""
    command = ["finetune", "rerank", "--model", model, "--data", table, *COLUMNS, *OPTIONS,
               "--out", tmp_path / "run"]  # fmt: skip
    take_step = step.take_step

    def raise_signal(*arguments: object, **keywords: object) -> object:
        signal.raise_signal(signal.SIGTERM)
        return take_step(*arguments, **keywords)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", raise_signal)
        completed = run_cli(*command)
    assert completed.status == 128 + signal.SIGTERM
    assert "stopped after step 1 of 5" in completed.err
    completed = run_cli(*command)
    assert completed.status == 0, completed.err
    assert "resuming from step 1 of 5" in completed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["rerank", "MODEL", "query"], "give the documents either as arguments or with"),
        (["rerank", "MODEL", "query", "text", "--documents", "a.txt"], "give the documents eith"),
        (["rerank", "MODEL", "query", "--documents", "no.txt"], "no.txt: no such file"),
        (["rerank", "MODEL", "query", "-"], "there are no documents"),
        (["rerank", "MODEL", "query", "-", "text"], "- reads all texts from standard input; rem"),
        (["rerank", "MODEL", "query", "text", "--format", "lines"], "--format: only valid with -"),
        (["rerank", "RERANKER", " ", "text"], "the query is empty; expected at least one word"),
        (["rerank", "RERANKER", "query", "text", ""], "document 2 is empty; expected at least"),
        (["rerank", "MODEL", "query", "text"], "this model is not fine-tuned on a task"),
        (["finetune", "rerank", "--model", "MODEL", "--data", "TABLE", "--out", "RUN", "--text",
          "q"], "columns has no column of the document; set pair (--pair)"),
        (["finetune", "rerank", "--model", "MODEL", "--data", "TABLE", "--out", "RUN"],
         "the columns are 'q', 'd', 'relevance'; name the columns: --text for the query"),
        (["finetune", "rerank", "--model", "MODEL", "--data", "TABLE", "--out", "RUN", "--text",
          "q", "--pair", "d", "--score", "rel"], "there is no column 'rel'"),
    ],
)  # fmt: skip
def test_mistakes_are_explained(
    run_cli: RunCli,
    model: Path,
    reranker: Path,
    table: Path,
    tmp_path: Path,
    options: list[str],
    message: str,
) -> None:
    """A mistake exits with status 2, a message and no run directory."""
    names = {"MODEL": model, "RERANKER": reranker, "TABLE": table, "RUN": tmp_path / "run"}
    completed = run_cli(*(names.get(option, option) for option in options))
    assert (completed.status, message in completed.err) == (2, True), completed.err
    assert not (tmp_path / "run").exists()
