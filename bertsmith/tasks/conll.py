"""Reading tagged sentences from CoNLL, CoNLL-U, JSON and Parquet files."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bertsmith.errors import SettingsError
from bertsmith.plurals import count_noun
from bertsmith.tasks import conllu
from bertsmith.tasks.conll_columns import ColumnFormat, LineRules, split_columns
from bertsmith.tasks.entities import list_bio2_tags, to_bio2
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts
from bertsmith.tasks.settings import TaskSettings, is_column_number
from bertsmith.tasks.tables import (
    Row,
    TableSource,
    get_cell,
    open_table,
    read_unique_id,
    reject_lone_surrogates,
)
from bertsmith.tasks.text_files import detect_table_format, open_lines

#: The first word of a line that starts a document.
DOCUMENT_MARKER = "-DOCSTART-"
#: Default columns of JSON and Parquet files.
_WORD_COLUMN, _TAG_COLUMN = "tokens", "tags"
#: Column of JSON and Parquet files that identifies the document of a sentence.
_DOCUMENT_COLUMN = "document"
#: Formats with one sentence per row.
ROW_FORMATS = ("jsonl", "json", "parquet")
#: Number of lines used to detect the delimiter and the number of columns.
_SAMPLE_LINES = 500
#: Prefix of comments in KLUE's files.
_COMMENT_PREFIX = "##"
#: Prefixes of comments before a sentence in other files, such as GermEval 2014 and MultiCoNER. The
#: line of a word "#" can start with them, too.
_SENTENCE_COMMENT_PREFIXES = ("# ", "#\t")
#: Prefix of the comments of MultiCoNER, which can have as many columns as the words.
_ID_COMMENT_PREFIX = "# id "
_MAX_LISTED_LABELS = 20


@dataclass(frozen=True)
class TaggedSentence:
    """A sentence with tagged units, which are words or characters.

    Attributes:
        text: The text of the sentence.
        unit_offsets: Character offsets [start, end) of each unit.
        tags: The tag of each unit, None for unlabeled data.
        document: Number of the document. The sentences of a document are consecutive.
        location: File and line, for messages.
    """

    text: str
    unit_offsets: tuple[tuple[int, int], ...]
    tags: tuple[str, ...] | None
    document: int
    location: str


@dataclass
class RawSentence:
    """A sentence as read from a file, before validation.

    Attributes:
        units: The text of each unit.
        tags: The tag of each unit.
        document: Number of the document.
        location: File and line, for messages.
        error: Why the sentence cannot be used, None if it can.
        line_numbers: The line of each token, in formats with one token per line.
        cells: Values of the row by column, in formats with one sentence per row.
        source_lines: The lines of the file from the end of the previous sentence to the end of
            this sentence, without line endings.
        first_line: The line number of ``source_lines[0]``, from 1.
    """

    units: list[str] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    document: int = 0
    location: str = ""
    error: BadExampleError | None = None
    line_numbers: list[int] = field(default_factory=list)
    cells: Mapping[str, Any] = field(default_factory=dict)
    source_lines: list[str] = field(default_factory=list)
    first_line: int = 1


def detect_sentence_format(path: Path) -> str:
    """Return the format that a file's suffix indicates: conll, conllu or one of ``ROW_FORMATS``."""
    if conllu.has_conllu_suffix(path):
        return "conllu"
    table_format = detect_table_format(path)
    return table_format if table_format in ROW_FORMATS else "conll"


def get_word_column(column: str) -> str:
    """Return the column of the words in JSON and Parquet.

    Column numbers, which are the default for CoNLL files, select the default column, "tokens".
    """
    return _WORD_COLUMN if is_column_number(column) else column


def has_token_lists(source: TableSource, column: str | None, training_column: str = "0") -> bool:
    """Return whether the rows of a table contain lists of words rather than text.

    For a file, the first valid row is inspected. A stream can be read only once, so its rows are
    assumed to contain lists if the column has the default name, "tokens", or that of the training
    data. The same applies to a file without rows, unless it names its columns and lacks this one.

    Args:
        source: The table.
        column: The column of the words, None for that of the training data.
        training_column: The column of the words in the training data, a number for CoNLL.
    """
    training_name = get_word_column(training_column)
    name = training_name if column is None else get_word_column(column)
    is_list_column = name in (_WORD_COLUMN, training_name)
    if source.stream is not None:
        return is_list_column
    with open_table(source) as table:
        first_row = next((row for row in table.rows if not row.error), None)
    if first_row is None:
        return is_list_column and name in (table.columns or [name])
    return isinstance(first_row.cells.get(name), list)


