"""Lines embedded into files: each form, stopping at any moment, and what stands in the way.

These tests never compare vectors with another library's: tests/use/test_embed.py does.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from bertsmith.errors import InputError
from bertsmith.use import embed_lines as embedfile
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import EmbeddingSummary, embed_lines
from bertsmith.use.table_input import Record
from bertsmith.use.vector_settings import build_vector_settings
from bertsmith.use.vector_writers import JsonlWriter, TableColumns
from tests.use.conftest import TEXT

#: Characters that end a line elsewhere, part cells, or are none; and a line without any.
ODD = [
    "one\u2028line",
    "a\ttab",
    "a\0zero",
    "",
    "  ",
    "\x85next",
    "\ufeffmark",
    "대장간의 망치",
    "\r",
]
LINES = [*TEXT, *ODD, "the smith " * 60, *reversed(TEXT), *(f"{n} hammers" for n in range(20))]

PLAIN, TOKENS = build_vector_settings(), build_vector_settings(pooling="none")


@pytest.fixture(scope="module")
def embedder(directory: Path) -> Embedder:
    """The random model of two layers."""
    return Embedder.load(directory)


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedfile, "_LINES", 7)


def test_an_array_is_what_encode_returns(embedder: Embedder, tmp_path: Path) -> None:
    """Its bytes are those of numpy.save; lines that were cut off are counted."""
    told = embed_lines(embedder, LINES, tmp_path / "new" / "v.npy", PLAIN)
    ids = [number for line in LINES for number in embedder.tokenizer.encode(line)]
    assert told.unknown_share == ids.count(embedder.tokenizer.unk_id) / len(ids) > 0
    assert told == EmbeddingSummary(
        tmp_path / "new" / "v.npy", len(LINES), 26, 1, told.unknown_share
    )
    found = np.load(told.path)
    np.testing.assert_allclose(found, embedder.encode(LINES), rtol=0, atol=1e-6)
    np.save(tmp_path / "same.npy", found)
    assert told.path.read_bytes() == (tmp_path / "same.npy").read_bytes()
    assert list(told.path.parent.iterdir()) == [told.path]


def test_lines_of_json_hold_the_exact_numbers(embedder: Embedder, tmp_path: Path) -> None:
    """Each line has its text and its float32 vector, digit for digit; or its tokens with theirs."""
    array = embed_lines(embedder, LINES, tmp_path / "v.npy", PLAIN).path
    path = embed_lines(embedder, LINES, tmp_path / "v.jsonl", PLAIN).path
    read = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert [own["text"] for own in read] == LINES
    assert np.array_equal(np.array([own["vector"] for own in read], np.float32), np.load(array))
    path = embed_lines(embedder, LINES, tmp_path / "t.jsonl", TOKENS).path
    read = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    for own, wanted in zip(read, embedder.encode_tokens(LINES), strict=True):
        assert (own["tokens"], own["ids"]) == (wanted.tokens, wanted.ids)
        assert list(map(tuple, own["offsets"])) == wanted.offsets
        np.testing.assert_allclose(own["vectors"], wanted.vectors, rtol=0, atol=1e-5)


def test_a_number_that_is_none_is_null(tmp_path: Path) -> None:
    """NaN is no JSON: it becomes null, beside numbers that stay."""
    sink = JsonlWriter(tmp_path / "v.jsonl", 0)
    sink.append(["a"], np.array([[np.nan, 0.1]], np.float32))
    sink.commit()
    sink.close()
    vector = json.loads((tmp_path / "v.jsonl").read_text())["vector"]
    assert (vector[0], np.float32(vector[1])) == (None, np.float32(0.1))


def test_tables_hold_the_same(embedder: Embedder, tmp_path: Path) -> None:
    """A Parquet table has text and vector, or text, tokens, ids, offsets and vectors."""
    array = embed_lines(embedder, LINES, tmp_path / "v.npy", PLAIN).path
    table = pq.read_table(embed_lines(embedder, LINES, tmp_path / "v.parquet", PLAIN).path)
    assert table["text"].to_pylist() == LINES
    assert np.array_equal(np.float32(table["vector"].to_pylist()), np.load(array))
    table = pq.read_table(embed_lines(embedder, LINES, tmp_path / "t.parquet", TOKENS).path)
    lines = embed_lines(embedder, LINES, tmp_path / "t.jsonl", TOKENS).path
    for row, line in zip(table.to_pylist(), lines.read_bytes().split(b"\n"), strict=False):
        wanted = json.loads(line)
        assert np.array_equal(np.float32(row.pop("vectors")), np.float32(wanted.pop("vectors")))
        assert row == wanted
    assert table.num_rows == len(LINES)


def test_rows_of_a_table_keep_their_columns(embedder: Embedder, tmp_path: Path) -> None:
    """In JSON lines and Parquet; arrays hold the vectors alone, which are those of the lines."""
    table = [
        Record(text, {"n": n, "text": text, "maybe": n or None}) for n, text in enumerate(LINES)
    ]
    columns = TableColumns(["n", "text", "maybe"], {"vector": "predicted_vector"})
    array = embed_lines(embedder, LINES, tmp_path / "v.npy", PLAIN).path
    for name in ("r.npy", "r.jsonl", "r.parquet"):
        embed_lines(embedder, table, tmp_path / name, PLAIN, columns=columns)
    assert (tmp_path / "r.npy").read_bytes() == array.read_bytes()
    read = [json.loads(line) for line in (tmp_path / "r.jsonl").read_bytes().split(b"\n")[:-1]]
    for found in (read, pq.read_table(tmp_path / "r.parquet").to_pylist()):
        vectors = np.array([row.pop("predicted_vector") for row in found], np.float32)
        assert np.array_equal(vectors, np.load(array))
        assert found == [row.cells for row in table]


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl", "v.parquet"])
def test_a_stopped_table_goes_on(embedder: Embedder, tmp_path: Path, name: str) -> None:
    """With the same rows, to the same file; another cell before the place is refused."""
    table = [Record(text, {"n": n, "text": text}) for n, text in enumerate(LINES)]
    columns = TableColumns(["n", "text"], {})

    def stopped() -> Iterator[Record]:
        yield from table[:16]
        raise KeyboardInterrupt

    out = tmp_path / name
    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, stopped(), out, PLAIN, columns=columns)
    other = [Record(LINES[0], {"n": "x", "text": LINES[0]}), *table[1:]]
    with pytest.raises(InputError, match="the first 14 lines are not those that were embedded"):
        embed_lines(embedder, other, out, PLAIN, columns=columns, resume=True)
    embed_lines(embedder, table, out, PLAIN, columns=columns, resume=True)
    embed_lines(embedder, table, tmp_path / f"whole-{name}", PLAIN, columns=columns)
    assert _same(out, tmp_path / f"whole-{name}")


#: Runs in a process of its own, which forks: each child kills itself at its n-th fsync, another one
#: goes on with what it left, until n is beyond the last one. Each flush to the disk is tried so.
KILLED = """
import os, signal, sys
from pathlib import Path
from bertsmith.use import embedfile
from bertsmith.use.embed import Embedder
from bertsmith.use.vector_settings import settings_of
embedfile._LINES = 7
embedder, folder, name, pooling = Embedder.load(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:5]
lines = [f"{n} hammers and a smith" for n in range(19)]

