"""``embed_lines``: file formats, interruption and resume, and errors.

The vectors are compared with transformers in test_embed.py.
"""

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bertsmith.errors import InputError
from bertsmith.use import embed_chunks
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import EmbeddingSummary, embed_lines
from bertsmith.use.table_input import TextRow
from bertsmith.use.vector_settings import build_vector_settings
from bertsmith.use.vector_writers import JsonlWriter, TableColumns
from tests.use.conftest import SENTENCES, WIDTH

#: Lines with unusual separators, control characters or Hangul, and lines without words.
UNUSUAL_LINES = [
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
LINES = [
    *SENTENCES,
    *UNUSUAL_LINES,
    "the smith " * 60,
    *reversed(SENTENCES),
    *(f"{number} hammers" for number in range(20)),
]

#: Settings for one vector per text, and for one vector per token.
TEXT_SETTINGS = build_vector_settings()
TOKEN_SETTINGS = build_vector_settings(pooling="none")
#: Maximum number of lines per chunk in these tests, so that the lines need several chunks.
LINES_PER_CHUNK = 7


@pytest.fixture(scope="module")
def embedder(model_dir: Path) -> Embedder:
    """The random model with two layers."""
    return Embedder.load(model_dir)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Embed ``LINES_PER_CHUNK`` lines per chunk."""
    monkeypatch.setattr(embed_chunks, "_MAX_LINES", LINES_PER_CHUNK)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines, which are separated by line feeds only."""
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]


def test_npy_output_equals_encode(embedder: Embedder, tmp_path: Path) -> None:
    """The .npy file has the bytes that numpy.save writes; the summary has correct counts."""
    summary = embed_lines(embedder, LINES, tmp_path / "new" / "v.npy", TEXT_SETTINGS)
    ids = [token_id for line in LINES for token_id in embedder.tokenizer.encode(line)]
    unknown_share = ids.count(embedder.tokenizer.unk_id) / len(ids)
    assert unknown_share > 0
    assert summary == EmbeddingSummary(
        path=tmp_path / "new" / "v.npy",
        num_lines=len(LINES),
        width=WIDTH,
        num_truncated=1,
        unknown_share=unknown_share,
    )
    vectors = np.load(summary.path)
    np.testing.assert_allclose(vectors, embedder.encode(LINES), rtol=0, atol=1e-6)
    np.save(tmp_path / "expected.npy", vectors)
    assert summary.path.read_bytes() == (tmp_path / "expected.npy").read_bytes()
    assert list(summary.path.parent.iterdir()) == [summary.path]


def test_json_lines_hold_exact_vectors(embedder: Embedder, tmp_path: Path) -> None:
    """JSON lines have the text and the same float32 values as .npy, or token vectors."""
    npy_path = embed_lines(embedder, LINES, tmp_path / "v.npy", TEXT_SETTINGS).path
    rows = read_jsonl(embed_lines(embedder, LINES, tmp_path / "v.jsonl", TEXT_SETTINGS).path)
    assert [row["text"] for row in rows] == LINES
    vectors = np.array([row["vector"] for row in rows], np.float32)
    assert np.array_equal(vectors, np.load(npy_path))
    rows = read_jsonl(embed_lines(embedder, LINES, tmp_path / "t.jsonl", TOKEN_SETTINGS).path)
    for row, expected in zip(rows, embedder.encode_tokens(LINES), strict=True):
        assert (row["tokens"], row["ids"]) == (expected.tokens, expected.ids)
        assert row["offsets"] == [list(offset) for offset in expected.offsets]
        np.testing.assert_allclose(row["vectors"], expected.vectors, rtol=0, atol=1e-5)


def test_nan_is_written_as_null(tmp_path: Path) -> None:
    """NaN becomes null, because JSON has no NaN; the other numbers remain."""
    writer = JsonlWriter(tmp_path / "v.jsonl", 0)
    writer.append(["a"], np.array([[np.nan, 0.1]], np.float32))
    writer.commit()
    writer.close()
    vector = json.loads((tmp_path / "v.jsonl").read_text())["vector"]
    assert (vector[0], np.float32(vector[1])) == (None, np.float32(0.1))


