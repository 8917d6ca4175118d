"""Mining of hard negatives: margins, limits, formats and errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError, SettingsError, TaskError
from bertsmith.tasks.embedding_data import read_examples
from bertsmith.tasks.embedding_settings import EmbeddingSettings, TextColumns
from bertsmith.tasks.reranking_data import read_reranking_examples
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.use import mine_negatives as mining
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import embed_lines
from bertsmith.use.mine_negatives import MiningCounts, mine_negatives
from bertsmith.use.mining_settings import MiningSettings
from bertsmith.use.rerank import RankedDocument
from bertsmith.use.vector_settings import VectorSettings
from tests.use.conftest import SENTENCES

#: The lines of the corpus, with a blank line and a duplicate.
LINES = [*SENTENCES, "", SENTENCES[0], *(f"{number} hammers and fires" for number in range(40))]
#: Queries and positives. One query has two positives; one positive is not in the corpus.
PAIRS = [
    ("who carried the hammer", SENTENCES[0]),
    ("fires", "5 hammers and fires"),
    ("who carried the hammer", SENTENCES[2]),
    (SENTENCES[1], "a text that is not in the corpus"),
]


@pytest.fixture(scope="module")
def model(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the random model."""
    return shutil.copytree(model_dir, tmp_path_factory.mktemp("mining") / "model")


@pytest.fixture(scope="module")
def index(model: Path) -> Path:
    """An index of the lines."""
    out = model.parent / "lines.index"
    return embed_lines(Embedder.load(model), LINES, out, VectorSettings()).path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of PAIRS."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"query": query, "positive": positive} for query, positive in PAIRS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def mine(
    index: Path, pairs: Path, out: Path, **values: Any
) -> tuple[list[dict[str, Any]], MiningCounts]:
    """Return the rows of the table that is written, and the counts; keywords are settings."""
    counts = mine_negatives(index, pairs, out, settings=MiningSettings(**values))
    return [json.loads(line) for line in out.read_text().splitlines()], counts


def find_expected(model: Path, **values: Any) -> list[dict[str, Any]]:
    """Mine negatives as ``mine_hard_negatives`` of sentence-transformers, by brute force."""
    settings = MiningSettings(**values)
    encode = Embedder.load(model).encode
    texts = list(dict.fromkeys([*LINES, *(text for pair in PAIRS for text in pair)]))
    unit_vectors = encode(texts, normalize=True).astype(np.float64)
    vector_of_text = dict(zip(texts, unit_vectors, strict=True))
    rows: dict[str, list[dict[str, Any]]] = {}
    for query, _ in PAIRS:
        positives = [positive for text, positive in PAIRS if text == query]
        score = {text: float(vector_of_text[query] @ vector_of_text[text]) for text in texts}
        lowest = min(score[positive] for positive in positives)
        candidates = {line for line in LINES if line} - {query, *positives}
        if settings.absolute_margin is not None:
            candidates = {t for t in candidates if score[t] + settings.absolute_margin <= lowest}
        if settings.relative_margin is not None:
            limit = lowest - abs(lowest) * settings.relative_margin
            candidates = {t for t in candidates if score[t] <= limit}
        if settings.max_score is not None:
            candidates = {t for t in candidates if score[t] <= settings.max_score}
        if settings.min_score is not None:
            candidates = {t for t in candidates if score[t] >= settings.min_score}
        ranking = sorted(candidates, key=lambda text: -score[text])[settings.skip :]
        negatives = ranking[: settings.num_negatives]
        rows[query] = [
            {"anchor": query, "positive": positive, "negatives": negatives}
            for positive in positives
            if negatives
        ]
    return [row for query_rows in rows.values() for row in query_rows]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"relative_margin": None},
        {"relative_margin": 0.02},
        {"absolute_margin": 0.03, "relative_margin": None, "num_negatives": 5},
        {"max_score": 0.94, "min_score": 0.9, "relative_margin": None},
        {"skip": 2, "num_negatives": 1},
    ],
    ids=lambda values: "-".join(values) or "default",
)
def test_negatives_satisfy_margins_and_limits(
    model: Path, index: Path, pairs: Path, tmp_path: Path, values: dict[str, Any]
) -> None:
    """The negatives are those of a brute-force search among all lines."""
    expected = find_expected(model, **values)
    rows, counts = mine(index, pairs, tmp_path / "out.jsonl", candidates=len(LINES), **values)
    assert rows == expected
    assert counts.num_pairs == 4
    assert counts.num_rows == len(rows)
    assert counts.num_negatives == sum(len(row["negatives"]) for row in rows)
    assert counts.num_pairs_without_negatives == 4 - len(rows)


def test_positive_with_line_breaks_is_no_negative(model: Path, tmp_path: Path) -> None:
    """An index has no line breaks, but its line of the positive is recognized."""
    positive = "5 hammers\nand fires"
    out = tmp_path / "lines.index"
    index = embed_lines(Embedder.load(model), [*LINES, positive], out, VectorSettings()).path
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"query": "fires", "positive": positive}) + "\n")
    [row], _ = mine(index, pairs, tmp_path / "out.jsonl", relative_margin=None,
                    num_negatives=len(LINES), candidates=len(LINES))  # fmt: skip
    assert "4 hammers and fires" in row["negatives"]
    assert "5 hammers and fires" not in row["negatives"]


def test_values_of_the_margin_test_make_a_difference(model: Path) -> None:
    """The brute-force results differ between settings, so that the test above compares them."""
    results = [
        find_expected(model, **values)
        for values in ({"relative_margin": None}, {"relative_margin": 0.02}, {"skip": 2})
    ]
    assert results[0] != results[1] != results[2]
    assert results[0]


