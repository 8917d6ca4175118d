"""Tagged sentences from files in CoNLL's form, CoNLL-U, or JSON lines.

It never knows how a sentence becomes an input.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks import conllu
from bertsmith.tasks.entities import bio2
from bertsmith.tasks.inputs import BadExampleError, Counts
from bertsmith.tasks.settings import TaskSettings, is_number
from bertsmith.tasks.tables import Row, cell, opened, refuse_half, rows, unique_id

#: What parts documents in CoNLL's files.
DOCUMENT = "-DOCSTART-"
#: JSON lines: the keys where the columns of CoNLL's form are meant, and that of the document.
_KEYS, _DOCUMENT = ("tokens", "tags"), "document"
_BLANKS = re.compile("[ \\t]+")


@dataclass(frozen=True)
class Sentence:
    """A text and the tag of each of its units, words or characters.

    units: the characters [start, end) of each. tags: None where they are not known. document: equal
    for the sentences of one document, which follow each other.
    """

    text: str
    units: tuple[tuple[int, int], ...]
    tags: tuple[str, ...] | None
    document: int
    where: str


@dataclass(frozen=True)
class _Raw:
    """A sentence as it stands in the file; ``fault``: why it cannot be used, if so.

    lines: the number of each unit's, where units have lines of their own.
    """

    units: list[str]
    tags: list[str]
    document: int
    where: str
    fault: BadExampleError | None = None
    lines: list[int] = field(default_factory=list)


def sentences(
    path: Path, task: TaskSettings, labels: Sequence[str] | None, *, labelled: bool
) -> tuple[list[Sentence], Counts]:
    """Read the sentences of a file; a bad one is an error or a counted skip. Raises TaskError."""
    found, counts = [], Counts()
    lines = path.suffix.lower() in (".jsonl", ".parquet")
    for raw in _rows(path, task, labelled) if lines else _blocks(path, task, labelled):
        with counts.one(raw.where, task, labelled=labelled):
            found.append(_sentence(raw, path, task, labels, labelled=labelled))
    return counts.checked(found, path), counts


def _sentence(
    raw: _Raw, path: Path, task: TaskSettings, labels: Sequence[str] | None, *, labelled: bool
) -> Sentence:
    if raw.fault:
        raise raw.fault
    if task.unit == "word" and not all(unit.strip() for unit in raw.units):
        raise BadExampleError("an empty word")
    between = "" if task.unit == "character" else " "
    units, start = [], 0
    for unit in raw.units:
        units.append((start, start + len(unit)))
        start += len(unit) + len(between)
    tags = None
    if labelled:
        tags = tuple(bio2(raw.tags) if task.kind == "entities" else raw.tags)
        known = set(tags if labels is None else labels)
        strange = next((place for place, tag in enumerate(tags) if tag not in known), None)
        if strange is not None:
            told = ", ".join(map(repr, list(labels or ())[:20]))
            raise BadExampleError(
                "an unknown label", f": {tags[strange]!r}; known are {told}",
                f"{path}, line {raw.lines[strange]:,}" if raw.lines else None,
            )  # fmt: skip
    return Sentence(between.join(raw.units), tuple(units), tags, raw.document, raw.where)


def _blocks(path: Path, task: TaskSettings, labelled: bool) -> Iterator[_Raw]:
    """Yield the sentences of CoNLL's form: a unit a line; a blank line or a document ends one."""
    column, begins_document = _number, _begins_document
    is_aside: Callable[[str], bool] = partial(_is_aside, task.unit)
    if conllu.is_conllu(path):
        column, begins_document = conllu.column, conllu.begins_document
        is_aside = conllu.is_aside
    word = column(task.text, "text", path)
    tag = column(task.label, "label", path) if labelled else None
    form: _Form | None = None
    own, document = _Raw([], [], 0, ""), 0
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            bare = line.rstrip("\r\n")
            begins = begins_document(bare)
            if not begins and is_aside(bare):
                continue
            if begins or not bare.strip():
                if own.units:
                    yield own
                document += begins
                own = _Raw([], [], document, "")
                continue
            form = form or _Form.of(bare, word, tag, f"{path}, line {number:,}")
            if not own.units:
                own = replace(own, where=f"{path}, line {number:,}")
            columns = form.columns(bare)
            if columns is None:
                columns = [""] * form.count
                if own.fault is None:
                    own = replace(own, fault=form.fault(bare, f"{path}, line {number:,}"))
            own.units.append(columns[word])
            own.lines.append(number)
            if tag is not None:
                own.tags.append(columns[tag])
    if own.units:
        yield own