def test_parquet_output_equals_other_formats(embedder: Embedder, tmp_path: Path) -> None:
    """The Parquet columns equal .npy for text vectors, and JSON lines for token vectors."""
    npy_path = embed_lines(embedder, LINES, tmp_path / "v.npy", TEXT_SETTINGS).path
    table = pq.read_table(embed_lines(embedder, LINES, tmp_path / "v.parquet", TEXT_SETTINGS).path)
    assert table["text"].to_pylist() == LINES
    assert np.array_equal(np.float32(table["vector"].to_pylist()), np.load(npy_path))
    table = pq.read_table(embed_lines(embedder, LINES, tmp_path / "t.parquet", TOKEN_SETTINGS).path)
    jsonl_path = embed_lines(embedder, LINES, tmp_path / "t.jsonl", TOKEN_SETTINGS).path
    for row, line in zip(table.to_pylist(), jsonl_path.read_bytes().split(b"\n"), strict=False):
        expected = json.loads(line)
        assert np.array_equal(np.float32(row.pop("vectors")), np.float32(expected.pop("vectors")))
        assert row == expected
    assert table.num_rows == len(LINES)


def test_table_rows_keep_their_columns(embedder: Embedder, tmp_path: Path) -> None:
    """JSON lines and Parquet include the columns of the input table; .npy has only vectors."""
    table = [
        TextRow(text, {"n": number, "text": text, "maybe": number or None})
        for number, text in enumerate(LINES)
    ]
    columns = TableColumns(["n", "text", "maybe"], {"vector": "predicted_vector"})
    npy_path = embed_lines(embedder, LINES, tmp_path / "v.npy", TEXT_SETTINGS).path
    for name in ("r.npy", "r.jsonl", "r.parquet"):
        embed_lines(embedder, table, tmp_path / name, TEXT_SETTINGS, columns=columns)
    assert (tmp_path / "r.npy").read_bytes() == npy_path.read_bytes()
    for rows in (
        read_jsonl(tmp_path / "r.jsonl"),
        pq.read_table(tmp_path / "r.parquet").to_pylist(),
    ):
        vectors = np.array([row.pop("predicted_vector") for row in rows], np.float32)
        assert np.array_equal(vectors, np.load(npy_path))
        assert rows == [record.cells for record in table]


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl", "v.parquet"])
def test_interrupted_table_can_be_resumed(embedder: Embedder, tmp_path: Path, name: str) -> None:
    """A resumed run ends with the same file; a changed cell in a written row is an error."""
    table = [TextRow(text, {"n": number, "text": text}) for number, text in enumerate(LINES)]
    columns = TableColumns(["n", "text"], {})

    def interrupted_rows() -> Iterator[TextRow]:
        yield from table[: 3 * LINES_PER_CHUNK + 2]
        raise KeyboardInterrupt

    out = tmp_path / name
    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, interrupted_rows(), out, TEXT_SETTINGS, columns=columns)
    changed_table = [TextRow(LINES[0], {"n": "x", "text": LINES[0]}), *table[1:]]
    with pytest.raises(InputError, match="the first 14 lines differ from those already embedded"):
        embed_lines(embedder, changed_table, out, TEXT_SETTINGS, columns=columns, resume=True)
    embed_lines(embedder, table, out, TEXT_SETTINGS, columns=columns, resume=True)
    uninterrupted = tmp_path / f"uninterrupted-{name}"
    embed_lines(embedder, table, uninterrupted, TEXT_SETTINGS, columns=columns)
    assert has_same_contents(out, uninterrupted)