def embed(out, last=None):
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left, sync = last, os.fsync
    def counted(file):
        nonlocal left
        left = left and left - 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(file)
    os.fsync = counted
    embedfile.embed_lines(embedder, lines, out, settings_of(pooling=pooling), resume=True)
    os._exit(0)

assert embed(folder / f"whole{name}") == 0
for last in range(1, 99):
    out = folder / f"{last}{name}"
    if embed(out, last) == 0:
        break
    if not out.exists():
        assert embed(out) == 0
print(last)
"""


def _same(one: Path, other: Path) -> bool:
    if one.is_dir():
        # How neighbours are joined depends on threads.
        names = sorted(path.name for path in one.iterdir() if path.suffix != ".usearch")
        return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)
    if one.suffix == ".parquet":
        return bool(pq.read_table(one).equals(pq.read_table(other)))
    return one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(
    ("name", "pooling", "least"),
    [(".npy", "mean", 13), (".jsonl", "none", 12), (".parquet", "mean", 15), (".index", "max", 20)],
)
def test_a_run_killed_at_any_moment_goes_on(
    directory: Path, tmp_path: Path, name: str, pooling: str, least: int
) -> None:
    """Killed by SIGKILL at each flush to the disk and resumed, it ends with the same bytes."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, directory, tmp_path, name, pooling],
        capture_output=True, text=True, check=False, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    moments = int(done.stdout)
    assert moments > least
    for last in range(1, moments + 1):
        assert _same(tmp_path / f"whole{name}", tmp_path / f"{last}{name}"), last


