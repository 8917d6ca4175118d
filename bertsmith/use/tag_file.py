"""Tags for the sentences of a file: CoNLL with a column added, CoNLL-U, or JSON."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import tee
from pathlib import Path
from typing import Any

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError, TaskError
from bertsmith.files import check_new_file
from bertsmith.progress import NullProgress, Progress
from bertsmith.tasks.conll import (
    DOCUMENT_MARKER,
    ROW_FORMATS,
    RawSentence,
    TaggedSentence,
    detect_sentence_format,
    parse_sentence,
    read_raw_sentences,
    read_row_sentences,
)
from bertsmith.tasks.families import get_task_settings
from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tables import TableSource, open_table
from bertsmith.tasks.text_files import UTF8, detect_table_format
from bertsmith.use.masked_lm import chunked
from bertsmith.use.predict_table import DECIMALS, TableCounts
from bertsmith.use.table_input import find_columns
from bertsmith.use.table_output import (
    Cells,
    TableLayout,
    create_text_writer,
    open_row_writer,
    open_text_output,
    unused_column_names,
)
from bertsmith.use.tag import TaggedUnits, tag_sentences

#: The columns that are added to JSON, and their types; see ``table_output.arrow_type``.
_COLUMNS = {"tags": "texts", "probabilities": "numbers"}
#: Stands in CoNLL where there is no tag.
_NO_TAG = "_"
#: The key of a tag in the last column of CoNLL-U.
PREDICTED = "Predicted"
#: Sentences that are written at once.
_WINDOW = 512

#: A sentence as it stands in the file, as the model takes it, and its tags.
_Item = tuple[RawSentence, TaggedSentence | None, TaggedUnits | None]


def tag_file(
    bundle: FineTunedBundle,
    source: TableSource,
    out: Path | Callable[[str], object],
    *,
    columns: Mapping[str, Any] | None = None,
    skip_bad: bool = False,
    as_json: bool = False,
    progress: Progress | None = None,
) -> TableCounts:
    """Write the sentences of a file with the tags that a model gives to their words.

    source: CoNLL, CoNLL-U, or rows of lists of words, as ``finetune`` reads them. out: a new file,
    or a function that takes text. CoNLL gets a column added at the end, CoNLL-U ``Predicted=`` in
    its last one; JSON, which a file's suffix or ``as_json`` asks for, gets tags and probabilities.
    columns: fields of ``TaskSettings`` that are others than at training. With ``skip_bad`` a bad
    sentence stays without tags. Raises BertsmithError; then ``out`` is not there.
    """
    form = source.format or detect_sentence_format(source.path)
    is_json = as_json or form in ROW_FORMATS
    out_form = "jsonl"
    if isinstance(out, Path):
        check_new_file(out)
        out_form = detect_table_format(out) or "conll"
        if form in ROW_FORMATS and out_form not in ROW_FORMATS:
            raise InputError(f"{out}: expected a name that ends in .jsonl, .json or .parquet")
        if out_form == "csv":
            raise InputError(
                f"{out}: sentences are no table of CSV; expected a name that ends in .txt, "
                ".conll, .conllu, .tsv, .jsonl, .json or .parquet"
            )
        is_json = out_form in ROW_FORMATS
    task, counts, progress = (
        get_task_settings(bundle, columns),
        TableCounts(unit="sentence"),
        progress or NullProgress(),
    )
    progress.start("tagging", None, "sentences")
    try:
        with _open(source, form, task) as (known, raws):
            items = _tagged(bundle, task, source, raws, counts, progress, skip_bad=skip_bad)
            if is_json:
                names, notes = unused_column_names(list(_COLUMNS), known, source.path)
                counts.notes += notes
                counts.columns += names.values()
                types = {names[name]: kind for name, kind in _COLUMNS.items()}
                layout = TableLayout(out_form, [*known, *names.values()], types=types)
                _write_rows(items, layout, names, out)
            else:
                encoding = source.encoding if isinstance(out, Path) else UTF8
                lines = partial(_lines, is_universal=form == "conllu", kind=bundle.head.kind)
                _write_lines(map(lines, items), out, encoding)
    finally:
        progress.finish()
    return counts


@contextmanager
def _open(
    source: TableSource, form: str, task: TaskSettings
) -> Iterator[tuple[list[str], Iterator[RawSentence]]]:
    """Yield the columns of rows, or those that CoNLL gets as JSON, and the sentences."""
    if form not in ROW_FORMATS:
        yield ["tokens"], read_raw_sentences(source, task, labeled=False, with_source=True)
        return
    # A row that does not name its document is one by itself.
    task = task.model_copy(update={"context": "sentence"})
    with open_table(replace(source, format=form)) as table:
        known, _, rows = find_columns(table, source)
        yield known, read_row_sentences(rows, task, labeled=False)


def _tagged(
    bundle: FineTunedBundle,
    task: TaskSettings,
    source: TableSource,
    raws: Iterator[RawSentence],
    counts: TableCounts,
    progress: Progress,
    *,
    skip_bad: bool,
) -> Iterator[_Item]:
    """Yield each sentence with its tags, without them where it is bad."""
    first, second = tee(_readable(raws, source.path, task, counts, skip_bad=skip_bad))
    tagged = tag_sentences(bundle, (one for _, one in first if one is not None), task=task)
    for raw, sentence in second:
        if sentence is None:
            yield raw, None, None
            continue
        counts.rows += 1
        progress.advance(1)
        yield raw, sentence, next(tagged)


def _readable(
    raws: Iterator[RawSentence],
    path: Path,
    task: TaskSettings,
    counts: TableCounts,
    *,
    skip_bad: bool,
) -> Iterator[tuple[RawSentence, TaggedSentence | None]]:
    """Yield each sentence as it stands in the file and as the model takes it."""
    for raw in raws:
        if not raw.units and raw.error is None:
            # What stands after the last sentence of CoNLL.
            yield raw, None
            continue
        try:
            sentence = parse_sentence(raw, path, task, None, labeled=False)
        except BadExampleError as fault:
            message = f"{fault.location or raw.location}: {fault}"
            if not skip_bad:
                raise TaskError(
                    f"{message}; repair it, or go on without its tags with --skip-bad"
                ) from None
            counts.first_problem = counts.first_problem or message
            if not raw.cells and not raw.source_lines:
                counts.unreadable += 1
                continue
            counts.without_prediction += 1
            counts.rows += 1
            yield raw, None
        else:
            yield raw, sentence


def _write_rows(
    items: Iterator[_Item],
    layout: TableLayout,
    names: Mapping[str, str],
    out: Path | Callable[[str], object],
) -> None:
    rows = (_row(raw, tagged, names) for raw, _, tagged in items if raw.units or raw.cells)
    batches = chunked(rows, _WINDOW)
    if isinstance(out, Path):
        with open_row_writer(out, layout) as writer:
            for batch in batches:
                writer.append(batch)
        return
    text = create_text_writer(out, layout)
    for batch in batches:
        text.append(batch)
    text.finish()


def _row(raw: RawSentence, tagged: TaggedUnits | None, names: Mapping[str, str]) -> Cells:
    row = dict(raw.cells) or {"tokens": raw.units}
    row[names["tags"]] = list(tagged.tags) if tagged else None
    shares = [share if share is None else round(share, DECIMALS) for share in tagged.probabilities
              ] if tagged else None  # fmt: skip
    row[names["probabilities"]] = shares
    return row


def _write_lines(blocks: Iterator[str], out: Path | Callable[[str], object], encoding: str) -> None:
    if not isinstance(out, Path):
        for block in blocks:
            out(block)
        return
    with open_text_output(out, encoding) as write:
        for block in blocks:
            write(block)


def _lines(item: _Item, *, is_universal: bool, kind: str) -> str:
    """Return the lines of a sentence with its tags, and those between it and the one before."""
    raw, _, tagged = item
    tags = tagged.tags if tagged else [_NO_TAG] * len(raw.line_numbers)
    by_line = dict(zip(raw.line_numbers, tags, strict=True))
    lines = []
    for number, line in enumerate(raw.source_lines, raw.first_line):
        written = line
        if number in by_line:
            add = _with_field if is_universal else _with_column
            written = add(line, by_line[number])
        elif not is_universal and line.split(maxsplit=1)[:1] == [DOCUMENT_MARKER]:
            # As many columns as other lines have.
            written = _with_column(line, "O" if kind == "entities" else "-X-")
        lines.append(f"{written}\n")
    return "".join(lines)


def _with_column(line: str, tag: str) -> str:
    return f"{line}\t{tag}" if "\t" in line else f"{line.rstrip()} {tag}"


def _with_field(line: str, tag: str) -> str:
    """Return a line of CoNLL-U with the tag in its last column, MISC."""
    columns = line.split("\t")
    fields = [] if columns[-1] == _NO_TAG else columns[-1].split("|")
    kept = [field for field in fields if not field.startswith(f"{PREDICTED}=")]
    columns[-1] = "|".join([*kept, f"{PREDICTED}={tag}"])
    return "\t".join(columns)
