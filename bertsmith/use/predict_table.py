"""Predict for the rows of a table or for lines, and write a table with the predictions.

Rows keep their order, and memory does not grow with the size of the table. With ``skip_invalid``, a
row whose text is invalid is written with empty predictions, and a row that cannot be read is
dropped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bertsmith.bundle import FineTunedBundle
from bertsmith.bundle.metadata import get_recorded_task
from bertsmith.errors import InputError, TaskError
from bertsmith.files import check_new_file
from bertsmith.progress import NullProgress, Progress
from bertsmith.tasks.conll import ROW_FORMATS, get_word_column
from bertsmith.tasks.families import get_task_settings, reject_unused_fields
from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.multiple_choice import read_prompt
from bertsmith.tasks.questions import open_question_json, read_squad_rows
from bertsmith.tasks.settings import TaskSettings, get_family_name
from bertsmith.tasks.tables import (
    Row,
    Table,
    TableSource,
    get_text,
    open_table,
)
from bertsmith.tasks.text_files import UTF8, choose_output_encoding, detect_table_format
from bertsmith.use.inputs import chunked
from bertsmith.use.predict import is_trained_on_single_texts, reject_pairs_of_single_text_model
from bertsmith.use.predict_lines import InvalidLines, predict_inputs, predict_lines
from bertsmith.use.table_input import find_columns
from bertsmith.use.table_output import (
    RowWriter,
    TableLayout,
    TextOutput,
    choose_column_names,
    get_output_format,
    open_row_writer,
)

#: Number of rows processed together.
_CHUNK_SIZE = 1024
#: Columns added for each kind of model, with their types; see ``table_output.get_arrow_type``.
_ADDED_COLUMNS: dict[str, dict[str, str]] = {
    "single": {"label": "text", "probability": "number"},
    "multi": {"labels": "texts", "probabilities": "numbers"},
    "regression": {"score": "number"},
    "span": {"answer": "text", "answer_start": "index", "probability": "number"},
    "choice": {"choice": "index", "ending": "text", "probability": "number"},
    "entities": {"entities": "spans"},
    "tags": {"tags": "spans"},
}
#: For each kind of model, the columns of its input in a table of lines, with their types. They are
#: keys of the JSON values of ``predict_lines``.
_LINE_COLUMNS: dict[str, dict[str, str]] = {
    "single": {"text": "text", "pair": "text"},
    "multi": {"text": "text", "pair": "text"},
    "regression": {"text": "text", "pair": "text"},
    "span": {"question": "text", "context": "text"},
    "choice": {"prompt": "text", "endings": "texts"},
    "entities": {"text": "text"},
    "tags": {"text": "text"},
}
#: Number of decimals of the probabilities and scores that are written.
DECIMALS = 6


@dataclass
class TableCounts:
    """How many rows of a table, or sentences of a file, were written.

    Attributes:
        num_rows: Number of rows written.
        num_without_prediction: Number of rows written without a prediction.
        num_unreadable: Number of rows dropped because they could not be read.
        num_truncated: Number of texts that were truncated.
        first_error: Error message of the first row that was dropped or written without a
            prediction.
        added_columns: Names of the added columns.
        notes: Messages for the user.
        unit: What is counted: "row", "line" or "sentence".
    """

    num_rows: int = 0
    num_without_prediction: int = 0
    num_unreadable: int = 0
    num_truncated: int = 0
    first_error: str = ""
    added_columns: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unit: str = "row"


def predict_table(
    bundle: FineTunedBundle,
    source: TableSource,
    out: TextOutput,
    *,
    columns: Mapping[str, Any] | None = None,
    skip_invalid: bool = False,
    out_format: str | None = None,
    progress: Progress | None = None,
) -> TableCounts:
    """Write a table with predictions for each row.

    Args:
        bundle: The model.
        source: The input table.
        out: A new file, whose suffix determines its format, or a function to which the table is
            passed as text.
        columns: Fields of ``TaskSettings`` that name columns, if they differ from fine-tuning.
        skip_invalid: Whether invalid rows are written without a prediction, instead of being an
            error.
        out_format: Format of the text that is passed to a function; None for the input's format.
        progress: Receives the number of rows.

    Raises:
        BertsmithError: The table cannot be read or written. Then ``out`` is not created.
    """
    if isinstance(out, Path):
        check_new_file(out)
        out_format = get_output_format(out)
    progress = progress or NullProgress()
    counts = TableCounts()
    reject_unused_fields(bundle.head.kind, columns or {}, [])
    reject_pairs_of_single_text_model(bundle, columns or {})
    task = get_task_settings(bundle, columns)
    with _open_input(bundle, source) as table:
        counts.notes += table.notes
        if get_family_name(bundle.head.kind) == "tag" and table.format in ROW_FORMATS:
            text_column = get_word_column(task.text_column)
            task = task.model_copy(update={"text_column": text_column})
        out_format = out_format or table.format
        options = _get_column_options(bundle, task)
        input_columns, missing, rows = find_columns(table, source, options)
        if missing:
            raise _create_missing_column_error(
                bundle, missing[0], options[missing[0]], input_columns, source
            )
        names, notes = choose_column_names(
            list(_ADDED_COLUMNS[bundle.head.kind]), input_columns, source.path
        )
        counts.notes += notes
        counts.added_columns += names.values()
        layout = _create_output_layout(bundle, table, source, out_format, input_columns, names)
        is_delimited = out_format in ("csv", "tsv")
        encoding = choose_output_encoding(source.path, source.encoding) if is_delimited else UTF8
        progress.start("predicting", None, "rows")
        try:
            with open_row_writer(out, layout, encoding) as writer:
                _write_rows(
                    bundle,
                    task,
                    rows,
                    names,
                    writer,
                    counts,
                    progress,
                    is_delimited=is_delimited,
                    skip_invalid=skip_invalid,
                )
        finally:
            progress.finish()
    return counts


def predict_lines_to_table(
    bundle: FineTunedBundle,
    lines: Iterable[str],
    out: Path,
    *,
    location: str = "line",
    skip_invalid: bool = False,
    progress: Progress | None = None,
) -> TableCounts:
    """Write a table with the model's input and its prediction for each line.

    Args:
        bundle: The model.
        lines: Lines as in ``predict_lines``.
        out: A new file, whose suffix determines its format.
        location: The word before the line number in error messages.
        skip_invalid: Whether invalid lines are skipped, instead of being an error.
        progress: Receives the number of lines.

    Raises:
        BertsmithError: A line is invalid, or the table cannot be written. Then ``out`` is not
            created.
    """
    check_new_file(out)
    out_format = get_output_format(out)
    progress = progress or NullProgress()
    kind = bundle.head.kind
    task = get_task_settings(bundle)
    is_delimited = out_format in ("csv", "tsv")
    counts = TableCounts(added_columns=list(_ADDED_COLUMNS[kind]), unit="line")
    input_columns = dict(_LINE_COLUMNS[kind])
    if is_trained_on_single_texts(bundle):
        input_columns.pop("pair", None)
    types = input_columns | _ADDED_COLUMNS[kind]
    layout = TableLayout(out_format, list(types), types=types)
    skipped = InvalidLines() if skip_invalid else None
    predictions = predict_lines(bundle, lines, location=location, skipped=skipped)
    progress.start("predicting", None, "lines")
    try:
        with open_row_writer(out, layout) as writer:
            for chunk in chunked(predictions, _CHUNK_SIZE):
                rows = []
                for prediction, _ in chunk:
                    inputs = {name: prediction.get(name) for name in input_columns}
                    cells = _to_cells(task, prediction, is_delimited=is_delimited)
                    rows.append(inputs | cells)
                    counts.num_truncated += bool(prediction.get("truncated"))
                writer.append(rows)
                counts.num_rows += len(rows)
                progress.advance(len(rows))
    finally:
        progress.finish()
    if skipped is not None:
        counts.num_unreadable, counts.first_error = skipped.count, skipped.first_error
    return counts


@contextmanager
def _open_input(bundle: FineTunedBundle, source: TableSource) -> Iterator[Table]:
    """Open a table. For question answering, a SQuAD file is opened as a table of questions."""
    is_json = (source.format or detect_table_format(source.path)) == "json"
    if bundle.head.kind == "span" and is_json:
        has_rows, stream = open_question_json(source.path, source.stream)
        source = replace(source, stream=stream)
        if not has_rows:
            squad_rows = read_squad_rows(source.path, source.encoding, stream)
            rows = (replace(row, cells=_get_question_cells(row)) for row in squad_rows)
            yield Table(rows, "json", ["id", "question", "context"])
            return
    with open_table(source) as table:
        yield table


def _get_question_cells(row: Row) -> dict[str, Any]:
    return {name: row.cells.get(name) for name in ("id", "question", "context")}


def _get_column_options(bundle: FineTunedBundle, task: TaskSettings) -> dict[str, str]:
    """Return the columns that the model reads, and for each the option that names it."""
    if bundle.head.kind == "choice" and not task.ending_columns:
        raise InputError(
            "the model does not record the columns of the endings; give --endings A,B,…"
        )
    options = {task.text_column: "--text"}
    if task.pair_column:
        options.setdefault(task.pair_column, "--pair")
    if bundle.head.kind == "choice":
        for name in task.ending_columns:
            options.setdefault(name, "--endings")
    return options


def _create_missing_column_error(
    bundle: FineTunedBundle, name: str, option: str, columns: Sequence[str], source: TableSource
) -> TaskError:
    """Return the error for a table without a column that the model reads."""
    recorded = get_recorded_task(bundle.info)
    recorded_columns = {
        recorded.get("text_column"), recorded.get("pair_column"),
        *recorded.get("ending_columns", []),
    }  # fmt: skip
    origin = " (as in its training table)" if name in recorded_columns else ""
    return TaskError(
        f"{source.path}: the model reads the column {name!r}{origin}, but the columns are "
        f"{', '.join(map(repr, columns))}; name the column with {option}"
    )


def _create_output_layout(
    bundle: FineTunedBundle,
    table: Table,
    source: TableSource,
    out_format: str,
    input_columns: Sequence[str],
    names: Mapping[str, str],
) -> TableLayout:
    """Return how the output is written: in the dialect of the input, if the format is the same.

    Args:
        bundle: The model.
        table: The input table.
        source: The file or stream of the input table.
        out_format: Format of the output.
        input_columns: Columns of the input table.
        names: Default name of each added column -> its name in the output.
    """
    added_columns = _ADDED_COLUMNS[bundle.head.kind]
    types = {names[name]: column_type for name, column_type in added_columns.items()}
    columns = [*input_columns, *names.values()]
    layout = TableLayout(out_format, columns, types=types, schema=table.schema)
    if table.format == out_format and table.dialect is not None:
        layout = replace(layout, dialect=table.dialect, header=source.has_header)
    return layout


def _write_rows(
    bundle: FineTunedBundle,
    task: TaskSettings,
    rows: Iterator[Row],
    names: Mapping[str, str],
    writer: RowWriter,
    counts: TableCounts,
    progress: Progress,
    *,
    is_delimited: bool,
    skip_invalid: bool,
) -> None:
    """Write each row with the cells of its prediction, under the column names ``names``."""
    empty_cells = dict.fromkeys(names.values())
    parsed_rows = _parse_rows(bundle, task, rows, counts, skip_invalid=skip_invalid)
    for chunk in chunked(parsed_rows, _CHUNK_SIZE):
        inputs = [model_input for _, model_input in chunk if model_input is not None]
        predictions = predict_inputs(bundle, inputs)
        out_rows = []
        for row, model_input in chunk:
            cells = empty_cells
            if model_input is not None:
                prediction = next(predictions)
                counts.num_truncated += bool(prediction.get("truncated"))
                columns = _to_cells(task, prediction, is_delimited=is_delimited)
                cells = {names[name]: cell for name, cell in columns.items()}
            out_rows.append({**row.cells, **cells})
        writer.append(out_rows)
        counts.num_rows += len(out_rows)
        progress.advance(len(out_rows))


def _parse_rows(
    bundle: FineTunedBundle,
    task: TaskSettings,
    rows: Iterator[Row],
    counts: TableCounts,
    *,
    skip_invalid: bool,
) -> Iterator[tuple[Row, Any]]:
    """Yield each row and the model's input parsed from it; None if it is not valid."""
    parse = _PARSERS[bundle.head.kind]
    for row in rows:
        try:
            model_input = parse(row, task)
        except BadExampleError as error:
            message = f"{error.location or row.location}: {error}"
            if not skip_invalid:
                raise TaskError(
                    f"{message}; correct it, or continue without its prediction with --skip-invalid"
                ) from None
            counts.first_error = counts.first_error or message
            if row.error:
                counts.num_unreadable += 1
                continue
            counts.num_without_prediction += 1
            model_input = None
        yield row, model_input


