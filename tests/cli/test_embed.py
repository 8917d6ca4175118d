"""The verbs that make and compare vectors: embed, similar, search."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bertsmith.cli.embed import count_lines
from bertsmith.use.embed import Embedder
from bertsmith.use.search import search
from tests.cli.conftest import SENTENCES

Run = Callable[..., Any]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of five lines, the third one too long for the model, the last without its end."""
    file = tmp_path / "lines.txt"
    file.write_text("\n".join([*SENTENCES[:2], "ferry " * 60, "", SENTENCES[2]]), encoding="utf-8")
    return file


def test_embed_without_out_prints_lines_of_json(run: Run, model: Path, lines: Path) -> None:
    """A line of JSON for each line, with its vector; from a file, standard input, a packed file."""
    done = run("embed", model, lines, "--layer", -2, "--pooling", "max")
    assert done.status == 0, done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    texts = lines.read_text().split("\n")
    assert [own["text"] for own in found] == texts
    wanted = Embedder.load(model).encode(texts, layer=-2, pooling="max")
    np.testing.assert_allclose([own["vector"] for own in found], wanted, rtol=0, atol=1e-6)
    assert "lines cut off at the model's 43 tokens: 1" in done.err
    options = ("--layer", "-2", "--pooling", "max")
    assert run("embed", model, "-", *options, stdin=lines.read_bytes()).out == done.out
    packed = lines.with_name("lines.gz")
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    assert run("embed", model, packed, *options).out == done.out


def test_a_terminal_gets_each_vector_at_once(run: Run, model: Path) -> None:
    """A line that is typed is embedded by itself; the reader is told that it reads."""
    done = run("embed", model, stdin=b"ferry\nriver\n", terminal=True)
    assert len(done.out.splitlines()) == 2
    assert "Ctrl-D" in done.err


@pytest.mark.parametrize("form", ["npy", "jsonl", "parquet", "index"])
def test_embed_writes_every_form(run: Run, model: Path, lines: Path, form: str) -> None:
    """Each names what it wrote and what comes next, and is never written over."""
    out = lines.with_name(f"v.{form}")
    done = run("embed", model, lines, "--out", out, "--normalize", "--json")
    assert done.status == 0, done.err
    told = {"out": str(out), "lines": 5, "width": 22, "cut_off": 1, "unknown_share": 0.0}
    assert json.loads(done.out) == told
    assert f"wrote {out}: 5 lines, a vector a line, of 22 numbers" in done.err
    assert "next: " in done.err
    wanted = Embedder.load(model).encode(lines.read_text().split("\n"), normalize=True)
    read: dict[str, Callable[[], Any]] = {
        "npy": lambda: np.load(out),
        "jsonl": lambda: [json.loads(line)["vector"] for line in out.read_text().splitlines()],
        "parquet": lambda: [own.as_py() for own in pq.read_table(out)["vector"]],
        "index": lambda: np.load(out / "vectors.npy"),
    }
    np.testing.assert_allclose(read[form](), wanted, rtol=0, atol=1e-6)
    again = run("embed", model, lines, "--out", out)
    assert again.status == 2
    assert "it is there already; choose another name" in again.err


