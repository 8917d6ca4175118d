"""Search in embedded lines: exact and approximate results; changed and damaged files."""

import json
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest

from bertsmith.errors import InputError, ModelError, SettingsError
from bertsmith.progress import NullProgress
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.nearest_neighbors import (
    DUPLICATES_FILE,
    GRAPH_FILE,
    VECTORS_FILE,
    VectorIndex,
    build_graph,
)
from bertsmith.use.search import Searcher, search
from bertsmith.use.vector_settings import build_vector_settings
from tests.use.conftest import SENTENCES

LINES = [
    *SENTENCES,
    "",
    "one\u2028line\twith a tab",
    "대장간의 망치",
    *(f"{number} hammers" for number in range(50)),
]


@pytest.fixture(scope="module")
def model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the random model, which tests may move or change."""
    return shutil.copytree(model_dir, tmp_path_factory.mktemp("search") / "model")


@pytest.fixture(scope="module")
def index(model: Path) -> Path:
    """An index of the lines, with the pooling "mean-max" over layer 1."""
    out = model.parent / "lines.index"
    settings = build_vector_settings(1, pooling="mean-max")
    return embed_lines(Embedder.load(model), LINES, out, settings).path


@pytest.mark.parametrize("exact", [False, True])
def test_line_finds_itself(index: Path, exact: bool) -> None:
    """The first result for each of 8 lines is this line, with cosine similarity 1."""
    results = Searcher(index).search(LINES[:8], 1, exact=exact)
    for number, [hit] in enumerate(results, 1):
        assert (hit.line, hit.text) == (number, LINES[number - 1])
        assert hit.cosine == pytest.approx(1, abs=1e-5)


def test_queries_are_embedded_like_the_lines(index: Path, model: Path) -> None:
    """Results equal a brute-force search with the layer and pooling of the index."""
    query = "who carried the hammer"
    encode = Embedder.load(model).encode
    query_vectors, line_vectors = (
        encode(texts, layer=1, pooling="mean-max", normalize=True) for texts in ([query], LINES)
    )
    similarities = (line_vectors @ query_vectors[0]).tolist()
    nearest = sorted(range(len(LINES)), key=lambda row: -similarities[row])[:5]
    for exact in (False, True):
        [hits] = search(index, [query], 5, exact=exact)
        assert [hit.line - 1 for hit in hits] == nearest
        assert [hit.cosine for hit in hits] == pytest.approx([similarities[row] for row in nearest])


def test_graph_recall_is_at_least_95_percent(tmp_path: Path) -> None:
    """The graph search finds 95 % of the 10 nearest of 20,000 vectors, the exact search all."""
    rng = np.random.default_rng(5)
    num_queries = 100
    num_vectors = num_queries + 20_000
    centers = rng.normal(size=(16, 64))
    vectors = centers[rng.integers(0, 16, num_vectors)] + rng.normal(size=(num_vectors, 64))
    # The lengths of the vectors differ, and must not affect the cosine similarities.
    vectors = (vectors * rng.uniform(0.1, 9, (num_vectors, 1))).astype(np.float32)
    np.save(tmp_path / VECTORS_FILE, vectors[num_queries:])
    build_graph(tmp_path, NullProgress())
    vector_index = VectorIndex(tmp_path)
    unit_vectors = vectors / np.linalg.norm(vectors, axis=1)[:, None]
    num_hits = 0
    for query, unit_query in zip(vectors[:num_queries], unit_vectors[:num_queries], strict=True):
        similarities = unit_vectors[num_queries:] @ unit_query
        nearest = np.argsort(-similarities)[:10].tolist()
        exact = vector_index.search(query, 10, exact=True)
        assert [row for row, _ in exact] == nearest
        assert [similarity for _, similarity in exact] == pytest.approx(
            similarities[nearest].tolist(), abs=1e-5
        )
        num_hits += len({row for row, _ in vector_index.search(query, 10)} & set(nearest))
    assert num_hits >= 0.95 * 10 * num_queries


def test_repeated_vectors_do_not_hide_other_vectors(tmp_path: Path) -> None:
    """With 5 vectors of 500 rows each, the best row is found, and all 500 copies of a vector.

    Copies that differ by rounding errors count as equal. The rows in the graph are distinct.
    """
    rng = np.random.default_rng(5)
    distinct = rng.standard_normal((1000, 32)).astype(np.float32)
    repeated = np.repeat(distinct[:5], 500, axis=0) * np.float32(1.0000001)
    vectors = np.concatenate([distinct, repeated])
    np.save(tmp_path / VECTORS_FILE, vectors)
    build_graph(tmp_path, NullProgress())
    vector_index = VectorIndex(tmp_path)
    queries = distinct[100:200] + 0.5 * rng.standard_normal((100, 32)).astype(np.float32)
    for query in queries:
        [(_, best)] = vector_index.search(query, 1, exact=True)
        assert vector_index.search(query, 1)[0][1] == pytest.approx(best, abs=1e-6)
    copies = {2, *range(1000 + 2 * 500, 1000 + 3 * 500)}
    assert {row for row, _ in vector_index.search(distinct[2], 501)} == copies
    assert {row for row, _ in vector_index.search(distinct[2], 30)} < copies
    first_rows, rows = np.load(tmp_path / DUPLICATES_FILE)
    assert first_rows.tolist() == np.repeat(np.arange(5), 500).tolist()
    assert rows.tolist() == list(range(1000, 3500))


def test_graph_of_an_earlier_version_is_searched_as_before(tmp_path: Path) -> None:
    """A graph with all rows, without a file of duplicates, is searched as before.

    A repeated build removes the file of duplicates of the interrupted one.
    """
    vectors = np.random.default_rng(5).standard_normal((300, 16)).astype(np.float32)
    np.save(tmp_path / DUPLICATES_FILE, np.zeros((2, 5), np.int64))
    np.save(tmp_path / VECTORS_FILE, vectors)
    build_graph(tmp_path, NullProgress())
    assert not (tmp_path / DUPLICATES_FILE).exists()
    vectors[50:60] = vectors[7]
    np.save(tmp_path / VECTORS_FILE, vectors)
    vector_index = VectorIndex(tmp_path)
    assert vector_index.search(vectors[9], 5) == vector_index.search(vectors[9], 5, exact=True)


def test_damaged_file_of_duplicates_is_an_error(tmp_path: Path) -> None:
    """A truncated duplicates.npy is an error that contains its name."""
    np.save(tmp_path / VECTORS_FILE, np.ones((9, 3), np.float32))
    build_graph(tmp_path, NullProgress())
    with (tmp_path / DUPLICATES_FILE).open("r+b") as file:
        file.truncate(50)
    with pytest.raises(InputError, match=rf"{DUPLICATES_FILE}: this part .* damaged"):
        VectorIndex(tmp_path)


def test_missing_file_of_duplicates_is_an_error(tmp_path: Path) -> None:
    """An index without its duplicates.npy is an error instead of a search that misses rows."""
    vectors = np.random.default_rng(6).standard_normal((300, 16)).astype(np.float32)
    vectors[50:60] = vectors[7]
    np.save(tmp_path / VECTORS_FILE, vectors)
    build_graph(tmp_path, NullProgress())
    (tmp_path / DUPLICATES_FILE).unlink()
    with pytest.raises(InputError, match=rf"{DUPLICATES_FILE}: .* \(10 vectors are neither"):
        VectorIndex(tmp_path).search(vectors[9], 5)


@pytest.mark.parametrize("num_missing_bytes", [100, 20_000])
def test_graph_that_is_not_completely_written_is_an_error(
    tmp_path: Path, num_missing_bytes: int
) -> None:
    """A limit within the last buffer of the graph, which usearch does not report, is noticed."""
    vectors = np.random.default_rng(0).standard_normal((600, 16)).astype(np.float32)
    np.save(tmp_path / VECTORS_FILE, vectors)
    build_graph(tmp_path, NullProgress())
    size = (tmp_path / GRAPH_FILE).stat().st_size
    (tmp_path / GRAPH_FILE).unlink()
    previous_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - num_missing_bytes, previous_limit[1]))
    try:
        with pytest.raises(OSError, match=GRAPH_FILE):
            build_graph(tmp_path, NullProgress())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous_limit)


def test_search_is_exact_if_all_vectors_are_candidates(tmp_path: Path) -> None:
    """The graph is not used if 4 candidates per result are at least as many as all vectors."""
    vectors = np.random.default_rng(5).standard_normal((20, 13), np.float32)
    # The graph has the vectors in another order, so a search that uses it finds other rows.
    np.save(tmp_path / VECTORS_FILE, vectors[::-1])
    build_graph(tmp_path, NullProgress())
    np.save(tmp_path / VECTORS_FILE, vectors)
    vector_index = VectorIndex(tmp_path)
    query = vectors[15]
    for top in (5, 20, 99):
        assert vector_index.search(query, top) == vector_index.search(query, top, exact=True)
    assert len(vector_index.search(query, 20)) == 20
    assert vector_index.search(query, 4) != vector_index.search(query, 4, exact=True)


def test_top_larger_than_the_index_returns_all_lines(index: Path) -> None:
    """``top=999`` returns each line once; ``top=0`` is an error."""
    for exact in (False, True):
        [hits] = search(index, ["a smith"], 999, exact=exact)
        assert sorted(hit.line for hit in hits) == list(range(1, len(LINES) + 1))
    assert search(index, []) == []
    with pytest.raises(InputError, match="top is 0; expected 1 or more"):
        search(index, ["a"], 0)


def test_model_must_be_unchanged(index: Path, model: Path) -> None:
    """A moved model is accepted with its new path. A missing or changed model is an error."""
    moved = model.with_name("moved")
    model.rename(moved)
    with pytest.raises(ModelError, match="no longer exists; restore it, or give its current path"):
        search(index, ["a smith"])
    assert search(index, ["a smith"], model=moved)
    moved.rename(model)
    original_config = (model / "config.json").read_text()
    changed_config = json.loads(original_config) | {"layer_norm_eps": 1e-3}
    (model / "config.json").write_text(json.dumps(changed_config))
    with pytest.raises(ModelError, match="is not the model that embedded the lines"):
        search(index, ["a smith"])
    (model / "config.json").write_text(original_config)
    (model / "README.md").write_text("A README does not change the model.")
    assert search(index, ["a smith"])


def test_missing_or_invalid_index_is_an_error(index: Path, tmp_path: Path) -> None:
    """A path without an index, and an index with a damaged manifest, are errors."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(InputError, match=r"bertsmith embed MODEL FILE --out"):
            search(path, ["a"])
    damaged = shutil.copytree(index, tmp_path / "damaged.index")
    for content in ("{", "[]", "{}"):
        (damaged / "index.json").write_text(content)
        with pytest.raises((InputError, SettingsError), match="damaged; recreate the index"):
            search(damaged, ["a"])


