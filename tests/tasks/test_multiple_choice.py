"""Reading, encoding and scoring prompts with endings."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertsmith.bundle import HeadConfig
from bertsmith.errors import SettingsError, TaskError
from bertsmith.model.packed import pack_sequences
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs, TaskMicroBatch
from bertsmith.tasks.multiple_choice import (
    compute_losses,
    compute_metrics,
    encode_examples,
    read_examples,
)
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import TaskSettings
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

ENDINGS = ["a", "b", "c"]
HEADER = "text,a,b,c,label"
HEAD = HeadConfig("choice")


def make_task(**changes: Any) -> TaskSettings:
    """Return the settings for a table with the columns of HEADER."""
    return TaskSettings.parse({"kind": "choice", "ending_columns": ENDINGS, **changes}, "the test")


def write_table(path: Path, *rows: str, header: str = HEADER) -> Path:
    """Write a table and return its path."""
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    ("label", "index"), [("0", 0), ("2", 2), (" 1 ", 1), ("A", 0), ("C", 2), ("b", 1)]
)
def test_label_is_index_letter_or_column(tmp_path: Path, label: str, index: int) -> None:
    """A label is an index from 0, a letter from A, or the name of the ending's column."""
    file = write_table(tmp_path / "t.csv", f"red,green,blue,white,{label}")
    ((example,), counts) = read_examples(file, make_task())
    assert (example.prompt, example.endings) == ("red", ("green", "blue", "white"))
    assert (example.correct_index, example.location) == (index, f"{file}, line 2")
    assert (counts.num_read, counts.num_used) == (1, 1)


def test_number_is_an_index_rather_than_a_column(tmp_path: Path) -> None:
    """CODAH has numbered columns, and its labels are indices of endings from 0."""
    (tmp_path / "t.tsv").write_text("o\tred\tgreen\tblue\t1\n")
    task = make_task(text_column="1", ending_columns=["2", "3"], label_column="4", header=False)
    ((example,), _) = read_examples(tmp_path / "t.tsv", task)
    assert (example.endings, example.correct_index) == (("green", "blue"), 1)


def test_letter_is_a_column_rather_than_an_index(tmp_path: Path) -> None:
    """With the columns C, B and A the label A is the third ending."""
    file = write_table(tmp_path / "t.csv", "red,green,blue,white,A", header="text,C,B,A,label")
    ((example,), _) = read_examples(file, make_task(ending_columns=["C", "B", "A"]))
    assert example.correct_index == 2


def test_pair_column_is_prepended_to_each_ending(tmp_path: Path) -> None:
    """In SWAG, the second text of a pair is "sent2" and the ending, separated by a space."""
    header = "video-id,sent1,sent2,ending0,ending1,ending2,ending3,label"
    row = "7,He waits.,She,runs.,sits.,eats.,sings.,2"
    file = write_table(tmp_path / "t.csv", row, header=header)
    values = {**PUBLIC_TASKS["swag"].fixed_settings, "name": "swag"}
    ((example,), _) = read_examples(file, TaskSettings.parse(values, "the test"))
    assert example.prompt == "He waits."
    assert example.endings == ("She runs.", "She sits.", "She eats.", "She sings.")
    assert example.correct_index == 2