#: For n = 1, 2, ..., a forked child embeds lines and kills itself at its n-th fsync, and a second
#: child resumes the run. The script ends at the first n that is larger than the number of fsyncs,
#: and prints this n.
KILL_SCRIPT = """
import os, signal, sys
from pathlib import Path
from typing import Any
from bertsmith.use import embed_chunks
from bertsmith.use import embed_lines as embed_lines_module
from bertsmith.use.embed import Embedder
from bertsmith.use.vector_settings import build_vector_settings
embed_chunks._MAX_LINES = 7
embedder = Embedder.load(sys.argv[1])
folder = Path(sys.argv[2])
suffix, pooling = sys.argv[3:5]
settings = build_vector_settings(pooling=pooling)
lines = [f"{number} hammers and a smith" for number in range(19)]

def embed_in_child(out, kill_at=None):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    num_fsyncs = 0
    original_fsync = os.fsync
    def counting_fsync(file):
        nonlocal num_fsyncs
        num_fsyncs += 1
        if num_fsyncs == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        original_fsync(file)
    os.fsync = counting_fsync
    embed_lines_module.embed_lines(embedder, lines, out, settings, resume=True)
    os._exit(0)

assert embed_in_child(folder / f"uninterrupted{suffix}") == 0
for kill_at in range(1, 99):
    out = folder / f"{kill_at}{suffix}"
    if embed_in_child(out, kill_at) == 0:
        break
    if not out.exists():
        assert embed_in_child(out) == 0
print(kill_at)
"""


def has_same_contents(a: Path, b: Path) -> bool:
    """Return whether two files or index directories have the same contents."""
    if a.is_dir():
        # The graph is not compared, because it depends on the timing of threads.
        names = sorted(path.name for path in a.iterdir() if path.suffix != ".usearch")
        return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)
    if a.suffix == ".parquet":
        return bool(pq.read_table(a).equals(pq.read_table(b)))
    return a.read_bytes() == b.read_bytes()


