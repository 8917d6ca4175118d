"""The command ``search``, and adding lines to its index."""

import json
import re
from pathlib import Path

import pytest

from bertsmith.use.search import search
from tests.cli.conftest import MODEL_WIDTH, SENTENCES, RunCli


def test_search_prints_the_most_similar_lines(
    run_cli: RunCli, model: Path, lines_file: Path
) -> None:
    """Cosine, line number and line of each hit are printed, as text or with --json."""
    index = lines_file.with_name("v.index")
    assert run_cli("embed", model, lines_file, "--out", index).status == 0
    completed = run_cli("search", index, SENTENCES[1], "--top", 2)
    assert completed.status == 0, completed.err
    rows = [row.strip().split("\t") for row in completed.out.splitlines()]
    assert rows[0] == ["1.0000", "2", SENTENCES[1]]
    assert len(rows) == 2
    inspected = run_cli("inspect", index)
    assert f"index {index}: 5 lines, vectors of {MODEL_WIDTH} numbers" in inspected.out
    assert re.search("pooling +default of the model", inspected.out)
    assert f"next: bertsmith search {index}" in inspected.err
    queries = "\n".join(SENTENCES[:2]).encode()
    completed = run_cli("search", index, "-", "--top", 1, "--exact", stdin=queries)
    assert [line.strip() for line in completed.out.splitlines()] == [
        SENTENCES[0],
        f"1.0000\t1\t{SENTENCES[0]}",
        SENTENCES[1],
        f"1.0000\t2\t{SENTENCES[1]}",
    ]
    interrupted = run_cli("search", index, "-", "--top", 1, "--exact", stdin=queries + b"\n\n")
    assert interrupted.status == 2
    assert interrupted.out == completed.out
    assert "query 3 is empty" in interrupted.err
    json_lines = run_cli("search", index, *SENTENCES[:2], "--json").out.splitlines()
    for line, hits in zip(json_lines, search(index, SENTENCES[:2]), strict=True):
        json_hits = json.loads(line)["hits"]
        assert [hit["line"] for hit in json_hits] == [hit.line for hit in hits]
        assert [hit["text"] for hit in json_hits] == [hit.text for hit in hits]


def test_embed_append_adds_lines(run_cli: RunCli, model: Path, lines_file: Path) -> None:
    """The next line number follows the old lines; the messages say how many were added."""
    index = lines_file.with_name("v.index")
    run_cli("embed", model, lines_file, "--out", index)
    exists = run_cli("embed", model, lines_file, "--out", index)
    assert "file exists; add the lines to it with --append, choose" in exists.err
    completed = run_cli("embed", model, "--out", index, "--append", "--json", stdin=b"a bridge\n")
    assert completed.status == 0, completed.err
    summary = json.loads(completed.out)
    assert (summary["num_lines"], summary["num_added"]) == (6, 1)
    assert f"added 1 line to {index}" in completed.err
    assert f"wrote {index}: 6 lines" in completed.err
    searched = run_cli("search", index, "a bridge", "--top", 1)
    assert searched.out.split() == ["1.0000", "6", "a", "bridge"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "v.npy"], "--append adds lines to an index; name it with --out NAME.index"),
        ([], "--append adds lines to an index"),
        (["--out", "nowhere.index"], "nowhere.index: no such directory; create an index with"),
        (["--out", "v.index", "--pooling", "max"], "embedded with a different pooling; use the"),
        (
            ["--out", "v.index", "--fast"],
            "embedded with a different value of --fast; use",
        ),
    ],
)
def test_invalid_append_is_an_error(
    run_cli: RunCli, model: Path, lines_file: Path, arguments: list[str], message: str
) -> None:
    """The index stays unchanged, and no file is created."""
    folder = lines_file.parent
    run_cli("embed", model, lines_file, "--out", folder / "v.index")
    contents = {path: path.read_bytes() for path in (folder / "v.index").iterdir()}
    paths = sorted(folder.iterdir())
    words = [str(folder / word) if "." in word else word for word in arguments]
    completed = run_cli("embed", model, lines_file, "--append", *words)
    assert (completed.status, completed.out) == (2, "")
    assert message in completed.err
    assert {path: path.read_bytes() for path in (folder / "v.index").iterdir()} == contents
    assert sorted(folder.iterdir()) == paths