def test_endings_may_be_lists_of_different_lengths(tmp_path: Path) -> None:
    """With a single column of lists, rows may have different numbers of endings."""
    rows = [
        {"text": "red", "ends": ["green", "blue"], "label": 1},
        {"text": "red", "ends": ["green", "blue", "white"], "label": "C"},
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples, _ = read_examples(tmp_path / "t.jsonl", make_task(ending_columns=["ends"]))
    assert [(len(example.endings), example.correct_index) for example in examples] == [
        (2, 1),
        (3, 2),
    ]


def test_label_may_be_an_integral_float(tmp_path: Path) -> None:
    """Integer columns with missing values are stored as floats in Parquet and CSV."""
    row = {"text": "red", "ends": ["green", "blue"], "label": 1.0}
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    [example], _ = read_examples(tmp_path / "t.jsonl", make_task(ending_columns=["ends"]))
    assert example.correct_index == 1
    file = write_table(tmp_path / "t.csv", "red,green,blue,white,2.0")
    [example], _ = read_examples(file, make_task())
    assert example.correct_index == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (" ,green,blue,white,1", "line 3: an empty text in column 'text'"),
        ("red,green,,white,1", "line 3: an empty text in column 'b'"),
        ("red,green,blue,white,", "line 3: an empty label"),
        ("red,green,blue,white,3", "line 3: an index out of range: 3; the endings are 0 to 2"),
        ("red,green,blue,white,3", "0 to 2; if labels count from 1, subtract 1"),
        ("red,green,blue,white,4", "0 to 2; correct it"),
        ("red,green,blue,white,-1", "line 3: an index out of range: -1"),
        ("red,green,blue,white,D", "line 3: an unknown label: 'D'; expected 0 to 2, A to C, or"),
        ("red,green,blue,white,d", "line 3: an unknown label: 'd'"),
        ("red,green,blue,1", "line 3: 4 columns where 5 are expected"),
    ],
)
def test_invalid_row_is_an_error_or_skipped(tmp_path: Path, row: str, message: str) -> None:
    """The error names file, line and reason; with skip_invalid the row is skipped and counted."""
    good = "red,green,blue,white,0"
    file = write_table(tmp_path / "t.csv", good, row, good)
    with pytest.raises(TaskError, match=message):
        read_examples(file, make_task())
    examples, counts = read_examples(file, make_task(skip_invalid=True))
    assert [example.correct_index for example in examples] == [0, 0]
    assert (counts.num_read, counts.num_used, sum(counts.skipped.values())) == (3, 2, 1)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "red", "ends": ["green"], "label": 0}, "fewer than two endings"),
        (
            {"text": "red", "ends": ["green", 5], "label": 0},
            "a value that is not text in column 'ends': found a number",
        ),
        (
            {"text": "red", "ends": ["green", None], "label": 0},
            "a value that is not text in column 'ends'",
        ),
        ({"text": "red", "ends": ["green", "blue"], "label": True}, "an unknown label: True"),
        ({"text": "red", "ends": ["green", "blue"], "label": 1.5}, r"an unknown label: 1\.5"),
        ({"text": "red", "ends": ["green", "blue"], "label": [1]}, r"an unknown label: \[1\]"),
        ({"text": "red", "ends": "green", "label": 0}, "the column 'ends' holds one ending"),
    ],
)
def test_wrong_json_type_is_rejected(tmp_path: Path, row: Any, message: str) -> None:
    """Too few endings, endings that are not text, and invalid labels are errors."""
    (tmp_path / "t.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskError, match=message):
        read_examples(tmp_path / "t.jsonl", make_task(ending_columns=["ends"]))


def test_wrong_columns_are_an_error_even_with_skip_invalid(tmp_path: Path) -> None:
    """Missing or unset columns are mistakes in the settings, so no row is skipped."""
    file = write_table(tmp_path / "t.csv", "red,green,blue,white,0")
    with pytest.raises(TaskError, match="no column 'd'; the columns are 'text', 'a'"):
        read_examples(file, make_task(ending_columns=["a", "d"], skip_invalid=True))
    with pytest.raises(TaskError, match="no column 'right'"):
        read_examples(file, make_task(label_column="right", skip_invalid=True))
    with pytest.raises(TaskError, match="the column 'a' holds one ending"):
        read_examples(file, make_task(ending_columns=["a"], skip_invalid=True))
    with pytest.raises(SettingsError, match=r"finetune.* or --set 'task.ending_columns="):
        read_examples(file, make_task(ending_columns=[], skip_invalid=True))


def test_ending_columns_must_differ() -> None:
    """A column cannot hold two endings."""
    with pytest.raises(SettingsError, match="the column 'a' is given for several endings"):
        TaskSettings.parse({"kind": "choice", "ending_columns": ["a", "b", "a"]}, "f")


def write_comve_files(directory: Path, answers: str, *ids: int) -> Path:
    """Write a table with ids and a separate file of answers, like ComVE; return the table."""
    rows = [f"{row_id},red,green,blue,white" for row_id in ids]
    (directory / "t-answers.csv").write_text(answers)
    return write_table(directory / "t.csv", *rows, header="id,text,a,b,c")


def test_answers_are_joined_by_id(tmp_path: Path) -> None:
    """The order of the answers does not matter; unlabeled reading does not need the file."""
    file = write_comve_files(tmp_path, "9,C\n7,A\n8,B\n", 7, 8, 9)
    examples, _ = read_examples(file, make_task(label_file_suffix="-answers"))
    assert [example.correct_index for example in examples] == [0, 1, 2]
    (tmp_path / "t-answers.csv").unlink()
    with pytest.raises(TaskError, match=r"t-answers\.csv: no such file"):
        read_examples(file, make_task(label_file_suffix="-answers"))
    examples, _ = read_examples(file, make_task(label_file_suffix="-answers"), labeled=False)
    assert [example.correct_index for example in examples] == [None] * 3


def test_answer_file_has_the_format_of_the_table(tmp_path: Path) -> None:
    """Encoding and delimiter apply to both files; suffixes of compressed files stay at the end."""
    row = "7~red~green~blue~white\n"
    for name, text in (("t.csv.gz", f"id~text~a~b~c\n{row}"), ("t-answers.csv.gz", "7~B\n")):
        with gzip.open(tmp_path / name, "wt", encoding="utf-16") as file:
            file.write(text)
    task = make_task(label_file_suffix="-answers", delimiter="~", encoding="utf-16")
    ((example,), _) = read_examples(tmp_path / "t.csv.gz", task)
    assert example.correct_index == 1
    assert task.get_label_file(Path("a.b/t.v1.tsv")) == Path("a.b/t.v1-answers.tsv")


@pytest.mark.parametrize(
    ("answers", "ids", "message"),
    [
        ("7,A\n", (7, 8), r"t\.csv, line 3: an id without an answer: '8'"),
        ("7,A\n8,B\n", (7, 7, 8), r"t\.csv, line 3: a duplicate id: '7'"),
        ("7,A\n8,Q\n", (7, 8), r"t\.csv, line 3: an unknown label: 'Q'"),
    ],
)
def test_row_without_valid_answer_is_an_error_or_skipped(
    tmp_path: Path, answers: str, ids: tuple[int, ...], message: str
) -> None:
    """A row with a duplicate id, a missing answer or an invalid answer is invalid."""
    file = write_comve_files(tmp_path, answers, *ids)
    with pytest.raises(TaskError, match=message):
        read_examples(file, make_task(label_file_suffix="-answers"))
    _, counts = read_examples(file, make_task(label_file_suffix="-answers", skip_invalid=True))
    assert (counts.num_used, sum(counts.skipped.values())) == (len(ids) - 1, 1)


def test_duplicate_id_is_rejected_in_a_labeled_table(tmp_path: Path) -> None:
    """The column "id" must be unique, even if labels are in the table; other columns need not."""
    rows = ("7,red,green,blue,white,0", "7,red,green,blue,white,0")
    file = write_table(tmp_path / "t.csv", *rows, header="id,text,a,b,c,label")
    with pytest.raises(TaskError, match=r"line 3: a duplicate id: '7'"):
        read_examples(file, make_task())
    file = write_table(tmp_path / "t.csv", *rows, header="number,text,a,b,c,label")
    assert read_examples(file, make_task())[1].num_used == 2


def test_answers_without_a_row_are_counted_as_skipped(tmp_path: Path) -> None:
    """Answers that no row needs do not affect the rows of the table."""
    file = write_comve_files(tmp_path, "7,A\n8,B\n9,C\n", 7)
    _, counts = read_examples(file, make_task(label_file_suffix="-answers"))
    assert (counts.num_read, counts.num_used) == (3, 1)
    assert counts.skipped == {"an answer without a row of that id": 2}
    file = write_comve_files(tmp_path, "7,A\n")
    with pytest.raises(
        TaskError, match=r"skipped \(1\), such as an answer without a row of that id"
    ):
        read_examples(file, make_task(label_file_suffix="-answers"))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("7,A\n8,B\n7,B\n", r"t-answers\.csv, line 3: duplicate id '7'"),
        ("7,A\n8\n", r"t-answers\.csv, line 2: 1 column where 2 are expected"),
        ("7\n8\n", r"t-answers\.csv, line 1: there is no column '1'"),
    ],
)
def test_damaged_label_file_is_an_error_even_with_skip_invalid(
    tmp_path: Path, answers: str, message: str
) -> None:
    """Rows of the label file are never skipped, because no row of the table is invalid."""
    file = write_comve_files(tmp_path, answers, 7, 8)
    with pytest.raises(TaskError, match=message):
        read_examples(file, make_task(label_file_suffix="-answers", skip_invalid=True))


