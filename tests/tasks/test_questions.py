"""Reading questions from SQuAD's JSON and from files with one question per row."""

import json
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import TaskError
from bertsmith.tasks.questions import read_examples
from bertsmith.tasks.settings import SQUAD_FIELDS, TaskSettings

CONTEXT = "Red greens and BLUE, red again"


def make_task(**changes: Any) -> TaskSettings:
    """Return settings for span prediction."""
    values = {"kind": "span", **SQUAD_FIELDS, "max_seqlen": 64, **changes}
    return TaskSettings.parse(values, "the test")


def write_squad_file(path: Path, *questions: Any, context: Any = CONTEXT) -> Path:
    """Write SQuAD's JSON with a single paragraph and return its path."""
    paragraph = {"context": context, "qas": list(questions)}
    path.write_text(json.dumps({"data": [{"title": "T", "paragraphs": [paragraph]}]}))
    return path


def make_question(**changes: Any) -> dict[str, Any]:
    """Return a valid question in SQuAD's format with changed fields; None removes a field."""
    question = {"id": "q1", "question": "who?", "answers": [{"text": "BLUE", "answer_start": 15}]}
    return {key: value for key, value in (question | changes).items() if value is not None}


def test_squad_files_and_rows_give_equal_examples(tmp_path: Path) -> None:
    """SQuAD's JSON and rows of the Hugging Face dataset give the same examples."""
    unanswerable_fields = {
        "is_impossible": True,
        "plausible_answers": [{"text": "Red", "answer_start": 0}],
    }
    squad_file = write_squad_file(
        tmp_path / "a.json",
        make_question(is_impossible=False),
        make_question(id="q2", answers=[], **unanswerable_fields),
    )
    squad_examples, counts = read_examples(squad_file, make_task())
    rows = [
        {
            "id": "q1",
            "question": "who?",
            "context": CONTEXT,
            "title": "T",
            "answers": {"text": ["BLUE"], "answer_start": [15]},
        },
        {
            "id": "q2",
            "question": "who?",
            "context": CONTEXT,
            "answers": {"text": [], "answer_start": []},
        },
    ]
    row_file = tmp_path / "a.jsonl"
    row_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    row_examples, _ = read_examples(row_file, make_task())
    assert [
        (example.id, example.question, example.context, example.answers)
        for example in squad_examples
    ] == [("q1", "who?", CONTEXT, (("BLUE", 15),)), ("q2", "who?", CONTEXT, ())]
    assert [example.answers for example in row_examples] == [
        example.answers for example in squad_examples
    ]
    assert squad_examples[1].location == f"{squad_file}, article 1 (T), paragraph 1, question q2"
    assert row_examples[1].location == f"{row_file}, line 2"
    assert (counts.num_read, counts.num_used) == (2, 2)
    unlabeled, _ = read_examples(row_file, make_task(), labeled=False)
    assert [example.answers for example in unlabeled] == [None, None]


def test_rows_without_ids_are_numbered(tmp_path: Path) -> None:
    """Ids are required in SQuAD's format, but not in files with one question per row."""
    row = {"question": "who?", "context": CONTEXT, "answers": make_question()["answers"]}
    (tmp_path / "a.jsonl").write_text((json.dumps(row) + "\n") * 2)
    examples, _ = read_examples(tmp_path / "a.jsonl", make_task())
    assert [example.id for example in examples] == ["1", "2"]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
def test_array_of_questions_may_have_any_encoding(tmp_path: Path, encoding: str) -> None:
    """An array is not mistaken for SQuAD's format, with or without a byte order mark."""
    row = {"question": "who?", "context": CONTEXT, "answers": make_question()["answers"]}
    (tmp_path / "a.json").write_text(json.dumps([row]), encoding=encoding)
    [example], _ = read_examples(tmp_path / "a.json", make_task(encoding=encoding))
    assert example.answers == (("BLUE", 15),)