def _stopped(embedder: Embedder, out: Path) -> Iterator[str]:
    """Leave a run at ``out`` that was stopped after 14 lines."""

    def lines() -> Iterator[str]:
        yield from LINES[:20]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, lines(), out, PLAIN)
    assert json.loads((out.with_name(f"{out.name}.partial") / "state.json").read_text())["lines"]
    return iter(LINES)


def test_going_on_refuses_what_is_not_the_same(
    embedder: Embedder, directory_without_pairs: Path, tmp_path: Path
) -> None:
    """Other lines, settings or another model are refused; the same then go on, only if asked to."""
    out = tmp_path / "v.npy"
    lines = list(_stopped(embedder, out))
    with pytest.raises(InputError, match="--resume goes on with it, or remove it"):
        embed_lines(embedder, lines, out, PLAIN)
    for other in (["x", *lines[1:]], lines[:9]):
        with pytest.raises(InputError, match="the first 14 lines are not those"):
            embed_lines(embedder, other, out, PLAIN, resume=True)
    with pytest.raises(InputError, match="begun with another pooling"):
        embed_lines(embedder, lines, out, build_vector_settings(pooling="max"), resume=True)
    other_model = Embedder.load(directory_without_pairs)
    with pytest.raises(InputError, match="begun with another model"):
        embed_lines(other_model, lines, out, PLAIN, resume=True)
    (out.with_name("v.npy.partial") / "data").rename(tmp_path / "kept")
    with pytest.raises(InputError, match="shorter than its run left it"):
        embed_lines(embedder, lines, out, PLAIN, resume=True)
    (tmp_path / "kept").rename(out.with_name("v.npy.partial") / "data")
    assert embed_lines(embedder, lines, out, PLAIN, resume=True).num_lines == len(LINES)
    whole = embed_lines(embedder, lines, tmp_path / "whole.npy", PLAIN).path
    assert whole.read_bytes() == out.read_bytes()


def test_nothing_is_written_over(embedder: Embedder, tmp_path: Path) -> None:
    """A file, a folder or something beside them that is in the way stays as it is."""
    out = tmp_path / "v.npy"
    out.write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match="it is there already; choose another name"):
            embed_lines(embedder, LINES, out, PLAIN, resume=resume)
    assert out.read_text() == "mine"
    beside = tmp_path / "w.npy.partial"
    beside.mkdir()
    (beside / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="this folder holds something else"):
        embed_lines(embedder, LINES, tmp_path / "w.npy", PLAIN, resume=True)
    assert (beside / "mine.txt").read_text() == "mine"
    (tmp_path / "x.npy.partial").write_text("mine")
    with pytest.raises(InputError, match=r"x\.npy\.partial: cannot be written: File exists"):
        embed_lines(embedder, LINES, tmp_path / "x.npy", PLAIN)


def test_two_runs_never_write_one_file(embedder: Embedder, tmp_path: Path) -> None:
    """While one is at work another is refused, and the first ends as if nothing had been."""

    def lines() -> Iterator[str]:
        yield from LINES[:9]
        with pytest.raises(InputError, match="another process is writing it now"):
            embed_lines(embedder, LINES, tmp_path / "v.npy", PLAIN, resume=True)
        yield from LINES[9:]

    assert embed_lines(embedder, lines(), tmp_path / "v.npy", PLAIN).num_lines == len(LINES)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "v.csv",
            PLAIN,
            r"v\.csv: expected a name that ends in \.npy, \.jsonl, \.parquet, \.index",
        ),
        ("v.npy", TOKENS, r"a vector a token fits \.jsonl and \.parquet only"),
    ],
)
def test_forms_that_do_not_fit_are_refused(
    embedder: Embedder, tmp_path: Path, name: str, settings: object, message: str
) -> None:
    """Each says what would; nothing is left behind."""
    with pytest.raises(InputError, match=message):
        embed_lines(embedder, LINES, tmp_path / name, settings)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_no_line_is_an_error_and_leaves_nothing(embedder: Embedder, tmp_path: Path) -> None:
    """An array of nothing would hide a mistake."""
    with pytest.raises(InputError, match="no line to embed"):
        embed_lines(embedder, [], tmp_path / "v.npy", PLAIN)
    assert list(tmp_path.iterdir()) == []


