"""Questions about a context: SQuAD's files, and flat ones with a question a line.

It never knows tokens.

SQuAD: Rajpurkar et al. 2016 (arXiv:1606.05250), 2018 (arXiv:1806.03822). The flat form is that of
Hugging Face's data sets: id, question, context, answers {text: [...], answer_start: [...]}; without
ids, questions are numbered from 1.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from bertsmith.errors import TaskError
from bertsmith.tasks.inputs import BadExampleError, ExampleCounts
from bertsmith.tasks.settings import SQUAD_FIELDS, TaskSettings
from bertsmith.tasks.tables import Row, read_task_rows
from bertsmith.tasks.text_files import UTF8, detect_table_format, open_text
from bertsmith.text.alphabet import has_surrogates

#: Formats of files that hold a question a row; JSON does so, too, if it is an array.
FLAT_FORMATS = ("csv", "tsv", "jsonl", "parquet")
#: Characters in which the first one that is no blank stands.
_HEAD = 4096
#: Blanks, and the bytes of UTF-8's mark, each as a character.
_BEFORE = " \t\r\n\u00ef\u00bb\u00bf"
#: Characters of a context that a message shows.
_SHOWN = 40


@dataclass(frozen=True)
class QuestionExample:
    """A question and the context that its answers are spans of.

    answers: text and first character of each. There are none where the context does not answer
    the question, and they are None where they are not known. ``where``: the place in the file.
    """

    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None
    id: str
    location: str


def read_examples(
    path: Path,
    task: TaskSettings,
    *,
    labels: Sequence[str] | None = None,  # noqa: ARG001 - spans have none
    labeled: bool = True,
) -> tuple[list[QuestionExample], ExampleCounts]:
    """Read questions from SQuAD's JSON (v1.1 or v2.0) or from a flat file; see ``Family``."""
    examples: list[QuestionExample] = []
    counts, seen = ExampleCounts(), set[str]()
    flat = is_flat_file(path)
    named = {name: getattr(task, name) or usual for name, usual in SQUAD_FIELDS.items()}
    fields = named if flat else SQUAD_FIELDS
    for number, row in enumerate(
        read_task_rows(path, task, counts) if flat else read_squad_rows(path, task.encoding), 1
    ):
        if flat and not row.error and "id" not in row.cells:
            row = replace(row, cells={**row.cells, "id": number})  # noqa: PLW2901 - SQuAD's has one
        with counts.count_example(row.location, task, labeled=labeled):
            example = _example(row, fields, labelled=labeled)
            if example.id in seen:
                raise BadExampleError("an id that stood there before", f": {example.id!r}")
            seen.add(example.id)
            examples.append(example)
    return counts.require_examples(examples, path), counts


def is_flat_file(path: Path) -> bool:
    """Tell whether a file holds a question a row; any other is read as SQuAD's JSON."""
    form = detect_table_format(path)
    if form != "json":
        return form in FLAT_FORMATS
    if not path.is_file():
        return False
    # Any byte is a character of Latin-1, and a bracket is one byte in every usual encoding.
    with open_text(path, encoding="latin-1") as pieces:
        return next(pieces, "")[:_HEAD].lstrip(_BEFORE).startswith("[")


def read_squad_rows(
    path: Path, encoding: str = UTF8, stream: IO[bytes] | None = None
) -> Iterator[Row]:
    """Yield each question of a file of SQuAD's, its context with it, as a row."""
    for number, article in enumerate(_list(_json(path, encoding, stream), "data", str(path)), 1):
        title = article.get("title") if isinstance(article, dict) else None
        where = f"{path}, article {number:,}" + (f" ({title})" if title else "")
        for count, paragraph in enumerate(_list(article, "paragraphs", where), 1):
            place = f"{where}, paragraph {count:,}"
            for index, asked in enumerate(_list(paragraph, "qas", place), 1):
                if isinstance(asked, dict):
                    shared = {key: paragraph[key] for key in ("context",) if key in paragraph}
                    name = asked.get("id", f"number {index:,}")
                    yield Row(f"{place}, question {name}", asked | shared)
                else:
                    yield Row(f"{place}, question number {index:,}", {}, "no JSON object")


def _json(path: Path, encoding: str, stream: IO[bytes] | None) -> Any:
    try:
        with open_text(path, encoding=encoding, stream=stream) as pieces:
            return json.loads("".join(pieces))
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{path}: not JSON: {error}; expected a file of SQuAD's, an array of questions, or a "
            "question a row in a file whose name ends in .jsonl or .parquet"
        ) from None


def _list(value: Any, key: str, where: str) -> list[Any]:
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, list):
        raise TaskError(
            f"{where}: there is no list {key!r}; expected SQuAD's form: data, paragraphs, qas"
        )
    return found


def _example(row: Row, fields: Mapping[str, str], *, labelled: bool) -> QuestionExample:
    question, context = (_text(row, fields[key], SQUAD_FIELDS[key]) for key in ("text", "pair"))
    key = _field(row, "id")
    if not isinstance(key, str | int) or isinstance(key, bool) or key == "":
        raise BadExampleError("an id that is no name", f": {key!r}")
    answers = _answers(row, fields["label"], context) if labelled else None
    return QuestionExample(question, context, answers, str(key), row.location)


def _field(row: Row, name: str) -> Any:
    if row.error:
        raise BadExampleError(row.error)
    if name not in row.cells:
        known = ", ".join(map(repr, row.cells))
        raise BadExampleError(f"there is no field {name!r}", f"; the fields are {known}")
    return row.cells[name]


def _text(row: Row, name: str, what: str) -> str:
    value = _field(row, name)
    if not isinstance(value, str):
        raise BadExampleError(f"a {what} that is no text", f": {value!r}")
    if not value.strip():
        raise BadExampleError(f"an empty {what}")
    if has_surrogates(value):
        raise BadExampleError(f"a {what} with half a character (a lone surrogate)")
    return value


def _answers(row: Row, name: str, context: str) -> tuple[tuple[str, int], ...]:
    pairs = _pairs(_field(row, name))
    for text, start in pairs:
        if not isinstance(text, str) or type(start) is not int:
            raise BadExampleError("an answer without text and start", f": {text!r} at {start!r}")
        if not text.strip():
            raise BadExampleError("an empty answer")
        if start < 0 or not context.startswith(text, start):
            there = context[max(start, 0) : max(start, 0) + _SHOWN]
            raise BadExampleError(
                "a span that is not in its context", f": {text!r} at {start}, where {there!r} is"
            )
    if row.cells.get("is_impossible") not in (None, not pairs):
        raise BadExampleError(
            "answers that is_impossible denies", f": it is {row.cells['is_impossible']!r}"
        )
    return tuple(pairs)


def _pairs(answers: Any) -> list[tuple[Any, Any]]:
    """Return text and start of each answer, from SQuAD's list or from Hugging Face's two."""
    if isinstance(answers, Mapping):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return list(zip(texts, starts, strict=True))
    elif isinstance(answers, list) and all(isinstance(one, Mapping) for one in answers):
        return [(one.get("text"), one.get("answer_start")) for one in answers]
    raise BadExampleError(
        "answers of another form", "; expected a list of {text, answer_start}, or one of two lists"
    )
