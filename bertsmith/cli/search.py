"""``bertsmith search``: find the indexed lines that are most similar to a query."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import print_json, print_line, print_table
from bertsmith.cli.model_options import (
    STDIN,
    Device,
    Json,
    LinesFormatOption,
    check_device,
    find_model,
    open_texts,
    resolve_device,
)
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.errors import InputError

_QUERIES_PER_BATCH = 256


@app.command(
    epilog=format_examples(
        "bertsmith embed my-run sentences.txt --out lines.index",
        'bertsmith search lines.index "how to bake bread" --top 3',
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
    lines_format: LinesFormatOption = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find the indexed lines that are most similar to a query.

    The query is embedded with the model that made the index. Prints the cosine similarity, the
    line number and the line, most similar first.
    """
    check_device(device)
    if not (index / "index.json").is_file():
        problem = "not an index (it has no index.json)" if index.exists() else "does not exist"
        raise InputError(
            f"{index}: {problem}; make an index with: bertsmith embed MODEL FILE --out NAME.index"
        )
    remaining_queries = _check_queries(open_texts(queries, lines_format))
    if model is not None:
        model = find_model(model)
    from bertsmith.use.search import Searcher

    searcher = Searcher(index, model=model, device=resolve_device(device))
    unknown = UnknownTokenWarning(searcher.token_counts)
    unbuffered = queries == [STDIN] and sys.stdin.isatty()
    while batch := list(islice(remaining_queries, 1 if unbuffered else _QUERIES_PER_BATCH)):
        for query, hits in zip(batch, searcher.search(batch, top, exact=exact), strict=True):
            if as_json:
                print_json({"query": query, "hits": [asdict(hit) for hit in hits]})
                continue
            if len(queries) > 1 or queries == [STDIN]:
                print_line(query)
            rows = ((f"{hit.cosine:.4f}", str(hit.line), hit.text) for hit in hits)
            print_table(("cosine", "line", ""), rows)
        if unbuffered:
            sys.stdout.flush()
        if queries == [STDIN]:
            unknown.warn()
    unknown.warn()


def _check_queries(queries: Iterable[str]) -> Iterator[str]:
    """Yield the queries. Raises InputError for an empty query."""
    for number, query in enumerate(queries, 1):
        if not query.strip():
            raise InputError(f"query {number:,} is empty; expected a text to search for")
        yield query
