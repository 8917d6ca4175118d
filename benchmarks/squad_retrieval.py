"""Compare late interaction and a reranker with single vectors, on the paragraphs of SQuAD.

Each question is to find its paragraph among all paragraphs. The variants are single vectors, MaxSim
of the best paragraphs by single vectors (as in ``search --late``), MaxSim of all paragraphs with
float32 and with int8 token vectors, and with ``--reranker`` the best paragraphs by single vectors
in the order of a reranker (as in ``search --rerank``).

    python benchmarks/squad_retrieval.py --model MODEL --squad squad/dev-v1.1.json

With ``--write DIR``, the script instead writes the questions and paragraphs in the formats of
``bertsmith mine``, to train a reranker: DIR/questions.jsonl and DIR/paragraphs.txt.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from reporting import report

from bertsmith.bundle.fine_tuned import load_fine_tuned
from bertsmith.tasks.retrieval import compute_retrieval_metrics
from bertsmith.use.embed import Embedder
from bertsmith.use.late_interaction import encode_line_tokens, encode_query_tokens
from bertsmith.use.rerank import rerank
from bertsmith.use.vector_settings import VectorSettings

Floats = NDArray[np.float32]
#: Number of ranked paragraphs, for recall@100.
DEPTH = 100


def read_squad(path: Path, num_queries: int) -> tuple[list[str], list[str], list[int]]:
    """Return all paragraphs, random questions, and the paragraph of each question."""
    paragraphs: list[str] = []
    questions: list[str] = []
    sources: list[int] = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for item in paragraph["qas"]:
                questions.append(item["question"])
                sources.append(len(paragraphs))
            paragraphs.append(" ".join(paragraph["context"].split()))
    drawn = np.random.default_rng(0).permutation(len(questions))[:num_queries].tolist()
    return paragraphs, [questions[row] for row in drawn], [sources[row] for row in drawn]


def write_training_data(
    folder: Path, paragraphs: list[str], questions: list[str], sources: list[int]
) -> None:
    """Write the paragraphs, one per line, and a table of questions and their paragraphs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "paragraphs.txt").write_text("".join(f"{line}\n" for line in paragraphs), "utf-8")
    rows = (
        {"query": question, "document": paragraphs[row]}
        for question, row in zip(questions, sources, strict=True)
    )
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (folder / "questions.jsonl").write_text(text, "utf-8")


def compute_metrics(scores: Floats, sources: Sequence[int]) -> dict[str, float]:
    """Return nDCG@10 and recall of the questions' paragraphs."""
    rankings = np.argsort(-scores, axis=1, kind="stable")[:, :DEPTH]
    return compute_retrieval_metrics(rankings, [{row: 1.0} for row in sources], (1, 10, DEPTH))


def compute_maxsims(queries: Sequence[Floats], lines: Sequence[Floats]) -> Floats:
    """Return the MaxSim of each query and each line, float32 [queries, lines]."""
    tokens = np.concatenate(lines)
    starts = np.cumsum([0, *map(len, lines[:-1])])
    rows = [np.maximum.reduceat(query @ tokens.T, starts, axis=1).mean(0) for query in queries]
    return np.stack(rows)


def round_to_int8(vectors: Floats) -> Floats:
    """Return vectors whose elements are rounded to 255 values between -maximum and maximum."""
    scales = np.abs(vectors).max(1, keepdims=True) / 127
    rounded: Floats = np.round(vectors / scales) * scales
    return rounded


def reorder(candidates: NDArray[np.int64], scores: Floats, num_paragraphs: int) -> Floats:
    """Return the scores of all paragraphs, float32 [queries, paragraphs].

    Args:
        candidates: Paragraphs of each query, [queries, candidates].
        scores: Their scores, float32 [queries, candidates]. All other paragraphs rank below.
        num_paragraphs: Number of all paragraphs.
    """
    reordered = np.full((len(candidates), num_paragraphs), -np.inf, np.float32)
    np.put_along_axis(reordered, candidates, scores, 1)
    return reordered


def compute_relevances(
    model: Path, questions: list[str], paragraphs: list[str], candidates: NDArray[np.int64]
) -> Floats:
    """Return the outputs of a reranker for the candidates of each question."""
    reranker = load_fine_tuned(model)
    relevances = np.empty(candidates.shape, np.float32)
    for row, question in enumerate(questions):
        documents = [paragraphs[index] for index in candidates[row].tolist()]
        for item in rerank(reranker, question, documents, raw_scores=True):
            relevances[row, item.index] = item.score
    return relevances


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse arguments; None for those of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", type=Path, help="an embedding model")
    parser.add_argument("--squad", type=Path, required=True, help="a file of SQuAD 1.1")
    parser.add_argument("--queries", type=int, default=1000, help="number of random questions")
    parser.add_argument("--candidates", type=int, default=50, help="as in search --late")
    parser.add_argument("--reranker", type=Path, help="a reranker, to order the candidates")
    parser.add_argument("--write", type=Path, help="write training data to this folder, and stop")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args(arguments)
    if options.model is None and options.write is None:
        parser.error("give --model or --write")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Compute the metrics of all variants, and report the ratio of their nDCG@10."""
    options = parse_options(arguments)
    paragraphs, questions, sources = read_squad(options.squad, options.queries)
    if options.write is not None:
        write_training_data(options.write, paragraphs, questions, sources)
        return
    embedder = Embedder.load(options.model)
    query_embedder, line_embedder = embedder.with_query_prompt(), embedder.with_document_prompt()
    cosines = (
        query_embedder.encode(questions, normalize=True)
        @ line_embedder.encode(paragraphs, normalize=True).T
    )
    settings = VectorSettings()
    queries = encode_query_tokens(query_embedder, settings, questions)
    lines = encode_line_tokens(line_embedder, settings, paragraphs)
    maxsims = compute_maxsims(queries, lines)
    candidates = np.argsort(-cosines, axis=1)[:, : options.candidates]
    candidate_scores = np.take_along_axis(maxsims, candidates, 1)
    variants = {
        "single vectors": cosines,
        f"MaxSim of the best {options.candidates}": reorder(
            candidates, candidate_scores, len(paragraphs)
        ),
        "MaxSim of all": maxsims,
        "MaxSim of all, int8": compute_maxsims(queries, list(map(round_to_int8, lines))),
    }
    if options.reranker is not None:
        relevances = compute_relevances(options.reranker, questions, paragraphs, candidates)
        variants[f"reranker of the best {options.candidates}"] = reorder(
            candidates, relevances, len(paragraphs)
        )
    figures = {
        f"{name}: {metric}": value
        for name, scores in variants.items()
        for metric, value in compute_metrics(scores, sources).items()
    }
    base = figures["single vectors: ndcg@10"]
    ratios = {
        f"nDCG@10, {name} / single vectors": figures[f"{name}: ndcg@10"] / base
        for name in variants
        if name != "single vectors"
    }
    report("squad-retrieval", ratios, figures, options.json)


if __name__ == "__main__":
    main()
