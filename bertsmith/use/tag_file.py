"""Tag the sentences of a file, and write them as CoNLL, CoNLL-U, JSON or Parquet."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
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
from bertsmith.tasks.conllu import has_conllu_suffix
from bertsmith.tasks.families import get_task_settings, reject_unused_fields
from bertsmith.tasks.inputs import BadExampleError
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.tables import TableSource, open_table
from bertsmith.tasks.text_files import detect_table_format
from bertsmith.use.inputs import chunked
from bertsmith.use.predict_table import DECIMALS, TableCounts
from bertsmith.use.table_input import find_columns
from bertsmith.use.table_output import (
    Cells,
    TableLayout,
    TextOutput,
    choose_column_names,
    open_row_writer,
    open_text_output,
)
from bertsmith.use.tag import TaggedUnits, tag_sentences

#: Columns added to JSON and Parquet, with their types; see ``table_output.get_arrow_type``.
_ADDED_COLUMNS = {"tags": "texts", "probabilities": "numbers"}
#: An empty field in CoNLL-U; also written instead of a tag for the words of an invalid sentence.
_EMPTY_FIELD = "_"
#: Key of the predicted tag in the last column of CoNLL-U (MISC).
PREDICTED = "Predicted"
#: Number of sentences written together.
_CHUNK_SIZE = 512

#: A sentence as read from the file, and its predicted tags; None for an invalid sentence.
_SentenceWithTags = tuple[RawSentence, TaggedUnits | None]


def tag_file(
    bundle: FineTunedBundle,
    source: TableSource,
    out: TextOutput,
    *,
    columns: Mapping[str, Any] | None = None,
    skip_invalid: bool = False,
    as_json: bool = False,
    progress: Progress | None = None,
) -> TableCounts:
    """Write the sentences of a file with predicted tags.

    In CoNLL output, the tags are an additional last column. In CoNLL-U output, they are the field
    ``Predicted=`` in the last column. JSON and Parquet output has added columns with the tags and
    their probabilities.

    Args:
        bundle: A tagger.
        source: A CoNLL or CoNLL-U file, or a table with a list of words in each row.
        out: A new file, whose suffix determines its format, or a function to which the output is
            passed as text.
        columns: Fields of ``TaskSettings`` that name columns, if they differ from fine-tuning.
        skip_invalid: Whether invalid sentences are written without tags, instead of being an error.
        as_json: Whether the text that is passed to a function is JSON lines.
        progress: Receives the number of sentences.

    Raises:
        BertsmithError: The file cannot be read or written. Then ``out`` is not created.
    """
    in_format = source.format or detect_sentence_format(source.path)
    is_json = as_json or in_format in ROW_FORMATS
    out_format = "jsonl"
    if isinstance(out, Path):
        out_format = _get_output_format(out, in_format)
        is_json = out_format in ROW_FORMATS
    reject_unused_fields(bundle.head.kind, columns or {}, [])
    task = get_task_settings(bundle, columns)
    counts = TableCounts(unit="sentence")
    progress = progress or NullProgress()
    progress.start("tagging", None, "sentences")
    try:
        with _open_input(source, in_format, task) as (input_columns, schema, raw_sentences):
            tagged_sentences = _tag_raw_sentences(
                bundle, task, source, raw_sentences, counts, progress, skip_invalid=skip_invalid
            )
            if is_json:
                names, notes = choose_column_names(list(_ADDED_COLUMNS), input_columns, source.path)
                counts.notes += notes
                counts.added_columns += names.values()
                types = {names[name]: column_type for name, column_type in _ADDED_COLUMNS.items()}
                output_columns = [*input_columns, *names.values()]
                layout = TableLayout(out_format, output_columns, types=types, schema=schema)
                _write_rows(tagged_sentences, layout, names, out)
            else:
                kind, is_conllu = bundle.head.kind, in_format == "conllu"
                with open_text_output(out, source.encoding) as write:
                    for sentence in tagged_sentences:
                        write(_format_sentence(sentence, kind, is_conllu=is_conllu))
    finally:
        progress.finish()
    return counts


def _get_output_format(out: Path, in_format: str) -> str:
    """Return the format that the suffix of a new file indicates; "conll" for unknown suffixes.

    Raises:
        BertsmithError: The file exists, or the format cannot hold the sentences.
    """
    check_new_file(out)
    out_format = detect_table_format(out) or "conll"
    if in_format in ROW_FORMATS and out_format not in ROW_FORMATS:
        raise InputError(f"{out}: expected a name that ends in .jsonl, .json or .parquet")
    if out_format == "csv":
        raise InputError(
            f"{out}: CSV cannot hold sentences; expected a name that ends in .txt, .conll, "
            ".conllu, .tsv, .jsonl, .json or .parquet"
        )
    if out_format not in ROW_FORMATS and has_conllu_suffix(out) != (in_format == "conllu"):
        name, suffixes = "CoNLL", ".txt, .conll, .tsv"
        if in_format == "conllu":
            name, suffixes = "CoNLL-U", ".conllu"
        raise InputError(
            f"{out}: the input is {name}, whose lines are written in the same format; expected a "
            f"name that ends in {suffixes}, .jsonl, .json or .parquet"
        )
    return out_format


@contextmanager
def _open_input(
    source: TableSource, in_format: str, task: TaskSettings
) -> Iterator[tuple[list[str], Any, Iterator[RawSentence]]]:
    """Open the input and yield its columns, its Arrow schema (of Parquet) and its sentences.

    CoNLL and CoNLL-U have one column, "tokens", when they are written as JSON or Parquet.
    """
    if in_format not in ROW_FORMATS:
        sentences = read_raw_sentences(source, task, labeled=False, with_source_lines=True)
        yield ["tokens"], None, sentences
        return
    # With document context, rows without the column "document" would be invalid.
    task = task.model_copy(update={"context": "sentence"})
    with open_table(replace(source, format=in_format)) as table:
        columns, _, rows = find_columns(table, source)
        yield columns, table.schema, read_row_sentences(rows, task, labeled=False)


def _tag_raw_sentences(
    bundle: FineTunedBundle,
    task: TaskSettings,
    source: TableSource,
    raw_sentences: Iterator[RawSentence],
    counts: TableCounts,
    progress: Progress,
    *,
    skip_invalid: bool,
) -> Iterator[_SentenceWithTags]:
    """Yield each sentence with its predicted tags, or with None if it is invalid."""
    parsed = _parse_sentences(raw_sentences, source.path, task, counts, skip_invalid=skip_invalid)
    model_sentences, output_sentences = tee(parsed)
    tagged_units = tag_sentences(
        bundle, (sentence for _, sentence in model_sentences if sentence is not None), task=task
    )
    for raw, sentence in output_sentences:
        if sentence is None:
            yield raw, None
            continue
        counts.num_rows += 1
        progress.advance(1)
        yield raw, next(tagged_units)


def _parse_sentences(
    raw_sentences: Iterator[RawSentence],
    path: Path,
    task: TaskSettings,
    counts: TableCounts,
    *,
    skip_invalid: bool,
) -> Iterator[tuple[RawSentence, TaggedSentence | None]]:
    """Yield each sentence as read from the file, and as parsed for the model.

    Instead of the parsed sentence, None is yielded for an invalid sentence.
    """
    for raw in raw_sentences:
        if not raw.units and raw.error is None:
            # The lines after the last sentence of a CoNLL file are written, but not tagged.
            yield raw, None
            continue
        try:
            sentence = parse_sentence(raw, path, task, None, labeled=False)
        except BadExampleError as error:
            message = f"{error.location or raw.location}: {error}"
            if not skip_invalid:
                raise TaskError(
                    f"{message}; correct it, or continue without its tags with --skip-invalid"
                ) from None
            counts.first_error = counts.first_error or message
            if not raw.cells and not raw.source_lines:
                counts.num_unreadable += 1
                continue
            counts.num_without_prediction += 1
            counts.num_rows += 1
            yield raw, None
        else:
            yield raw, sentence


def _write_rows(
    sentences: Iterator[_SentenceWithTags],
    layout: TableLayout,
    names: Mapping[str, str],
    out: TextOutput,
) -> None:
    """Write sentences as the rows of a table."""
    rows = (_to_row(raw, units, names) for raw, units in sentences if raw.units or raw.cells)
    with open_row_writer(out, layout) as writer:
        for chunk in chunked(rows, _CHUNK_SIZE):
            writer.append(chunk)


def _to_row(raw: RawSentence, units: TaggedUnits | None, names: Mapping[str, str]) -> Cells:
    """Return the cells of a sentence; ``names`` are the names of the added columns."""
    row = dict(raw.cells) or {"tokens": raw.units}
    row[names["tags"]] = list(units.tags) if units else None
    probabilities = None
    if units:
        probabilities = [
            probability if probability is None else round(probability, DECIMALS)
            for probability in units.probabilities
        ]
    row[names["probabilities"]] = probabilities
    return row


def _format_sentence(sentence: _SentenceWithTags, kind: str, *, is_conllu: bool) -> str:
    """Return the lines of a sentence with its tags, and the comments and markers before it."""
    raw, units = sentence
    tags = units.tags if units else [_EMPTY_FIELD] * len(raw.line_numbers)
    tags_by_line = dict(zip(raw.line_numbers, tags, strict=True))
    lines = []
    for line_number, line in enumerate(raw.source_lines, raw.first_line):
        tagged_line = line
        if line_number in tags_by_line:
            add_tag = _add_misc_field if is_conllu else _add_column
            tagged_line = add_tag(line, tags_by_line[line_number])
        elif not is_conllu and line.split(maxsplit=1)[:1] == [DOCUMENT_MARKER]:
            # A document marker must have as many columns as the other lines.
            tagged_line = _add_column(line, "O" if kind == "entities" else "-X-")
        lines.append(f"{tagged_line}\n")
    return "".join(lines)


def _add_column(line: str, tag: str) -> str:
    """Return a CoNLL line with the tag as an additional last column."""
    return f"{line}\t{tag}" if "\t" in line else f"{line.rstrip()} {tag}"


def _add_misc_field(line: str, tag: str) -> str:
    r"""Return a CoNLL-U line with the tag in its last column, MISC.

    Fields of this column are separated by "|", so this character in a tag, such as NN|UTR|SIN, is
    written as "\p", and a backslash as two, as in the field SpacesAfter of UDPipe.
    """
    columns = line.split("\t")
    fields = [] if columns[-1] == _EMPTY_FIELD else columns[-1].split("|")
    other_fields = [field for field in fields if not field.startswith(f"{PREDICTED}=")]
    escaped_tag = tag.replace("\\", r"\\").replace("|", r"\p")
    columns[-1] = "|".join([*other_fields, f"{PREDICTED}={escaped_tag}"])
    return "\t".join(columns)
