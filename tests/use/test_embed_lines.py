"""``embed_lines``: file formats, settings, memory, and errors.

The vectors are compared with transformers in test_embed.py.
"""

import json
import os
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
from bertsmith.use.vector_writers import JsonlWriter, ParquetWriter, TableColumns
from tests.use.conftest import LINES, TEXT_SETTINGS, WIDTH

pytestmark = pytest.mark.usefixtures("small_chunks")

#: Settings for one vector per token.
TOKEN_SETTINGS = build_vector_settings(pooling="none")


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
        num_added=len(LINES),
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


def test_conflicting_types_are_found_in_the_first_part_that_has_them(tmp_path: Path) -> None:
    """A column with numbers and then texts is an error at once, also after resuming."""
    columns = TableColumns(["id"], {})
    vectors = np.ones((1, 2), np.float32)
    writer = ParquetWriter(tmp_path / "v.parquet", 0, columns)
    writer.append(["a"], vectors, [{"id": 1}])
    with pytest.raises(InputError, match=r"must have one type: .*write \.jsonl instead"):
        writer.append(["b"], vectors, [{"id": "x"}])
    writer = ParquetWriter(tmp_path / "v.parquet", 1, columns)
    with pytest.raises(InputError, match="must have one type"):
        writer.append(["b"], vectors, [{"id": "x"}])


def test_existing_files_are_not_overwritten(embedder: Embedder, tmp_path: Path) -> None:
    """An existing output file, or unrelated files at the partial path, are errors."""
    out = tmp_path / "v.npy"
    out.write_text("original")
    with pytest.raises(InputError, match="already exists; choose another name"):
        embed_lines(embedder, LINES, out, TEXT_SETTINGS)
    assert out.read_text() == "original"
    unrelated_dir = tmp_path / "w.npy.partial"
    unrelated_dir.mkdir()
    (unrelated_dir / "notes.txt").write_text("original")
    with pytest.raises(InputError, match="this directory contains unrelated files"):
        embed_lines(embedder, LINES, tmp_path / "w.npy", TEXT_SETTINGS)
    assert (unrelated_dir / "notes.txt").read_text() == "original"
    (tmp_path / "x.npy.partial").write_text("original")
    with pytest.raises(InputError, match=r"x\.npy\.partial: cannot be written: File exists"):
        embed_lines(embedder, LINES, tmp_path / "x.npy", TEXT_SETTINGS)


def test_concurrent_runs_are_rejected(embedder: Embedder, tmp_path: Path) -> None:
    """A second run with the same output is an error and does not disturb the first."""

    def lines_with_second_run() -> Iterator[str]:
        yield from LINES[:9]
        with pytest.raises(InputError, match="another process is writing to it"):
            embed_lines(embedder, LINES, tmp_path / "v.npy", TEXT_SETTINGS)
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


#: Prints by how many MiB peak memory grows from embedding some lines to embedding five times as
#: many.
PEAK_MEMORY_SCRIPT = """
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from bertsmith.use import embed_chunks
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
first_count = int(sys.argv[5])
# With the default, a chunk of wide vectors would need half of the memory that is allowed.
embed_chunks._MAX_LINES = first_count // 5
for count in (first_count, 5 * first_count):
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
    ("name", "pooling", "repetitions", "first_count"),
    [("v.npy", "mean", "40", "10000"), ("t.parquet", "none", "15", "2000")],
)
def test_memory_does_not_grow_with_the_input(
    model_dir: Path, tmp_path: Path, name: str, pooling: str, repetitions: str, first_count: str
) -> None:
    """Additional lines, whose vectors take 157 MiB, need less than 80 MiB of memory."""
    process = subprocess.run(
        [
            sys.executable,
            "-c",
            PEAK_MEMORY_SCRIPT,
            model_dir,
            tmp_path / name,
            pooling,
            repetitions,
            first_count,
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
