"""The verbs that ask a model: fill, pair, score."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertsmith.bundle import load
from bertsmith.use.fill import fill
from bertsmith.use.pair import pair
from bertsmith.use.score import score

Run = Callable[..., Any]


def test_fill_prints_words_and_probabilities(run: Run, model: Path) -> None:
    """Without a terminal: the text, then a line a word with its share; each mask by itself."""
    done = run("fill", model, "the [MASK] crossed the [MASK]", "--top", 3, "--device", "cpu")
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == "the [MASK] crossed the [MASK]"
    assert lines[1] == "[MASK] 1 of 2, by itself"
    assert lines[5] == "[MASK] 2 of 2, by itself"
    first, _ = fill(load(model), lines[0], top=3)
    shown = [line.split() for line in lines[2:5]]
    assert shown == [[f"{share:.2%}", word] for word, share in first.words]


def test_fill_draws_bars_on_a_terminal(
    run: Run, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal each word has a bar of its probability."""
    monkeypatch.setattr("rich.console.Console.is_terminal", property(lambda _: True))
    done = run("fill", model, "the [MASK]")
    assert done.status == 0, done.err
    assert len([line for line in done.out.splitlines() if set("█▉▊▋▌▍▎▏") & set(line)]) == 5


def test_fill_json_holds_the_numbers(run: Run, model: Path) -> None:
    """--json gives an object a text, with the places and the words that the library gives."""
    texts = ["a [MASK] ferry", "[MASK] river [MASK]"]
    done = run("fill", model, "-", "--json", "--top", 2, stdin="\n".join(texts).encode())
    found = [json.loads(line) for line in done.out.splitlines()]
    assert [one["text"] for one in found] == texts
    for one in found:
        wanted = fill(model, one["text"], top=2)
        assert [mask["place"] for mask in one["masks"]] == [mask.place for mask in wanted]
        for mask, other in zip(one["masks"], wanted, strict=True):
            assert [word for word, _ in mask["words"]] == [word for word, _ in other.words]
            shares = [share for _, share in other.words]
            assert [share for _, share in mask["words"]] == pytest.approx(shares, abs=1e-6)


def test_pair_says_the_probability(run: Run, model: Path) -> None:
    """Two arguments give one sentence; lines with a tab give a row each; --json the number."""
    a, b = "The ferry crossed the river.", "Nobody remembered a winter."
    wanted = pair(model, a, b)
    assert run("pair", model, a, b).out == f"B follows A with probability {wanted:.4f}\n"
    both = run("pair", model, "-", stdin=f"{a}\t{b}\n{b}\t{a}\n".encode()).out.splitlines()
    assert both[0].split("\t") == [f"{wanted:.6f}", a, b]
    assert both[1].split("\t")[1:] == [b, a]
    found = json.loads(run("pair", model, a, b, "--json").out)
    assert found == {"a": a, "b": b, "follows": pytest.approx(wanted), "left_out": 0}


def test_pair_tells_of_a_cut(run: Run, model: Path) -> None:
    """A pair cut to the model's length is not cut in silence."""
    done = run("pair", model, "ferry " * 50, "river")
    assert done.status == 0
    assert "pairs cut to the model's length (A's front, B's end): 1" in done.err


def test_score_rows_sums_and_problems(run: Run, model: Path, tmp_path: Path) -> None:
    """Every line of a file has its row; the sums and the lines without a score are said."""
    lines = ["The ferry crossed.", "", "ferry " * 60, "river"]
    file = tmp_path / "lines.txt"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    done = run("score", model, file)
    rows = [row.split("\t") for row in done.out.splitlines()]
    assert len(rows) == 4
    bundle = load(model)
    for index in (0, 3):
        wanted = score(bundle, lines[index])
        figures = [wanted.total, wanted.per_token, wanted.perplexity, len(wanted.tokens)]
        assert [float(cell) for cell in rows[index][:4]] == pytest.approx(figures, abs=1e-3)
        assert rows[index][4] == lines[index]
    assert rows[1][:4] == rows[2][:4] == ["-"] * 4
    assert rows[1][5].startswith("(empty")
    assert rows[2][5].startswith("(too long")
    assert "lines scored: 2;" in done.err
    assert "lines without a score: 1 (empty)" in done.err
    assert "lines without a score: 1 (too long)" in done.err


def test_score_reads_stdin_arguments_and_packed_files(
    run: Run, model: Path, tmp_path: Path
) -> None:
    """The same lines give the same rows, wherever they come from."""
    text = "The ferry crossed.\nthe old pilot\n"
    packed = tmp_path / "lines.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    wanted = run("score", model, packed).out
    assert len(wanted.splitlines()) == 2
    assert run("score", model, stdin=text.encode()).out == wanted
    assert run("score", model, "-", stdin=text.encode()).out == wanted
    first, second = text.splitlines()
    assert run("score", model, "--text", first, "--text", second).out == wanted


def test_score_json_with_tokens(run: Run, model: Path) -> None:
    """--json --tokens holds each token's share of the sum, and a problem where there is one."""
    done = run("score", model, "--json", "--tokens", stdin=b"the old pilot\n\n")
    scored, empty = [json.loads(line) for line in done.out.splitlines()]
    assert scored["tokens"] == len(scored["each"])
    assert sum(value for _, value in scored["each"]) == pytest.approx(scored["log_likelihood"])
    assert empty == {"line": 2, "text": "", "problem": "empty: there is no token to predict"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fill", "MODEL", "no mask here"], "no [MASK] in 'no mask here'"),
        (["fill", "MODEL", "[MASK]", "--device", "tpu"], "expected auto, cpu, cuda or cuda:N"),
        (["fill", "MODEL", "[MASK]", "--device", "cuda:99"], "CUDA devices here"),
        (["fill", "nowhere", "[MASK]"], "nowhere: no such file or directory"),
        (["pair", "SINGLE", "a", "b"], "no next-sentence head"),
        (["pair", "MODEL", "a"], "one text was given; expected two"),
        (["pair", "MODEL", "-"], "no tab in 'x'"),
        (["score", "MODEL", "nowhere.txt"], "nowhere.txt: cannot be read: No such file"),
        (["score", "MODEL", "x.txt", "--text", "x"], "expected one of them"),
        (["score", "MODEL", "DAMAGED"], "a damaged or cut-off archive"),
        (["score", "MODEL", "LATIN"], "line 2: not UTF-8 (byte 0xe9)"),
    ],
)
def test_mistakes_are_one_message(
    run: Run,
    model: Path,
    model_without_pairs: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    """A user's mistake ends with status 2 and one message that says what to do."""
    damaged, latin = tmp_path / "damaged.gz", tmp_path / "latin.txt"
    damaged.write_bytes(gzip.compress(b"The ferry crossed the river.\n" * 999)[:50])
    latin.write_bytes(b"ferry\ncaf\xe9\n")
    places = {"MODEL": model, "SINGLE": model_without_pairs, "DAMAGED": damaged, "LATIN": latin}
    done = run(*[places.get(word, word) for word in arguments], stdin=b"x\n")
    assert done.status == 2
    assert done.err.count("error: ") == 1
    assert message in done.err.partition("error: ")[2]


def test_a_terminal_is_told_that_it_is_read(run: Run, model: Path) -> None:
    """Whoever forgot the file sees why nothing happens; a pipe is read without a word."""
    assert "Ctrl-D" in run("score", model, stdin=b"ferry\n", terminal=True).err
    assert "Ctrl-D" not in run("score", model, stdin=b"ferry\n").err
