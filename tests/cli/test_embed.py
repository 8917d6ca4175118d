"""The command ``embed``, and errors of ``similar`` and ``search``."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bertsmith.cli.model_options import count_lines
from bertsmith.errors import InputError
from bertsmith.interop.sentence_transformers import write_sentence_transformers
from bertsmith.use import embed_chunks
from bertsmith.use import embed_lines as embed_lines_module
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.vector_settings import VectorSettings
from tests.cli.conftest import MAX_SEQLEN, MODEL_WIDTH, RunCli


def test_embed_without_out_prints_json_lines(
    run_cli: RunCli, model: Path, lines_file: Path
) -> None:
    """Each line gets a line of JSON, from a file, standard input or a compressed file."""
    options = ("--layer", -2, "--pooling", "max")
    completed = run_cli("embed", model, lines_file, *options)
    assert completed.status == 0, completed.err
    rows = [json.loads(line) for line in completed.out.splitlines()]
    texts = lines_file.read_text().split("\n")
    assert [row["text"] for row in rows] == texts
    expected = Embedder.load(model).encode(texts, layer=-2, pooling="max")
    np.testing.assert_allclose([row["vector"] for row in rows], expected, rtol=0, atol=1e-6)
    assert f"lines truncated to the model's {MAX_SEQLEN} tokens: 1" in completed.err
    from_stdin = run_cli("embed", model, "-", *options, stdin=lines_file.read_bytes())
    assert from_stdin.out == completed.out
    compressed = lines_file.with_name("lines.gz")
    compressed.write_bytes(gzip.compress(lines_file.read_bytes()))
    assert run_cli("embed", model, compressed, *options).out == completed.out


def test_terminal_input_is_embedded(run_cli: RunCli, model: Path) -> None:
    """Typed lines are embedded, and a message tells the user how to end the input."""
    completed = run_cli("embed", model, stdin=b"ferry\nriver\n", stdin_is_terminal=True)
    assert len(completed.out.splitlines()) == 2
    assert "Ctrl-D" in completed.err


@pytest.mark.parametrize("suffix", ["npy", "jsonl", "parquet", "index"])
def test_embed_writes_all_formats(
    run_cli: RunCli, model: Path, lines_file: Path, suffix: str
) -> None:
    """Each format contains the vectors, logs a next step, and is never overwritten."""
    out = lines_file.with_name(f"v.{suffix}")
    completed = run_cli("embed", model, lines_file, "--out", out, "--normalize", "--json")
    assert completed.status == 0, completed.err
    summary = {
        "out": str(out),
        "num_lines": 5,
        "num_added": 5,
        "width": MODEL_WIDTH,
        "num_truncated": 1,
        "unknown_share": 0.0,
    }
    assert json.loads(completed.out) == summary
    message = f"wrote {out}: 5 lines, one vector of {MODEL_WIDTH} numbers per line"
    assert message in completed.err
    assert "next: " in completed.err
    expected = Embedder.load(model).encode(lines_file.read_text().split("\n"), normalize=True)
    readers: dict[str, Callable[[], Any]] = {
        "npy": lambda: np.load(out),
        "jsonl": lambda: [json.loads(line)["vector"] for line in out.read_text().splitlines()],
        "parquet": lambda: [vector.as_py() for vector in pq.read_table(out)["vector"]],
        "index": lambda: np.load(out / "vectors.npy"),
    }
    np.testing.assert_allclose(readers[suffix](), expected, rtol=0, atol=1e-6)
    repeated = run_cli("embed", model, lines_file, "--out", out)
    assert repeated.status == 2
    assert "choose another name, or remove it" in repeated.err


def test_embed_options_equal_those_of_encode(
    run_cli: RunCli, model: Path, lines_file: Path
) -> None:
    """Layers, weights and special tokens have the same effect as in ``Embedder.encode``."""
    out = lines_file.with_name("v.npy")
    completed = run_cli(
        "embed", model, lines_file, "--out", out, "--layer", "-2,-1", "--combine", "weighted",
        "--weights", "0.25,2", "--no-special-tokens", "--no-normalize", "--batch-tokens", 30,
    )  # fmt: skip
    assert completed.status == 0, completed.err
    expected = Embedder.load(model).encode(
        lines_file.read_text().split("\n"),
        layer=[-2, -1],
        combine="weighted",
        weights=[0.25, 2],
        include_special_tokens=False,
    )
    np.testing.assert_allclose(np.load(out), expected, rtol=0, atol=1e-5)


def test_prompt_is_added_to_each_line(
    run_cli: RunCli, model: Path, lines_file: Path, tmp_path: Path
) -> None:
    """--prompt-name selects a prompt of the model, is part of a resumed run, and is checked."""
    prompted = tmp_path / "prompted"
    write_sentence_transformers(model, prompted)
    path = prompted / "config_sentence_transformers.json"
    path.write_text(json.dumps({"prompts": {"query": "the river: ", "document": ""}}))
    out = tmp_path / "v.npy"
    command = ("embed", prompted, lines_file, "--out", out, "--prompt-name")
    assert run_cli(*command, "query").status == 0
    texts = [f"the river: {text}" for text in lines_file.read_text().split("\n")]
    expected = Embedder.load(model).encode(texts, normalize=True)
    np.testing.assert_allclose(np.load(out), expected, rtol=0, atol=1e-5)
    out.unlink()
    completed = run_cli(*command, "question")
    assert completed.status == 2
    assert "unknown prompt 'question'; expected one of 'query', 'document'" in completed.err
    embedder = Embedder.load(prompted)
    lines = iter(["ferry"] * 3000)
    with pytest.raises(RuntimeError, match="interrupted"):
        embed_lines(embedder.with_prompt("query"), _interrupt(lines), out, VectorSettings())
    with pytest.raises(InputError, match="a different prompt name"):
        embed_lines(embedder.with_prompt("document"), ["ferry"] * 3000, out, VectorSettings())


def _interrupt_call(*_: Any) -> None:
    """Raise KeyboardInterrupt."""
    raise KeyboardInterrupt


def _interrupt(lines: Iterator[str]) -> Iterator[str]:
    """Yield all lines, then fail."""
    yield from lines
    raise RuntimeError("interrupted")


def test_old_name_of_the_special_tokens_option_is_accepted(
    run_cli: RunCli, model: Path, lines_file: Path
) -> None:
    """--no-special, the option of version 0.1, has the same effect as --no-special-tokens."""
    old_flag = run_cli("embed", model, lines_file, "--no-special").out
    assert old_flag == run_cli("embed", model, lines_file, "--no-special-tokens").out
    assert old_flag != run_cli("embed", model, lines_file).out


def test_pooling_none_prints_a_vector_per_token(
    run_cli: RunCli, model: Path, lines_file: Path
) -> None:
    """With --pooling none, a row has the tokens, their ids, offsets and vectors."""
    tokens = run_cli("embed", model, lines_file, "--pooling", "none")
    first_row = json.loads(tokens.out.splitlines()[0])
    assert len(first_row["tokens"]) == len(first_row["ids"]) == len(first_row["offsets"])
    assert np.shape(first_row["vectors"]) == (len(first_row["ids"]), MODEL_WIDTH)


def test_fast_vectors_are_nearly_exact(run_cli: RunCli, model: Path, lines_file: Path) -> None:
    """The cosine similarity of the vectors with and without --fast is above 0.995."""
    fast_rows = run_cli("embed", model, lines_file, "--fast").out.splitlines()
    exact_rows = run_cli("embed", model, lines_file).out.splitlines()
    fast = np.array([json.loads(row)["vector"] for row in fast_rows])
    exact = np.array([json.loads(row)["vector"] for row in exact_rows])
    norms = np.linalg.norm(fast, axis=1) * np.linalg.norm(exact, axis=1)
    cosines = (fast * exact).sum(1) / norms
    assert cosines.min() > 0.995
    assert (fast != exact).any()


@pytest.mark.slow
@pytest.mark.parametrize(("signal_number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_embed_continues(
    run_cli: RunCli, model: Path, tmp_path: Path, signal_number: signal.Signals, status: int
) -> None:
    """Ctrl-C and SIGTERM save; the same command completes the file. --resume has no effect."""
    out = tmp_path / "v.npy"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    text = "the ferry\n" * 30_000
    command = [sys.executable, "-m", "bertsmith", "embed", str(model), str(pipe), "--out", str(out)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        writer = pipe.open("w")
        # The pipe stays open, so the process waits for more lines when it is interrupted.
        writer.write(text)
        writer.flush()
        # Wait at most a minute for the first saved vectors.
        state = tmp_path / "v.npy.partial" / "state.json"
        for _ in range(600):
            if state.exists() and json.loads(state.read_text())["num_lines"]:
                break
            time.sleep(0.1)
        process.send_signal(signal_number)
        _, err = process.communicate(timeout=60)
        writer.close()
    assert process.returncode == status, err
    num_saved = json.loads(state.read_text())["num_lines"]
    message = f"stopped; {num_saved:,} lines are saved; run the same command again to continue"
    assert message in err.splitlines()
    assert "Traceback" not in err
    file = tmp_path / "lines.txt"
    file.write_text(text)
    rejected = run_cli("embed", model, file, "--out", out, "--pooling", "max")
    assert rejected.status == 2
    assert "started with a different pooling" in rejected.err
    # Earlier versions continued only with --resume.
    options = ["--resume"] if signal_number == signal.SIGTERM else []
    resumed = run_cli("embed", model, file, "--out", out, *options)
    assert resumed.status == 0, resumed.err
    assert ("the option --resume is no longer needed" in resumed.err) == bool(options)
    assert np.load(out).shape == (30_000, MODEL_WIDTH)


def _interrupt_second_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embed one chunk, and raise KeyboardInterrupt for all later ones."""
    encode_batches = Embedder.encode_batches
    num_chunks = 0

    def encode_first_chunk(*arguments: Any) -> Any:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks != 1:
            raise KeyboardInterrupt
        return encode_batches(*arguments)

    monkeypatch.setattr(Embedder, "encode_batches", encode_first_chunk)


