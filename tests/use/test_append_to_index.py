"""Adding lines to an index: the same files as embedding all lines at once, also after a kill."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from bertsmith.errors import InputError
from bertsmith.progress import NullProgress
from bertsmith.use import embed_state
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.embed_state import DATA_FILE, STATE_FILE, RunState, get_partial_dir
from bertsmith.use.nearest_neighbors import GRAPH_FILE
from bertsmith.use.search import Searcher
from bertsmith.use.search_index import MANIFEST_FILE
from bertsmith.use.vector_settings import VectorSettings, build_vector_settings
from tests.use.conftest import LINES_PER_CHUNK

pytestmark = pytest.mark.usefixtures("small_chunks")

#: Both parts have blank and repeated lines, which are equal in the graph. The old lines fill whole
#: chunks, because vectors depend on the other lines of their chunk by rounding.
NUM_HAMMERS = 5 * LINES_PER_CHUNK - 3
OLD_LINES = [*(f"{number} hammers" for number in range(NUM_HAMMERS)), "", "3 hammers", "the smith"]
NEW_LINES = ["the smith", "", *(f"{number} anvils" for number in range(20)), "5 hammers"]
SETTINGS = build_vector_settings()


def read_files(index: Path) -> dict[str, bytes]:
    """Return the content of each file except the graph, which depends on the timing of threads."""
    return {
        path.name: path.read_bytes() for path in sorted(index.iterdir()) if path.name != GRAPH_FILE
    }


@pytest.fixture(scope="module")
def embedder(model_dir: Path) -> Embedder:
    """The random model."""
    return Embedder.load(model_dir)


@pytest.fixture
def expected(embedder: Embedder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of all lines."""
    out = tmp_path_factory.mktemp("expected") / "all.index"
    embed_lines(embedder, OLD_LINES + NEW_LINES, out, SETTINGS)
    return out


@pytest.fixture
def index(embedder: Embedder, tmp_path: Path) -> Path:
    """An index of the old lines."""
    return embed_lines(embedder, OLD_LINES, tmp_path / "lines.index", SETTINGS).path


def test_appended_index_equals_one_of_all_lines(
    embedder: Embedder, index: Path, expected: Path
) -> None:
    """The files are equal, and a search in the graph finds old, new and repeated lines."""
    summary = embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True)
    assert (summary.num_lines, summary.num_added) == (58, 23)
    assert read_files(index) == read_files(expected)
    assert [path.name for path in index.parent.iterdir()] == ["lines.index"]
    searcher = Searcher(index)
    for query, lines in [("4 hammers", [5]), ("7 anvils", [45]), ("3 hammers", [4, 34])]:
        [results] = searcher.search([query], len(lines))
        # Equal lines of different chunks have vectors that differ by rounding.
        assert sorted(result.line for result in results) == lines
        assert {result.text for result in results} == {query}


class IndexingProgress(NullProgress):
    """Records the number of finished vectors at the start of indexing."""

    num_finished: float | None = None

    def start(self, description: str, total: float | None, unit: str, initial: float = 0) -> None:
        """Record the number of finished vectors."""
        if description == "indexing":
            self.num_finished = initial


def test_graph_of_the_old_lines_is_extended(embedder: Embedder, index: Path) -> None:
    """Only the vectors of the new lines are added to it."""
    progress = IndexingProgress()
    embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True, progress=progress)
    # The last old line is a new vector of the graph, unlike the two before it.
    assert progress.num_finished == len(OLD_LINES)


@pytest.mark.parametrize("damage", ["bytes", "rows", "width"])
def test_graph_of_other_vectors_is_rebuilt(
    embedder: Embedder, index: Path, tmp_path: Path, damage: str
) -> None:
    """A graph that is damaged, or has other rows or another width, is not extended."""
    if damage == "bytes":
        (index / GRAPH_FILE).write_bytes(b"damaged")
    else:
        settings = build_vector_settings(pooling="mean-max") if damage == "width" else SETTINGS
        other_lines = OLD_LINES if damage == "width" else ["the same line"] * len(OLD_LINES)
        other = embed_lines(
            embedder, [*other_lines, "another"], tmp_path / "b.index", settings
        ).path
        shutil.copy(other / GRAPH_FILE, index)
    progress = IndexingProgress()
    embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True, progress=progress)
    assert progress.num_finished == 0
    [results] = Searcher(index).search(["7 anvils"], 1)
    assert (results[0].line, results[0].text) == (45, "7 anvils")