def test_embed_takes_all_its_options(run: Run, model: Path, lines: Path) -> None:
    """Several layers, weights, special tokens and batches are those of ``encode``."""
    out = lines.with_name("v.npy")
    done = run(
        "embed", model, lines, "--out", out, "--layer", "-2,-1", "--combine", "weighted",
        "--weights", "0.25,2", "--no-special", "--no-normalize", "--batch-tokens", 30,
    )  # fmt: skip
    assert done.status == 0, done.err
    wanted = Embedder.load(model).encode(
        lines.read_text().split("\n"), layer=[-2, -1], combine="weighted", weights=[0.25, 2],
        special=False,
    )  # fmt: skip
    np.testing.assert_allclose(np.load(out), wanted, rtol=0, atol=1e-5)
    tokens = run("embed", model, lines, "--pooling", "none")
    first = json.loads(tokens.out.splitlines()[0])
    assert len(first["tokens"]) == len(first["ids"]) == len(first["offsets"])
    assert np.shape(first["vectors"]) == (len(first["ids"]), 22)
    fast = run("embed", model, lines, "--fast")
    exact = run("embed", model, lines)
    one, other = (np.array([json.loads(line)["vector"] for line in done.out.splitlines()])
                  for done in (fast, exact))  # fmt: skip
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    assert cosines.min() > 0.995
    assert (one != other).any()


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(model: Path, tmp_path: Path) -> None:
    """Interrupted, the program leaves in peace; the same command with --resume ends the file."""
    out, pipe = tmp_path / "v.npy", tmp_path / "pipe"
    os.mkfifo(pipe)
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "bertsmith",
        "embed",
        model,
        pipe,
        "--out",
        out,
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = pipe.open("w")
        # Then nothing more comes: it is waiting when it is interrupted.
        lines.write("the ferry\n" * 30_000)
        lines.flush()
        state = tmp_path / "v.npy.partial" / "state.json"
        for _ in range(600):
            if state.exists() and json.loads(state.read_text())["lines"]:
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
        lines.close()
    assert process.returncode == 130, told
    assert "the same command with --resume goes on from there" in told
    assert "Traceback" not in told
    whole = tmp_path / "lines.txt"
    whole.write_text("the ferry\n" * 30_000)
    again: list[str | Path] = [
        sys.executable,
        "-m",
        "bertsmith",
        "embed",
        model,
        whole,
        "--out",
        out,
    ]
    refused = subprocess.run(again, capture_output=True, text=True, check=False, timeout=120)
    assert (refused.returncode, "--resume goes on with it" in refused.stderr) == (2, True)
    done = subprocess.run([*again, "--resume"], capture_output=True, text=True, timeout=120)  # noqa: PLW1510
    assert done.returncode == 0, done.stderr
    assert np.load(out).shape == (30_000, 22)


def test_lines_of_a_plain_file_are_counted(tmp_path: Path, lines: Path) -> None:
    """The progress bar's total: with or without a last line's end; nothing of what is packed."""
    assert count_lines(str(lines)) == 5
    lines.write_text(lines.read_text() + "\n")
    assert count_lines(str(lines)) == 5
    (tmp_path / "empty").touch()
    assert count_lines(str(tmp_path / "empty")) == 0
    (tmp_path / "packed").write_bytes(gzip.compress(b"a\nb\n"))
    assert count_lines(str(tmp_path / "packed")) is count_lines("-") is None
    assert count_lines(str(tmp_path / "nowhere")) is None


def test_similar_prints_distances(run: Run, model: Path, tmp_path: Path) -> None:
    """A row for each place with its distance to all, a picture beside it; --json has the same."""
    file, picture = tmp_path / "lines.txt", tmp_path / "ferry.png"
    file.write_text("\n".join([*SENTENCES[:2], "강의 ferry $5 $6"]))
    done = run("similar", model, file, "--word", "ferry", "--layer", -2, "--plot", picture)
    assert done.status == 0, done.err
    assert f"wrote {picture}" in done.err
    assert picture.read_bytes().startswith(b"\x89PNG")
    rows = [row.strip().split("\t") for row in done.out.splitlines()]
    assert [row[:2] for row in rows] == [
        ["1", "The [ferry] crossed the river twice…"],
        ["2", "…ch the ice had held the [ferry] fast."],
        ["3", "강의 [ferry] $5 $6"],
    ]
    found = json.loads(
        run(
            "similar", model, "--word", "ferry", "--layer", -2, "--json", stdin=file.read_bytes()
        ).out
    )
    shown = [[float(cell) for cell in row[2:]] for row in rows]
    np.testing.assert_allclose(shown, found["distances"], rtol=0, atol=6e-5)
    done = run("similar", model, "--word", "ferry", stdin=b"ferry\nriver\n")
    assert done.status == 2
    assert "text 2: the word 'ferry' is not in 'river'" in done.err
    done = run("similar", model, "--word", "ferry", "--skip-bad", stdin=b"ferry\nriver\nferry\n")
    assert "left out 1 lines without the word 'ferry'" in done.err
    many = run("similar", model, "--word", "ferry", stdin=b"the ferry\na ferry\n" * 10)
    assert re.fullmatch(
        r"  1\tthe \[ferry\]\t0\.0000 to 3\t0\.\d{4} to (2|4|20)", many.out.splitlines()[0]
    )
    assert "20 places; --json has the distances of all" in many.err


