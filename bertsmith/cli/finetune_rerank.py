"""``bertsmith finetune rerank``: train a reranker."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from bertsmith.cli.app import format_examples
from bertsmith.cli.console import TerminalProgress, log
from bertsmith.cli.finetune import (
    Assignments,
    ConfigFile,
    Epochs,
    FilesEncoding,
    LearningRateByWidth,
    RunDirectory,
    StartModel,
    build_values,
    drop_missing,
    group,
    report_result,
)
from bertsmith.cli.hints import quote_path
from bertsmith.cli.launcher import report_once
from bertsmith.cli.model_options import SkipInvalid, TableDelimiter
from bertsmith.cli.task_options import parse_columns


@group.command(
    epilog=format_examples(
        "bertsmith finetune rerank --model my-run --data judged.csv \\\n"
        "      --text query --pair document --score relevance --out my-reranker",
        "bertsmith finetune rerank --model my-run --data triplets.jsonl --loss mnrl \\\n"
        "      --text anchor --pair positive --negatives negative --out my-reranker",
    )
)
def rerank(
    model: StartModel,
    data: Annotated[
        list[Path], typer.Option(help="A table of queries and documents; may be repeated.")
    ],
    out: RunDirectory,
    dev: Annotated[
        list[Path] | None,
        typer.Option(
            help="A validation table; may be repeated. Default: the documents of a tenth of the "
            "queries, at most 1,000 queries."
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The column of the query.")] = None,
    pair: Annotated[
        str | None, typer.Option(help="The column of the document, or of a list of documents.")
    ] = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="The column of the relevance of the document: 0 or 1, or any numbers. Without "
            "it, the document is relevant."
        ),
    ] = None,
    negatives: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,...",
            help="The columns of documents that are not relevant, each a text or a list.",
        ),
    ] = None,
    loss: Annotated[
        Literal["bce", "ranknet", "margin_mse", "listnet", "mnrl"] | None,
        typer.Option(
            help="Pointwise: bce (binary cross-entropy). Pairwise: ranknet or margin_mse. "
            "Listwise: listnet or mnrl (multiple negatives ranking). Default: bce."
        ),
    ] = None,
    random_negatives: Annotated[
        int | None,
        typer.Option(
            help="Random documents of other queries to add to each query in each step. Default: 4 "
            "if all documents are relevant, else 0.",
            min=0,
        ),
    ] = None,
    epochs: Epochs = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Batch size: queries with all their documents, or pairs for bce. Default: 16 "
            "queries or 32 pairs.",
            min=1,
        ),
    ] = None,
    lr: LearningRateByWidth = None,
    max_seqlen: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens of a query and a document together. Default: 512, or less if the "
            "model takes less.",
            min=8,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Random seed of the new weights, the data order and dropout.", min=0),
    ] = None,
    skip_invalid: SkipInvalid = False,
    encoding: FilesEncoding = None,
    delimiter: TableDelimiter = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a reranker (cross-encoder) on queries with relevant and other documents.

    A reranker reads a query and a document together and predicts how relevant the document is. It
    is more accurate than embeddings, and slower: use it to reorder the results of a search
    (`bertsmith rerank`, `bertsmith search --rerank`).

    A row has a query and a document with its score, or a query, a relevant document and negatives.
    Rows of the same query need not be consecutive. Columns named query, document (or passage) and
    score (or label), or query (or anchor), positive and negative are found without options.

    OUT/model is loaded by transformers, and by the CrossEncoder of sentence-transformers. Ctrl-C
    and SIGTERM save a checkpoint; the same command then continues the run.
    """
    columns = {
        "text": text, "pair": pair, "score": score,
        "negatives": parse_columns("--negatives", negatives),
    }  # fmt: skip
    settings: dict[str, Any] = {
        "columns": drop_missing(columns) or None,
        "loss": loss,
        "random_negatives": random_negatives,
    }
    values = build_values(
        "reranking", settings,
        dev=dev, batch_size=batch_size, max_seqlen=max_seqlen, skip_invalid=skip_invalid,
        encoding=encoding, delimiter=delimiter, epochs=epochs, lr=lr, seed=seed,
    )  # fmt: skip
    from bertsmith.train.engine.finetuning_overrides import check_run_arguments
    from bertsmith.train.reranking.settings import read_overrides, resolve_settings

    with report_once():
        check_run_arguments(
            read_overrides, resolve_settings, model, data, out, config, assignments or [], values
        )
    from bertsmith.train.reranking.finetune import finetune_reranker

    result = finetune_reranker(
        model,
        out,
        data=data,
        config=config,
        assignments=assignments or [],
        values=values,
        progress=TerminalProgress(),
    )
    is_ranking = "map" in result.metric_names
    unit = ("query", "queries") if is_ranking else ("pair", "pairs")
    model_path = report_result(result, as_json=as_json, unit=unit)
    log(f"wrote {model_path}")
    log(f'next: bertsmith rerank {quote_path(result.run)} "QUERY" --documents lines.txt')
