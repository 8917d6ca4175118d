"""``bertsmith predict`` and ``bertsmith evaluate``: ask a fine-tuned model, and score it."""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bertsmith.cli.app import app
from bertsmith.cli.classification_report import format_class_report, format_confusion_matrix
from bertsmith.cli.console import TerminalProgress, log, print_counts, print_json, print_line
from bertsmith.cli.model_options import (
    FORMAT_OPTION,
    STDIN,
    Delimiter,
    Device,
    Encoding,
    Header,
    Input,
    Json,
    Model,
    check_not_table,
    check_readable,
    load_fine_tuned,
    open_input,
)
from bertsmith.cli.unknown_warning import UnknownWarning
from bertsmith.errors import InputError, SettingsError
from bertsmith.files import check_new_file
from bertsmith.settings import user_settings

if TYPE_CHECKING:
    from bertsmith.bundle import FineTunedBundle
    from bertsmith.tasks.inputs import ExampleCounts
    from bertsmith.tasks.tables import TableSource
    from bertsmith.use.predict_table import TableCounts


class InputFormat(StrEnum):
    """How an input is read: lines of text, a table, or tagged sentences."""

    lines = "lines"
    csv = "csv"
    tsv = "tsv"
    jsonl = "jsonl"
    json = "json"
    parquet = "parquet"
    conll = "conll"
    conllu = "conllu"


NullThreshold = Annotated[
    float | None,
    typer.Option(
        help="Questions: give no answer where that scores more than the best span by more than "
        "this; inf always gives a span. Default: the threshold tuned in fine-tuning, if any."
    ),
]