def looks_like_conll(text_start: str, labels: Collection[str]) -> bool:
    """Return whether a text has one word per line, like CoNLL files, rather than prose.

    Lines of prose have different numbers of words. If all lines have the same number of words, the
    text is CoNLL if a column contains only labels of the model, or if each line has a single word
    and there are blank lines between words.

    Args:
        text_start: The first part of the text.
        labels: The labels of the model.
    """
    lines = text_start.splitlines()[: _SAMPLE_LINES + 1]
    if len(lines) > _SAMPLE_LINES or not text_start.endswith("\n"):
        # The last line may be incomplete. It is used only if there is no other line.
        lines = lines[:-1] or lines
    if any(_is_document_start(line) for line in lines):
        return True
    word_lines = [line for line in lines if line.strip() and not line.startswith(_COMMENT_PREFIX)]
    has_tabs = all("\t" in line for line in word_lines)
    rows = [split_columns(line, has_tabs=has_tabs) for line in word_lines]
    column_counts = {len(row) for row in rows}
    if len(rows) < 2 or len(column_counts) > 1:
        return False
    if column_counts == {1}:
        # Blank lines at the start and the end are not between words.
        return any(not line.strip() for line in "\n".join(lines).strip().split("\n"))
    columns = zip(*rows, strict=True)
    return any(set(column) <= set(labels) for column in columns)


def read_examples(
    path: Path,
    task: TaskSettings,
    *,
    labels: Sequence[str] | None = None,
    labeled: bool = True,
) -> tuple[list[TaggedSentence], ExampleCounts]:
    """Read the sentences of a file.

    Args:
        path: The file.
        task: The task settings; with ``skip_invalid`` invalid sentences are skipped and counted.
        labels: Allowed tags, None for any. Entities may be tagged in another scheme.
        labeled: Whether to read the tags.

    Raises:
        TaskError: The file is unreadable, or a sentence is invalid.
    """
    sentences, counts = [], ExampleCounts()
    valid_tags = None if labels is None else _list_valid_tags(labels, task)
    source = TableSource(path, encoding=task.encoding)
    for raw in read_raw_sentences(source, task, labeled=labeled):
        with counts.count_example(raw.location, task, labeled=labeled):
            sentences.append(parse_sentence(raw, path, task, valid_tags, labeled=labeled))
    return counts.require_examples(sentences, path), counts


def read_raw_sentences(
    source: TableSource,
    task: TaskSettings,
    *,
    labeled: bool,
    with_source_lines: bool = False,
) -> Iterator[RawSentence]:
    """Yield the sentences of a file without validating them.

    Args:
        source: The file or stream.
        task: The task settings.
        labeled: Whether to read the tags.
        with_source_lines: Whether to set ``source_lines``. Lines after the last sentence are then
            returned in a sentence without units.

    Raises:
        TaskError: The file is unreadable.
    """
    file_format = source.format or detect_sentence_format(source.path)
    if file_format in ROW_FORMATS:
        with open_table(replace(source, format=file_format)) as table:
            yield from read_row_sentences(table.rows, task, labeled=labeled)
        return
    with open_lines(source.path, encoding=source.encoding, stream=source.stream) as lines:
        yield from _read_conll_sentences(
            lines,
            source.path,
            task,
            is_conllu=file_format == "conllu",
            labeled=labeled,
            with_source_lines=with_source_lines,
        )


def _list_valid_tags(labels: Sequence[str], task: TaskSettings) -> list[str]:
    """Return the labels, and for entities also the BIO2 tags of their entity types."""
    valid_tags = dict.fromkeys(labels)
    if task.kind == "entities":
        valid_tags |= dict.fromkeys(tag for label in labels for tag in list_bio2_tags(label))
    return list(valid_tags)