def test_search_prints_the_nearest_lines(run: Run, model: Path, lines: Path) -> None:
    """The cosine, the number and the line; several questions each under its own words; --json."""
    index = lines.with_name("v.index")
    assert run("embed", model, lines, "--out", index).status == 0
    done = run("search", index, SENTENCES[1], "--top", 2)
    assert done.status == 0, done.err
    rows = [row.strip().split("\t") for row in done.out.splitlines()]
    assert rows[0] == ["1.0000", "2", SENTENCES[1]]
    assert len(rows) == 2
    shown = run("inspect", index)
    assert f"index {index}: 5 lines, vectors of 22 numbers" in shown.out
    assert f"next: bertsmith search {index}" in shown.err
    both = run("search", index, "-", "--top", 1, "--exact", stdin="\n".join(SENTENCES[:2]).encode())
    assert [line.strip() for line in both.out.splitlines()] == [
        SENTENCES[0], f"1.0000\t1\t{SENTENCES[0]}", SENTENCES[1], f"1.0000\t2\t{SENTENCES[1]}",
    ]  # fmt: skip
    found = [json.loads(line) for line in
             run("search", index, *SENTENCES[:2], "--json").out.splitlines()]  # fmt: skip
    for one, wanted in zip(found, search(index, SENTENCES[:2]), strict=True):
        assert [hit["line"] for hit in one["hits"]] == [hit.line for hit in wanted]
        assert [hit["text"] for hit in one["hits"]] == [hit.text for hit in wanted]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["embed", "MODEL", "nowhere.txt", "--out", "OUT.npy"], "nowhere.txt: cannot be read"),
        (["embed", "MODEL", "--out", "OUT.csv"], "expected a name that ends in .npy"),
        (["embed", "MODEL", "--resume"], "name it with --out"),
        (["embed", "MODEL", "--layer", "9"], "there is no layer 9 in a model of 2"),
        (["embed", "MODEL", "--layer", "-1,2"], "a layer stands there twice"),
        (["embed", "MODEL", "--layer", "a"], "--layer a: expected numbers, parted by commas"),
        (["embed", "MODEL", "--layer", "1.5"], "expected whole numbers"),
        (["embed", "MODEL", "--pooling", "median"], "pooling"),
        (["embed", "MODEL", "--weights", "1"], "weights belong to"),
        (["embed", "MODEL", "--pooling", "none", "--out", "OUT.npy"], "fits .jsonl and .parquet"),
        (["embed", "nowhere"], "nowhere: no such file or directory"),
        (["embed", "MODEL", "LATIN", "--out", "OUT.npy"], "line 2: not UTF-8 (byte 0xe9)"),
        (["embed", "MODEL", "EMPTY", "--out", "OUT.npy"], "there is no line to embed"),
        (["embed", "SINGLE", "--pooling", "pooled"], "has no pooler"),
        (["similar", "MODEL", "EMPTY", "--word", "x"], "in none of the 0 texts"),
        (["similar", "MODEL", "--word", " "], "is not in"),
        (["search", "nowhere", "x"], "nowhere: there is nothing; make an index with"),
        (["search", "MODEL", "x"], "not an index (no"),
        (["search", "INDEX", ""], "question 1 is empty"),
    ],
)
def test_mistakes_are_one_message(
    run: Run,
    model: Path,
    model_without_pairs: Path,
    tmp_path: Path,
    lines: Path,
    arguments: list[str],
    message: str,
) -> None:
    """A user's mistake ends with status 2, one message that says what to do, and nothing behind."""
    latin, empty, index = (tmp_path / name for name in ("latin.txt", "empty.txt", "v.index"))
    latin.write_bytes(b"ferry\ncaf\xe9\n")
    empty.touch()
    if "INDEX" in arguments:
        run("embed", model, lines, "--out", index)
    places = {"MODEL": model, "SINGLE": model_without_pairs, "LATIN": latin, "EMPTY": empty,
              "INDEX": index}  # fmt: skip
    before = sorted(tmp_path.iterdir())
    words = [
        str(places.get(word, word)).replace("OUT", str(tmp_path / "out")) for word in arguments
    ]
    done = run(*words, stdin=b"x\n")
    assert done.status == 2
    assert done.err.count("error: ") == 1
    assert message in done.err.partition("error: ")[2]
    assert sorted(tmp_path.iterdir()) == before


