"""Tagged sentences from files in CoNLL's form, CoNLL-U, or JSON lines."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks import conllu
from bertsmith.tasks.entities import to_bio2
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

#: What parts documents in CoNLL's files.
DOCUMENT_MARKER = "-DOCSTART-"
#: JSON lines: the keys where the columns of CoNLL's form are meant, and that of the document.
_KEYS, _DOCUMENT = ("tokens", "tags"), "document"
_BLANKS = re.compile("[ \\t]+")
#: Formats that hold a sentence a row, and all formats of tagged sentences.
ROW_FORMATS = ("jsonl", "json", "parquet")
SENTENCE_FORMATS = ("conll", "conllu", *ROW_FORMATS)
#: Lines by which the separator and the number of columns are told.
_SAMPLE_LINES = 500
#: How KLUE's comments begin.
_COMMENT = "##"


@dataclass(frozen=True)
class TaggedSentence:
    """A text and the tag of each of its units, words or characters.

    units: the characters [start, end) of each. tags: None where they are not known. document: equal
    for the sentences of one document, which follow each other.
    """

    text: str
    units: tuple[tuple[int, int], ...]
    tags: tuple[str, ...] | None
    document: int
    location: str


@dataclass(frozen=True)
class RawSentence:
    """A sentence as it stands in the file; ``fault``: why it cannot be used, if so.

    line_numbers: the number of each unit's, where units have lines of their own. cells: the row that holds
    it, where it is one. source: the lines of the file from the end of the sentence before it to its
    own end, without their ends; the first is number ``first_line``.
    """

    units: list[str]
    tags: list[str]
    document: int
    location: str
    error: BadExampleError | None = None
    line_numbers: list[int] = field(default_factory=list)
    cells: Mapping[str, Any] = field(default_factory=dict)
    source_lines: list[str] = field(default_factory=list)
    first_line: int = 1


def detect_sentence_format(path: Path) -> str:
    """Return the format of a file of tagged sentences by its suffix: one of ``SENTENCE_FORMATS``."""
    if conllu.is_conllu(path):
        return "conllu"
    form = detect_table_format(path)
    return form if form in ROW_FORMATS else "conll"


def has_token_lists(source: TableSource, column: str | None) -> bool:
    """Tell whether rows hold lists of words, by the first of them; of a stream, by the column.

    column: that of the words, if it is named.
    """
    name = _KEYS[0] if column is None or is_column_number(column) else column
    if source.stream is not None:
        return name == _KEYS[0]
    with open_table(source) as table:
        first = next((row for row in table.rows if not row.error), None)
    return first is not None and isinstance(first.cells.get(name), list)


def looks_like_conll(head: str, labels: Collection[str]) -> bool:
    """Tell whether a text of unknown form has a word on each line, not a text.

    Lines of prose have different numbers of words. Lines that have the same number are units if
    they are single words with blank lines between, or if one of the columns holds labels only.
    """
    lines = head.splitlines()[: _SAMPLE_LINES + 1]
    if len(lines) > _SAMPLE_LINES or not head.endswith("\n"):
        # The last line may be cut off.
        lines = lines[:-1] or lines
    if any(_begins_document(line) for line in lines):
        return True
    units = [line for line in lines if line.strip() and not line.startswith(_COMMENT)]
    tabs = all("\t" in line for line in units)
    rows = [split_columns(line, tabs=tabs) for line in units]
    if len(rows) < 2 or len(set(map(len, rows))) > 1:
        return False
    if len(rows[0]) == 1:
        return any(not line.strip() for line in lines[: lines.index(units[-1])])
    return any(set(column) <= set(labels) for column in zip(*rows, strict=True))


def read_tagged_sentences(
    path: Path, task: TaskSettings, labels: Sequence[str] | None, *, labeled: bool
) -> tuple[list[TaggedSentence], ExampleCounts]:
    """Read the sentences of a file; a bad one is an error or a counted skip. Raises TaskError."""
    found, counts = [], ExampleCounts()
    source = TableSource(path, encoding=task.encoding)
    for raw in read_raw_sentences(source, task, labeled=labeled):
        with counts.count_example(raw.location, task, labeled=labeled):
            found.append(parse_sentence(raw, path, task, labels, labeled=labeled))
    return counts.require_examples(found, path), counts


def read_raw_sentences(
    source: TableSource, task: TaskSettings, *, labeled: bool, with_source: bool = False
) -> Iterator[RawSentence]:
    """Yield the sentences of a file as they stand there.

    with_source: with their lines; those after the last sentence come with one that has no units.
    Raises TaskError.
    """
    form = source.format or detect_sentence_format(source.path)
    if form in ROW_FORMATS:
        with open_table(replace(source, format=form)) as table:
            yield from read_row_sentences(table.rows, task, labeled=labeled)
        return
    with open_lines(source.path, encoding=source.encoding, stream=source.stream) as lines:
        yield from _blocks(lines, source.path, task, labeled, form, with_source=with_source)


def parse_sentence(
    raw: RawSentence,
    path: Path,
    task: TaskSettings,
    labels: Sequence[str] | None,
    *,
    labeled: bool,
) -> TaggedSentence:
    """Return a sentence with its text and places. Raises BadExampleError."""
    if raw.error:
        raise raw.error
    if task.unit == "word" and not all(unit.strip() for unit in raw.units):
        advice = ""
        if all(len(unit) == 1 for unit in raw.units):
            advice = "; if each unit is one character, give --set task.unit=character"
        raise BadExampleError("an empty word", advice)
    between = "" if task.unit == "character" else " "
    units, start = [], 0
    for unit in raw.units:
        units.append((start, start + len(unit)))
        start += len(unit) + len(between)
    tags = None
    if labeled:
        tags = tuple(to_bio2(raw.tags) if task.kind == "entities" else raw.tags)
        known = set(tags if labels is None else labels)
        strange = next((place for place, tag in enumerate(tags) if tag not in known), None)
        if strange is not None:
            told = ", ".join(map(repr, list(labels or ())[:20]))
            raise BadExampleError(
                "an unknown label", f": {tags[strange]!r}; known are {told}",
                f"{path}, line {raw.line_numbers[strange]:,}" if raw.line_numbers else None,
            )  # fmt: skip
    return TaggedSentence(between.join(raw.units), tuple(units), tags, raw.document, raw.location)


def _blocks(
    lines: Iterator[str],
    path: Path,
    task: TaskSettings,
    labelled: bool,
    form: str,
    *,
    with_source: bool,
) -> Iterator[RawSentence]:
    """Yield the sentences of CoNLL's form: a unit a line; a blank line or a document ends one."""
    is_universal = form == "conllu"
    rules = _CONLLU if is_universal else _CONLL
    column = conllu.get_column_index if is_universal else _number
    word = column(task.text, "text", path)
    tag = column(task.label, "label", path) if labelled else None
    sample = list(islice(lines, _SAMPLE_LINES))
    columns = _Columns.of(sample, rules, word, tag, path)
    is_aside: Callable[[str], bool] = conllu.is_not_word
    if not is_universal:
        is_aside = partial(_is_aside, task.unit, columns)
    block = RawSentence([], [], 0, "")
    for number, line in enumerate(chain(sample, lines), 1):
        bare = line.rstrip("\r\n")
        begins = rules.begins_document(bare)
        if begins and block.units:
            yield block
            block = RawSentence([], [], block.document, "", first_line=number)
        if with_source:
            block.source_lines.append(bare)
        if begins:
            block = replace(block, document=block.document + 1)
        elif is_aside(bare):
            continue
        elif not bare.strip():
            if block.units:
                yield block
                block = RawSentence([], [], block.document, "", first_line=number + 1)
        else:
            assert columns is not None
            block = _with_unit(block, bare, columns, word, tag, f"{path}, line {number:,}")
            block.line_numbers.append(number)
    if block.units or block.source_lines:
        yield block