def test_results_do_not_depend_on_the_batches(
    index: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of one query give the same negatives."""
    rows, _ = mine(index, pairs, tmp_path / "a.jsonl", relative_margin=None)
    monkeypatch.setattr(mining, "_QUERIES_PER_BATCH", 1)
    assert mine(index, pairs, tmp_path / "b.jsonl", relative_margin=None)[0] == rows


def test_random_negatives_come_from_all_candidates(
    index: Path, pairs: Path, tmp_path: Path
) -> None:
    """Random sampling depends on the seed only, and draws less similar lines too."""
    values = {"sampling": "random", "relative_margin": None, "candidates": len(LINES)}
    rows, _ = mine(index, pairs, tmp_path / "a.jsonl", **values)
    assert rows == mine(index, pairs, tmp_path / "b.jsonl", **values)[0]
    assert rows != mine(index, pairs, tmp_path / "c.jsonl", **values, seed=1)[0]
    values |= {"sampling": "top", "num_negatives": len(LINES)}
    ranking = mine(index, pairs, tmp_path / "d.jsonl", **values)[0]
    for row, all_negatives in zip(rows, ranking, strict=True):
        positions = [all_negatives["negatives"].index(text) for text in row["negatives"]]
        assert positions == sorted(set(positions))
        assert positions != [0, 1, 2]


def test_relevance_of_a_reranker_replaces_the_similarity(
    index: Path, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Order and margins follow the reranker."""

    def rank_by_length(_: object, query: str, texts: list[str]) -> list[RankedDocument]:
        return [RankedDocument(i, len(text) / 100, text, False) for i, text in enumerate(texts)]

    monkeypatch.setattr(mining, "rank_documents", rank_by_length)
    monkeypatch.setattr(mining, "resolve_reranker", lambda *_, **__: FineTunedBundle)
    mine_negatives(
        index, pairs, tmp_path / "out.jsonl", reranker="reranker",
        settings=MiningSettings(candidates=len(LINES), num_negatives=9, relative_margin=0.1),
    )  # fmt: skip
    for line in (tmp_path / "out.jsonl").read_text().splitlines():
        row = json.loads(line)
        lengths = [len(text) for text in row["negatives"]]
        positives = [len(positive) for query, positive in PAIRS if query == row["anchor"]]
        assert lengths == sorted(lengths, reverse=True)
        assert max(lengths) <= 0.9 * min(positives)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv", ".tsv.gz"])
def test_result_is_training_data(
    index: Path, pairs: Path, tmp_path: Path, tokenizer: Any, suffix: str
) -> None:
    """``finetune embed`` and ``finetune rerank`` read every format without naming columns."""
    out = tmp_path / f"out{suffix}"
    counts = mine_negatives(index, pairs, out, settings=MiningSettings(relative_margin=None))
    [_, embedding_counts] = read_examples(
        [out], EmbeddingSettings(), lambda texts, _: [[0] for _ in texts], TextColumns()
    )
    assert embedding_counts[0].num_used == counts.num_rows
    examples, _ = read_reranking_examples([out], RerankingSettings(), tokenizer, 50, TextColumns())
    num_negatives = {query: 3 for query, _ in PAIRS}
    assert len(examples) == len(num_negatives)
    assert examples.scores.tolist().count(0) == sum(num_negatives.values())
    assert examples.scores.sum() == len(PAIRS)
    assert counts.num_rows == (len(PAIRS) * 3 if suffix.startswith((".csv", ".tsv")) else 4)


def test_line_with_a_tab_cannot_be_written_to_tsv(model: Path, pairs: Path, tmp_path: Path) -> None:
    """The error comes before mining, and other formats are possible."""
    lines = [*LINES, "a tab\tof a corpus"]
    index = embed_lines(Embedder.load(model), lines, tmp_path / "i.index", VectorSettings()).path
    with pytest.raises(InputError, match=rf"lines.txt, line {len(lines)}: TSV cannot hold the tab"):
        mine(index, pairs, tmp_path / "out.tsv")
    assert not (tmp_path / "out.tsv").exists()
    mine(index, pairs, tmp_path / "out.jsonl")


def test_mistakes_are_errors_and_write_nothing(index: Path, pairs: Path, tmp_path: Path) -> None:
    """Without negatives, or with invalid arguments, there is no output file."""
    out = tmp_path / "out.jsonl"
    with pytest.raises(TaskError, match="no line of the index is a negative; lower --relative"):
        mine(index, pairs, out, max_score=-0.99)
    other = tmp_path / "other.csv"
    other.write_text("question,answer\na,b\n")
    with pytest.raises(TaskError, match="name the columns: --text for the query and --pair for"):
        mine(index, other, out)
    other.write_text("query,positive\na,\n")
    with pytest.raises(TaskError, match="an empty text in column 'positive'"):
        mine(index, other, out)
    with pytest.raises(TaskError, match="this file has no valid pair"):
        mine(index, other, out, skip_invalid=True)
    with pytest.raises(InputError, match=r"expected a name that ends in \.csv"):
        mine(index, pairs, tmp_path / "out.xyz")
    with pytest.raises(InputError, match="this file exists already"):
        mine(index, pairs, pairs)
    other = tmp_path / "other.jsonl"
    other.write_text('{"query": "a", "positive": "b\\nc"}\n')
    with pytest.raises(InputError, match="TSV cannot hold a tab or line break inside a cell"):
        # The model of the index is not loaded before the error.
        mine(tmp_path / "no.index", other, tmp_path / "out.tsv")
    assert not out.exists()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"candidates": 3, "skip": 3}, "candidates is 3 and skip is 3; give more candidates"),
        ({"columns": {"text": "a"}}, "mining needs the columns of a query and its positive"),
    ]
    for values, message in cases:
        with pytest.raises(SettingsError, match=message):
            MiningSettings.parse(values, "the settings")