def test_interrupted_embed_continues_with_the_same_column(
    run_cli: RunCli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another --text than that of the interrupted run is an error."""
    monkeypatch.setattr(embed_chunks, "_MAX_LINES", 1)
    table = tmp_path / "table.csv"
    table.write_text("title,body\nferry,the ferry\nriver,the river\n")
    command = ("embed", model, table, "--out", tmp_path / "v.npy", "--text")
    _interrupt_second_chunk(monkeypatch)
    assert run_cli(*command, "title").status == 130
    completed = run_cli(*command, "body")
    assert completed.status == 2
    assert "started with a different text column" in completed.err


def test_interrupted_embed_says_how_much_is_saved(
    run_cli: RunCli,
    model: Path,
    lines_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C reports the number of saved lines, or that nothing was saved and leaves no files."""
    monkeypatch.setattr(embed_chunks, "_MAX_LINES", 1)
    out = tmp_path / "new" / "v.npy"
    command = ("embed", model, lines_file, "--out", out)
    encode_batches = Embedder.encode_batches
    _interrupt_second_chunk(monkeypatch)
    completed = run_cli(*command)
    assert completed.status == 130
    assert "stopped; 1 line is saved; run the same command again to continue" in completed.err
    out = tmp_path / "new" / "w.npy"
    completed = run_cli("embed", model, lines_file, "--out", out)
    assert completed.status == 130
    assert "stopped; nothing was saved\n" in completed.err
    assert [path.name for path in out.parent.iterdir()] == ["v.npy.partial"]
    monkeypatch.setattr(Embedder, "encode_batches", encode_batches)
    assert run_cli(*command).status == 0
    with monkeypatch.context() as patch:
        patch.setattr(embed_lines_module, "sync", _interrupt_call)
        completed = run_cli("embed", model, lines_file, "--out", out)
    assert completed.status == 130
    assert f"stopped; {out} is complete\n" in completed.err
    assert sorted(path.name for path in out.parent.iterdir()) == ["v.npy", "w.npy"]
    np.testing.assert_allclose(
        np.load(tmp_path / "new" / "v.npy"),
        Embedder.load(model).encode(lines_file.read_text().split("\n")),
        rtol=0,
        atol=1e-5,
    )


def test_lines_of_plain_files_are_counted(tmp_path: Path, lines_file: Path) -> None:
    """Lines of plain files are counted; compressed files, stdin and missing files give None."""
    assert count_lines(str(lines_file)) == 5
    lines_file.write_text(lines_file.read_text() + "\n")
    assert count_lines(str(lines_file)) == 5
    (tmp_path / "empty").touch()
    assert count_lines(str(tmp_path / "empty")) == 0
    (tmp_path / "compressed").write_bytes(gzip.compress(b"a\nb\n"))
    assert count_lines(str(tmp_path / "compressed")) is None
    assert count_lines("-") is None
    assert count_lines(str(tmp_path / "nowhere")) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed", "MODEL", "nowhere.txt", "--out", "OUT.npy"], "nowhere.txt: no such file"),
        (["embed", "MODEL", "--out", "OUT.csv"], "expected a name that ends in .npy"),
        (["embed", "MODEL", "--layer", "9"], "no layer 9"),
        (["embed", "MODEL", "--layer", "-1,2"], "twice"),
        (["embed", "MODEL", "--layer", "a"], "--layer a: expected integers separated by commas"),
        (["embed", "MODEL", "--layer", "1.5"], "expected integers"),
        (["embed", "MODEL", "--pooling", "median"], "pooling"),
        (["embed", "MODEL", "--weights", "1"], "weights"),
        (["embed", "MODEL", "--pooling", "none", "--out", "OUT.npy"], "to .jsonl and .parquet"),
        (["embed", "nowhere"], "nowhere: no such file or directory"),
        (["embed", "LATIN", "--text", "x"], "a file, not a model; expected bertsmith embed MODEL"),
        (["embed", "MODEL", "LATIN", "--out", "OUT.npy"], "line 2: not UTF-8 (byte 0xe9)"),
        (["embed", "MODEL", "EMPTY", "--out", "OUT.npy"], "no line"),
        (["embed", "SINGLE", "--pooling", "pooled"], "no pooler"),
        (["similar", "MODEL", "EMPTY", "--word", "x"], "in none of the 0 texts"),
        (["similar", "MODEL", "--word", " "], "--word is empty"),
        (["search", "nowhere", "x"], "nowhere: does not exist; make an index with"),
        (["search", "MODEL", "x"], "not an index (it has no"),
        (["search", "INDEX", ""], "query 1 is empty"),
    ],
)
def test_invalid_arguments_are_errors(
    run_cli: RunCli,
    model: Path,
    model_without_nsp: Path,
    tmp_path: Path,
    lines_file: Path,
    arguments: list[str],
    message: str,
) -> None:
    """Invalid arguments exit with 2, print one message and write no file."""
    latin = tmp_path / "latin.txt"
    empty = tmp_path / "empty.txt"
    index = tmp_path / "v.index"
    latin.write_bytes(b"ferry\ncaf\xe9\n")
    empty.touch()
    if "INDEX" in arguments:
        run_cli("embed", model, lines_file, "--out", index)
    paths = {
        "MODEL": model,
        "SINGLE": model_without_nsp,
        "LATIN": latin,
        "EMPTY": empty,
        "INDEX": index,
    }
    files = sorted(tmp_path.iterdir())
    out = str(tmp_path / "out")
    words = [str(paths.get(word, word)).replace("OUT", out) for word in arguments]
    completed = run_cli(*words, stdin=b"x\n")
    assert completed.status == 2
    assert completed.err.count("error: ") == 1
    assert message in completed.err.partition("error: ")[2]
    assert sorted(tmp_path.iterdir()) == files