def _with_unit(
    block: RawSentence, line: str, columns: "_Columns", word: int, tag: int | None, place: str
) -> RawSentence:
    if not block.units:
        block = replace(block, location=place)
    cells = columns.split(line)
    if cells is None:
        cells = [""] * columns.count
        if block.error is None:
            block = replace(block, error=columns.fault(line, place))
    block.units.append(cells[word])
    if tag is not None:
        block.tags.append(cells[tag])
    return block


def _begins_document(line: str) -> bool:
    return line.split(maxsplit=1)[:1] == [DOCUMENT_MARKER]


@dataclass(frozen=True)
class _Rules:
    """Which lines of a form begin a document, and which are certainly no unit."""

    begins_document: Callable[[str], bool]
    is_comment: Callable[[str], bool]


_CONLL = _Rules(_begins_document, lambda line: line.startswith(_COMMENT))
_CONLLU = _Rules(conllu.is_document_start, conllu.is_not_word)


def _is_aside(unit: str, columns: "_Columns | None", line: str) -> bool:
    """Tell whether a line is a comment of KLUE's files; "##" may be a word, too."""
    if not line.startswith(_COMMENT):
        return False
    if unit == "character" or columns is None:
        return True
    if columns.tabs:
        return line.startswith(f"{_COMMENT} ") or columns.split(line) is None
    return columns.split(line) is None


