"""Interrupted and killed runs of ``embed_lines`` end with the same files when they are resumed."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from bertsmith.errors import InputError
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.table_input import TextRow
from bertsmith.use.vector_settings import build_vector_settings
from bertsmith.use.vector_writers import TableColumns
from tests.use.conftest import LINES, LINES_PER_CHUNK, TEXT_SETTINGS

pytestmark = pytest.mark.usefixtures("small_chunks")


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
        embed_lines(embedder, changed_table, out, TEXT_SETTINGS, columns=columns)
    embed_lines(embedder, table, out, TEXT_SETTINGS, columns=columns)
    uninterrupted = tmp_path / f"uninterrupted-{name}"
    embed_lines(embedder, table, uninterrupted, TEXT_SETTINGS, columns=columns)
    assert has_same_contents(out, uninterrupted)


#: For n = 1, 2, ..., a forked child embeds lines and kills itself at its n-th fsync, and a second
#: child resumes the run. The script ends at the first n that is larger than the number of fsyncs,
#: and prints this n.
KILL_SCRIPT = """
import os, signal, sys
from pathlib import Path
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
    embed_lines_module.embed_lines(embedder, lines, out, settings)
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
        if names != sorted(path.name for path in b.iterdir() if path.suffix != ".usearch"):
            return False
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
    # Version 0.1 had no prompts, stored no column, and did not add lines to an index.
    assert len(old_settings) == len(settings.keys() - {"prompt_name", "text_column"})
    new_keys = {"num_indexed_lines", "index_sha256", "is_complete"}
    assert len(old_state) == len(state.keys() - new_keys)
    state_file.write_text(json.dumps(old_state))
    embed_lines(embedder, LINES, out, TEXT_SETTINGS)
    uninterrupted = tmp_path / "uninterrupted.npy"
    embed_lines(embedder, LINES, uninterrupted, TEXT_SETTINGS)
    assert out.read_bytes() == uninterrupted.read_bytes()


def test_resume_requires_the_same_input(
    embedder: Embedder, model_dir_without_nsp: Path, tmp_path: Path
) -> None:
    """A run resumes with the same lines, settings and model; others are errors."""
    out = tmp_path / "v.npy"
    start_and_interrupt_run(embedder, out)
    for other_lines in (["x", *LINES[1:]], LINES[:9]):
        with pytest.raises(InputError, match="the first 14 lines differ"):
            embed_lines(embedder, other_lines, out, TEXT_SETTINGS)
    with pytest.raises(InputError, match="started with a different pooling"):
        embed_lines(embedder, LINES, out, build_vector_settings(pooling="max"))
    other_embedder = Embedder.load(model_dir_without_nsp)
    with pytest.raises(InputError, match="started with a different model"):
        embed_lines(other_embedder, LINES, out, TEXT_SETTINGS)
    data = out.with_name("v.npy.partial") / "data"
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"shorter than when .*; remove \S*/v.npy.partial and"):
        embed_lines(embedder, LINES, out, TEXT_SETTINGS)
    data.write_bytes(content)
    summary = embed_lines(embedder, LINES, out, TEXT_SETTINGS)
    assert summary.num_lines == len(LINES)
    uninterrupted = embed_lines(embedder, LINES, tmp_path / "uninterrupted.npy", TEXT_SETTINGS).path
    assert uninterrupted.read_bytes() == out.read_bytes()


def test_resume_requires_the_same_text_column(embedder: Embedder, tmp_path: Path) -> None:
    """Another column of the same table is an error; a state of version 0.2 has no column."""
    rows = [{"title": line, "body": f"{line} body"} for line in LINES]
    tables = {name: [TextRow(row[name], row) for row in rows] for name in ("title", "body")}
    columns = {name: TableColumns(["title", "body"], {}, text_column=name) for name in tables}

    def interrupted_rows() -> Iterator[TextRow]:
        yield from tables["title"][: 3 * LINES_PER_CHUNK + 2]
        raise KeyboardInterrupt

    out, state_file = tmp_path / "v.npy", tmp_path / "v.npy.partial" / "state.json"
    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, interrupted_rows(), out, TEXT_SETTINGS, columns=columns["title"])
    with pytest.raises(InputError, match=r"a different text column; .* remove \S*/v.npy.partial"):
        embed_lines(embedder, tables["body"], out, TEXT_SETTINGS, columns=columns["body"])
    state = json.loads(state_file.read_text())
    assert state["settings"].pop("text_column") == "title"
    state_file.write_text(json.dumps(state))
    summary = embed_lines(embedder, tables["title"], out, TEXT_SETTINGS, columns=columns["title"])
    assert summary.num_lines == len(LINES)


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl", "v.parquet", "v.index"])
def test_state_of_a_complete_run_is_discarded(
    embedder: Embedder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The state of a run that was killed or interrupted at its end does not block a new run."""
    out, partial = tmp_path / name, tmp_path / f"{name}.partial"
    remove_directory = shutil.rmtree

    def interrupt(path: Path) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove_directory)
        shutil.copytree(path, tmp_path / "killed")
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, LINES, out, TEXT_SETTINGS)
    assert not partial.exists()
    expected = tmp_path / f"expected-{name}"
    out.rename(expected)
    (tmp_path / "killed").rename(partial)
    embed_lines(embedder, LINES, out, TEXT_SETTINGS)
    assert has_same_contents(out, expected)


def test_file_of_another_program_does_not_delete_finished_lines(
    embedder: Embedder, tmp_path: Path
) -> None:
    """If the output appears during an interrupted run, the lines of the run are kept."""
    out = tmp_path / "v.npy"

    def interrupted_lines() -> Iterator[str]:
        yield from LINES[: 3 * LINES_PER_CHUNK + 2]
        out.touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, interrupted_lines(), out, TEXT_SETTINGS)
    state = json.loads((tmp_path / "v.npy.partial" / "state.json").read_text())
    assert state["num_lines"] == 2 * LINES_PER_CHUNK
    out.unlink()
    embed_lines(embedder, LINES, out, TEXT_SETTINGS)
    assert not (tmp_path / "v.npy.partial").exists()


def test_error_of_a_damaged_index_names_the_directory_to_remove(
    embedder: Embedder, tmp_path: Path
) -> None:
    """An unfinished index with missing vectors cannot be resumed."""
    out = tmp_path / "v.index"
    start_and_interrupt_run(embedder, out)
    (tmp_path / "v.index.partial" / "data" / "vectors.npy").write_bytes(b"")
    with pytest.raises(InputError, match=r"remove \S*/v.index.partial and start again"):
        embed_lines(embedder, LINES, out, TEXT_SETTINGS)


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl", "v.index"])
def test_run_can_be_resumed_after_a_full_disk(
    embedder: Embedder, tmp_path: Path, name: str
) -> None:
    """A file size limit is an error, and the run resumes when the limit is removed."""
    lines = LINES * 30
    previous_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, previous_limit[1]))
    try:
        with pytest.raises(InputError, match="cannot be written: File too large; fix this"):
            embed_lines(embedder, lines, tmp_path / name, TEXT_SETTINGS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous_limit)
    state = json.loads((tmp_path / f"{name}.partial" / "state.json").read_text())
    assert 0 < state["num_lines"] < len(lines)
    embed_lines(embedder, lines, tmp_path / name, TEXT_SETTINGS)
    uninterrupted = tmp_path / f"uninterrupted.{name}"
    embed_lines(embedder, lines, uninterrupted, TEXT_SETTINGS)
    assert has_same_contents(tmp_path / name, uninterrupted)