def test_embed_reads_a_table_column(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """The text column of a table is embedded and the other columns are kept."""
    table = tmp_path / "t.csv"
    out = tmp_path / "v.jsonl"
    table.write_text("id;review\n1;the ferry, again\n2;\n")
    completed = run_cli("embed", model, table, "--text", "review", "--out", out)
    assert completed.status == 0, completed.err
    message = f"wrote {out}: 2 rows, one vector of {MODEL_WIDTH} numbers per row"
    assert message in completed.err
    assert f"{table}: columns are separated by ';'" in completed.err
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["review"]) for row in rows] == [("1", "the ferry, again"), ("2", "")]
    expected = Embedder.load(model).encode(["the ferry, again", ""])
    np.testing.assert_allclose([row["vector"] for row in rows], expected, rtol=0, atol=1e-6)
    options = ("--text", "review", "--format", "csv")
    completed = run_cli("embed", model, *options, stdin=table.read_bytes())
    assert [json.loads(line)["id"] for line in completed.out.splitlines()] == ["1", "2"]
    completed = run_cli("embed", model, table)
    assert completed.status == 2
    assert "no column 'text'; the columns are 'id', 'review'" in completed.err
    json_file = tmp_path / "rows.jsonl"
    json_file.write_text('{"id": 1}\n{"text": "ferry"}\n')
    completed = run_cli("embed", model, json_file)
    assert completed.status == 2
    assert "rows.jsonl, line 1: there is no column 'text'; the columns are 'id'" in completed.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "ferry"}\n', "looks like JSONL"),
        (b'[\n{"text": "ferry"}]', "looks like JSON"),
        (b"id,text\n1,ferry\n", "looks like CSV"),
        (b"PK\x03\x04\0\0", "binary file"),
    ],
)
def test_embed_reads_a_table_as_lines_only_if_requested(
    run_cli: RunCli, model: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    """A table or a binary file is rejected as lines unless --format lines is given."""
    file = tmp_path / "a.dat"
    file.write_bytes(content)
    for completed in (run_cli("embed", model, file), run_cli("embed", model, stdin=content)):
        assert (completed.status, completed.out) == (2, "")
        assert message in completed.err
    assert run_cli("embed", model, file, "--format", "lines").status == 0
    completed = run_cli("embed", model, file, "--format", "lines", "--text", "x")
    assert completed.status == 2
    assert "read as one text per line, without columns" in completed.err


def test_embed_reads_other_encodings(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """--encoding applies to lines and tables; without it, the error suggests CP949."""
    text = "강을 건너는 배"
    (tmp_path / "l.txt").write_bytes(f"{text}\n".encode("cp949"))
    (tmp_path / "t.csv").write_bytes(f"text\n{text}\n".encode("cp949"))
    for name in ("l.txt", "t.csv"):
        completed = run_cli("embed", model, tmp_path / name)
        assert completed.status == 2
        assert "949" in completed.err
        completed = run_cli("embed", model, tmp_path / name, "--encoding", "cp949")
        assert json.loads(completed.out)["text"] == text
