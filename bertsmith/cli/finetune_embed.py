"""``bertsmith finetune embed``: train a sentence-embedding model."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bertsmith.cli.app import format_examples
from bertsmith.cli.console import TerminalProgress, log
from bertsmith.cli.finetune import (
    Assignments,
    ConfigFile,
    Epochs,
    FilesEncoding,
    RunDirectory,
    StartModel,
    build_values,
    drop_missing,
    group,
    report_result,
)
from bertsmith.cli.hints import quote_path
from bertsmith.cli.launcher import report_once
from bertsmith.cli.model_options import SkipInvalid, TableDelimiter, check_positive, parse_numbers
from bertsmith.cli.task_options import parse_columns


@group.command(
    epilog=format_examples(
        "bertsmith finetune embed --model my-run --data questions.csv \\\n"
        "      --text question --pair answer --out my-embedder",
        "bertsmith finetune embed --model my-run --data train.csv --dev dev.csv \\\n"
        "      --text sentence1 --pair sentence2 --score score --out my-embedder",
        "bertsmith finetune embed --model my-run --data lines.txt --out my-embedder",
    )
)
def embed(
    model: StartModel,
    data: Annotated[
        list[Path],
        typer.Option(help="A training table or a .txt file of lines; may be repeated."),
    ],
    out: RunDirectory,
    dev: Annotated[
        list[Path] | None,
        typer.Option(
            help="A validation table of any kind, or a folder in BEIR's format; may be "
            "repeated. Default: a tenth of the training examples, at most 1,000."
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER,...",
            help="How often each training file is used per epoch, such as 1,0.5.",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="The column of the text (query), or the first of two texts.")
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help="The column of its positive, or the second of two texts.")
    ] = None,
    negatives: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,...", help="The columns of hard negatives, each a text or a list."
        ),
    ] = None,
    score: Annotated[
        str | None, typer.Option(help="The column of the similarity of two texts.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="The column of the class of the text.")] = None,
    loss: Annotated[
        str | None,
        typer.Option(
            help="mnrl (multiple negatives ranking), cosent, cosine, triplet, or tsdae for plain "
            "text. Default: cosent for scored pairs, else mnrl."
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="mnrl, cosent: similarities are divided by it. Default: 0.05.", min=0),
    ] = None,
    matryoshka: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER,...",
            help="Train vectors that can be shortened to these numbers of first dimensions, such "
            "as 384,128,64; one of them is the width of the vectors.",
        ),
    ] = None,
    pooling: Annotated[
        str | None,
        typer.Option(help="mean, cls, max and so on. Default: as the model specifies, else mean."),
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="A prefix of every text. Default: that of the model.")
    ] = None,
    query_prompt: Annotated[
        str | None, typer.Option(help="Pairs: a prefix of the column --text, such as 'query: '.")
    ] = None,
    document_prompt: Annotated[
        str | None, typer.Option(help="Pairs: a prefix of the columns --pair and --negatives.")
    ] = None,
    epochs: Epochs = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Batch size in examples; any size fits in memory. Default: 64.", min=2),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate. Default: 3e-5.", callback=check_positive),
    ] = None,
    max_seqlen: Annotated[
        int | None,
        typer.Option(help="Maximum tokens per text. Default: as the model, else 128.", min=8),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of the data order and dropout.", min=0)
    ] = None,
    skip_invalid: SkipInvalid = False,
    encoding: FilesEncoding = None,
    delimiter: TableDelimiter = None,
    config: ConfigFile = None,
    assignments: Assignments = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train sentence embeddings on pairs, scored pairs, labels or plain text.

    The columns determine the kind of training: --text and --pair, also with --negatives, for pairs
    of texts that belong together; with --score for pairs with a similarity; --text and --label for
    texts with a class; only --text, or a .txt file, for unlabeled text (SimCSE or TSDAE). Columns
    named anchor, positive and negative, or sentence1, sentence2 and score, or text and label are
    found without options.

    OUT/model is a sentence-transformers directory. Ctrl-C and SIGTERM save a checkpoint; the same
    command then continues the run.
    """
    columns = {
        "text": text, "pair": pair, "score": score, "label": label,
        "negatives": parse_columns("--negatives", negatives),
    }  # fmt: skip
    settings: dict[str, Any] = {
        "columns": drop_missing(columns) or None, "loss": loss, "temperature": temperature,
        "file_weights": parse_numbers("--weights", weights, float),
        "matryoshka_dims": parse_numbers("--matryoshka", matryoshka, int),
        "pooling": pooling, "prompt": prompt, "query_prompt": query_prompt,
        "document_prompt": document_prompt,
    }  # fmt: skip
    values = build_values(
        "embedding", settings,
        dev=dev, batch_size=batch_size, max_seqlen=max_seqlen, skip_invalid=skip_invalid,
        encoding=encoding, delimiter=delimiter, epochs=epochs, lr=lr, seed=seed,
    )  # fmt: skip
    from bertsmith.train.embedding.settings import read_overrides, resolve_settings
    from bertsmith.train.engine.finetuning_overrides import check_run_arguments

    with report_once():
        check_run_arguments(
            read_overrides, resolve_settings, model, data, out, config, assignments or [], values
        )
    from bertsmith.train.embedding.finetune import finetune_embedder

    result = finetune_embedder(
        model,
        out,
        data=data,
        config=config,
        assignments=assignments or [],
        values=values,
        progress=TerminalProgress(),
    )
    shortened = f"{result.metric_names[0]}_dim"
    dim_metrics = [name for name in result.metrics if name.startswith(shortened)]
    model_path = report_result(result, as_json=as_json, other_metrics=dim_metrics)
    log(f"wrote {model_path}, a sentence-transformers directory")
    log(f"next: bertsmith embed {quote_path(result.run)} lines.txt --out lines.index")
