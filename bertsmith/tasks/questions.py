"""Reading questions about contexts, from SQuAD's JSON or from files with one question per row.

SQuAD: Rajpurkar et al. 2016 (arXiv:1606.05250) and 2018 (arXiv:1806.03822). Rows have the columns
of the Hugging Face dataset: id, question, context, answers {text: [...], answer_start: [...]}.
Rows without ids are numbered from 1.
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
from bertsmith.text.archives import decompress

#: Formats with one question per row. A JSON file also has one question per row if it is an array.
QUESTION_ROW_FORMATS = ("csv", "tsv", "jsonl", "parquet")
#: The first character that is not blank is searched for among this many characters.
_SAMPLE_CHARACTERS = 4096
#: Whitespace, and the bytes of byte order marks (UTF-8, UTF-16, UTF-32) and the zero bytes of
#: UTF-16 and UTF-32, all decoded as Latin-1.
_BLANKS = " \t\r\n\u00ef\u00bb\u00bf\u00ff\u00fe\0"
#: Maximum number of context characters in a message.
_EXCERPT_LENGTH = 40


@dataclass(frozen=True)
class QuestionExample:
    """A question about a context.

    Attributes:
        question: The question.
        context: The text that contains the answers.
        answers: Text and start offset of each answer. Empty for unanswerable questions, None for
            unlabeled data.
        id: The id of the question.
        location: File, and line or number of the question, for messages.
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
    labels: Sequence[str] | None = None,  # noqa: ARG001 - spans have no labels
    labeled: bool = True,
) -> tuple[list[QuestionExample], ExampleCounts]:
    """Read questions from SQuAD's JSON (v1.1 or v2.0) or from rows; see ``TaskFamily``."""
    examples: list[QuestionExample] = []
    counts, seen_ids = ExampleCounts(), set[str]()
    if has_question_rows(path):
        rows = _add_missing_ids(read_task_rows(path, task, counts))
        fields = {name: getattr(task, name) or default for name, default in SQUAD_FIELDS.items()}
    else:
        rows = read_squad_rows(path, task.encoding)
        fields = SQUAD_FIELDS
    for row in rows:
        with counts.count_example(row.location, task, labeled=labeled):
            example = _parse_example(row, fields, labeled=labeled)
            if example.id in seen_ids:
                raise BadExampleError("a duplicate id", f": {example.id!r}")
            seen_ids.add(example.id)
            examples.append(example)
    return counts.require_examples(examples, path), counts


def _add_missing_ids(rows: Iterator[Row]) -> Iterator[Row]:
    """Yield the rows; a row without an id gets its number, from 1, as its id."""
    for number, row in enumerate(rows, 1):
        needs_id = not row.error and row.cells.get("id") is None
        yield replace(row, cells={**row.cells, "id": number}) if needs_id else row


def has_question_rows(path: Path) -> bool:
    """Return whether a file has one question per row; other files are read as SQuAD's JSON."""
    file_format = detect_table_format(path)
    if file_format != "json":
        return file_format in QUESTION_ROW_FORMATS
    return path.is_file() and open_question_json(path)[0]


def open_question_json(
    path: Path, stream: IO[bytes] | None = None
) -> tuple[bool, IO[bytes] | None]:
    """Return whether JSON is an array with one question per row, and the stream from its start.

    Args:
        path: The file. If there is a stream, ``path`` is only its name in messages.
        stream: The stream, whose first characters are read; None to read the file.
    """
    if stream is not None:
        head, stream = decompress(stream)
        return _is_array(head.decode("latin-1")), stream
    # Latin-1 decodes any bytes, and a bracket has the same byte in all common encodings.
    with open_text(path, encoding="latin-1") as chunks:
        return _is_array(next(chunks, "")), None


def _is_array(text: str) -> bool:
    return text[:_SAMPLE_CHARACTERS].lstrip(_BLANKS).startswith("[")


def read_squad_rows(
    path: Path,
    encoding: str = UTF8,
    stream: IO[bytes] | None = None,
) -> Iterator[Row]:
    """Yield the questions of a file in SQuAD's format as rows with the question and its context.

    Args:
        path: The file. If there is a stream, ``path`` is only its name in messages.
        encoding: The text encoding.
        stream: The stream to read, None to read the file.
    """
    articles = _get_list(_read_json(path, encoding, stream), "data", str(path))
    for article_number, article in enumerate(articles, 1):
        article_location = f"{path}, article {article_number:,}"
        title = article.get("title") if isinstance(article, dict) else None
        if title:
            article_location += f" ({title})"
        paragraphs = _get_list(article, "paragraphs", article_location)
        for paragraph_number, paragraph in enumerate(paragraphs, 1):
            location = f"{article_location}, paragraph {paragraph_number:,}"
            for number, question in enumerate(_get_list(paragraph, "qas", location), 1):
                if isinstance(question, dict):
                    cells = dict(question)
                    if "context" in paragraph:
                        cells["context"] = paragraph["context"]
                    question_id = question.get("id", f"number {number:,}")
                    yield Row(f"{location}, question {question_id}", cells)
                else:
                    question_location = f"{location}, question number {number:,}"
                    yield Row(question_location, {}, "not a JSON object")