def test_open_index_has_the_old_lines(embedder: Embedder, index: Path) -> None:
    """A searcher that was opened before lines are added finds the old lines."""
    searcher = Searcher(index)
    embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True)
    assert len(searcher) == len(OLD_LINES)
    [[result]] = searcher.search(["7 hammers"], 1)
    assert (result.line, result.text) == (8, "7 hammers")
    assert all(result.line <= len(OLD_LINES) for [result] in searcher.search(NEW_LINES[2:9], 1))


def test_copy_of_a_killed_command_is_not_used_for_another_index(
    embedder: Embedder, index: Path
) -> None:
    """The graph of the old lines would have other vectors than the new index."""
    partial = get_partial_dir(index)
    shutil.copytree(index, partial / DATA_FILE)
    (partial / STATE_FILE).write_text(json.dumps(asdict(RunState({}, position=len(OLD_LINES)))))
    shutil.rmtree(index)
    new_lines = [f"{number} smiths" for number in range(40)]
    embed_lines(embedder, new_lines, index, SETTINGS)
    searcher = Searcher(index)
    for number in (3, 17, 39):
        [[result]] = searcher.search([f"{number} smiths"], 1)
        assert result.line == number + 1


def test_interrupted_command_can_be_repeated(
    embedder: Embedder, index: Path, expected: Path
) -> None:
    """Until all lines are embedded, the index is unchanged; other lines are an error."""
    old_files = read_files(index)

    def interrupted_lines() -> Iterator[str]:
        yield from NEW_LINES[: 2 * LINES_PER_CHUNK + 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, interrupted_lines(), index, SETTINGS, append=True)
    assert read_files(index) == old_files
    with pytest.raises(InputError, match=f"the first {LINES_PER_CHUNK} lines differ"):
        embed_lines(embedder, OLD_LINES, index, SETTINGS, append=True)
    embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True)
    assert read_files(index) == read_files(expected)


def test_index_must_not_change_between_interrupted_commands(
    embedder: Embedder, index: Path
) -> None:
    """The unfinished run has a copy of the old lines."""

    def interrupted_lines() -> Iterator[str]:
        yield from NEW_LINES[: 2 * LINES_PER_CHUNK + 2]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, interrupted_lines(), index, SETTINGS, append=True)
    shutil.rmtree(index)
    partial = get_partial_dir(index)
    # An index with the same number of lines.
    other = embed_lines(embedder, OLD_LINES[::-1], index.with_name("other.index"), SETTINGS).path
    other.rename(index)
    with pytest.raises(InputError, match="the index has changed since this unfinished run"):
        embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True)
    assert partial.exists()


@pytest.mark.parametrize("num_renames", [0, 1, 2])
def test_interrupted_replacement_is_completed(
    embedder: Embedder,
    index: Path,
    expected: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    num_renames: int,
) -> None:
    """The same command completes it without adding the lines again; other lines are not lost."""
    original = embed_state.finish_replacement
    renamed = 0

    def fail_after(path: Path, target: Path) -> Path:
        nonlocal renamed
        # The state file is also written by renaming.
        if path.is_dir():
            if renamed == num_renames:
                raise KeyboardInterrupt
            renamed += 1
        return path.rename(target)

    def fail_at_end(out: Path, partial: Path) -> None:
        original(out, partial)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if num_renames == 2:
            patch.setattr(embed_state, "finish_replacement", fail_at_end)
        else:
            patch.setattr(Path, "replace", fail_after)
        with pytest.raises(KeyboardInterrupt):
            embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True)
    backup = shutil.copytree(index.parent, tmp_path_factory.mktemp("backup") / "copy")
    summary = embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True)
    assert (summary.num_lines, summary.num_added) == (58, 23)
    assert read_files(index) == read_files(expected)
    assert [path.name for path in index.parent.iterdir()] == ["lines.index"]
    # Other lines: the error says that the interrupted command is completed now.
    other = backup / index.name
    with pytest.raises(InputError, match="23 other lines, which are now in the index; run this"):
        embed_lines(embedder, ["another line"], other, SETTINGS, append=True)
    assert read_files(other) == read_files(expected)
    assert embed_lines(embedder, ["another line"], other, SETTINGS, append=True).num_lines == 59