def test_embed_reads_a_column_of_a_table(run: Run, model: Path, tmp_path: Path) -> None:
    """By its suffix or --format; the rows' columns go along, and a wrong column is named."""
    table, out = tmp_path / "t.csv", tmp_path / "v.jsonl"
    table.write_text("id;review\n1;the ferry, again\n2;\n")
    done = run("embed", model, table, "--text", "review", "--out", out)
    assert done.status == 0, done.err
    assert f"wrote {out}: 2 rows, a vector a row, of 22 numbers" in done.err
    assert f"{table}: columns are separated by ';'" in done.err
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["id"], row["review"]) for row in found] == [("1", "the ferry, again"), ("2", "")]
    expected = Embedder.load(model).encode(["the ferry, again", ""])
    np.testing.assert_allclose([row["vector"] for row in found], expected, rtol=0, atol=1e-6)
    done = run("embed", model, "--text", "review", "--format", "csv", stdin=table.read_bytes())
    assert [json.loads(line)["id"] for line in done.out.splitlines()] == ["1", "2"]
    done = run("embed", model, table)
    assert (done.status, "no column 'text'; the columns are 'id', 'review'" in done.err) == (
        2,
        True,
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "ferry"}\n', "looks like JSONL"),
        (b'[\n{"text": "ferry"}]', "looks like JSON"),
        (b"id,text\n1,ferry\n", "looks like CSV"),
        (b"PK\x03\x04\0\0", "not text, but a binary file"),
    ],
)
def test_embed_refuses_a_table_as_lines(
    run: Run, model: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    """Unless that is what is asked for."""
    (tmp_path / "a.dat").write_bytes(content)
    for done in (run("embed", model, tmp_path / "a.dat"), run("embed", model, stdin=content)):
        assert (done.status, done.out) == (2, "")
        assert message in done.err
    done = run("embed", model, tmp_path / "a.dat", "--format", "lines")
    assert done.status == 0
    done = run("embed", model, tmp_path / "a.dat", "--format", "lines", "--text", "x")
    assert (done.status, "a text on each line, which has no columns" in done.err) == (2, True)


def test_embed_reads_other_encodings(run: Run, model: Path, tmp_path: Path) -> None:
    """Of lines and of tables; the error for Korean text names its usual encoding."""
    text = "강을 건너는 배"
    (tmp_path / "l.txt").write_bytes(f"{text}\n".encode("cp949"))
    (tmp_path / "t.csv").write_bytes(f"text\n{text}\n".encode("cp949"))
    for name in ("l.txt", "t.csv"):
        done = run("embed", model, tmp_path / name)
        assert (done.status, "949" in done.err) == (2, True)
        done = run("embed", model, tmp_path / name, "--encoding", "cp949")
        assert json.loads(done.out)["text"] == text
