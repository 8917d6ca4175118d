"""``bertsmith rerank``: order documents by their relevance to a query."""

from pathlib import Path
from typing import Annotated

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import log, print_json, print_table
from bertsmith.cli.model_options import (
    Device,
    Fast,
    Json,
    LinesFormatOption,
    Model,
    load_fine_tuned_model,
    open_lines,
    open_texts,
)
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.errors import InputError
from bertsmith.plurals import count_noun


@app.command(
    epilog=format_examples(
        'bertsmith rerank my-reranker "bread" "Mix flour and water." "Stars shine."',
        'bertsmith rerank my-reranker "bread" --documents lines.txt --top 3',
        'bertsmith rerank cross-encoder/ms-marco-MiniLM-L6-v2 "bread" - < lines.txt',
    )
)
def rerank(
    model: Model,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="The query.", show_default=False)],
    documents: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DOCUMENT",
            help="Documents; - reads one document per line of standard input.",
            show_default=False,
        ),
    ] = None,
    documents_file: Annotated[
        Path | None,
        typer.Option("--documents", help="A file with one document per line.", show_default=False),
    ] = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Number of documents to print. Default: all.")
    ] = None,
    raw_scores: Annotated[
        bool,
        typer.Option("--raw-scores", help="Print the outputs of the model, not probabilities."),
    ] = False,
    lines_format: LinesFormatOption = None,
    fast: Fast = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Order documents by their relevance to a query.

    The most relevant document is printed first, with its relevance from 0 to 1 and its number; in
    JSON, the index counts from 0. The model is a reranker (cross-encoder) with one output, from
    `bertsmith finetune rerank` or another toolkit.
    """
    if (documents_file is None) == (not documents):
        raise InputError("give the documents either as arguments or with --documents FILE")
    if documents_file is not None:
        texts = list(open_lines(str(documents_file), lines_format))
    else:
        texts = list(open_texts(documents or [], lines_format))
    if not texts:
        raise InputError("there are no documents; expected at least one")
    bundle = load_fine_tuned_model(model, device, fast=fast)
    from bertsmith.use import rerank as reranking

    unknown = UnknownTokenWarning()
    ranking = reranking.rerank(
        unknown.with_token_counter(bundle), query, texts, top=top, raw_scores=raw_scores
    )
    if as_json:
        for document in ranking:
            print_json({"index": document.index, "score": document.score, "text": document.text})
    else:
        rows = ((f"{item.score:.4f}", str(item.index + 1), item.text) for item in ranking)
        print_table(("score", "document", ""), rows)
    num_truncated = sum(document.is_truncated for document in ranking)
    if num_truncated:
        log(f"{count_noun(num_truncated, 'printed document')} truncated with the query")
    unknown.warn()