def _parse_text_or_pair(row: Row, task: TaskSettings) -> str | tuple[str, str]:
    text = get_text(row, task.text_column)
    return (text, get_text(row, task.pair_column)) if task.pair_column else text


def _parse_text(row: Row, task: TaskSettings) -> str:
    return get_text(row, task.text_column)


def _parse_question(row: Row, task: TaskSettings) -> tuple[str, str]:
    assert task.pair_column
    return get_text(row, task.text_column), get_text(row, task.pair_column)


def _parse_prompt(row: Row, task: TaskSettings) -> tuple[str, list[str]]:
    prompt, endings = read_prompt(row, task)
    return prompt, list(endings)


#: For each kind of model, the function that returns the model's input for a row.
_PARSERS: dict[str, Callable[[Row, TaskSettings], Any]] = {
    "single": _parse_text_or_pair, "multi": _parse_text_or_pair,
    "regression": _parse_text_or_pair, "entities": _parse_text, "tags": _parse_text,
    "span": _parse_question, "choice": _parse_prompt,
}  # fmt: skip


def _to_cells(
    task: TaskSettings, prediction: Mapping[str, Any], *, is_delimited: bool
) -> dict[str, Any]:
    """Return the cells of the added columns, by the names in ``_ADDED_COLUMNS``.

    Args:
        task: The task settings of the model.
        prediction: The prediction as a JSON value.
        is_delimited: Whether the output is CSV or TSV, in which several labels share one cell.
    """
    kind = task.kind
    if kind == "single":
        label = prediction["label"]
        return {"label": label, "probability": _round_to_decimals(prediction["labels"][label])}
    if kind == "multi":
        labels = prediction["label"]
        probabilities = [_round_to_decimals(prediction["labels"][label]) for label in labels]
        if is_delimited:
            return {
                "labels": task.label_separator.join(labels),
                "probabilities": task.label_separator.join(map(str, probabilities)),
            }
        return {"labels": labels, "probabilities": probabilities}
    if kind == "regression":
        return {"score": _round_to_decimals(prediction["score"])}
    if kind == "span":
        return {
            "answer": prediction["text"],
            "answer_start": prediction["start"],
            "probability": _round_to_decimals(prediction["probability"]),
        }
    if kind == "choice":
        best = prediction["best_index"]
        return {
            "choice": best,
            "ending": prediction["best_ending"],
            "probability": _round_to_decimals(prediction["probabilities"][best]),
        }
    name = "entities" if kind == "entities" else "tags"
    spans = [
        {**span, "probability": _round_to_decimals(span["probability"])}
        for span in prediction[name]
    ]
    return {name: spans}


def _round_to_decimals(number: float) -> float:
    return round(number, DECIMALS)