def test_long_lines_end_a_window_early(
    embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window holds few long lines, so that they do not fill the memory; all are embedded."""
    monkeypatch.setattr(embedfile, "_CHARACTERS", 500)
    sizes: list[int] = []
    whole = Embedder.tokenize

    def counted(self: Embedder, texts: list[str]) -> object:
        sizes.append(len(texts))
        return whole(self, texts)

    monkeypatch.setattr(Embedder, "ids", counted)
    lines = ["a smith", "the smith " * 40_000, *["the smith " * 26] * 4]
    told = embed_lines(embedder, lines, tmp_path / "v.npy", PLAIN)
    assert (told.num_lines, told.num_truncated) == (6, 1)
    assert sizes == [2, 2, 2]


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl", "v.index"])
def test_a_full_disk_leaves_what_is_done(embedder: Embedder, tmp_path: Path, name: str) -> None:
    """Where nothing more can be written it says so, and goes on when there is room again."""
    many = LINES * 30
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, before[1]))
    try:
        with pytest.raises(InputError, match="cannot be written: File too large; what is done"):
            embed_lines(embedder, many, tmp_path / name, PLAIN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    state = json.loads((tmp_path / f"{name}.partial" / "state.json").read_text())
    assert 0 < state["lines"] < len(many)
    embed_lines(embedder, many, tmp_path / name, PLAIN, resume=True)
    embed_lines(embedder, many, tmp_path / f"whole.{name}", PLAIN)
    assert _same(tmp_path / name, tmp_path / f"whole.{name}")


#: Says by how many MiB the most memory ever used grows when many lines follow few.
FLAT = """
import sys
from dataclasses import replace
from pathlib import Path
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.vector_settings import settings_of
embedder, settings = Embedder.load(sys.argv[1]), settings_of(pooling=sys.argv[3])
plain, times, marks = embedder.recipe(settings), int(sys.argv[4]), []
# Long vectors of a small model: the same state many times, which no user may ask for.
long = replace(plain, states=plain.states * times, width=plain.width * times)
embedder.recipe = lambda settings: long
for count in (5_000, 20_000):
    # Equally many tokens in every line: batches of other sizes would move the peak.
    lines = ("some hammers and the smith who lifted many of them" for _ in range(count))
    out = sys.argv[2].replace(".", f"-{count}.")
    embed_lines(embedder, lines, out, settings)
    # Not ru_maxrss, which a process inherits from the one that starts it.
    told = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    marks.append(int(told.split()[0]) / 1024)
print(marks[1] - marks[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pooling", "times"), [("v.npy", "mean", "40"), ("t.parquet", "none", "3")]
)
def test_memory_does_not_grow_with_the_lines(
    directory: Path, tmp_path: Path, name: str, pooling: str, times: str
) -> None:
    """20,000 lines need at most 35 MiB more than 5,000; the vectors of 15,000 have over 60."""
    done = subprocess.run(
        [sys.executable, "-c", FLAT, directory, tmp_path / name, pooling, times],
        capture_output=True, text=True, check=False, timeout=300,
        # One heap for all threads, and large blocks outside of it: glibc adapts its thresholds as
        # a program runs, so that the peak of a heap depends on the order of frees.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1",
             "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Kept windows would be 59 MiB and more; 6 to 28 were seen without any.
    assert float(done.stdout) < 35


def test_all_settings_reach_the_vectors(embedder: Embedder, tmp_path: Path) -> None:
    """Layers, pooling, length and special tokens of a file are those that encode is given."""
    said = {"pooling": "mean-max", "normalize": True, "special": False, "combine": "mean"}
    told = embed_lines(embedder, LINES, tmp_path / "v.npy", build_vector_settings([-1, 0], **said))
    encode: Callable[..., np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = embedder.encode
    wanted = encode(LINES, layer=[-1, 0], **said)
    assert told.width == 52
    np.testing.assert_allclose(np.load(told.path), wanted, rtol=0, atol=1e-6)