@pytest.mark.parametrize(
    ("suffix", "pooling", "min_fsyncs"),
    [(".npy", "mean", 13), (".jsonl", "none", 12), (".parquet", "mean", 15), (".index", "max", 20)],
)
def test_killed_run_can_be_resumed(
    model_dir: Path, tmp_path: Path, suffix: str, pooling: str, min_fsyncs: int
) -> None:
    """A run that is killed at any fsync and resumed ends with the bytes of an uninterrupted run."""
    process = subprocess.run(
        [sys.executable, "-c", KILL_SCRIPT, model_dir, tmp_path, suffix, pooling],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    last_kill = int(process.stdout)
    assert last_kill > min_fsyncs
    uninterrupted = tmp_path / f"uninterrupted{suffix}"
    for kill_at in range(1, last_kill + 1):
        assert has_same_contents(uninterrupted, tmp_path / f"{kill_at}{suffix}"), kill_at


def start_and_interrupt_run(embedder: Embedder, out: Path) -> None:
    """Start a run and interrupt it in the fourth chunk, when two chunks are committed."""

    def interrupted_lines() -> Iterator[str]:
        yield from LINES[: 4 * LINES_PER_CHUNK - 1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, interrupted_lines(), out, TEXT_SETTINGS)
    state_file = out.with_name(f"{out.name}.partial") / "state.json"
    assert json.loads(state_file.read_text())["num_lines"] == 2 * LINES_PER_CHUNK


def test_run_of_version_0_1_is_resumed(embedder: Embedder, tmp_path: Path) -> None:
    """A run whose state has the keys of version 0.1 resumes, and ends with the same bytes."""
    out = tmp_path / "v.npy"
    start_and_interrupt_run(embedder, out)
    state_file = tmp_path / "v.npy.partial" / "state.json"
    state = json.loads(state_file.read_text())
    settings = state["settings"]
    old_settings = {
        "path": settings["model_path"],
        "model": settings["model_sha256"],
        "fast": False,
        "layers": [-1],
        "combine": "concat",
        "weights": [],
        "pooling": settings["pooling"],
        "normalize": settings["normalize"],
        "special": True,
    }
    old_state = {
        "settings": old_settings,
        "lines": state["num_lines"],
        "read": state["lines_sha256"],
        "place": state["position"],
        "cut_off": state["num_truncated"],
    }
    # Version 0.1 had no prompts.
    assert len(old_settings) == len(settings.keys() - {"prompt_name"})
    assert len(old_state) == len(state)
    state_file.write_text(json.dumps(old_state))
    embed_lines(embedder, LINES, out, TEXT_SETTINGS, resume=True)
    uninterrupted = tmp_path / "uninterrupted.npy"
    embed_lines(embedder, LINES, uninterrupted, TEXT_SETTINGS)
    assert out.read_bytes() == uninterrupted.read_bytes()


def test_resume_requires_the_same_input(
    embedder: Embedder, model_dir_without_nsp: Path, tmp_path: Path
) -> None:
    """A run resumes with the same lines, settings and model; others are errors."""
    out = tmp_path / "v.npy"
    start_and_interrupt_run(embedder, out)
    with pytest.raises(InputError, match="continue it with --resume, or remove it"):
        embed_lines(embedder, LINES, out, TEXT_SETTINGS)
    for other_lines in (["x", *LINES[1:]], LINES[:9]):
        with pytest.raises(InputError, match="the first 14 lines differ"):
            embed_lines(embedder, other_lines, out, TEXT_SETTINGS, resume=True)
    with pytest.raises(InputError, match="started with a different pooling"):
        embed_lines(embedder, LINES, out, build_vector_settings(pooling="max"), resume=True)
    other_embedder = Embedder.load(model_dir_without_nsp)
    with pytest.raises(InputError, match="started with a different model"):
        embed_lines(other_embedder, LINES, out, TEXT_SETTINGS, resume=True)
    (out.with_name("v.npy.partial") / "data").rename(tmp_path / "data")
    with pytest.raises(InputError, match="shorter than when its run was interrupted"):
        embed_lines(embedder, LINES, out, TEXT_SETTINGS, resume=True)
    (tmp_path / "data").rename(out.with_name("v.npy.partial") / "data")
    summary = embed_lines(embedder, LINES, out, TEXT_SETTINGS, resume=True)
    assert summary.num_lines == len(LINES)
    uninterrupted = embed_lines(embedder, LINES, tmp_path / "uninterrupted.npy", TEXT_SETTINGS).path
    assert uninterrupted.read_bytes() == out.read_bytes()


def test_existing_files_are_not_overwritten(embedder: Embedder, tmp_path: Path) -> None:
    """An existing output file, or unrelated files at the partial path, are errors."""
    out = tmp_path / "v.npy"
    out.write_text("original")
    for resume in (False, True):
        with pytest.raises(InputError, match="already exists; choose another name"):
            embed_lines(embedder, LINES, out, TEXT_SETTINGS, resume=resume)
    assert out.read_text() == "original"
    unrelated_dir = tmp_path / "w.npy.partial"
    unrelated_dir.mkdir()
    (unrelated_dir / "notes.txt").write_text("original")
    with pytest.raises(InputError, match="this directory contains unrelated files"):
        embed_lines(embedder, LINES, tmp_path / "w.npy", TEXT_SETTINGS, resume=True)
    assert (unrelated_dir / "notes.txt").read_text() == "original"
    (tmp_path / "x.npy.partial").write_text("original")
    with pytest.raises(InputError, match=r"x\.npy\.partial: cannot be written: File exists"):
        embed_lines(embedder, LINES, tmp_path / "x.npy", TEXT_SETTINGS)


def test_concurrent_runs_are_rejected(embedder: Embedder, tmp_path: Path) -> None:
    """A second run with the same output is an error and does not disturb the first."""

    def lines_with_second_run() -> Iterator[str]:
        yield from LINES[:9]
        with pytest.raises(InputError, match="another process is writing to it"):
            embed_lines(embedder, LINES, tmp_path / "v.npy", TEXT_SETTINGS, resume=True)
        yield from LINES[9:]

    summary = embed_lines(embedder, lines_with_second_run(), tmp_path / "v.npy", TEXT_SETTINGS)
    assert summary.num_lines == len(LINES)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (
            "v.csv",
            TEXT_SETTINGS,
            r"v\.csv: expected a name that ends in \.npy, \.jsonl, \.parquet, \.index",
        ),
        (
            "v.npy",
            TOKEN_SETTINGS,
            r"vectors per token can only be written to \.jsonl and \.parquet",
        ),
    ],
)
def test_unsuitable_formats_are_errors(
    embedder: Embedder, tmp_path: Path, name: str, settings: object, message: str
) -> None:
    """An unknown suffix, or token vectors in .npy, are errors before anything is written."""
    with pytest.raises(InputError, match=message):
        embed_lines(embedder, LINES, tmp_path / name, settings)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_empty_input_is_an_error(embedder: Embedder, tmp_path: Path) -> None:
    """Input without lines is an error, and no file is left."""
    with pytest.raises(InputError, match="no line to embed"):
        embed_lines(embedder, [], tmp_path / "v.npy", TEXT_SETTINGS)
    assert list(tmp_path.iterdir()) == []