@dataclass(frozen=True)
class _Columns:
    """How the lines of a file are split; ``first`` is the place of the first line of this form."""

    tabs: bool
    count: int
    first: str

    @classmethod
    def of(
        cls, sample: Sequence[str], rules: _Rules, word: int, tag: int | None, path: Path
    ) -> "_Columns | None":
        """Return the commonest form of some lines, so that a damaged first one has no say.

        None where they hold no unit. Raises TaskError if that form lacks a column.
        """
        lines = [(number, line.rstrip("\r\n")) for number, line in enumerate(sample, 1)]
        lines = [(number, line) for number, line in lines
                 if line.strip() and not rules.begins_document(line)
                 and not rules.is_comment(line)]  # fmt: skip
        if not lines:
            return None
        tabs = 2 * sum("\t" in line for _, line in lines) > len(lines)
        counts = [len(split_columns(line, tabs=tabs)) for _, line in lines]
        count = Counter(counts).most_common(1)[0][0]
        place = f"{path}, line {lines[counts.index(count)][0]:,}"
        form = cls(tabs, count, place)
        for column in (word, tag):
            if column is not None and not -count <= column < count:
                raise TaskError(
                    f"{place}: a line of {count} columns where column {column} is expected"
                )
        if tag is not None and word % count == tag % count:
            raise TaskError(
                f"{place}: words and tags would both be column {word % count} of "
                f"{count}; expected a word and its tag, parted by blanks or tabs (other "
                "columns: task.text and task.label)"
            )
        return form

    def split(self, line: str) -> list[str] | None:
        """Return the columns of a line; None where there are more or fewer of them."""
        cells = split_columns(line, tabs=self.tabs)
        return cells if len(cells) == self.count else None

    def fault(self, line: str, place: str) -> BadExampleError:
        """Return what is wrong with a line of other columns."""
        count, between = len(split_columns(line, tabs=self.tabs)), "tabs" if self.tabs else "blanks"
        detail = f": {count} parted by {between} where {self.first} has {self.count}"
        return BadExampleError("a line of other columns", detail, place)


def split_columns(line: str, *, tabs: bool) -> list[str]:
    """Return the columns of a line, which tabs or blanks separate."""
    if tabs:
        return line.split("\t")
    # A word may hold a blank that does not break, at which ``split`` would part it.
    return line.split() if line.isascii() else _BLANKS.split(line.strip(" \t"))


def read_row_sentences(
    rows: Iterable[Row], task: TaskSettings, *, labeled: bool
) -> Iterator[RawSentence]:
    """Yield the sentences of JSON lines or Parquet: a list of words and a list of tags a row."""
    names = [key if is_column_number(name) else name
             for name, key in zip((task.text, task.label), _KEYS, strict=True)]  # fmt: skip
    number, last, seen = -1, None, set[str]()
    for row in rows:
        # Without a document each row is its own.
        here = row.cells.get(_DOCUMENT)
        number, last = number + (here is None or here != last), here
        raw = RawSentence([], [], number, row.location, cells=row.cells)
        try:
            read_unique_id(row, task.id, seen)
            units = _listed(row, names[0])
            # Hugging Face's data sets have numbers for tags.
            tags = _listed(row, names[1], numbers=True) if labeled else []
        except BadExampleError as error:
            yield replace(raw, error=error)
            continue
        fault = None
        if labeled and len(units) != len(tags):
            fault = BadExampleError(f"{len(units)} words but {len(tags)} tags")
        elif not units:
            fault = BadExampleError("a sentence without words")
        elif task.context == "document" and here is None:
            fault = BadExampleError(
                f"no column {_DOCUMENT!r} to tell which rows task.context 'document' may put "
                "together"
            )
        yield replace(raw, units=units, tags=tags, error=fault)


def _listed(row: Row, name: str, *, numbers: bool = False) -> list[str]:
    value = get_cell(row, name)
    if not isinstance(value, list):
        raise BadExampleError("no list where words or tags are expected", f" in {name!r}")
    for one in value:
        if type(one) is not str and not (numbers and type(one) is int):
            raise BadExampleError("a word or tag that is no text", f" in {name!r}: {one!r}")
    found = [str(one) for one in value]
    reject_lone_surrogates("".join(found), name)
    return found


def _number(name: str, field: str, path: Path) -> int:
    """Return the number of a column; SettingsError for a name, which only tables have."""
    if not is_column_number(name):
        raise SettingsError(
            f"{path}: the {field} is said to be in the column {name!r}, but columns of CoNLL's "
            f"form have no names; give task.{field} a number, from 0, or from the end -1"
        )
    return int(name)
