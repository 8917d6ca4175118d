"""``bertsmith search``: the embedded lines that are nearest to a question.

It never knows how they are found.
"""

import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app
from bertsmith.cli.console import print_json, print_line, print_table
from bertsmith.cli.model_options import (
    STDIN,
    Device,
    Json,
    check_device,
    read_texts,
    resolve_device,
)
from bertsmith.cli.models import find_model
from bertsmith.cli.unknown_warning import UnknownWarning
from bertsmith.errors import InputError

#: Questions that are embedded together.
_TOGETHER = 256


@app.command()
def search(
    index: Annotated[
        Path,
        typer.Argument(
            metavar="INDEX",
            help="What `bertsmith embed MODEL FILE --out NAME.index` wrote.",
            show_default=False,
        ),
    ],
    queries: Annotated[
        list[str],
        typer.Argument(
            metavar="QUERY",
            help="Questions, or any texts; - reads lines from standard input.",
            show_default=False,
        ),
    ],
    top: Annotated[int, typer.Option(min=1, help="How many lines to find.")] = 5,
    exact: Annotated[
        bool, typer.Option("--exact", help="Look at every line, not at the likely ones only.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="Where the model that made the index is now, if it was moved."),
    ] = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Find the lines whose vectors are nearest to a question's.

    The model that made the index makes the question's vector. Prints the cosine, the line's number
    and the line, the nearest first.
    """
    check_device(device)
    if not (index / "index.json").is_file():
        problem = "not an index (no index.json in it)" if index.exists() else "there is nothing"
        raise InputError(
            f"{index}: {problem}; make an index with: bertsmith embed MODEL FILE --out NAME.index"
        )
    if model is not None:
        model = find_model(model)
    from bertsmith.use.search import Searcher

    searcher = Searcher(index, model=model, device=resolve_device(device))
    unknown = UnknownWarning(searcher.token_counts)
    at_once = queries == [STDIN] and sys.stdin.isatty()
    asked = _questions(queries)
    while some := list(islice(asked, 1 if at_once else _TOGETHER)):
        for query, hits in zip(some, searcher.search(some, top, exact=exact), strict=True):
            if as_json:
                print_json({"query": query, "hits": [asdict(hit) for hit in hits]})
                continue
            if len(queries) > 1 or queries == [STDIN]:
                print_line(query)
            rows = ((f"{hit.cosine:.4f}", str(hit.line), hit.text) for hit in hits)
            print_table(("cosine", "line", ""), rows)
        if at_once:
            sys.stdout.flush()
        if queries == [STDIN]:
            unknown.warn()
    unknown.warn()


def _questions(queries: list[str]) -> Iterator[str]:
    for number, query in enumerate(read_texts(queries), 1):
        if not query.strip():
            raise InputError(f"question {number:,} is empty; there is nothing to search for")
        yield query
