"""Predictions for the rows of a table: the same table with columns added.

Rows keep their order. With ``skip_bad``, a row that cannot be asked about stays with empty
predictions; one that cannot be read at all is left out. Memory does not grow with the table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError, TaskError
from bertsmith.files import check_new_file
from bertsmith.progress import NullProgress, Progress
from bertsmith.tasks.classification import LABEL_SEPARATOR
from bertsmith.tasks.families import get_family_name, get_task_settings, reject_unused_fields
from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.multiple_choice import read_prompt
from bertsmith.tasks.questions import is_flat_file, read_squad_rows
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tables import (
    Row,
    Table,
    TableSource,
    get_text,
    has_column,
    open_table,
)
from bertsmith.tasks.text_files import UTF8, choose_output_encoding, detect_table_format
from bertsmith.use.masked_lm import chunked
from bertsmith.use.predict_lines import predict_items
from bertsmith.use.table_input import find_columns
from bertsmith.use.table_output import (
    RowWriter,
    TableLayout,
    create_text_writer,
    open_row_writer,
    output_format,
    unused_column_names,
)

#: Rows worked on at once.
_WINDOW = 1024
#: The columns that each kind of model adds, and their types; see ``table_output.arrow_type``.
_COLUMNS: dict[str, dict[str, str]] = {
    "single": {"label": "text", "probability": "number"},
    "multi": {"labels": "texts", "probabilities": "numbers"},
    "regression": {"score": "number"},
    "span": {"answer": "text", "answer_start": "index", "probability": "number"},
    "choice": {"choice": "index", "ending": "text", "probability": "number"},
    "entities": {"entities": "spans"},
    "tags": {"tags": "spans"},
}
#: Decimals of a probability or score.
DECIMALS = 6


@dataclass
class TableCounts:
    """What became of a table's rows.

    rows: written. empty: of these, without a prediction. left_out: rows that could not be read.
    first_problem: what is wrong with the first row without a prediction. cut_off: texts that were too long.
    """

    rows: int = 0
    without_prediction: int = 0
    unreadable: int = 0
    num_truncated: int = 0
    first_problem: str = ""
    #: The columns that were added, and what a user should know of them and of the table.
    columns: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: What a row is.
    unit: str = "row"


def predict_table(
    bundle: FineTunedBundle,
    source: TableSource,
    out: Path | Callable[[str], object],
    *,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    out_format: str | None = None,
    progress: Progress | None = None,
) -> TableCounts:
    """Write a table with what the model says of each row.

    out: a new file, whose suffix tells the format, or a function that takes text. columns: fields
    of ``TaskSettings`` that name columns, where they are not those of the training table. form:
    the format of the text that a function takes; None: that of the table.
    Raises BertsmithError; then ``out`` is not there.
    """
    if isinstance(out, Path):
        check_new_file(out)
        out_format = output_format(out)
    progress, counts = progress or NullProgress(), TableCounts()
    _refuse_columns(bundle, columns or {})
    task = get_task_settings(bundle, columns)
    with _open(bundle, source) as table:
        counts.notes += table.notes
        out_format = out_format or table.format
        known, first, rows = find_columns(table, source)
        if first is not None:
            _check_columns(bundle, task, first, source)
        names, notes = unused_column_names(list(_COLUMNS[bundle.head.kind]), known, source.path)
        counts.notes += notes
        counts.columns += names.values()
        layout = _layout(bundle, table, source, out_format, known, names)
        is_text = out_format in ("csv", "tsv")
        encoding = choose_output_encoding(source.path, source.encoding) if is_text else UTF8
        write = partial(
            _write, bundle, task, rows, names, counts=counts, progress=progress,
            is_text=is_text, skip_bad=skip_bad,
        )  # fmt: skip
        progress.start("predicting", None, "rows")
        try:
            if isinstance(out, Path):
                with open_row_writer(out, layout, encoding) as writer:
                    write(writer)
            else:
                writer = create_text_writer(out, layout)
                write(writer)
                writer.finish()
        finally:
            progress.finish()
    return counts


def _refuse_columns(bundle: FineTunedBundle, columns: Mapping[str, Any]) -> None:
    """Raise BertsmithError for a column that is named and that the model does not read."""
    reject_unused_fields(bundle.head.kind, columns, [])
    trained = bundle.info.get("provenance", {}).get("task")
    is_single = trained is not None and not trained.get("pair")
    if columns.get("pair") and is_single and get_family_name(bundle.head.kind) == "classify":
        raise InputError(
            f"--pair {columns['pair']}: {bundle.path} was fine-tuned on single texts; leave --pair "
            "out"
        )


@contextmanager
def _open(bundle: FineTunedBundle, source: TableSource) -> Iterator[Table]:
    """Open a table; of a model of questions, SQuAD's files are tables of questions, too."""
    is_json = (source.format, detect_table_format(source.path)) in (
        (None, "json"),
        ("json", "json"),
    )
    if bundle.head.kind == "span" and is_json and not is_flat_file(source.path):
        squad = read_squad_rows(source.path, source.encoding, source.stream)
        rows = (replace(row, cells=_question_cells(row)) for row in squad)
        yield Table(rows, "json", ["id", "question", "context"])
        return
    with open_table(source) as table:
        yield table


def _question_cells(row: Row) -> dict[str, Any]:
    return {name: row.cells.get(name) for name in ("id", "question", "context")}