def test_columns_of_question_rows_can_be_set(tmp_path: Path) -> None:
    """Question, context and answers are read from the columns in the settings."""
    row = {"id": 1, "q": "who?", "passage": CONTEXT, "gold": make_question()["answers"]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    task = make_task(text_column="q", pair_column="passage", label_column="gold")
    [example], _ = read_examples(tmp_path / "a.jsonl", task)
    assert (example.question, example.context) == ("who?", CONTEXT)
    assert example.answers == (("BLUE", 15),)
    with pytest.raises(TaskError, match="there is no field 'nope'; the fields are 'id', 'q'"):
        read_examples(
            tmp_path / "a.jsonl",
            make_task(text_column="q", pair_column="nope", label_column="gold"),
        )


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (make_question(id="q1"), "a duplicate id: 'q1'"),
        (make_question(id=""), "an empty id"),
        (make_question(id="q2", question=" \t"), "an empty question"),
        (make_question(id="q2", question=7), "a question that is not text: 7"),
        (make_question(id="q2", question="who \ud83d?"), "a lone surrogate"),
        (make_question(id="q2", question=None), "there is no field 'question'"),
        (make_question(id="q2", answers=None), "there is no field 'answers'"),
        (make_question(id=None), "there is no field 'id'"),
        (make_question(id="q2", answers="BLUE"), "answers in an unknown format"),
        (make_question(id="q2", answers={"text": ["BLUE"], "answer_start": []}),
         "answers in an unknown format"),
        (make_question(id="q2", answers=[{"text": "BLUE"}]), "an answer without text and start"),
        (make_question(id="q2", answers=[{"text": "BLUE", "answer_start": "15"}]),
         "an answer without text and start"),
        (make_question(id="q2", answers=[{"text": "BLUE", "answer_start": 14}]),
         "an answer that is not in its context: 'BLUE' at 14, where the context has ' BLUE, red"),
        (make_question(id="q2", answers=[{"text": "again", "answer_start": -5}]),
         "an answer that is not in its context"),
        (make_question(id="q2", answers=[{"text": " ", "answer_start": 3}]), "an empty answer"),
        (make_question(id="q2", answers=[{"text": "Red", "answer_start": 0},
                                         {"text": "red", "answer_start": 0}]),
         "'red' at 0, where the context has 'Red"),
        (make_question(id="q2", is_impossible=True),
         "answers that contradict is_impossible: it is True"),
        (make_question(id="q2", answers=[], is_impossible=False),
         "answers that contradict is_impossible"),
        (["who?"], "not a JSON object"),
    ],
)  # fmt: skip
def test_invalid_question_is_an_error_or_skipped(
    tmp_path: Path, question: Any, message: str
) -> None:
    """The error names article, paragraph and question; with skip_invalid a question is skipped."""
    file = write_squad_file(tmp_path / "a.json", make_question(), question, make_question(id="q3"))
    with pytest.raises(TaskError) as error:
        read_examples(file, make_task())
    assert message in str(error.value)
    assert f"{file}, article 1 (T), paragraph 1, question" in str(error.value)
    assert "--skip-invalid" in str(error.value)
    examples, counts = read_examples(file, make_task(skip_invalid=True))
    assert [example.id for example in examples] == ["q1", "q3"]
    assert (counts.num_read, counts.num_used, sum(counts.skipped.values())) == (3, 2, 1)


def test_empty_context_invalidates_its_questions(tmp_path: Path) -> None:
    """Each question of the context is skipped; a file without valid questions is an error."""
    questions = make_question(), make_question(id="q2")
    file = write_squad_file(tmp_path / "a.json", *questions, context="\n")
    with pytest.raises(TaskError, match=r"question q1: an empty context"):
        read_examples(file, make_task())
    with pytest.raises(TaskError, match=r"all examples were skipped \(2\)"):
        read_examples(file, make_task(skip_invalid=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("7", "a.json: there is no list 'data'"),
        ('{"data": [{"title": "T"}]}', r"article 1 \(T\): there is no list 'paragraphs'"),
        ('{"data": [{"paragraphs": [3]}]}', "article 1, paragraph 1: there is no list 'qas'"),
        ('{"id": 1}\n{"id": 2}\n', r"not JSON: .*whose name ends in \.jsonl or \.parquet"),
        ("[" * 10**5, r"a\.json, line 1: not JSON: nested too deeply"),
        ("[{}, ]", r"a\.json, line 1: not JSON: Expecting value; repair the array"),
    ],
)
def test_wrong_file_format_is_an_error_even_with_skip_invalid(
    tmp_path: Path, content: str, message: str
) -> None:
    """The message names the location and the expected format."""
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(TaskError, match=message):
        read_examples(tmp_path / "a.json", make_task(skip_invalid=True))
    with pytest.raises(TaskError, match="no such file"):
        read_examples(tmp_path / "b.json", make_task())
    (tmp_path / "b.json").write_bytes(b'{"data":\n"caf\xe9"}')
    with pytest.raises(TaskError, match=r"b\.json, line 2: not UTF-8: byte 0xe9"):
        read_examples(tmp_path / "b.json", make_task())
