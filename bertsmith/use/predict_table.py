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

from bertsmith.bundle import TaskBundle
from bertsmith.errors import QuestionError, TaskError
from bertsmith.files import check_new_file
from bertsmith.progress import Progress, Silent
from bertsmith.tasks.classification import SEPARATOR
from bertsmith.tasks.families import name_of, refuse_unread, task_of
from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.multiple_choice import read_prompt
from bertsmith.tasks.questions import is_flat, squad_rows
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tables import (
    Row,
    Table,
    TableSource,
    has_column,
    open_table,
    text_of,
)
from bertsmith.tasks.text_files import UTF8, encoding_of, table_format
from bertsmith.use.masked_lm import windows
from bertsmith.use.predict_lines import values_of
from bertsmith.use.table_input import known_columns
from bertsmith.use.table_output import (
    Layout,
    RowWriter,
    add_columns,
    open_rows,
    output_format,
    text_writer,
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
    first: what is wrong with the first row without a prediction. cut_off: texts that were too long.
    """

    rows: int = 0
    empty: int = 0
    left_out: int = 0
    cut_off: int = 0
    first: str = ""
    #: The columns that were added, and what a user should know of them and of the table.
    columns: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: What a row is.
    unit: str = "row"


def predict_table(
    bundle: TaskBundle,
    source: TableSource,
    out: Path | Callable[[str], object],
    *,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    form: str | None = None,
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
        form = output_format(out)
    progress, counts = progress or Silent(), TableCounts()
    _refuse_columns(bundle, columns or {})
    task = task_of(bundle, columns)
    with _open(bundle, source) as table:
        counts.notes += table.notes
        form = form or table.format
        known, first, rows = known_columns(table, source)
        if first is not None:
            _check_columns(bundle, task, first, source)
        names, notes = add_columns(list(_COLUMNS[bundle.head.kind]), known, source.path)
        counts.notes += notes
        counts.columns += names.values()
        layout = _layout(bundle, table, source, form, known, names)
        is_text = form in ("csv", "tsv")
        encoding = encoding_of(source.path, source.encoding) if is_text else UTF8
        write = partial(
            _write, bundle, task, rows, names, counts=counts, progress=progress,
            is_text=is_text, skip_bad=skip_bad,
        )  # fmt: skip
        progress.start("predicting", None, "rows")
        try:
            if isinstance(out, Path):
                with open_rows(out, layout, encoding) as writer:
                    write(writer)
            else:
                writer = text_writer(out, layout)
                write(writer)
                writer.finish()
        finally:
            progress.finish()
    return counts


def _refuse_columns(bundle: TaskBundle, columns: Mapping[str, Any]) -> None:
    """Raise BertsmithError for a column that is named and that the model does not read."""
    refuse_unread(bundle.head.kind, columns, [])
    trained = bundle.info.get("provenance", {}).get("task")
    is_single = trained is not None and not trained.get("pair")
    if columns.get("pair") and is_single and name_of(bundle.head.kind) == "classify":
        raise QuestionError(
            f"--pair {columns['pair']}: {bundle.path} was fine-tuned on single texts; leave --pair "
            "out"
        )


@contextmanager
def _open(bundle: TaskBundle, source: TableSource) -> Iterator[Table]:
    """Open a table; of a model of questions, SQuAD's files are tables of questions, too."""
    is_json = (source.format, table_format(source.path)) in ((None, "json"), ("json", "json"))
    if bundle.head.kind == "span" and is_json and not is_flat(source.path):
        squad = squad_rows(source.path, source.encoding, source.stream)
        rows = (replace(row, cells=_question_cells(row)) for row in squad)
        yield Table(rows, "json", ["id", "question", "context"])
        return
    with open_table(source) as table:
        yield table


def _question_cells(row: Row) -> dict[str, Any]:
    return {name: row.cells.get(name) for name in ("id", "question", "context")}


def _check_columns(bundle: TaskBundle, task: TaskSettings, row: Row, source: TableSource) -> None:
    """Raise TaskError where the table lacks a column that the model is asked by."""
    has_task = "task" in bundle.info.get("provenance", {})
    options = {"--text": [task.text], "--pair": [task.pair] if task.pair else []}
    if bundle.head.kind == "choice":
        options["--endings"] = task.endings
        if not task.endings:
            raise QuestionError("the columns of the endings are not known; give --endings A,B,…")
    for option, names in options.items():
        for name in names:
            if not has_column(row, name):
                origin = " (as in its training table)" if has_task else ""
                raise TaskError(
                    f"{source.path}: the model reads the column {name!r}{origin}, but the columns "
                    f"are {', '.join(map(repr, row.cells))}; name it with {option}"
                )


def _layout(
    bundle: TaskBundle,
    table: Table,
    source: TableSource,
    form: str,
    known: Sequence[str],
    names: Mapping[str, str],
) -> Layout:
    types = {names[name]: kind for name, kind in _COLUMNS[bundle.head.kind].items()}
    layout = Layout(form, [*known, *names.values()], types=types, schema=table.schema)
    if form == "tsv":
        layout = replace(layout, dialect=replace(layout.dialect, delimiter="\t", quoted=False))
    if table.format == form and table.dialect is not None:
        layout = replace(layout, dialect=table.dialect, header=source.header)
    return layout


def _write(
    bundle: TaskBundle,
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
    for window in windows(_items(bundle, task, rows, counts, skip_bad=skip_bad), _WINDOW):
        items = [item for _, item in window if item is not None]
        values = iter(list(values_of(bundle, items)))
        written = []
        for row, item in window:
            cells = empty
            if item is not None:
                value = next(values)
                counts.cut_off += bool(value.get("cut_off"))
                columns = _prediction(bundle.head.kind, value, is_text=is_text)
                cells = {names[name]: cell for name, cell in columns.items()}
            written.append({**row.cells, **cells})
        writer.append(written)
        counts.rows += len(written)
        progress.advance(len(written))


def _items(
    bundle: TaskBundle,
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
            message = f"{fault.where or row.where}: {fault}"
            if not skip_bad:
                raise TaskError(
                    f"{message}; repair it, or go on without its prediction with --skip-bad"
                ) from None
            counts.first = counts.first or message
            if row.fault:
                counts.left_out += 1
                continue
            counts.empty += 1
            item = None
        yield row, item


def _text_or_pair(row: Row, task: TaskSettings) -> str | tuple[str, str]:
    text = text_of(row, task.text)
    return (text, text_of(row, task.pair)) if task.pair else text


def _text(row: Row, task: TaskSettings) -> str:
    return text_of(row, task.text)


def _question(row: Row, task: TaskSettings) -> tuple[str, str]:
    assert task.pair
    return text_of(row, task.text), text_of(row, task.pair)


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
            return {"labels": SEPARATOR.join(names),
                    "probabilities": SEPARATOR.join(map(str, shares))}  # fmt: skip
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