def parse_sentence(
    raw: RawSentence,
    path: Path,
    task: TaskSettings,
    valid_tags: Sequence[str] | None,
    *,
    labeled: bool,
) -> TaggedSentence:
    """Validate a sentence and compute the character offsets of its units.

    Raises:
        BadExampleError: The sentence is invalid.
    """
    if raw.error:
        raise raw.error
    if task.tag_level == "word" and not all(unit.strip() for unit in raw.units):
        advice = ""
        if all(len(unit) == 1 for unit in raw.units):
            advice = "; if each unit is one character, give --set task.tag_level=character"
        raise BadExampleError("an empty word", advice)
    separator = "" if task.tag_level == "character" else " "
    unit_offsets, start = [], 0
    for unit in raw.units:
        unit_offsets.append((start, start + len(unit)))
        start += len(unit) + len(separator)
    tags = None
    if labeled:
        tags = tuple(to_bio2(raw.tags) if task.kind == "entities" else raw.tags)
        if valid_tags is not None:
            _reject_invalid_tags(raw, tags, valid_tags, path)
    text = separator.join(raw.units)
    return TaggedSentence(text, tuple(unit_offsets), tags, raw.document, raw.location)


def _reject_invalid_tags(
    raw: RawSentence,
    tags: Sequence[str],
    valid_tags: Sequence[str],
    path: Path,
) -> None:
    """Raise BadExampleError with the line of the first tag that is not one of ``valid_tags``.

    The error message contains the tag as in the file, which may have another scheme.
    """
    for index, tag in enumerate(tags):
        if tag not in valid_tags:
            listed_labels = ", ".join(map(repr, valid_tags[:_MAX_LISTED_LABELS]))
            raise BadExampleError(
                "an unknown label",
                f": {raw.tags[index]!r}; known labels are {listed_labels}",
                f"{path}, line {raw.line_numbers[index]:,}" if raw.line_numbers else None,
            )


def _read_conll_sentences(
    lines: Iterator[str],
    path: Path,
    task: TaskSettings,
    *,
    is_conllu: bool,
    labeled: bool,
    with_source_lines: bool,
) -> Iterator[RawSentence]:
    """Yield the sentences of a CoNLL or CoNLL-U file, which has one token per line.

    A sentence ends at a blank line or at the start of a document.
    """
    line_rules = _CONLLU_RULES if is_conllu else _CONLL_RULES
    get_column_index = conllu.get_column_index if is_conllu else _parse_column_number
    word_column = get_column_index(task.text_column, "text_column", path)
    tag_column = get_column_index(task.label_column, "label_column", path) if labeled else None
    sample: list[str] = []
    columns: ColumnFormat | None = None
    # A long comment can precede the first word.
    while columns is None and (next_lines := list(islice(lines, _SAMPLE_LINES))):
        sample += next_lines
        columns = ColumnFormat.detect(sample, line_rules, word_column, tag_column, path)
    is_ignored: Callable[[str], bool]
    if is_conllu:
        is_ignored = conllu.is_non_word_line
    else:
        is_ignored = partial(_is_comment, task.tag_level, columns)
    sentence = RawSentence()
    for line_number, line in enumerate(chain(sample, lines), 1):
        content = line.rstrip("\r\n")
        is_document_start = line_rules.is_document_start(content)
        if is_document_start and sentence.units:
            yield sentence
            sentence = RawSentence(document=sentence.document, first_line=line_number)
        if with_source_lines:
            sentence.source_lines.append(content)
        if is_document_start:
            sentence.document += 1
        elif is_ignored(content) or (
            not (is_conllu or sentence.units) and _is_sentence_comment(columns, content)
        ):
            continue
        elif not content.strip():
            if sentence.units:
                yield sentence
                sentence = RawSentence(document=sentence.document, first_line=line_number + 1)
        else:
            assert columns is not None
            location = f"{path}, line {line_number:,}"
            _add_unit(sentence, content, columns, word_column, tag_column, location)
            sentence.line_numbers.append(line_number)
    if sentence.units or sentence.source_lines:
        yield sentence


def _add_unit(
    sentence: RawSentence,
    line: str,
    columns: ColumnFormat,
    word_column: int,
    tag_column: int | None,
    location: str,
) -> None:
    """Add the unit (word or character) of a line to a sentence.

    A line with the wrong number of columns adds an empty unit and sets ``error``.
    """
    if not sentence.units:
        sentence.location = location
    cells = columns.split_line(line)
    if cells is None:
        cells = [""] * columns.num_columns
        if sentence.error is None:
            sentence.error = columns.build_error(line, location)
    sentence.units.append(cells[word_column])
    if tag_column is not None:
        sentence.tags.append(cells[tag_column].strip())


