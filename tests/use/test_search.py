"""Searching embedded lines: the graph beside brute force, and the model that must be the same.

These tests never look at how an index is written line by line: tests/use/test_embed_lines.py does.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from bertsmith.errors import InputError, ModelError, SettingsError
from bertsmith.progress import NullProgress
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.nearest_neighbors import VECTORS_FILE, VectorIndex, build_graph
from bertsmith.use.search import Searcher, search
from bertsmith.use.vector_settings import build_vector_settings
from tests.use.conftest import TEXT

LINES = [
    *TEXT,
    "",
    "one\u2028line\twith a tab",
    "대장간의 망치",
    *(f"{n} hammers" for n in range(50)),
]


@pytest.fixture(scope="module")
def model(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the random model, which may be moved."""
    return shutil.copytree(directory, tmp_path_factory.mktemp("search") / "model")


@pytest.fixture(scope="module")
def index(model: Path) -> Path:
    """The lines, embedded by layer 1."""
    out = model.parent / "lines.index"
    settings = build_vector_settings(1, pooling="mean-max")
    return embed_lines(Embedder.load(model), LINES, out, settings).path


@pytest.mark.parametrize("exact", [False, True])
def test_a_line_finds_itself(index: Path, exact: bool) -> None:
    """Each line asked for is its own nearest, with its number and its text, odd characters too."""
    for number, [hit] in enumerate(Searcher(index).search(LINES[:8], 1, exact=exact), 1):
        assert (hit.line, hit.text) == (number, LINES[number - 1])
        assert hit.cosine == pytest.approx(1, abs=1e-5)


def test_questions_get_the_vectors_of_the_lines(index: Path, model: Path) -> None:
    """Layer and pooling are those of the index: cosines are those of ``encode``, in their order."""
    question = "who carried the hammer"
    encode = Embedder.load(model).encode
    one, lines = (encode(texts, layer=1, pooling="mean-max", normalize=True)
                  for texts in ([question], LINES))  # fmt: skip
    wanted = (lines @ one[0]).tolist()
    order = sorted(range(len(LINES)), key=lambda row: -wanted[row])[:5]
    for exact in (False, True):
        [found] = search(index, [question], 5, exact=exact)
        assert [hit.line - 1 for hit in found] == order
        assert [hit.cosine for hit in found] == pytest.approx([wanted[row] for row in order])


def test_the_graph_finds_nearly_all(tmp_path: Path) -> None:
    """Of the ten nearest among 20,000 random vectors in 16 clouds the graph finds 95 in 100."""
    chance = np.random.default_rng(5)
    middles = chance.normal(size=(16, 64))
    drawn = middles[chance.integers(0, 16, 20_100)] + chance.normal(size=(20_100, 64))
    # Lengths unlike each other: a cosine does not see them.
    drawn = (drawn * chance.uniform(0.1, 9, (20_100, 1))).astype(np.float32)
    np.save(tmp_path / VECTORS_FILE, drawn[100:])
    build_graph(tmp_path, NullProgress())
    neighbours, units = VectorIndex(tmp_path), drawn / np.linalg.norm(drawn, axis=1)[:, None]
    shared = 0
    for asked, unit in zip(drawn[:100], units[:100], strict=True):
        cosines = units[100:] @ unit
        best = np.argsort(-cosines)[:10].tolist()
        exact = neighbours.search(asked, 10, exact=True)
        assert [row for row, _ in exact] == best
        assert [own for _, own in exact] == pytest.approx(cosines[best].tolist(), abs=1e-5)
        shared += len({row for row, _ in neighbours.search(asked, 10)} & set(best))
    assert shared >= 950


def test_more_than_there_is(index: Path) -> None:
    """All lines are returned where more are asked for; none is an error."""
    for exact in (False, True):
        [found] = search(index, ["a smith"], 999, exact=exact)
        assert sorted(hit.line for hit in found) == list(range(1, len(LINES) + 1))
    assert search(index, []) == []
    with pytest.raises(InputError, match="top is 0; expected 1 or more"):
        search(index, ["a"], 0)


def test_the_model_must_be_the_same(index: Path, model: Path) -> None:
    """A model that was moved is found by its new name; another or a changed one is refused."""
    moved = model.with_name("moved")
    model.rename(moved)
    with pytest.raises(ModelError, match="which is not there any more; put it back, or say"):
        search(index, ["a smith"])
    assert search(index, ["a smith"], model=moved)
    moved.rename(model)
    config = json.loads((model / "config.json").read_text())
    before = (model / "config.json").read_text()
    (model / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-3}))
    with pytest.raises(ModelError, match="is not the one that made this index"):
        search(index, ["a smith"])
    (model / "config.json").write_text(before)
    (model / "README.md").write_text("Notes change nothing.")
    assert search(index, ["a smith"])


def test_what_is_no_index_is_refused(index: Path, tmp_path: Path) -> None:
    """A missing folder, another one, a broken file: each is told, with how to make an index."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match=r"bertsmith embed MODEL FILE --out"):
            search(path, ["a"])
    broken = shutil.copytree(index, tmp_path / "broken.index")
    for content in ("{", "[]", "{}"):
        (broken / "index.json").write_text(content)
        with pytest.raises((InputError, SettingsError), match="it is broken"):
            search(broken, ["a"])


@pytest.mark.parametrize("name", ["graph.usearch", "vectors.npy", "places.npy"])
@pytest.mark.parametrize("size", [50, 0])
def test_a_damaged_index_is_told(index: Path, tmp_path: Path, name: str, size: int) -> None:
    """A file that was cut: which one, and what to do."""
    own = shutil.copytree(index, tmp_path / "own.index")
    with (own / name).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(InputError, match=rf"{name}: this part .* damaged .* bertsmith embed"):
        search(own, ["a hammer"])