def test_each_ending_forms_a_pair_with_the_prompt(tmp_path: Path) -> None:
    """Sequences are [CLS] prompt [SEP] ending [SEP]; the target is the index of an ending."""
    vocabulary = (*SPECIAL_TOKENS, "red", "green", "blue", "##s")
    tokenizer = Tokenizer(TokenizerSpec(vocab=vocabulary))
    file = write_table(
        tmp_path / "t.csv", "red greens,blue,red,green green green,1", "red,blue,red,green,2"
    )
    counts = ExampleCounts()
    examples, _ = read_examples(file, make_task())
    inputs = encode_examples(examples, tokenizer, HEAD, make_task(max_seqlen=8), counts)
    tokens = [tokenizer.ids_to_tokens(ids) for ids, _ in inputs.sequences[0]]
    prompt = ["[CLS]", "red", "green", "##s", "[SEP]"]
    assert tokens[0] == [*prompt, "blue", "[SEP]"]
    assert tokens[1] == [*prompt, "red", "[SEP]"]
    assert tokens[2] == ["[CLS]", "red", "green", "[SEP]", "green", "green", "green", "[SEP]"]
    assert inputs.sequences[0][0][1] == [0] * 5 + [1] * 2
    assert inputs.targets is not None
    assert np.concatenate(inputs.targets).tolist() == [1, 2]
    assert (inputs.is_truncated, counts.num_truncated) == ([True, False], 1)
    assert inputs.count_tokens(1) == 3 * 5  # 3 endings: [CLS], 1 word, [SEP], 1 word, [SEP]