def _check_columns(
    bundle: FineTunedBundle, task: TaskSettings, row: Row, source: TableSource
) -> None:
    """Raise TaskError where the table lacks a column that the model is asked by."""
    has_task = "task" in bundle.info.get("provenance", {})
    options = {"--text": [task.text], "--pair": [task.pair] if task.pair else []}
    if bundle.head.kind == "choice":
        options["--endings"] = task.endings
        if not task.endings:
            raise InputError("the columns of the endings are not known; give --endings A,B,…")
    for option, names in options.items():
        for name in names:
            if not has_column(row, name):
                origin = " (as in its training table)" if has_task else ""
                raise TaskError(
                    f"{source.path}: the model reads the column {name!r}{origin}, but the columns "
                    f"are {', '.join(map(repr, row.cells))}; name it with {option}"
                )


def _layout(
    bundle: FineTunedBundle,
    table: Table,
    source: TableSource,
    form: str,
    known: Sequence[str],
    names: Mapping[str, str],
) -> TableLayout:
    types = {names[name]: kind for name, kind in _COLUMNS[bundle.head.kind].items()}
    layout = TableLayout(form, [*known, *names.values()], types=types, schema=table.schema)
    if form == "tsv":
        layout = replace(layout, dialect=replace(layout.dialect, delimiter="\t", has_quotes=False))
    if table.format == form and table.dialect is not None:
        layout = replace(layout, dialect=table.dialect, header=source.header)
    return layout


def _write(
    bundle: FineTunedBundle,
    task: TaskSettings,
    rows: Iterator[Row],
    names: Mapping[str, str],
    writer: RowWriter,
    counts: TableCounts,
    progress: Progress,
    *,
    is_text: bool,
    skip_bad: bool,
) -> None:
    empty = dict.fromkeys(names.values())
    for window in chunked(_items(bundle, task, rows, counts, skip_bad=skip_bad), _WINDOW):
        items = [item for _, item in window if item is not None]
        values = iter(list(predict_items(bundle, items)))
        written = []
        for row, item in window:
            cells = empty
            if item is not None:
                value = next(values)
                counts.num_truncated += bool(value.get("cut_off"))
                columns = _prediction(bundle.head.kind, value, is_text=is_text)
                cells = {names[name]: cell for name, cell in columns.items()}
            written.append({**row.cells, **cells})
        writer.append(written)
        counts.rows += len(written)
        progress.advance(len(written))


def _items(
    bundle: FineTunedBundle,
    task: TaskSettings,
    rows: Iterator[Row],
    counts: TableCounts,
    *,
    skip_bad: bool,
) -> Iterator[tuple[Row, Any]]:
    """Yield each row with what the model is asked; None where nothing can be asked."""
    read = _READERS[bundle.head.kind]
    for row in rows:
        try:
            item = read(row, task)
        except BadExampleError as fault:
            message = f"{fault.location or row.location}: {fault}"
            if not skip_bad:
                raise TaskError(
                    f"{message}; repair it, or go on without its prediction with --skip-bad"
                ) from None
            counts.first_problem = counts.first_problem or message
            if row.error:
                counts.unreadable += 1
                continue
            counts.without_prediction += 1
            item = None
        yield row, item


def _text_or_pair(row: Row, task: TaskSettings) -> str | tuple[str, str]:
    text = get_text(row, task.text)
    return (text, get_text(row, task.pair)) if task.pair else text


def _text(row: Row, task: TaskSettings) -> str:
    return get_text(row, task.text)


def _question(row: Row, task: TaskSettings) -> tuple[str, str]:
    assert task.pair
    return get_text(row, task.text), get_text(row, task.pair)


def _prompt(row: Row, task: TaskSettings) -> tuple[str, list[str]]:
    prompt, endings = read_prompt(row, task)
    return prompt, list(endings)


_READERS: dict[str, Callable[[Row, TaskSettings], Any]] = {
    "single": _text_or_pair, "multi": _text_or_pair, "regression": _text_or_pair,
    "entities": _text, "tags": _text, "span": _question, "choice": _prompt,
}  # fmt: skip


def _prediction(kind: str, value: Mapping[str, Any], *, is_text: bool) -> dict[str, Any]:
    """Return the cells of a prediction, by the names of ``_COLUMNS``.

    is_text: several labels share one cell, as in a training table of CSV.
    """
    if kind == "single":
        return {"label": value["label"], "probability": _rounded(value["labels"][value["label"]])}
    if kind == "multi":
        names = value["label"]
        shares = [_rounded(value["labels"][name]) for name in names]
        if is_text:
            return {"labels": LABEL_SEPARATOR.join(names),
                    "probabilities": LABEL_SEPARATOR.join(map(str, shares))}  # fmt: skip
        return {"labels": names, "probabilities": shares}
    if kind == "regression":
        return {"score": _rounded(value["score"])}
    if kind == "span":
        return {"answer": value["text"], "answer_start": value["start"],
                "probability": _rounded(value["probability"])}  # fmt: skip
    if kind == "choice":
        best = value["best"]
        return {"choice": best, "ending": value["endings"][best],
                "probability": _rounded(value["probabilities"][best])}  # fmt: skip
    name = "entities" if kind == "entities" else "tags"
    return {name: [{**span, "probability": _rounded(span["probability"])} for span in value[name]]}


def _rounded(number: float) -> float:
    return round(number, DECIMALS)
