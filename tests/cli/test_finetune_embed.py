"""The command ``finetune embed``."""

import json
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from bertsmith.train.engine import loop, step
from bertsmith.use.embed import Embedder
from tests.cli.conftest import SENTENCES, RunCli


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 30 pairs of texts."""
    file = tmp_path_factory.mktemp("table") / "pairs.csv"
    rows = [f"{SENTENCES[n % 3].replace(',', '')} {n},the river {n}" for n in range(30)]
    file.write_text("\n".join(["question,answer", *rows]) + "\n")
    return file


def test_train_embed_and_search(run_cli: RunCli, model: Path, table: Path, tmp_path: Path) -> None:
    """A trained model is inspected, embeds lines, and is searched."""
    run = tmp_path / "run"
    options = ["--text", "question", "--pair", "answer", "--epochs", "1", "--batch-size", "16",
               "--matryoshka", "22,8", "--set", "run.threads=1"]  # fmt: skip
    command = ["finetune", "embed", "--model", model, "--data", table, "--out", run, *options]
    completed = run_cli(*command)
    assert completed.status == 0, completed.err
    assert completed.out.startswith("held out (3 examples): ndcg@10 ")
    assert re.search(r"ndcg@10_dim22 0\.\d+, ndcg@10_dim8 \d\.\d+", completed.out)
    assert "train: 30 read, 30 used" in completed.out
    assert f"wrote {run / 'model'}, a sentence-transformers directory" in completed.err
    assert "loss mnrl at 22, 8 dimensions, mean pooling" in completed.err
    result = json.loads(run_cli(*command, "--json").out)
    assert result["metrics"]["examples"] == 3
    assert "finished" in run_cli("inspect", run).out
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(SENTENCES))
    completed = run_cli("embed", run, lines, "--out", tmp_path / "lines.index")
    assert completed.status == 0, completed.err
    hits = json.loads(run_cli("search", tmp_path / "lines.index", SENTENCES[1], "--json").out)
    assert SENTENCES[1] in json.dumps(hits)


def test_validation_sets_of_other_kinds_are_printed(
    run_cli: RunCli, model: Path, tmp_path: Path
) -> None:
    """Each validation set is printed with its metrics, also if the first set has other metrics."""
    table = tmp_path / "pairs.csv"
    rows = [f"{text},the river {n}" for n, text in enumerate("abcdef")]
    table.write_text("\n".join(["anchor,positive", *rows]) + "\n")
    for name in ("scores", "scores_new"):
        rows = [f"{text},the river,{n}" for n, text in enumerate("abc")]
        lines = ["sentence1,sentence2,score", *rows]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines) + "\n")
    completed = run_cli(
        "finetune", "embed", "--model", model, "--data", table, "--out", tmp_path / "run",
        "--set", "schedule.steps=1", "--set", "run.threads=1", "--dev", table,
        "--dev", tmp_path / "scores.csv", "--dev", tmp_path / "scores_new.csv",
    )  # fmt: skip
    assert completed.status == 0, completed.err
    titles = [line.rpartition(" ")[0] for line in completed.out.splitlines()[:3]]
    assert titles[0].startswith("held out (6 examples): ndcg@10 ")
    for title, name in zip(titles[1:], ("scores", "scores_new"), strict=True):
        assert title.startswith(f"held out, {name}.csv (3 examples): spearman ")
        assert ", pearson" in title


def test_vectors_are_evaluated(run_cli: RunCli, model: Path, table: Path, tmp_path: Path) -> None:
    """``evaluate --embeddings`` prints metrics of any model; other options are errors."""
    command = ["evaluate", model, "--embeddings", table, "--text", "question", "--pair", "answer"]
    completed = run_cli(*command)
    assert completed.status == 0, completed.err
    assert completed.out.startswith("ndcg@10 ")
    assert "30 read, 30 used" in completed.out
    metrics = json.loads(run_cli(*command, "--dimensions", "5", "--json").out)
    assert metrics["counts"]["num_read"] == 30
    assert 0 < metrics["ndcg@10"] < 1
    beir = tmp_path / "beir"
    (beir / "qrels").mkdir(parents=True)
    (beir / "corpus.jsonl").touch()
    for options, message in [
        (["evaluate", model, "--data", table, "--score", "x"], "--score: only valid with --emb"),
        ([*command, "--metric", "f1"], "--metric: not valid with --embeddings"),
        (["evaluate", model, "--embeddings", "no.csv"], "no.csv: no such file or folder"),
        ([*command, "--split", "dev"], "is a table, without splits; remove it"),
        (["evaluate", model, "--embeddings", beir, "--text", "body"], "--text: only valid with a"),
        (["evaluate", model, "--embeddings", beir, "--skip-invalid"], "--skip-invalid: only valid"),
    ]:
        completed = run_cli(*options)
        assert (completed.status, message in completed.err) == (2, True), completed.err


def test_stopped_run_is_continued_by_the_same_command(
    run_cli: RunCli, model: Path, table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM saves a checkpoint and exits with its status; export writes the checkpoint."""
    command = ["finetune", "embed", "--model", model, "--data", table, "--text", "question",
               "--pair", "answer", "--batch-size", "8", "--epochs", "2", "--set", "run.threads=1",
               "--out", tmp_path / "run"]  # fmt: skip
    take_step = step.take_step

    def raise_signal(*arguments: object, **keywords: object) -> object:
        signal.raise_signal(signal.SIGTERM)
        return take_step(*arguments, **keywords)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", raise_signal)
        completed = run_cli(*command)
    assert completed.status == 128 + signal.SIGTERM
    assert "stopped after step 1 of 8" in completed.err
    completed = run_cli("export", tmp_path / "run", "--to", "hf", "--out", tmp_path / "snapshot")
    assert completed.status == 0, completed.err
    assert "using its latest checkpoint, step 1 of 8" in completed.err
    assert (tmp_path / "snapshot" / "model.safetensors").exists()
    completed = run_cli(*command)
    assert completed.status == 0, completed.err
    assert "resuming from step 1 of 8" in completed.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--weights", "1,x"], "--weights 1,x: expected numbers separated by commas"),
        (["--weights", "1,2"], "file_weights has 2 values and train_files has 1"),
        (["--score", "answer"], "the column of the text is missing; set text (--text)"),
        (["--loss", "mse"], "embedding.loss: Input should be"),
        (["--text", "question", "--pair", "reply"], "there is no column 'reply'"),
        ([], "no column has a standard name; the columns are 'question', 'answer'"),
        (["--config", "{run}"], "these are not the settings of `finetune embed`"),
    ],
)
def test_mistakes_are_explained(
    run_cli: RunCli, model: Path, table: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    """A mistake exits with status 2, a message and no run directory."""
    (tmp_path / "run.toml").write_text("[task]\nname = 'rte'\n")
    options = [option.format(run=tmp_path / "run.toml") for option in options]
    completed = run_cli(
        "finetune", "embed", "--model", model, "--data", table, "--out", tmp_path / "run", *options
    )
    assert completed.status == 2
    assert message in completed.err
    assert not (tmp_path / "run").exists()


def test_prompts_of_queries_and_documents_are_used_in_search(
    run_cli: RunCli, model: Path, table: Path, tmp_path: Path
) -> None:
    """Lines of an index have the prompt of documents, and queries that of queries."""
    run, lines = tmp_path / "run", tmp_path / "lines.txt"
    options = ["--query-prompt", "ferry ", "--document-prompt", "river river "]
    completed = run_cli(
        "finetune", "embed", "--model", model, "--data", table, "--text", "question", "--pair",
        "answer", "--set", "schedule.steps=1", "--set", "run.threads=1", "--out", run, *options
    )  # fmt: skip
    assert completed.status == 0, completed.err
    lines.write_text("\n".join(SENTENCES))
    index = tmp_path / "lines.index"
    assert run_cli("embed", run, lines, "--out", index).status == 0
    embedder = Embedder.load(run)
    documents = embedder.encode(SENTENCES, prompt_name="document")
    np.testing.assert_allclose(np.load(index / "vectors.npy"), documents, rtol=0, atol=1e-6)
    for name, arguments in (("query", []), ("document", ["--prompt-name", "document"])):
        [query] = embedder.encode([SENTENCES[1]], prompt_name=name)
        output = run_cli("search", index, SENTENCES[1], "--json", *arguments).out
        cosines = {hit["text"]: hit["cosine"] for hit in json.loads(output)["hits"]}
        expected = dict(zip(SENTENCES, (documents @ query).tolist(), strict=True))
        assert cosines == pytest.approx({text: expected[text] for text in cosines}, abs=1e-5)
    plain = run_cli("embed", run, lines, "--out", tmp_path / "plain.npy")
    assert plain.status == 0, plain.err
    np.testing.assert_allclose(
        np.load(tmp_path / "plain.npy"), embedder.encode(SENTENCES), rtol=0, atol=1e-6
    )