def test_loss_is_cross_entropy_over_the_endings_of_a_prompt() -> None:
    """Prompts with 2, 3 and 2 endings have separate softmaxes and finite gradients."""
    torch.manual_seed(0)
    scores = torch.randn(7, 1, requires_grad=True)
    targets = torch.tensor([1, 2, 0])
    endings_per_prompt = [2, 3, 2]
    unused_sequences = pack_sequences([([1], [0])])
    batch = TaskMicroBatch(unused_sequences, None, targets, torch.ones(3), endings_per_prompt)
    losses = compute_losses(scores, batch, HEAD)
    scores_by_prompt = torch.split(scores[:, 0], endings_per_prompt)
    expected = torch.stack(
        [
            -prompt_scores.log_softmax(0)[target]
            for prompt_scores, target in zip(scores_by_prompt, targets.tolist(), strict=True)
        ]
    )
    torch.testing.assert_close(losses, expected)
    torch.autograd.backward(losses.sum())
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_accuracy_counts_prompts() -> None:
    """The ending with the highest score is the prediction, for any number of endings."""
    outputs = [
        np.array([[0.1], [0.9]], np.float32),
        np.array([[3.0], [1.0], [2.0]], np.float32),
        np.array([[-5.0], [-4.0]], np.float32),
    ]
    targets = [np.array([1]), np.array([2]), np.array([1])]
    inputs = ModelInputs([[]] * 3, [""] * 3, [False] * 3, targets)
    scores = compute_metrics(outputs, inputs, [], HEAD, make_task(metrics=["accuracy"]))
    assert scores == {"accuracy": pytest.approx(2 / 3)}


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "num_rows", "num_used", "label_counts"),
    [("codah", 2776, 2776, [689, 684, 697, 706]), ("comve-b", 10_000, 9_997, None)],
)
def test_public_datasets_are_read_completely(
    labeled_data: Path, name: str, num_rows: int, num_used: int, label_counts: list[int] | None
) -> None:
    """CODAH has no invalid row; three rows of ComVE's training table have no third ending."""
    values = PUBLIC_TASKS[name].resolve_settings(labeled_data / name)
    task = TaskSettings.parse({"name": name, **values}, "the task")
    examples, counts = read_examples(Path(task.train_file), task)
    assert (counts.num_read, counts.num_used) == (num_rows, num_used)
    assert counts.skipped == ({} if num_rows == num_used else {"an empty text": 3})
    if label_counts is not None:
        correct_indices = np.array([example.correct_index for example in examples], np.int64)
        assert np.bincount(correct_indices).tolist() == label_counts
    for file in task.validation_files.values():
        heldout_examples, counts = read_examples(Path(file), task)
        assert (len(heldout_examples), counts.skipped) == (997, {})
