"""``bertsmith search``: find the indexed lines that are most similar to a query."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import print_json, print_line, print_table
from bertsmith.cli.model_options import (
    STDIN,
    Device,
    Json,
    LinesFormatOption,
    check_device,
    check_unused_options,
    find_embedding_model,
    load_fine_tuned_model,
    open_texts,
    resolve_device,
)
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.errors import InputError

if TYPE_CHECKING:
    from bertsmith.bundle import FineTunedBundle
    from bertsmith.use.search import SearchResult

_QUERIES_PER_BATCH = 256


@app.command(
    epilog=format_examples(
        "bertsmith embed my-run sentences.txt --out lines.index",
        'bertsmith search lines.index "how to bake bread" --top 3',
        'bertsmith search lines.index "how to bake bread" --rerank my-reranker',
        "bertsmith search lines.index - --json < queries.txt",
    )
)
def search(
    index: Annotated[
        Path,
        typer.Argument(
            metavar="INDEX",
            help="An index made by `bertsmith embed MODEL FILE --out NAME.index`.",
            show_default=False,
        ),
    ],
    queries: Annotated[
        list[str],
        typer.Argument(
            metavar="QUERY",
            help="Query texts; - reads one query per line of standard input.",
            show_default=False,
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="Number of lines to find per query.")] = 5,
    exact: Annotated[
        bool,
        typer.Option("--exact", help="Compare with all lines instead of searching approximately."),
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="The model of the index. Default: the path stored in the index."),
    ] = None,
    rerank: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="A reranker (cross-encoder), which orders the most similar lines by relevance.",
        ),
    ] = None,
    late: Annotated[
        bool,
        typer.Option(
            "--late",
            help="Order the most similar lines by late interaction: compare all tokens of query "
            "and line (ColBERT's MaxSim).",
        ),
    ] = False,
    candidates: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --rerank or --late: number of most similar lines to order. Default: 50.",
        ),
    ] = None,
    prompt_name: Annotated[
        str | None,
        typer.Option(
            help="Name of the prompt of the model that is added to each query. Default: query, if "
            "the model has it."
        ),
    ] = None,
    lines_format: LinesFormatOption = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find the indexed lines that are most similar to a query.

    The query is embedded with the model that made the index. Prints the cosine similarity, the
    line number and the line, most similar first. With --rerank, prints also the relevance from 0 to
    1, most relevant first; with --late, the mean similarity of the query's tokens with the most
    similar tokens of the line.
    """
    check_device(device)
    if rerank is None and not late:
        advice = "only valid with --rerank or --late; remove it"
        check_unused_options({"--candidates": candidates}, advice)
    if rerank is not None and late:
        raise InputError("--rerank and --late exclude each other; use one of them")
    check_index(index)
    remaining_queries = _check_queries(open_texts(queries, lines_format))
    if model is not None:
        model = find_embedding_model(model)
    from bertsmith.use.inputs import chunked
    from bertsmith.use.search import DEFAULT_CANDIDATES, Searcher

    searcher = Searcher(index, model=model, device=resolve_device(device), prompt_name=prompt_name)
    reranker = None if rerank is None else _load_reranker(rerank, device)
    unknown = UnknownTokenWarning(searcher.token_counts)
    unbuffered = queries == [STDIN] and sys.stdin.isatty()
    for batch in chunked(remaining_queries, 1 if unbuffered else _QUERIES_PER_BATCH):
        results = searcher.search(
            batch,
            top,
            exact=exact,
            reranker=reranker,
            candidates=candidates or DEFAULT_CANDIDATES,
            late=late,
        )
        for query, hits in zip(batch, results, strict=True):
            if as_json:
                print_json({"query": query, "hits": [_to_json(hit) for hit in hits]})
                continue
            if len(queries) > 1 or queries == [STDIN]:
                print_line(query)
            _print_hits(hits)
        if unbuffered:
            sys.stdout.flush()
        if queries == [STDIN]:
            unknown.warn()
    unknown.warn()


def check_index(index: Path) -> None:
    """Raise InputError if a path is not an index, without loading torch."""
    if not (index / "index.json").is_file():
        problem = "not an index (it has no index.json)" if index.exists() else "does not exist"
        raise InputError(
            f"{index}: {problem}; make an index with: bertsmith embed MODEL FILE --out NAME.index"
        )


def _load_reranker(model: Path, device: str) -> "FineTunedBundle":
    """Load a model with one output."""
    bundle = load_fine_tuned_model(model, device)
    from bertsmith.use.model_setup import resolve_reranker

    return resolve_reranker(bundle)


def _to_json(hit: "SearchResult") -> dict[str, Any]:
    """Return a line as JSON, without the relevance if there is no reranker."""
    return {name: value for name, value in asdict(hit).items() if value is not None}


def _print_hits(hits: list["SearchResult"]) -> None:
    """Print the lines that were found for a query, with the scores that they have."""
    names = [
        name
        for name in ("relevance", "maxsim", "cosine")
        if hits and getattr(hits[0], name) is not None
    ]
    rows = [
        (*(f"{getattr(hit, name):.4f}" for name in names), str(hit.line), hit.text) for hit in hits
    ]
    print_table((*names, "line", ""), rows)


def _check_queries(queries: Iterable[str]) -> Iterator[str]:
    """Yield the queries. Raises InputError for an empty query."""
    for number, query in enumerate(queries, 1):
        if not query.strip():
            raise InputError(f"query {number:,} is empty; expected a text to search for")
        yield query