def _begins_document(line: str) -> bool:
    return line.split(maxsplit=1)[:1] == [DOCUMENT]


def _is_aside(unit: str, line: str) -> bool:
    """Tell whether a line is a comment of KLUE's files."""
    return unit == "character" and line.startswith("##")


@dataclass(frozen=True)
class _Form:
    """How the lines of a file are parted, by its first one."""

    tabs: bool
    count: int
    first: str

    @classmethod
    def of(cls, line: str, word: int, tag: int | None, place: str) -> "_Form":
        """Return the form of a file that begins so; TaskError if it lacks a column."""
        tabs = "\t" in line
        form = cls(tabs, len(_parted(line, tabs=tabs)), place)
        for asked in (word, tag):
            if asked is not None and not -form.count <= asked < form.count:
                raise TaskError(
                    f"{place}: a line of {form.count} columns where column {asked} is expected"
                )
        if tag is not None and word % form.count == tag % form.count:
            raise TaskError(
                f"{place}: words and tags would both be column {word % form.count} of "
                f"{form.count}; expected a word and its tag, parted by blanks or tabs (other "
                "columns: task.text and task.label)"
            )
        return form

    def columns(self, line: str) -> list[str] | None:
        """Return the columns of a line; None where they are not as many as the first one's."""
        found = _parted(line, tabs=self.tabs)
        return found if len(found) == self.count else None

    def fault(self, line: str, place: str) -> BadExampleError:
        """Return what is wrong with a line of other columns."""
        count, between = len(_parted(line, tabs=self.tabs)), "tabs" if self.tabs else "blanks"
        detail = f": {count} parted by {between} where {self.first} has {self.count}"
        return BadExampleError("a line of other columns", detail, place)


def _parted(line: str, *, tabs: bool) -> list[str]:
    if tabs:
        return line.split("\t")
    # A word may hold a blank that does not break, at which ``split`` would part it.
    return line.split() if line.isascii() else _BLANKS.split(line.strip(" \t"))


def _rows(path: Path, task: TaskSettings, labelled: bool) -> Iterator[_Raw]:
    """Yield the sentences of JSON lines or Parquet: a list of words and a list of tags a row."""
    names = [key if is_number(name) else name
             for name, key in zip((task.text, task.label), _KEYS, strict=True)]  # fmt: skip
    number, last, seen = -1, None, set[str]()
    for row in rows(path):
        # Without a document each row is its own.
        here = row.cells.get(_DOCUMENT)
        number, last = number + (here is None or here != last), here
        try:
            unique_id(row, task.id, seen)
            units = _listed(row, names[0])
            # Hugging Face's data sets have numbers for tags.
            tags = _listed(row, names[1], numbers=True) if labelled else []
        except BadExampleError as error:
            yield _Raw([], [], number, row.where, error)
            continue
        fault = None
        if labelled and len(units) != len(tags):
            fault = BadExampleError(f"{len(units)} words but {len(tags)} tags")
        elif not units:
            fault = BadExampleError("a sentence without words")
        elif task.context == "document" and here is None:
            fault = BadExampleError(
                f"no column {_DOCUMENT!r} to tell which rows task.context 'document' may put "
                "together"
            )
        yield _Raw(units, tags, number, row.where, fault)


def _listed(row: Row, name: str, *, numbers: bool = False) -> list[str]:
    value = cell(row, name)
    if not isinstance(value, list):
        raise BadExampleError("no list where words or tags are expected", f" in {name!r}")
    for one in value:
        if type(one) is not str and not (numbers and type(one) is int):
            raise BadExampleError("a word or tag that is no text", f" in {name!r}: {one!r}")
    found = [str(one) for one in value]
    refuse_half("".join(found), name)
    return found


def _number(name: str, field: str, path: Path) -> int:
    """Return the number of a column; SettingsError for a name, which only tables have."""
    if not is_number(name):
        raise SettingsError(
            f"{path}: the {field} is said to be in the column {name!r}, but columns of CoNLL's "
            f"form have no names; give task.{field} a number, from 0, or from the end -1"
        )
    return int(name)