def test_completed_command_whose_index_was_removed(embedder: Embedder, index: Path) -> None:
    """The state of a command that was killed at its end does not hide the missing index."""
    partial = get_partial_dir(index)
    partial.mkdir()
    state = RunState({}, num_lines=3, num_indexed_lines=5, is_complete=True)
    (partial / STATE_FILE).write_text(json.dumps(asdict(state)))
    shutil.rmtree(index)
    with pytest.raises(InputError, match="no such directory; create an index"):
        embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True)
    assert not partial.exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (build_vector_settings(pooling="max"), "embedded with a different pooling;"),
        (build_vector_settings(0, normalize=True), "embedded with a different layers, normalize;"),
    ],
)
def test_settings_must_be_those_of_the_index(
    embedder: Embedder, index: Path, settings: VectorSettings, message: str
) -> None:
    """Otherwise the vectors would not be comparable; the index stays unchanged."""
    old_files = read_files(index)
    with pytest.raises(InputError, match=message):
        embed_lines(embedder, NEW_LINES, index, settings, append=True)
    assert read_files(index) == old_files
    assert not get_partial_dir(index).exists()


def test_other_model_is_an_error(embedder: Embedder, index: Path) -> None:
    """The hash of the model is compared, not its path."""
    manifest = json.loads((index / MANIFEST_FILE).read_text())
    (index / MANIFEST_FILE).write_text(json.dumps({**manifest, "model_path": "moved"}))
    embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True)
    (index / MANIFEST_FILE).write_text(json.dumps({**manifest, "model_sha256": "0"}))
    with pytest.raises(InputError, match="embedded with a different model;"):
        embed_lines(embedder, NEW_LINES, index, SETTINGS, append=True)


def test_missing_index_is_an_error(embedder: Embedder, tmp_path: Path) -> None:
    """Nothing is created."""
    with pytest.raises(InputError, match=r"new\.index: no such directory; create an index with"):
        embed_lines(embedder, NEW_LINES, tmp_path / "new.index", SETTINGS, append=True)
    assert not list(tmp_path.iterdir())


#: For n = 1, 2, ..., a forked child adds lines to a copy of an index and kills itself at its n-th
#: fsync, and a second child repeats the command. Prints the first n larger than the number of
#: fsyncs.
KILL_SCRIPT = """
import os, shutil, signal, sys
from pathlib import Path
from bertsmith.use import embed_chunks
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.vector_settings import build_vector_settings
embed_chunks._MAX_LINES = 7
embedder = Embedder.load(sys.argv[1])
folder, index = Path(sys.argv[2]), Path(sys.argv[3])
lines = sys.argv[4:]

def append_in_child(out, kill_at=None):
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
    embed_lines(embedder, lines, out, build_vector_settings(), append=True)
    os._exit(0)

for kill_at in range(1, 99):
    out = Path(shutil.copytree(index, folder / f"{kill_at}.index"))
    if append_in_child(out, kill_at) == 0:
        break
    assert append_in_child(out) == 0, kill_at
print(kill_at)
"""


def test_killed_command_can_be_repeated(
    model_dir: Path, index: Path, expected: Path, tmp_path: Path
) -> None:
    """A command that is killed at any fsync and repeated adds each line once."""
    folder = tmp_path / "killed"
    folder.mkdir()
    process = subprocess.run(
        [sys.executable, "-c", KILL_SCRIPT, model_dir, folder, index, *NEW_LINES],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.returncode == 0, process.stderr
    last_kill = int(process.stdout)
    assert last_kill >= 15
    for number in range(1, last_kill + 1):
        assert read_files(folder / f"{number}.index") == read_files(expected), number
    assert len(list(folder.iterdir())) == last_kill