def _is_document_start(line: str) -> bool:
    return line.split(maxsplit=1)[:1] == [DOCUMENT_MARKER]


def _may_be_comment(line: str) -> bool:
    return line.startswith((_COMMENT_PREFIX, *_SENTENCE_COMMENT_PREFIXES))


_CONLL_RULES = LineRules(_is_document_start, _may_be_comment)
_CONLLU_RULES = LineRules(conllu.is_document_start, conllu.is_non_word_line)


def _is_comment(tag_level: str, columns: ColumnFormat | None, line: str) -> bool:
    """Return whether a line is a comment, which starts with "##" in KLUE's files.

    A line that starts with the token "##" is not a comment: it has as many columns as the other
    lines. With columns separated by tabs, "##" and a space always start a comment.
    """
    if not line.startswith(_COMMENT_PREFIX):
        return False
    if tag_level == "character" or columns is None:
        return True
    if columns.has_tabs and line.startswith(f"{_COMMENT_PREFIX} "):
        return True
    return columns.split_line(line) is None


def _is_sentence_comment(columns: ColumnFormat | None, line: str) -> bool:
    """Return whether a line before the first word of a sentence is a comment that starts with "# ".

    The line of the word "#" has as many columns as the other lines.
    """
    if not line.startswith(_SENTENCE_COMMENT_PREFIXES):
        return False
    if columns is None or line.startswith(_ID_COMMENT_PREFIX):
        return True
    return columns.split_line(line) is None


def read_row_sentences(
    rows: Iterable[Row],
    task: TaskSettings,
    *,
    labeled: bool,
) -> Iterator[RawSentence]:
    """Yield the sentences of JSON or Parquet rows with a list of words and a list of tags."""
    word_column = get_word_column(task.text_column)
    tag_column = _TAG_COLUMN if is_column_number(task.label_column) else task.label_column
    document_number, previous_document = -1, None
    seen_ids: set[str] = set()
    for row in rows:
        document = row.cells.get(_DOCUMENT_COLUMN)
        # Each row without a value in this column is a document.
        if document is None or document != previous_document:
            document_number += 1
        previous_document = document
        raw = RawSentence(document=document_number, location=row.location, cells=row.cells)
        try:
            # In data to tag, ids have no effect and may repeat.
            if labeled:
                read_unique_id(row, task.id_column, seen_ids)
            units = _get_text_list(row, word_column, "--text")
            # Hugging Face datasets use numbers as tags.
            tags = _get_text_list(row, tag_column, "--label", allow_numbers=True) if labeled else []
        except BadExampleError as error:
            raw.error = error
            yield raw
            continue
        raw.units, raw.tags = units, tags
        if labeled and len(units) != len(tags):
            raw.error = BadExampleError(
                f"{count_noun(len(units), 'word')} but {count_noun(len(tags), 'tag')}"
            )
        elif not units:
            raw.error = BadExampleError("a sentence without words")
        elif task.context == "document" and document is None:
            raw.error = BadExampleError(
                f"no column {_DOCUMENT_COLUMN!r}, needed for task.context 'document' to group rows",
            )
        yield raw


def _get_text_list(row: Row, name: str, option: str, *, allow_numbers: bool = False) -> list[str]:
    """Return the list of words or tags in a column; raise BadExampleError for other values.

    ``option`` is as in ``get_cell``.
    """
    value = get_cell(row, name, option)
    if not isinstance(value, list):
        raise BadExampleError("no list where words or tags are expected", f" in {name!r}")
    for item in value:
        if type(item) is not str and not (allow_numbers and type(item) is int):
            raise BadExampleError("a word or tag that is not text", f" in {name!r}: {item!r}")
    items = [str(item) for item in value]
    reject_lone_surrogates("".join(items), name)
    return items


def _parse_column_number(name: str, field_name: str, path: Path) -> int:
    """Convert the column number of a CoNLL file; raise SettingsError for a column name.

    The arguments are those of ``conllu.get_column_index``.
    """
    if not is_column_number(name):
        raise SettingsError(
            f"{path}: task.{field_name} is {name!r}, but columns of CoNLL files have no names; "
            "give the number of the column: 0 for the first, -1 for the last",
        )
    return int(name)
