"""``bertsmith predict``: predict with a fine-tuned model."""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from bertsmith.cli.app import app, format_examples
from bertsmith.cli.console import TerminalProgress, log, print_json, print_line
from bertsmith.cli.model_options import (
    FORMAT_OPTION,
    STDIN,
    Delimiter,
    Device,
    Encoding,
    Fast,
    Header,
    Input,
    Json,
    Model,
    check_not_table,
    check_readable,
    check_unused_options,
    load_fine_tuned_model,
    open_input,
)
from bertsmith.cli.task_options import LabelThreshold, NullThreshold, parse_columns
from bertsmith.cli.unknown_warning import UnknownTokenWarning
from bertsmith.errors import InputError
from bertsmith.files import check_new_file
from bertsmith.plurals import count_noun

if TYPE_CHECKING:
    from bertsmith.bundle import FineTunedBundle
    from bertsmith.tasks.inputs import ExampleCounts
    from bertsmith.tasks.tables import TableSource
    from bertsmith.use.predict_table import TableCounts

#: File name suffixes of tagged sentences, and their formats.
_CONLL_SUFFIXES = {".conllu": "conllu", ".conll": "conll", ".iob": "conll", ".bio": "conll"}


@app.command(
    epilog=format_examples(
        'bertsmith predict my-classifier "a wonderful film" "a dull film"',
        "bertsmith predict my-classifier --input reviews.csv --out predictions.csv",
        r"bertsmith predict my-squad $'Who forged it?\tThe smith forged it.' --json",
    )
)
def predict(
    model: Model,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="Texts. Tabs separate the two texts of a pair, a question and its context, or a "
            "prompt and its endings.",
            show_default=False,
        ),
    ] = None,
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="A file with one text per line, or a table (.csv, .tsv, .jsonl, .json or "
            ".parquet); for taggers also CoNLL, CoNLL-U or lists of tokens; may be compressed; - "
            "is standard input. Lines typed on a terminal are predicted one by one, other lines in "
            "batches of about 1,000.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The table to write: the table of --input with added columns, or its lines and "
            "their predictions, as .csv, .tsv, .jsonl, .json or .parquet. Without --out, a table "
            "is printed in the input's format.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="The column of the text, question or prompt. A dot, as in labels.label, selects a "
            "key inside a column. Default: as in the training table.",
            show_default=False,
        ),
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help="The column of a second text, or of the context.")
    ] = None,
    endings: Annotated[
        str | None, typer.Option(help="The columns of the endings, such as a,b,c,d.")
    ] = None,
    input_format: Annotated[
        Literal["lines", "csv", "tsv", "jsonl", "json", "parquet", "conll", "conllu"] | None,
        FORMAT_OPTION,
    ] = None,
    header: Header = None,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    skip_invalid: Annotated[
        bool,
        typer.Option(
            "--skip-invalid",
            help="Count invalid input instead of stopping. Invalid lines are skipped; invalid rows "
            "of a table get empty predictions.",
        ),
    ] = False,
    glue: Annotated[
        Path | None,
        typer.Option(help="A GLUE task's test.tsv: print a submission for the GLUE server."),
    ] = None,
    squad: Annotated[
        Path | None,
        typer.Option(help="A SQuAD file: print predictions for the official evaluation script."),
    ] = None,
    threshold: LabelThreshold = None,
    null_threshold: NullThreshold = None,
    fast: Fast = False,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Predict labels, tags, answers or choices for texts or a table.

    The model must be fine-tuned, with `bertsmith finetune` or another toolkit. With --json, each
    prediction is printed as a line of JSON; with --json and --out, only a summary is printed.

    A table is written with added columns, which depend on the task: label and probability; labels
    and probabilities; score; answer, answer_start and probability; choice, ending and probability;
    entities; or tags. If the table has a column of that name, the new one gets the prefix
    predicted_. A table of lines has the column text (also pair, or question and context, or prompt
    and endings) and these columns. CoNLL gets an additional last column, CoNLL-U gets Predicted=TAG
    in its last column, and lists of tokens get the columns tags and probabilities.
    """
    _check_inputs(input_file, texts, glue, squad, skip_invalid=skip_invalid, as_json=as_json)
    columns = {
        "text_column": text,
        "pair_column": pair,
        "ending_columns": parse_columns("--endings", endings),
    }
    table_options = {
        "--text": text,
        "--pair": pair,
        "--endings": endings,
        "--out": out,
        "--header": header,
        "--delimiter": delimiter,
        "--encoding": encoding,
    }
    if input_file is None:
        input_options = table_options | {"--format": input_format}
        check_unused_options(input_options, "only valid with --input FILE; remove it")
    source = None if input_file is None else open_input(input_file, encoding)
    if out is not None:
        check_new_file(out)
    bundle = load_fine_tuned_model(model, device, fast=fast)
    from bertsmith.tasks.inputs import ExampleCounts
    from bertsmith.use.submission import format_glue_submission, predict_squad_answers

    bundle = _set_thresholds(bundle, threshold, null_threshold)
    unknown = UnknownTokenWarning()
    bundle = unknown.with_token_counter(bundle)
    counts = ExampleCounts()
    if source is not None:
        table_format, has_tokens = _detect_format(bundle, source, input_format, text)
        _check_table_options(source, table_format, table_options, has_tokens=has_tokens)
        if table_format is not None:
            table_source = source.to_table_source(
                table_format, header=_has_header(bundle, header), delimiter=delimiter
            )
            _write_table(
                bundle, table_source, out, columns,
                has_tokens=has_tokens, skip_invalid=skip_invalid, as_json=as_json,
            )  # fmt: skip
            unknown.warn()
            return
        if out is not None:
            _write_line_table(bundle, source, out, skip_invalid=skip_invalid, as_json=as_json)
            unknown.warn()
            return
    if squad is not None:
        print_json(predict_squad_answers(bundle, squad, counts))
    elif glue is not None:
        for line in format_glue_submission(bundle, glue, counts):
            print_line(line)
    else:
        _predict_lines(
            bundle, source, texts or [], counts, unknown, skip_invalid=skip_invalid, as_json=as_json
        )
    _log_num_truncated(counts.num_truncated)
    unknown.warn()


def _set_thresholds(
    bundle: "FineTunedBundle", label_threshold: float | None, null_threshold: float | None
) -> "FineTunedBundle":
    """Return the model with the thresholds that are not None."""
    from bertsmith.use.answer import with_null_threshold
    from bertsmith.use.predict import with_label_threshold

    if label_threshold is not None:
        bundle = with_label_threshold(bundle, label_threshold)
    if null_threshold is not None:
        bundle = with_null_threshold(bundle, null_threshold)
    return bundle


def _check_inputs(
    input_file: str | None,
    texts: list[str] | None,
    glue: Path | None,
    squad: Path | None,
    *,
    skip_invalid: bool,
    as_json: bool,
) -> None:
    """Raise InputError unless there is exactly one readable input, with options that suit it."""
    num_inputs = sum(value is not None for value in (input_file, texts or None, glue, squad))
    if num_inputs != 1:
        raise InputError(
            f"expected exactly one input, found {num_inputs}; use texts, --input FILE (- for "
            "standard input), --glue FILE, or --squad FILE"
        )
    if skip_invalid and (glue or squad):
        raise InputError(
            "--skip-invalid: not valid with --glue or --squad, which need a prediction for each "
            "row; remove it"
        )
    if glue is not None and as_json:
        raise InputError("--json: not valid with --glue, which prints GLUE's format; remove it")
    for file in (input_file, glue, squad):
        check_readable(file)


def _check_table_options(
    source: Input,
    table_format: str | None,
    table_options: Mapping[str, Any],
    *,
    has_tokens: bool,
) -> None:
    """Raise InputError for options that have no effect on the input.

    Args:
        source: The input.
        table_format: The format of the input; None for one text per line.
        table_options: Values of the options by name.
        has_tokens: Whether the rows contain lists of tokens, or tagged sentences.
    """
    if table_format is None:
        unused = table_options.keys() - {"--out", "--encoding"}
        reason = (
            f"{source.path} is read as one text per line; use --format for a table, or remove this "
            "option"
        )
    else:
        unused = set() if table_format in ("csv", "tsv") else {"--header", "--delimiter"}
        if has_tokens:
            unused |= {"--pair", "--endings"}
        if table_format == "parquet":
            unused.add("--encoding")
        reason = f"no effect on {source.path}, which is read as {table_format}; remove this option"
    check_unused_options(
        {name: value for name, value in table_options.items() if name in unused}, reason
    )


def _log_num_truncated(count: int) -> None:
    if count:
        log(f"truncated to the model's maximum length: {count:,}")


def _has_header(bundle: "FineTunedBundle", header: bool | None) -> bool:
    """Return ``header``; if it is None, whether the training table had a header."""
    if header is not None:
        return header
    from bertsmith.bundle.metadata import get_recorded_task

    return bool(get_recorded_task(bundle.info).get("header", True))


def _detect_format(
    bundle: "FineTunedBundle", source: Input, input_format: str | None, text_column: str | None
) -> tuple[str | None, bool]:
    """Return the format of an input table, and whether its texts are lists of tokens.

    The format is None if the input contains one text per line.
    """
    from bertsmith.tasks.conll import ROW_FORMATS, has_token_lists, looks_like_conll
    from bertsmith.tasks.families import get_task_settings
    from bertsmith.tasks.settings import is_column_number
    from bertsmith.tasks.text_files import detect_table_format, is_txt_table
    from bertsmith.text.archives import get_format_suffix

    is_tagger = bundle.head.kind in ("entities", "tags")
    if input_format == "lines":
        return None, False
    if input_format in ("conll", "conllu"):
        if not is_tagger:
            raise InputError(f"--format {input_format}: this model is not a tagger")
        return input_format, True
    suffix = get_format_suffix(source.path)
    is_stdin = source.name == STDIN
    table_format = input_format or (None if is_stdin else detect_table_format(source.path))
    if is_tagger:
        has_column_name = text_column is not None and not is_column_number(text_column)
        is_conll = suffix in _CONLL_SUFFIXES or (table_format == "tsv" and not has_column_name)
        if input_format is None and is_conll:
            return _CONLL_SUFFIXES.get(suffix, "conll"), True
        if table_format in ROW_FORMATS:
            table_source = source.to_table_source(table_format)
            training_column = get_task_settings(bundle).text_column
            return table_format, has_token_lists(table_source, text_column, training_column)
        if table_format is None and looks_like_conll(source.head, bundle.head.labels):
            log(
                f"{source.path}: read as CoNLL, one word per line; use --format lines for one "
                "text per line"
            )
            return "conll", True
    if table_format is None and is_txt_table(source.path, text_column):
        table_format = "tsv"
    if table_format is None and input_format is None:
        task = get_task_settings(bundle)
        check_not_table(source, {task.text_column} - {"0"})
    return table_format, False


def _write_table(
    bundle: "FineTunedBundle",
    source: "TableSource",
    out: Path | None,
    columns: Mapping[str, Any],
    *,
    has_tokens: bool,
    skip_invalid: bool,
    as_json: bool,
) -> None:
    """Write a table with predictions and log a summary.

    Args:
        bundle: The fine-tuned model.
        source: The table.
        out: The file to write; None for stdout.
        columns: Settings of the task that name input columns, such as ``text_column``; None for
            columns named as in the training table.
        has_tokens: Whether the rows contain lists of tokens, or tagged sentences.
        skip_invalid: Whether invalid rows get empty predictions, instead of being errors.
        as_json: Whether to print JSON: the rows, or only a summary if there is a file to write.
    """
    from bertsmith.use.predict_table import predict_table
    from bertsmith.use.tag_file import tag_file

    print_json_lines = as_json and out is None
    if source.format == "parquet" and out is None and not print_json_lines:
        raise InputError(
            f"{source.path}: Parquet cannot be printed; add --out FILE, or --json for JSON lines"
        )
    columns = {name: value for name, value in columns.items() if value is not None}
    target: Path | Callable[[str], object] = out or sys.stdout.write
    if has_tokens:
        counts = tag_file(
            bundle,
            source,
            target,
            columns=columns,
            skip_invalid=skip_invalid,
            as_json=print_json_lines,
            progress=TerminalProgress(),
        )
    else:
        counts = predict_table(
            bundle,
            source,
            target,
            columns=columns,
            skip_invalid=skip_invalid,
            out_format="jsonl" if print_json_lines else None,
            progress=TerminalProgress(),
        )
    _log_table_counts(counts, source.path, out, as_json=as_json)


def _log_table_counts(
    counts: "TableCounts", path: Path, out: Path | None, *, as_json: bool
) -> None:
    """Log a summary of a predicted table; with --json and --out, also print it as JSON."""
    for note in counts.notes:
        log(note)
    if out is not None and as_json:
        print_json(
            {
                "out": str(out),
                "num_rows": counts.num_rows,
                "columns": counts.added_columns,
                "num_without_prediction": counts.num_without_prediction,
                "num_skipped": counts.num_unreadable,
                "num_truncated": counts.num_truncated,
            }
        )
    _log_num_truncated(counts.num_truncated)
    if counts.num_without_prediction:
        log(
            f"{counts.num_without_prediction:,} {counts.unit}s have no prediction; the first: "
            f"{counts.first_error}"
        )
    if counts.num_unreadable:
        log(
            f"skipped {count_noun(counts.num_unreadable, counts.unit)}; the first: "
            f"{counts.first_error}"
        )
    if not counts.num_rows:
        log(f"{path}: no {counts.unit}s; nothing to do")
    if out is not None:
        columns = f", with {', '.join(counts.added_columns)}" if counts.added_columns else ""
        log(f"wrote {out}: {counts.num_rows:,} {counts.unit}s{columns}")


def _write_line_table(
    bundle: "FineTunedBundle", source: Input, out: Path, *, skip_invalid: bool, as_json: bool
) -> None:
    """Write a table with the lines of ``source`` and their predictions, and log a summary."""
    from bertsmith.use.predict_table import predict_lines_to_table

    counts = predict_lines_to_table(
        bundle,
        source.lines(),
        out,
        location=f"{source.path}, line",
        skip_invalid=skip_invalid,
        progress=TerminalProgress(),
    )
    _log_table_counts(counts, source.path, out, as_json=as_json)


def _predict_lines(
    bundle: "FineTunedBundle",
    source: Input | None,
    texts: list[str],
    counts: "ExampleCounts",
    unknown: UnknownTokenWarning,
    *,
    skip_invalid: bool,
    as_json: bool,
) -> None:
    """Print the predictions of the lines of ``source``, or of ``texts`` if it is None."""
    from bertsmith.use.predict_lines import InvalidLines, predict_lines

    lines: Iterator[str] = iter(texts) if source is None else source.lines()
    location = "text" if source is None else f"{source.path}, line"
    unbuffered = source is not None and source.name == STDIN and sys.stdin.isatty()
    skipped = InvalidLines() if skip_invalid else None
    predictions = predict_lines(
        bundle, lines, location=location, skipped=skipped, unbuffered=unbuffered
    )
    for values, line in predictions:
        counts.num_truncated += values.get("truncated", False)
        if as_json:
            print_json(values)
        else:
            print_line(line)
        if unbuffered:
            sys.stdout.flush()
        if source is not None and source.name == STDIN:
            unknown.warn()
    if skipped is not None and skipped.count:
        log(f"skipped {count_noun(skipped.count, 'line')}; the first: {skipped.first_error}")