def _read_json(path: Path, encoding: str, stream: IO[bytes] | None) -> Any:
    """Return the content of a JSON file or stream; raise TaskError if it is not JSON."""
    try:
        with open_text(path, encoding=encoding, stream=stream) as chunks:
            return json.loads("".join(chunks))
    except (ValueError, RecursionError) as error:
        raise TaskError(
            f"{path}: not JSON: {error}; expected SQuAD's format, an array of questions, or one "
            "question per row in a file whose name ends in .jsonl or .parquet",
        ) from None


def _get_list(value: Any, key: str, location: str) -> list[Any]:
    """Return the list at ``key`` of an object; raise TaskError if there is none."""
    items = value.get(key) if isinstance(value, dict) else None
    if not isinstance(items, list):
        raise TaskError(
            f"{location}: there is no list {key!r}; expected SQuAD's format: data, paragraphs, qas",
        )
    return items


def _parse_example(row: Row, fields: Mapping[str, str], *, labeled: bool) -> QuestionExample:
    """Parse the question of a row.

    Args:
        row: The row.
        fields: ``TaskSettings`` field -> name of the row's field.
        labeled: Whether to read the answers.
    """
    question = _get_text(row, fields["text_column"], "question")
    context = _get_text(row, fields["pair_column"], "context")
    question_id = _get_field(row, "id")
    is_valid_id = isinstance(question_id, str | int) and not isinstance(question_id, bool)
    if question_id == "":
        raise BadExampleError("an empty id")
    if not is_valid_id:
        raise BadExampleError("an id that is neither text nor an integer", f": {question_id!r}")
    answers = _parse_answers(row, fields["label_column"], context) if labeled else None
    return QuestionExample(question, context, answers, str(question_id), row.location)


def _get_field(row: Row, name: str) -> Any:
    """Return the value of a field; raise BadExampleError if it is missing or the row is invalid."""
    if row.error:
        raise BadExampleError(row.error)
    if name not in row.cells:
        names = ", ".join(map(repr, row.cells))
        raise BadExampleError(f"there is no field {name!r}", f"; the fields are {names}")
    return row.cells[name]


def _get_text(row: Row, name: str, noun: str) -> str:
    """Return the text of the field ``name``, which error messages call ``noun``."""
    value = _get_field(row, name)
    if not isinstance(value, str):
        raise BadExampleError(f"a {noun} that is not text", f": {value!r}")
    if not value.strip():
        raise BadExampleError(f"an empty {noun}")
    if has_surrogates(value):
        raise BadExampleError(f"a {noun} with a lone surrogate (half of a character)")
    return value


def _parse_answers(row: Row, name: str, context: str) -> tuple[tuple[str, int], ...]:
    """Return the text and start offset of each answer, which must match the context."""
    answers = _list_answers(_get_field(row, name))
    for text, start in answers:
        if not isinstance(text, str) or type(start) is not int:
            raise BadExampleError("an answer without text and start", f": {text!r} at {start!r}")
        if not text.strip():
            raise BadExampleError("an empty answer")
        if start < 0 or not context.startswith(text, start):
            excerpt = context[max(start, 0) : max(start, 0) + _EXCERPT_LENGTH]
            raise BadExampleError(
                "an answer that is not in its context",
                f": {text!r} at {start}, where the context has {excerpt!r}",
            )
    is_impossible = row.cells.get("is_impossible")
    if is_impossible is not None and is_impossible != (not answers):
        raise BadExampleError("answers that contradict is_impossible", f": it is {is_impossible!r}")
    return tuple(answers)


def _list_answers(answers: Any) -> list[tuple[Any, Any]]:
    """Return the text and start of each answer.

    SQuAD has a list of answers; the Hugging Face dataset has a list of texts and a list of starts.
    """
    if isinstance(answers, Mapping):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return list(zip(texts, starts, strict=True))
    elif isinstance(answers, list) and all(isinstance(answer, Mapping) for answer in answers):
        return [(answer.get("text"), answer.get("answer_start")) for answer in answers]
    raise BadExampleError(
        "answers in an unknown format",
        "; expected a list of {text, answer_start}, or {text: [...], answer_start: [...]}",
    )
