"""``bertsmith mine``: mine hard negatives for training."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import (
    TerminalProgress,
    log,
    print_example_counts,
    print_json,
    print_line,
)
from bertsmith.cli.finetune import FilesEncoding, drop_missing
from bertsmith.cli.hints import quote_path
from bertsmith.cli.model_options import (
    Device,
    SkipInvalid,
    TableDelimiter,
    check_device,
    check_readable,
    find_embedding_model,
    load_fine_tuned_model,
    resolve_device,
)
from bertsmith.cli.search import check_index
from bertsmith.errors import InputError
from bertsmith.files import check_new_file
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from bertsmith.use.mine_negatives import MiningCounts


@app.command(
    epilog=format_examples(
        "bertsmith embed my-embedder answers.txt --out answers.index",
        "bertsmith mine answers.index --data questions.csv --text question \\\n"
        "      --pair answer --out triplets.jsonl",
        "bertsmith finetune rerank --model my-run --data triplets.jsonl \\\n"
        "      --out my-reranker",
    )
)
def mine(
    index: Annotated[
        Path,
        typer.Argument(
            metavar="INDEX",
            help="An index of the corpus, made by `bertsmith embed MODEL FILE --out NAME.index`.",
            show_default=False,
        ),
    ],
    data: Annotated[Path, typer.Option(help="A table of queries and their positives.")],
    out: Annotated[
        Path, typer.Option(help="The table to write: .jsonl, .json, .parquet, .csv or .tsv.")
    ],
    text: Annotated[str | None, typer.Option(help="The column of the query.")] = None,
    pair: Annotated[str | None, typer.Option(help="The column of its positive.")] = None,
    negatives: Annotated[
        int | None,
        typer.Option(help="Maximum number of negatives of a query. Default: 3.", min=1),
    ] = None,
    candidates: Annotated[
        int | None,
        typer.Option(help="Number of most similar lines to consider. Default: 50.", min=1),
    ] = None,
    skip: Annotated[
        int | None,
        typer.Option(help="Leave out this many of the most similar negatives. Default: 0.", min=0),
    ] = None,
    relative_margin: Annotated[
        float | None,
        typer.Option(
            help="A negative has at most the similarity of the positive minus this fraction of "
            "it. Default: 0.05.",
            min=0,
        ),
    ] = None,
    absolute_margin: Annotated[
        float | None,
        typer.Option(
            help="A negative has at most the similarity of the positive minus this.", min=0
        ),
    ] = None,
    max_score: Annotated[
        float | None, typer.Option(help="Maximum similarity of a negative.")
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(help="Minimum similarity of a negative.")
    ] = None,
    sampling: Annotated[
        Literal["top", "random"] | None,
        typer.Option(help="Use the most similar negatives (top), or random ones. Default: top."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of --sampling random. Default: 0.", min=0)
    ] = None,
    rerank: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL",
            help="A reranker, whose relevance replaces the cosine similarity of candidates and "
            "positives.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="The model of the index. Default: the path stored in the index."),
    ] = None,
    skip_invalid: SkipInvalid = False,
    encoding: FilesEncoding = None,
    delimiter: TableDelimiter = None,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts as JSON.")] = False,
) -> None:
    """Mine hard negatives: texts similar to a query, but not relevant.

    For each query of a table, the most similar lines of an index are found. Positives of the query
    and lines that are nearly as similar as its positive, which are often relevant too, are left
    out. The table that is written has the columns anchor, positive and negatives (a list), or in
    CSV and TSV a row for each negative. `finetune embed` and `finetune rerank` find them without
    options.

    The corpus is not loaded into memory.
    """
    check_device(device)
    check_index(index)
    check_readable(data)
    if not data.is_file():
        raise InputError(f"{data}: a pipe cannot be read twice; give a file")
    check_new_file(out)
    from bertsmith.use.mining_settings import MiningSettings

    values: dict[str, Any] = {
        "columns": drop_missing({"text": text, "pair": pair}) or None,
        "num_negatives": negatives, "candidates": candidates, "skip": skip,
        "relative_margin": relative_margin, "absolute_margin": absolute_margin,
        "max_score": max_score, "min_score": min_score, "seed": seed,
        "sampling": sampling, "skip_invalid": skip_invalid, "encoding": encoding,
        "delimiter": delimiter,
    }  # fmt: skip
    settings = MiningSettings.parse(drop_missing(values), "the options")
    if model is not None:
        model = find_embedding_model(model)
    from bertsmith.use.mine_negatives import mine_negatives

    counts = mine_negatives(
        index,
        data,
        out,
        settings=settings,
        model=model,
        reranker=None if rerank is None else load_fine_tuned_model(rerank, device),
        device=resolve_device(device),
        progress=TerminalProgress(),
    )
    if as_json:
        print_json({**asdict(counts), "examples": counts.examples.as_dict()})
    else:
        _print_counts(counts)
    log(f"wrote {out}")
    log(f"next: bertsmith finetune rerank --model MODEL --data {quote_path(out)} --out RUN")


def _print_counts(counts: "MiningCounts") -> None:
    """Print how many negatives were found, and why candidates were not used."""
    num_written = counts.num_pairs - counts.num_pairs_without_negatives
    print_line(
        f"{count_noun(counts.num_negatives, 'negative')} for {num_written:,} of "
        f"{count_noun(counts.num_pairs, 'pair')}"
    )
    for reason, count in counts.rejected.items():
        print_line(f"{count_noun(count, 'candidate')} not used: {reason}")
    print_example_counts(counts.examples.as_dict())