@app.command()
def predict(
    model: Model,
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="Texts; tabs part the two of a pair, a question and its context, or a prompt and "
            "its endings.",
            show_default=False,
        ),
    ] = None,
    read: Annotated[
        str | None,
        typer.Option(
            "--input",
            help="A table (.csv, .tsv, .jsonl, .json, .parquet, packed or not); for a tagger also "
            "CoNLL, CoNLL-U or lists of tokens; or a file of texts, one a line. - is stdin. A "
            "terminal gets each answer at once; else about 1,000 are computed together.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The table to write: that of --input with columns added, as .csv, .tsv, .jsonl, "
            ".json or .parquet. Without it the table goes to stdout in its own format.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="The column of the text, question or prompt; labels.label is a key in a column. "
            "Else that of the training table.",
            show_default=False,
        ),
    ] = None,
    pair: Annotated[
        str | None, typer.Option(help="The column of a second text, or of the context.")
    ] = None,
    endings: Annotated[
        str | None, typer.Option(help="The columns of the endings, such as a,b,c,d.")
    ] = None,
    form: Annotated[InputFormat | None, FORMAT_OPTION] = None,
    header: Header = None,
    encoding: Encoding = None,
    delimiter: Delimiter = None,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Go on after bad lines and rows, counted, instead of stopping: lines are left "
            "out, rows of a table stay with empty predictions.",
        ),
    ] = False,
    glue: Annotated[
        Path | None,
        typer.Option(help="A GLUE task's test.tsv: put what its server takes on stdout."),
    ] = None,
    squad: Annotated[
        Path | None,
        typer.Option(help="A file of SQuAD's: put on stdout what its official program scores."),
    ] = None,
    null_threshold: NullThreshold = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Tell the labels of texts, with their probabilities, or their score; or answer questions.

    The model is one that `bertsmith finetune` made. With --json each answer is a line of JSON; with
    --out, what was written is one.

    A table is written again with columns added: label and probability, labels and probabilities,
    score, answer with answer_start and probability, choice with ending and probability, entities,
    or tags. A name that the table has already gets the prefix predicted_. CoNLL gets a column at
    its end, CoNLL-U Predicted=TAG in its last one, and tokens get tags and probabilities.
    """
    if sum((read is not None, bool(texts), glue is not None, squad is not None)) != 1:
        raise InputError(
            "give texts, or --input FILE (- for standard input), or --glue FILE, or --squad FILE"
        )
    columns = {"text": text, "pair": pair, "endings": endings.split(",") if endings else None}
    options = {
        **{f"--{name}": value for name, value in columns.items()},
        "--out": out, "--header": header, "--delimiter": delimiter, "--encoding": encoding,
        "--format": form,
    }  # fmt: skip
    if read is None:
        _refuse(options, "it is for --input FILE; leave it out")
    if skip_bad and (glue or squad):
        raise InputError("--skip-bad: each row of a benchmark's file must have its answer")
    for file in (read, glue, squad):
        check_readable(file)
    given = None if read is None else open_input(read, encoding)
    if out is not None:
        check_new_file(out)
    bundle = load_fine_tuned(model, device)
    from bertsmith.tasks.inputs import ExampleCounts
    from bertsmith.use.answer import with_null_threshold
    from bertsmith.use.submission import glue_submission, squad_predictions

    if null_threshold is not None:
        bundle = with_null_threshold(bundle, null_threshold)
    unknown = UnknownWarning()
    bundle, counts = unknown.with_token_counts(bundle), ExampleCounts()
    if given is not None:
        kind, is_tokens = _recognize(bundle, given, form and form.value, text)
        if kind is not None:
            source = given.to_table_source(
                kind, header=_has_header(bundle, header), delimiter=delimiter
            )
            columns = {name: value for name, value in columns.items() if value is not None}
            target = _Target(source, out, columns, skip_bad=skip_bad, as_json=as_json)
            target.predict(bundle, is_tokens=is_tokens)
            unknown.warn()
            return
        lines_only = {name: options[name] for name in list(options)[:-2]}
        _refuse(lines_only, f"{given.path} is read as a text on each line; give --format, or leave "
                            "it out")  # fmt: skip
    if squad is not None:
        print_json(squad_predictions(bundle, squad, counts))
    elif glue is not None:
        for line in glue_submission(bundle, glue, counts):
            print_line(line)
    else:
        _answer_lines(
            bundle, given, texts or [], counts, unknown, skip_bad=skip_bad, as_json=as_json
        )
    _tell_cut(counts.num_truncated)
    unknown.warn()


def _refuse(options: Mapping[str, Any], why: str) -> None:
    """Raise QuestionError for an option that was given and that means nothing here."""
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name}: {why}")


def _tell_cut(count: int) -> None:
    if count:
        log(f"cut off {count:,} that are longer than the model reads")


def _has_header(bundle: "FineTunedBundle", header: bool | None) -> bool:
    task = bundle.info.get("provenance", {}).get("task", {})
    return bool(task.get("header", True)) if header is None else header


def _recognize(
    bundle: "FineTunedBundle", given: Input, form: str | None, text: str | None
) -> tuple[str | None, bool]:
    """Return the format of a table, and whether it holds tokens; None for lines of text."""
    from bertsmith.tasks.conll import ROW_FORMATS, has_token_lists, looks_like_conll
    from bertsmith.tasks.families import get_task_settings
    from bertsmith.tasks.settings import is_column_number
    from bertsmith.tasks.text_files import detect_table_format

    is_tagger = bundle.head.kind in ("entities", "tags")
    if form == "lines":
        return None, False
    if form in ("conll", "conllu"):
        if not is_tagger:
            raise InputError(f"--format {form}: the model tags no words")
        return form, True
    suffix = given.path.suffix.lower()
    kind = form or (None if given.name == STDIN else detect_table_format(given.path))
    if is_tagger:
        names_column = text is not None and not is_column_number(text)
        conll = {".conllu": "conllu", ".conll": "conll", ".iob": "conll", ".bio": "conll"}
        if form is None and (suffix in conll or (kind == "tsv" and not names_column)):
            return conll.get(suffix, "conll"), True
        if kind in ROW_FORMATS:
            return kind, has_token_lists(given.to_table_source(kind), text)
        if kind is None and looks_like_conll(given.head, bundle.head.labels):
            log(f"{given.path}: read as CoNLL, a word on each line; --format lines reads a text "
                "on each line")  # fmt: skip
            return "conll", True
    if kind is None and suffix == ".txt" and text is not None:
        # As fine-tuning reads it.
        kind = "tsv"
    if kind is None and form is None:
        task = get_task_settings(bundle)
        check_not_table(given, {task.text} - {"0"})
    return kind, False


@dataclass(frozen=True)
class _Target:
    """A table to read, and where and how it is written."""

    source: "TableSource"
    out: Path | None
    columns: Mapping[str, Any]
    skip_bad: bool
    as_json: bool

    def predict(self, bundle: "FineTunedBundle", *, is_tokens: bool) -> None:
        """Write the table with predictions, and say what became of its rows."""
        from bertsmith.use.predict_table import predict_table
        from bertsmith.use.tag_file import tag_file

        as_lines = self.as_json and self.out is None
        if self.source.format == "parquet" and self.out is None and not as_lines:
            raise InputError(f"{self.source.path}: give --out FILE, or --json for lines of JSON")
        target: Path | Callable[[str], object] = self.out or sys.stdout.write
        if is_tokens:
            counts = tag_file(
                bundle, self.source, target, columns=self.columns, skip_bad=self.skip_bad,
                as_json=as_lines, progress=TerminalProgress(),
            )  # fmt: skip
        else:
            counts = predict_table(
                bundle, self.source, target, columns=self.columns, skip_bad=self.skip_bad,
                out_format="jsonl" if as_lines else None, progress=TerminalProgress(),
            )  # fmt: skip
        _tell_table(counts, self.source.path, self.out, as_json=self.as_json)


def _tell_table(counts: "TableCounts", path: Path, out: Path | None, *, as_json: bool) -> None:
    for note in counts.notes:
        log(note)
    if out is not None and as_json:
        print_json({"out": str(out), "rows": counts.rows, "columns": counts.columns,
                  "without_prediction": counts.without_prediction, "left_out": counts.unreadable,
                  "cut_off": counts.num_truncated})  # fmt: skip
    _tell_cut(counts.num_truncated)
    if counts.without_prediction:
        log(
            f"{counts.without_prediction:,} {counts.unit}s have no prediction; the first: {counts.first_problem}"
        )
    if counts.unreadable:
        unreadable = f"{counts.unreadable:,} {counts.unit}s that cannot be read"
        log(f"left out {unreadable}; the first: {counts.first_problem}")
    if not counts.rows:
        log(f"{path}: there is no {counts.unit} in it")
    if out is not None:
        added = f", with {', '.join(counts.columns)}" if counts.columns else ""
        log(f"wrote {out}: {counts.rows:,} {counts.unit}s{added}")


def _answer_lines(
    bundle: "FineTunedBundle",
    given: Input | None,
    texts: list[str],
    counts: "ExampleCounts",
    unknown: UnknownWarning,
    *,
    skip_bad: bool,
    as_json: bool,
) -> None:
    from bertsmith.use.predict_lines import SkippedLines, predict_lines

    lines: Iterator[str] = iter(texts) if given is None else given.lines()
    where = "text" if given is None else f"{given.path}, line"
    at_once = given is not None and given.name == STDIN and sys.stdin.isatty()
    skipped = SkippedLines() if skip_bad else None
    for value, line in predict_lines(
        bundle, lines, location=where, skipped=skipped, unbuffered=at_once
    ):
        counts.num_truncated += value.get("cut_off", False)
        if as_json:
            print_json(value)
        else:
            print_line(line)
        if at_once:
            sys.stdout.flush()
        if given is not None and given.name == STDIN:
            unknown.warn()
    if skipped is not None and skipped.count:
        log(f"left out {skipped.count:,} lines; the first: {skipped.first_problem}")


@app.command()
def evaluate(
    model: Model,
    data: Annotated[
        Path, typer.Option(help="A labelled table; or the folder of a public task's files.")
    ],
    text: Annotated[str | None, typer.Option(help="The column of the text.")] = None,
    pair: Annotated[str | None, typer.Option(help="The column of a second text.")] = None,
    label: Annotated[str | None, typer.Option(help="The column of the label.")] = None,
    assign: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting of the task, such as task.header=false."),
    ] = None,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave bad rows out, counted, instead of stopping.")
    ] = False,
    encoding: Annotated[
        str | None, typer.Option(help="The table's encoding if it is not UTF-8, such as cp949.")
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="What separates the columns of CSV; else it is detected.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="A metric, such as roc_auc, mae or f1:LABEL; may be repeated. Default: the "
            "metrics of the task."
        ),
    ] = None,
    null_threshold: NullThreshold = None,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Score a fine-tuned model on a labelled table, by the metrics of its task and by label.

    Of many labels those with the lowest F1 and the most confused pairs are shown, with --json all.
    Columns are those of the table that it was fine-tuned on, unless they are named here.
    """
    named = {"text": text, "pair": pair, "label": label, "skip_bad": skip_bad,
             "encoding": encoding, "delimiter": delimiter,
             "null_threshold": null_threshold, "metrics": metric or None}  # fmt: skip
    said = {name: value for name, value in named.items() if value is not None}
    changes = user_settings(None, {"task": said}, assign or [])
    if len(changes) > 1 or not isinstance(changes["task"], dict):
        raise SettingsError("--set: evaluate takes settings of the task, such as task.header=false")
    if not data.exists():
        raise InputError(f"{data}: no such file")
    bundle = load_fine_tuned(model, device)
    from bertsmith.use.evaluate import evaluate as scored

    unknown = UnknownWarning()
    figures = scored(unknown.with_token_counts(bundle), data, changes=changes["task"])
    unknown.warn()
    if as_json:
        print_json(figures)
        return
    counts = figures.pop("counts")
    classes, confusion = figures.pop("classes", {}), figures.pop("confusion", {})
    print_line(", ".join(f"{name} {value:.4f}" for name, value in figures.items()))
    for line in format_class_report(classes) + format_confusion_matrix(confusion):
        print_line(line)
    print_counts(counts)
    for reason, where in counts.get("first_skipped", {}).items():
        log(f"{counts['skipped'][reason]:,} skipped: {reason} (the first: {where})")
    for note in counts.get("notes", []):
        log(note)