@pytest.mark.parametrize("name", ["graph.usearch", "vectors.npy", "offsets.npy", "lines.txt"])
@pytest.mark.parametrize("size", [50, 0])
def test_truncated_index_file_is_an_error(
    index: Path, tmp_path: Path, name: str, size: int
) -> None:
    """A truncated or empty file of an index is an error that contains its name."""
    damaged = shutil.copytree(index, tmp_path / "damaged.index")
    with (damaged / name).open("r+b") as file:
        file.truncate(size)
    with pytest.raises(InputError, match=rf"{name}: this part .* damaged .* bertsmith embed"):
        search(damaged, ["a hammer"])


def test_late_interaction_orders_the_most_similar_lines(index: Path, model: Path) -> None:
    """Results have the MaxSim of a triple loop, highest first; cosine chooses the candidates."""
    queries = ["who carried the hammer", "fires"]
    encode = Embedder.load(model).encode_tokens
    query_tokens, line_tokens = (
        [item.vectors / np.linalg.norm(item.vectors, axis=1)[:, None] for item in items]
        for items in (
            encode(queries, layer=1, include_special_tokens=False),
            encode(LINES, layer=1),
        )
    )
    results = search(index, queries, 5, late=True, candidates=9)
    for query, vectors, hits in zip(queries, query_tokens, results, strict=True):
        [candidates] = search(index, [query], 9)
        expected = {
            hit.line: np.mean(
                [max(float(q @ t) for t in line_tokens[hit.line - 1]) for q in vectors]
            )
            for hit in candidates
        }
        best = sorted(expected, key=lambda line: -expected[line])[:5]
        assert [hit.line for hit in hits] == best
        assert [hit.maxsim for hit in hits] == pytest.approx([expected[n] for n in best], abs=1e-5)
        cosines = {hit.line: hit.cosine for hit in candidates}
        assert [hit.cosine for hit in hits] == pytest.approx([cosines[n] for n in best], abs=1e-5)
