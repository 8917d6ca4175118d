"""``bertsmith evaluate``: compute metrics on labeled data, pairs, embeddings or reranking."""

from pathlib import Path
from typing import Annotated, Any

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.classification_report import format_class_report, format_confusion_matrix
from bertsmith.cli.console import log, print_example_counts, print_json, print_line
from bertsmith.cli.finetune import drop_missing
from bertsmith.cli.minimal_pairs import evaluate_minimal_pairs
from bertsmith.cli.model_options import (
    Device,
    Fast,
    Json,
    Model,
    PllOption,
    SkipInvalid,
    TableDelimiter,
    check_unused_options,
    load_fine_tuned_model,
)
from bertsmith.cli.ranking_evaluation import evaluate_reranking, evaluate_vectors
from bertsmith.cli.task_options import LabelColumns, LabelThreshold, NullThreshold, parse_columns
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.errors import InputError, SettingsError
from bertsmith.files import describe_missing_path
from bertsmith.settings import load_user_settings


@app.command(
    epilog=format_examples(
        "bertsmith evaluate my-classifier --data test.csv",
        "bertsmith evaluate my-classifier --data test.csv --metric roc_auc --json",
        "bertsmith evaluate my-run --minimal-pairs blimp/*.jsonl",
        "bertsmith evaluate my-run --minimal-pairs blimp/ --out scores.csv",
        "bertsmith evaluate my-embedder --embeddings sts-test.csv --text sentence1 \\\n"
        "      --pair sentence2 --score score",
        "bertsmith evaluate my-embedder --embeddings BEIR/scifact",
        "bertsmith evaluate my-reranker --reranking judged.csv --text query \\\n"
        "      --pair document --score relevance",
    )
)
def evaluate(
    model: Model,
    # A shell expands --minimal-pairs *.jsonl to several files. The first is the option's value; the
    # others are arguments.
    files_after_first: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", hidden=True)
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A labeled table, or the folder of a public task's files.")
    ] = None,
    minimal_pairs: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE...",
            help="JSON lines or other tables of minimal pairs with the columns sentence_good and "
            "sentence_bad, as in BLiMP, or a folder of such files.",
            show_default=False,
        ),
    ] = None,
    embeddings: Annotated[
        Path | None,
        typer.Option(
            help="Evaluate vectors on a table of scored pairs, pairs (with negatives) or labeled "
            "texts, or on a folder in BEIR's format.",
            show_default=False,
        ),
    ] = None,
    reranking: Annotated[
        Path | None,
        typer.Option(
            help="Evaluate a reranker on a table of queries and documents with scores or "
            "negatives.",
            show_default=False,
        ),
    ] = None,
    pll: Annotated[
        PllOption | None,
        typer.Option(
            help="Minimal pairs: mask only the token to predict (original), or also the following "
            "tokens of its word (within-word). Default: both.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Minimal pairs: a new table with the scores of each pair, as .csv, .tsv, .jsonl, "
            ".json or .parquet.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[str | None, typer.Option(help="The column of the text.")] = None,
    pair: Annotated[str | None, typer.Option(help="The column of a second text.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    label_columns: LabelColumns = None,
    score: Annotated[
        str | None,
        typer.Option(
            help="Embeddings: the column of the similarity of two texts. Reranking: the column of "
            "the relevance of the document."
        ),
    ] = None,
    negatives: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN,...", help="Embeddings and reranking: the columns of negatives."
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(help="Embeddings: the split of a BEIR folder. Default: test."),
    ] = None,
    dimensions: Annotated[
        int | None,
        typer.Option(help="Embeddings: use only this many first dimensions.", min=1),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting of the task, such as task.header=false; may be repeated."
        ),
    ] = None,
    skip_invalid: SkipInvalid = False,
    encoding: Annotated[
        str | None,
        typer.Option(help="Encoding of the table if it is not UTF-8, such as cp949."),
    ] = None,
    delimiter: TableDelimiter = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A metric, such as roc_auc, mae or f1:LABEL; may be repeated. Default: the "
            "metrics of the task."
        ),
    ] = None,
    threshold: LabelThreshold = None,
    null_threshold: NullThreshold = None,
    fast: Fast = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Compute metrics on labels, minimal pairs, embeddings or reranking.

    With --data, the model must be fine-tuned. For classifiers, metrics per label and a confusion
    matrix are also shown. If there are many labels, only those with the lowest F1 and the most
    confused pairs are shown; --json contains all. Columns default to those of the training table.

    With --minimal-pairs, the model needs a masked-LM head. A pair is correct if sentence_good has
    a higher pseudo-log-likelihood than sentence_bad (see `bertsmith score`).

    With --embeddings, any model is evaluated by its vectors: Spearman correlation for scored pairs,
    nDCG@10, MRR@10 and recall for pairs and BEIR, triplet accuracy for negatives. Columns have the
    same names as in `finetune embed`.

    With --reranking, a reranker is evaluated: nDCG@10, MRR@10 and MAP of each query's documents.
    Columns have the same names as in `finetune rerank`.
    """
    if files_after_first and not minimal_pairs:
        raise InputError(f"{files_after_first[0]}: unexpected argument; use --data FILE")
    labeled_data_options: dict[str, Any] = {
        "--data": data, "--metric": metric, "--set": assignments,
        "--null-threshold": null_threshold, "--threshold": threshold,
        "--label-columns": label_columns,
    }  # fmt: skip
    vector_options = {"--split": split, "--dimensions": dimensions}
    table_options = {"--score": score, "--negatives": negatives}
    columns = {"text": text, "pair": pair, "label": label}
    reading = drop_missing(
        {"skip_invalid": skip_invalid or None, "encoding": encoding, "delimiter": delimiter}
    )
    common: dict[str, Any] = {"device": device, "fast": fast, "as_json": as_json}
    other_options = {"--minimal-pairs": minimal_pairs, "--pll": pll, "--out": out}
    table_columns = drop_missing(
        {**columns, "score": score, "negatives": parse_columns("--negatives", negatives)}
    )
    if embeddings is not None:
        unused = {**labeled_data_options, **other_options, "--reranking": reranking}
        check_unused_options(unused, "not valid with --embeddings; remove it")
        common |= {"split": split, "dimensions": dimensions, "reading": reading}
        evaluate_vectors(model, embeddings, table_columns, **common)
        return
    if reranking is not None:
        unused = {**labeled_data_options, **other_options, "--label": label, **vector_options}
        check_unused_options(unused, "not valid with --reranking; remove it")
        evaluate_reranking(model, reranking, table_columns, reading, **common)
        return
    check_unused_options(vector_options, "only valid with --embeddings; remove it")
    check_unused_options(table_options, "only valid with --embeddings or --reranking; remove it")
    if minimal_pairs:
        labeled_data_options |= {"--text": text, "--pair": pair, "--label": label,
                                 "--delimiter": delimiter}  # fmt: skip
        check_unused_options(labeled_data_options, "not valid with --minimal-pairs; remove it")
        evaluate_minimal_pairs(
            model,
            [*minimal_pairs, *(files_after_first or [])],
            pll,
            skip_invalid=skip_invalid,
            encoding=encoding,
            out=out,
            **common,
        )
        return
    if data is None:
        raise InputError(
            "nothing to evaluate on: add --data FILE, --minimal-pairs FILE, --embeddings FILE or "
            "--reranking FILE"
        )
    check_unused_options({"--pll": pll, "--out": out}, "only valid with --minimal-pairs; remove it")
    task_options = drop_missing({
        **{f"{name}_column": value for name, value in columns.items()}, **reading,
        "label_columns": parse_columns("--label-columns", label_columns),
        "label_threshold": threshold, "null_threshold": null_threshold, "metrics": metric or None,
    })  # fmt: skip
    _evaluate_labeled_data(model, data, task_options, assignments or [], **common)


def _evaluate_labeled_data(
    model: Path,
    data: Path,
    task_options: dict[str, Any],
    assignments: list[str],
    *,
    device: str,
    fast: bool,
    as_json: bool,
) -> None:
    """Compute and print the metrics of a fine-tuned model on labeled data.

    Args:
        model: The model.
        data: A labeled table, or the folder of a public task.
        task_options: Task settings of the command line.
        assignments: Values of --set.
        device: Device of the model.
        fast: Whether to use 8-bit or 16-bit arithmetic.
        as_json: Whether to print JSON.
    """
    overrides = load_user_settings(None, {"task": task_options}, assignments)
    if len(overrides) > 1 or not isinstance(overrides["task"], dict):
        raise SettingsError(
            "--set: only settings of the task can be changed, such as task.header=false; remove "
            "the others"
        )
    if not data.exists():
        raise InputError(describe_missing_path(data, "file or folder"))
    bundle = load_fine_tuned_model(model, device, fast=fast)
    from bertsmith.use import evaluate as evaluation

    unknown = UnknownTokenWarning()
    metrics = evaluation.evaluate(
        unknown.with_token_counter(bundle), data, changes=overrides["task"]
    )
    unknown.warn()
    if as_json:
        print_json(metrics)
        return
    counts = metrics.pop("counts")
    classes, confusion = metrics.pop("classes", {}), metrics.pop("confusion", {})
    print_line(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    for line in format_class_report(classes) + format_confusion_matrix(confusion):
        print_line(line)
    print_example_counts(counts)
    for reason, location in counts.get("first_skipped", {}).items():
        log(f"{counts['skipped'][reason]:,} skipped: {reason} (the first: {location})")
    for note in counts.get("notes", []):
        log(note)
