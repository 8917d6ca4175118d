"""The commands ``fill``, ``pair`` and ``score``."""

import codecs
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertsmith.bundle import load
from bertsmith.use.fill import fill
from bertsmith.use.pair import pair
from bertsmith.use.score import score
from tests.cli.conftest import RunCli


def test_fill_prints_words_and_probabilities(run_cli: RunCli, model: Path) -> None:
    """The text is printed, then the probabilities and words of each mask."""
    text = "the [MASK] crossed the [MASK]"
    completed = run_cli("fill", model, text, "--top", 3, "--device", "cpu")
    assert completed.status == 0, completed.err
    lines = completed.out.splitlines()
    assert lines[0] == text
    assert lines[1] == "[MASK] 1 of 2, predicted independently"
    assert lines[5] == "[MASK] 2 of 2, predicted independently"
    first_filling, _ = fill(load(model), text, top=3)
    assert [line.split() for line in lines[2:5]] == [
        [f"{probability:.2%}", word] for word, probability in first_filling.predictions
    ]


def test_fill_draws_bars_on_a_terminal(
    run_cli: RunCli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal each word has a bar of its probability."""
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda _: True))
    completed = run_cli("fill", model, "the [MASK]")
    assert completed.status == 0, completed.err
    bars = [line for line in completed.out.splitlines() if set("█▉▊▋▌▍▎▏") & set(line)]
    assert len(bars) == 5


def test_fill_json_equals_the_python_api(run_cli: RunCli, model: Path) -> None:
    """--json prints an object per text with the positions, words and probabilities."""
    texts = ["a [MASK] ferry", "[MASK] river [MASK]"]
    completed = run_cli("fill", model, "-", "--json", "--top", 2, stdin="\n".join(texts).encode())
    rows = [json.loads(line) for line in completed.out.splitlines()]
    assert [row["text"] for row in rows] == texts
    for row in rows:
        fillings = fill(model, row["text"], top=2)
        assert [mask["start"] for mask in row["masks"]] == [filling.start for filling in fillings]
        for mask, filling in zip(row["masks"], fillings, strict=True):
            assert [word for word, _ in mask["predictions"]] == [
                word for word, _ in filling.predictions
            ]
            expected = [probability for _, probability in filling.predictions]
            actual = [probability for _, probability in mask["predictions"]]
            assert actual == pytest.approx(expected, abs=1e-6)


def test_pair_prints_the_probability(run_cli: RunCli, model: Path) -> None:
    """Two arguments print a sentence, lines of stdin print rows, and --json prints an object."""
    a, b = "The ferry crossed the river.", "Nobody remembered a winter."
    probability = pair(model, a, b)
    assert run_cli("pair", model, a, b).out == f"B follows A with probability {probability:.4f}\n"
    rows = run_cli("pair", model, "-", stdin=f"{a}\t{b}\n{b}\t{a}\n".encode()).out.splitlines()
    assert rows[0].split("\t") == [f"{probability:.6f}", a, b]
    assert rows[1].split("\t")[1:] == [b, a]
    row = json.loads(run_cli("pair", model, a, b, "--json").out)
    assert row == {
        "a": a,
        "b": b,
        "next_sentence_probability": pytest.approx(probability),
        "num_removed_tokens": 0,
    }


def test_pair_reports_truncation(run_cli: RunCli, model: Path) -> None:
    """Truncated pairs are counted on stderr."""
    completed = run_cli("pair", model, "ferry " * 50, "river")
    assert completed.status == 0
    message = "pairs truncated to the model's length (A at its start, B at its end): 1"
    assert message in completed.err


def test_score_prints_rows_totals_and_problems(
    run_cli: RunCli, model: Path, tmp_path: Path
) -> None:
    """Each line has a row; totals and lines without a score are reported on stderr."""
    lines = ["The ferry crossed.", "", "ferry " * 60, "river"]
    file = tmp_path / "lines.txt"
    file.write_bytes(codecs.BOM_UTF8 + "\r\n".join(lines).encode())
    completed = run_cli("score", model, file)
    rows = [row.split("\t") for row in completed.out.splitlines()]
    assert len(rows) == 4
    bundle = load(model)
    for index in (0, 3):
        line_score = score(bundle, lines[index])
        expected = [
            line_score.total,
            line_score.per_token,
            line_score.perplexity,
            len(line_score.tokens),
        ]
        assert [float(cell) for cell in rows[index][:4]] == pytest.approx(expected, abs=1e-3)
        assert rows[index][4] == lines[index]
    assert rows[1][:4] == rows[2][:4] == ["-"] * 4
    assert rows[1][5].startswith("(empty")
    assert rows[2][5].startswith("(too long")
    assert "lines scored: 2;" in completed.err
    assert "lines without a score: 1 (empty)" in completed.err
    assert "lines without a score: 1 (too long)" in completed.err


def test_score_reads_stdin_arguments_and_compressed_files(
    run_cli: RunCli, model: Path, tmp_path: Path
) -> None:
    """The same lines give the same rows from every kind of input."""
    text = "The ferry crossed.\nthe old pilot\n"
    compressed = tmp_path / "lines.gz"
    compressed.write_bytes(gzip.compress(text.encode()))
    expected = run_cli("score", model, compressed).out
    assert len(expected.splitlines()) == 2
    assert run_cli("score", model, stdin=text.encode()).out == expected
    assert run_cli("score", model, "-", stdin=text.encode()).out == expected
    first, second = text.splitlines()
    assert run_cli("score", model, "--text", first, "--text", second).out == expected


def test_score_json_with_tokens(run_cli: RunCli, model: Path) -> None:
    """--json --tokens contains each token's log-probability, or the problem of a line."""
    completed = run_cli("score", model, "--json", "--tokens", stdin=b"the old pilot\n\n")
    scored, empty = [json.loads(line) for line in completed.out.splitlines()]
    assert scored["num_tokens"] == len(scored["token_log_probabilities"])
    total = sum(log_probability for _, log_probability in scored["token_log_probabilities"])
    assert total == pytest.approx(scored["pseudo_log_likelihood"])
    assert empty == {"line": 2, "text": "", "error": empty["error"]}
    assert empty["error"].startswith("empty: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fill", "MODEL", "no mask here"], "no [MASK] in 'no mask here'"),
        (["fill", "MODEL", "[MASK]", "--device", "tpu"], "expected auto, cpu, cuda or cuda:N"),
        (["fill", "MODEL", "[MASK]", "--device", "cuda:99"], "CUDA devices here"),
        (["fill", "nowhere", "[MASK]"], "nowhere: no such file or directory"),
        (["pair", "SINGLE", "a", "b"], "no next-sentence head"),
        (["pair", "MODEL", "a"], "only one text: expected A and B"),
        (["pair", "MODEL", "-"], "no tab in 'x'"),
        (["pair", "MODEL", "-", "b"], "B is 'b', but - reads both texts"),
        (["pair", "MODEL", "a", "-"], "B is '-', but - reads both texts"),
        (["score", "MODEL", "nowhere.txt"], "nowhere.txt: no such file"),
        (
            ["score", "MODEL", "a long text " * 30],
            "to score a text instead of a file, use --text",
        ),
        (["score", "MODEL", "x.txt", "--text", "x"], "use one of them"),
        (["score", "MODEL", "--text", "x", "--format", "lines"], "--format: not valid with --text"),
        (["fill", "MODEL", "[MASK]", "--format", "lines"], "--format: only valid with -"),
        (["fill", "MODEL", "[MASK]", "-"], "- reads all texts from standard input; remove the"),
        (["score", "MODEL", "DAMAGED"], "damaged or truncated archive"),
        (["score", "MODEL", "LATIN"], "line 2: not UTF-8 (byte 0xe9)"),
    ],
)
def test_invalid_arguments_are_errors(
    run_cli: RunCli,
    model: Path,
    model_without_nsp: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    """Invalid arguments exit with 2 and print one message."""
    damaged = tmp_path / "damaged.gz"
    latin = tmp_path / "latin.txt"
    damaged.write_bytes(gzip.compress(b"The ferry crossed the river.\n" * 999)[:50])
    latin.write_bytes(b"ferry\ncaf\xe9\n")
    paths = {"MODEL": model, "SINGLE": model_without_nsp, "DAMAGED": damaged, "LATIN": latin}
    completed = run_cli(*[paths.get(word, word) for word in arguments], stdin=b"x\n")
    assert completed.status == 2
    assert completed.err.count("error: ") == 1
    assert message in completed.err.partition("error: ")[2]


def test_reading_from_a_terminal_is_announced(run_cli: RunCli, model: Path) -> None:
    """A message tells the user to type if stdin is a terminal, but not if it is a pipe."""
    assert "Ctrl-D" in run_cli("score", model, stdin=b"ferry\n", stdin_is_terminal=True).err
    assert "Ctrl-D" not in run_cli("score", model, stdin=b"ferry\n").err


@pytest.mark.parametrize("command", ["fill", "score", "similar", "search"])
def test_tables_are_not_read_as_lines(
    run_cli: RunCli, model: Path, tmp_path: Path, command: str
) -> None:
    """A table or a binary file is rejected as lines unless --format lines is given."""
    json_line = b'{"text": "the river [MASK]"}\n'
    plain = tmp_path / "plain.txt"
    plain.write_bytes(b"the river [MASK]\n" * 3)
    index = tmp_path / "lines.index"
    if command == "search":
        assert run_cli("embed", model, plain, "--out", index).status == 0
    arguments: list[object] = [index if command == "search" else model, "-"]
    if command == "similar":
        arguments += ["--word", "river"]
    for content, message in (
        (json_line, "standard input: this looks like JSONL, not like one text per line"),
        (b"id,text\n1,the river [MASK]\n", "this looks like CSV"),
        (b"PK\x03\x04\0\0", "standard input: binary file; expected text"),
    ):
        completed = run_cli(command, *arguments, stdin=content)
        assert (completed.status, completed.out) == (2, ""), content
        assert message in completed.err
    completed = run_cli(command, *arguments, "--format", "lines", stdin=json_line * 2)
    assert completed.status == 0, completed.err
    assert "river" in completed.out
    if command in ("fill", "search"):
        # These commands have no FILE argument.
        return
    for name in ("a.csv", "a.tsv.gz", "a.jsonl", "a.json", "a.parquet"):
        table = tmp_path / name
        table.write_bytes(plain.read_bytes())
        completed = run_cli(command, model, table, *arguments[2:])
        assert (completed.status, completed.out) == (2, "")
        assert re.search(rf"{name}: a table \([A-Z]+\), not .* use --format lines", completed.err)
    completed = run_cli(command, model, tmp_path / "a.csv", *arguments[2:], "--format", "lines")
    assert completed.status == 0, completed.err
    assert "river" in completed.out


@pytest.mark.parametrize(
    ("arguments", "get_number"),
    [
        (["fill", "MODEL", "[MASK]", "--json"], lambda row: row["masks"][0]["predictions"][0][1]),
        (["pair", "MODEL", "the", "ferry", "--json"], lambda row: row["next_sentence_probability"]),
        (["score", "MODEL", "--text", "the ferry", "--json"], lambda row: row["pseudo_perplexity"]),
    ],
    ids=["fill", "pair", "score"],
)
def test_fast_results_are_similar(
    run_cli: RunCli, model: Path, arguments: list[str], get_number: Callable[[Any], float]
) -> None:
    """With --fast, probabilities and scores differ a little from those in float32."""
    command = [str(model) if argument == "MODEL" else argument for argument in arguments]
    exact, fast = (
        get_number(json.loads(run_cli(*command, *options).out)) for options in ([], ["--fast"])
    )
    assert exact != fast
    assert exact == pytest.approx(fast, rel=0.05)