def test_long_lines_end_a_chunk_early(
    embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a limit of 500 characters, a chunk ends at the line that exceeds it."""
    monkeypatch.setattr(embed_chunks, "_MAX_CHARACTERS", 500)
    chunk_sizes: list[int] = []
    original_tokenize = Embedder.tokenize

    def recording_tokenize(self: Embedder, texts: list[str]) -> object:
        chunk_sizes.append(len(texts))
        return original_tokenize(self, texts)

    monkeypatch.setattr(Embedder, "tokenize", recording_tokenize)
    lines = ["a smith", "the smith " * 40_000, *["the smith " * 26] * 4]
    summary = embed_lines(embedder, lines, tmp_path / "v.npy", TEXT_SETTINGS)
    assert (summary.num_lines, summary.num_truncated) == (6, 1)
    assert chunk_sizes == [2, 2, 2]


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl", "v.index"])
def test_run_can_be_resumed_after_a_full_disk(
    embedder: Embedder, tmp_path: Path, name: str
) -> None:
    """A file size limit is an error, and the run resumes when the limit is removed."""
    lines = LINES * 30
    previous_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, previous_limit[1]))
    try:
        with pytest.raises(InputError, match="cannot be written: File too large; finished lines"):
            embed_lines(embedder, lines, tmp_path / name, TEXT_SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous_limit)
    state = json.loads((tmp_path / f"{name}.partial" / "state.json").read_text())
    assert 0 < state["num_lines"] < len(lines)
    embed_lines(embedder, lines, tmp_path / name, TEXT_SETTINGS, resume=True)
    uninterrupted = tmp_path / f"uninterrupted.{name}"
    embed_lines(embedder, lines, uninterrupted, TEXT_SETTINGS)
    assert has_same_contents(tmp_path / name, uninterrupted)


#: Prints by how many MiB peak memory grows from embedding 10,000 lines to embedding 50,000.
PEAK_MEMORY_SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.vector_settings import build_vector_settings
embedder = Embedder.load(sys.argv[1])
settings = build_vector_settings(pooling=sys.argv[3])
spec = embedder.resolve_settings(settings)
repetitions = int(sys.argv[4])
peaks = []
# Repeat a layer to get wide vectors from a small model; settings do not allow repetition.
wide_spec = replace(
    spec, layer_indices=spec.layer_indices * repetitions, width=spec.width * repetitions
)
embedder.resolve_settings = lambda settings: wide_spec
for count in (10_000, 50_000):
    # Lines have equal lengths, because the peak depends on the size of batches.
    lines = ("some hammers and the smith who lifted many of them" for _ in range(count))
    out = sys.argv[2].replace(".", f"-{count}.")
    embed_lines(embedder, lines, out, settings)
    # ru_maxrss would include the peak of the parent process.
    peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    peaks.append(int(peak.split()[0]) / 1024)
print(peaks[1] - peaks[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pooling", "repetitions"), [("v.npy", "mean", "40"), ("t.parquet", "none", "3")]
)
def test_memory_does_not_grow_with_the_input(
    model_dir: Path, tmp_path: Path, name: str, pooling: str, repetitions: str
) -> None:
    """40,000 additional lines, whose vectors take 157 MiB, need less than 80 MiB of memory."""
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            PEAK_MEMORY_SCRIPT,
            model_dir,
            tmp_path / name,
            pooling,
            repetitions,
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        # Use one heap for all threads and mmap for large blocks: glibc adapts its thresholds at
        # run time, which makes the peak depend on the order of frees. Arrow uses the same heap.
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
            "MALLOC_TRIM_THRESHOLD_": "65536",
            "ARROW_DEFAULT_MEMORY_POOL": "system",
        },
    )
    assert process.returncode == 0, process.stderr
    # Keeping all vectors would need at least 157 MiB. The heap grows by 20 to 45 MiB, depending on
    # the run.
    assert float(process.stdout) < 80


def test_all_settings_are_used(embedder: Embedder, tmp_path: Path) -> None:
    """Each of the vector settings has the same effect as in ``encode``."""
    settings = {
        "pooling": "mean-max",
        "normalize": True,
        "include_special_tokens": False,
        "combine": "mean",
    }
    vector_settings = build_vector_settings([-1, 0], **settings)
    summary = embed_lines(embedder, LINES, tmp_path / "v.npy", vector_settings)
    encode: Callable[..., np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = embedder.encode
    expected = encode(LINES, layer=[-1, 0], **settings)
    assert summary.width == 2 * WIDTH  # mean and maximum
    np.testing.assert_allclose(np.load(summary.path), expected, rtol=0, atol=1e-6)


def test_the_next_chunk_is_tokenized_during_the_computation(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second chunk is tokenized before the vectors of the first one are computed.

    If the third chunk cannot be read, the first two are still embedded. Unbuffered, no line is read
    before the vectors of the previous one are there.
    """
    embedder = Embedder.load(model_dir)
    monkeypatch.setattr(embed_chunks, "_MAX_LINES", 2)
    events: list[str] = []
    is_tokenized = threading.Event()
    tokenize, encode_batches = embedder.tokenize, embedder.encode_batches

    def tokenize_and_report(texts: list[str]) -> Any:
        if "hammers 3" in texts:
            is_tokenized.set()
        return tokenize(texts)

    def wait_and_encode(*arguments: Any) -> Any:
        assert is_tokenized.wait(30)
        return encode_batches(*arguments)

    def read_lines() -> Iterator[str]:
        for number in range(1, 5):
            events.append(f"line {number}")
            yield f"hammers {number}"
        raise InputError("line 5 cannot be read")

    vectors: list[np.ndarray] = []
    spec = embedder.resolve_settings(TEXT_SETTINGS)

    def embed_all(**options: Any) -> None:
        for chunk in embed_chunks.embed_chunks(embedder, read_lines(), spec, **options):
            events.append("vectors")
            vectors.append(np.asarray(chunk.vectors))

    expected = embedder.encode([f"hammers {number}" for number in range(1, 5)])
    monkeypatch.setattr(embedder, "tokenize", tokenize_and_report)
    monkeypatch.setattr(embedder, "encode_batches", wait_and_encode)
    with pytest.raises(InputError, match="line 5"):
        embed_all()
    np.testing.assert_allclose(np.concatenate(vectors), expected, atol=1e-6)
    events.clear()
    with pytest.raises(InputError, match="line 5"):
        embed_all(unbuffered=True)
    assert events == [event for number in range(1, 5) for event in (f"line {number}", "vectors")]
