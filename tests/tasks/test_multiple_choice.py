"""Reading, encoding and scoring prompts with their endings."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertsmith.bundle import HeadConfig
from bertsmith.errors import SettingsError, TaskError
from bertsmith.model.packed import pack_sequences
from bertsmith.tasks.inputs import ExampleCounts, MicroBatch, ModelInputs
from bertsmith.tasks.multiple_choice import (
    compute_losses,
    compute_metrics,
    encode_examples,
    read_examples,
)
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import TaskSettings
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.wordpiece import SPECIAL_TOKENS, Tokenizer

ENDINGS = ["a", "b", "c"]
HEADER = "text,a,b,c,label"
HEAD = HeadConfig("choice")


def task_of(**changes: Any) -> TaskSettings:
    """Return the settings of a table with the columns of HEADER."""
    return TaskSettings.parse({"kind": "choice", "endings": ENDINGS, **changes}, "the test")


def table(path: Path, *rows: str, header: str = HEADER) -> Path:
    """Write a table."""
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    ("label", "right"), [("0", 0), ("2", 2), (" 1 ", 1), ("A", 0), ("C", 2), ("b", 1)]
)
def test_a_label_is_an_index_a_letter_or_a_column(tmp_path: Path, label: str, right: int) -> None:
    """An index from 0, a letter from A, or the name of the ending's column."""
    file = table(tmp_path / "t.csv", f"red,green,blue,white,{label}")
    ((example,), counts) = read_examples(file, task_of())
    assert (example.prompt, example.endings) == ("red", ("green", "blue", "white"))
    assert (example.correct_index, example.location) == (right, f"{file}, line 2")
    assert (counts.num_read, counts.num_used) == (1, 1)


def test_a_number_is_an_index_before_it_is_a_column(tmp_path: Path) -> None:
    """CODAH's columns have no names but numbers, and its labels count from 0."""
    (tmp_path / "t.tsv").write_text("o\tred\tgreen\tblue\t1\n")
    task = task_of(text="1", endings=["2", "3"], label="4", header=False)
    ((example,), _) = read_examples(tmp_path / "t.tsv", task)
    assert (example.endings, example.correct_index) == (("green", "blue"), 1)


def test_a_letter_that_is_a_columns_name_means_the_column(tmp_path: Path) -> None:
    """With columns named C, B, A the label A is the third ending."""
    file = table(tmp_path / "t.csv", "red,green,blue,white,A", header="text,C,B,A,label")
    ((example,), _) = read_examples(file, task_of(endings=["C", "B", "A"]))
    assert example.correct_index == 2


def test_each_ending_begins_with_the_pair_column(tmp_path: Path) -> None:
    """SWAG's form: sentence B is sent2 and the ending, parted by a space."""
    header = "video-id,sent1,sent2,ending0,ending1,ending2,ending3,label"
    file = table(tmp_path / "t.csv", "7,He waits.,She,runs.,sits.,eats.,sings.,2", header=header)
    task = TaskSettings.parse({**PUBLIC_TASKS["swag"].fixed_settings, "name": "swag"}, "the test")
    ((example,), _) = read_examples(file, task)
    assert example.prompt == "He waits."
    assert example.endings == ("She runs.", "She sits.", "She eats.", "She sings.")
    assert example.correct_index == 2


def test_endings_can_be_a_list_of_any_number(tmp_path: Path) -> None:
    """One column of lists: rows whose endings differ in number are told apart."""
    lines = [{"text": "red", "ends": ["green", "blue"], "label": 1},
             {"text": "red", "ends": ["green", "blue", "white"], "label": "C"}]  # fmt: skip
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    examples, _ = read_examples(tmp_path / "t.jsonl", task_of(endings=["ends"]))
    assert [(len(one.endings), one.correct_index) for one in examples] == [(2, 1), (3, 2)]


def test_an_index_may_stand_as_a_whole_float(tmp_path: Path) -> None:
    """As it does in a Parquet column of whole numbers some of which are missing."""
    line = {"text": "red", "ends": ["green", "blue"], "label": 1.0}
    (tmp_path / "t.jsonl").write_text(json.dumps(line) + "\n")
    [example], _ = read_examples(tmp_path / "t.jsonl", task_of(endings=["ends"]))
    assert example.correct_index == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (" ,green,blue,white,1", "line 3: an empty text in column 'text'"),
        ("red,green,,white,1", "line 3: an empty text in column 'b'"),
        ("red,green,blue,white,", "line 3: an empty label"),
        ("red,green,blue,white,3", "line 3: an index out of range: 3; the endings are 0 to 2"),
        ("red,green,blue,white,-1", "line 3: an index out of range: -1"),
        ("red,green,blue,white,D", "line 3: an unknown label: 'D'; expected 0 to 2, A to C, or"),
        ("red,green,blue,white,d", "line 3: an unknown label: 'd'"),
        ("red,green,blue,1", "line 3: 4 columns where 5 are expected"),
    ],
)
def test_a_bad_row_is_told_or_counted(tmp_path: Path, row: str, message: str) -> None:
    """An error names file, line and fault; with skip_bad the row is counted under its fault."""
    good = "red,green,blue,white,0"
    file = table(tmp_path / "t.csv", good, row, good)
    with pytest.raises(TaskError, match=message):
        read_examples(file, task_of())
    examples, counts = read_examples(file, task_of(skip_bad=True))
    assert [one.correct_index for one in examples] == [0, 0]
    assert (counts.num_read, counts.num_used, sum(counts.skipped.values())) == (3, 2, 1)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"text": "red", "ends": ["green"], "label": 0}, "fewer than two endings"),
        ({"text": "red", "ends": ["green", 5], "label": 0}, "no text in column 'ends', but a num"),
        ({"text": "red", "ends": ["green", None], "label": 0}, "no text in column 'ends'"),
        ({"text": "red", "ends": ["green", "blue"], "label": True}, "an unknown label: True"),
        ({"text": "red", "ends": ["green", "blue"], "label": 1.5}, r"an unknown label: 1\.5"),
        ({"text": "red", "ends": ["green", "blue"], "label": [1]}, r"an unknown label: \[1\]"),
        ({"text": "red", "ends": "green", "label": 0}, "the column 'ends' holds one ending"),
    ],
)
def test_json_of_another_form_is_refused(tmp_path: Path, line: Any, message: str) -> None:
    """Too few endings, endings that are no texts, labels that are neither number nor name."""
    (tmp_path / "t.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(TaskError, match=message):
        read_examples(tmp_path / "t.jsonl", task_of(endings=["ends"]))


def test_a_fault_of_the_command_is_no_bad_row(tmp_path: Path) -> None:
    """Missing columns, or none named at all, are errors even when bad rows are skipped."""
    file = table(tmp_path / "t.csv", "red,green,blue,white,0")
    with pytest.raises(TaskError, match="no column 'd'; the columns are 'text', 'a'"):
        read_examples(file, task_of(endings=["a", "d"], skip_bad=True))
    with pytest.raises(TaskError, match="no column 'right'"):
        read_examples(file, task_of(label="right", skip_bad=True))
    with pytest.raises(TaskError, match="the column 'a' holds one ending"):
        read_examples(file, task_of(endings=["a"], skip_bad=True))
    with pytest.raises(SettingsError, match=r"give --endings A,B"):
        read_examples(file, task_of(endings=[], skip_bad=True))


def comve(folder: Path, answers: str, *ids: int) -> Path:
    """Write a table with ids, and the file of its answers."""
    rows = [f"{one},red,green,blue,white" for one in ids]
    (folder / "t-answers.csv").write_text(answers)
    return table(folder / "t.csv", *rows, header="id,text,a,b,c")


def test_answers_may_stand_in_a_file_of_their_own(tmp_path: Path) -> None:
    """Joined by the id, in whatever order; unlabelled reading does not look at them."""
    file = comve(tmp_path, "9,C\n7,A\n8,B\n", 7, 8, 9)
    examples, _ = read_examples(file, task_of(answers="-answers"))
    assert [one.correct_index for one in examples] == [0, 1, 2]
    (tmp_path / "t-answers.csv").unlink()
    with pytest.raises(TaskError, match=r"t-answers\.csv: no such file"):
        read_examples(file, task_of(answers="-answers"))
    examples, _ = read_examples(file, task_of(answers="-answers"), labeled=False)
    assert [one.correct_index for one in examples] == [None] * 3


@pytest.mark.parametrize(
    ("answers", "ids", "message"),
    [
        ("7,A\n", (7, 8), r"t\.csv, line 3: an id without an answer: '8'"),
        ("7,A\n8,B\n", (7, 7, 8), r"t\.csv, line 3: an id that stood before: '7'"),
        ("7,A\n8,Q\n", (7, 8), r"t\.csv, line 3: an unknown label: 'Q'"),
    ],
)
def test_ids_that_do_not_fit_are_bad_rows(
    tmp_path: Path, answers: str, ids: tuple[int, ...], message: str
) -> None:
    """An id twice, or without its answer: an error, or else a counted skip."""
    file = comve(tmp_path, answers, *ids)
    with pytest.raises(TaskError, match=message):
        read_examples(file, task_of(answers="-answers"))
    _, counts = read_examples(file, task_of(answers="-answers", skip_bad=True))
    assert (counts.num_used, sum(counts.skipped.values())) == (len(ids) - 1, 1)


def test_ids_are_of_one_row_each_also_without_a_file_of_answers(tmp_path: Path) -> None:
    """A table with a column of ids says which rows are the same; without one nothing is asked."""
    rows = ("7,red,green,blue,white,0", "7,red,green,blue,white,0")
    file = table(tmp_path / "t.csv", *rows, header="id,text,a,b,c,label")
    with pytest.raises(TaskError, match=r"line 3: an id that stood before: '7'"):
        read_examples(file, task_of())
    file = table(tmp_path / "t.csv", *rows, header="number,text,a,b,c,label")
    assert read_examples(file, task_of())[1].num_used == 2


def test_answers_of_no_row_are_counted(tmp_path: Path) -> None:
    """They are no row's fault, so that the others are read; they stand among what is skipped."""
    file = comve(tmp_path, "7,A\n8,B\n9,C\n", 7)
    _, counts = read_examples(file, task_of(answers="-answers"))
    assert (counts.num_read, counts.num_used) == (3, 1)
    assert counts.skipped == {"an answer whose id no row has": 2}


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("7,A\n8,B\n7,B\n", r"t-answers\.csv, line 3: the id '7' stood before"),
        ("7,A\n8\n", r"t-answers\.csv, line 2: 1 columns where 2 are expected"),
        ("7\n8\n", r"t-answers\.csv, line 1: there is no column '1'"),
    ],
)
def test_a_broken_file_of_answers_is_an_error(tmp_path: Path, answers: str, message: str) -> None:
    """Also where bad rows are skipped: no row of the table is at fault."""
    file = comve(tmp_path, answers, 7, 8)
    with pytest.raises(TaskError, match=message):
        read_examples(file, task_of(answers="-answers", skip_bad=True))


def test_inputs_are_a_pair_for_each_ending(tmp_path: Path) -> None:
    """[CLS] prompt [SEP] ending [SEP], cut as pairs are; one target a prompt."""
    words = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, "red", "green", "blue", "##s")))
    file = table(tmp_path / "t.csv", "red greens,blue,red,green green green,1",
                 "red,blue,red,green,2")  # fmt: skip
    counts = ExampleCounts()
    examples, _ = read_examples(file, task_of())
    found = encode_examples(examples, words, HEAD, task_of(length=8), counts)
    first = [words.ids_to_tokens(ids) for ids, _ in found.sequences[0]]
    prompt = ["[CLS]", "red", "green", "##s", "[SEP]"]
    assert first[0] == [*prompt, "blue", "[SEP]"]
    assert first[1] == [*prompt, "red", "[SEP]"]
    assert first[2] == ["[CLS]", "red", "green", "[SEP]", "green", "green", "green", "[SEP]"]
    assert found.sequences[0][0][1] == [0] * 5 + [1] * 2
    assert found.targets is not None
    assert np.concatenate(found.targets).tolist() == [1, 2]
    assert (found.is_truncated, counts.num_truncated) == ([True, False], 1)
    assert found.num_tokens(1) == 3 * 5


def test_the_loss_is_that_of_each_prompts_own_endings() -> None:
    """Cross-entropy over 2, 3 and 2 scores, and no gradient that is not a number."""
    torch.manual_seed(0)
    scores = torch.randn(7, 1, requires_grad=True)
    right = torch.tensor([1, 2, 0])
    part = MicroBatch(pack_sequences([([1], [0])]), None, right, torch.ones(3), [2, 3, 2])
    found = compute_losses(scores, part, HEAD)
    wanted = torch.stack([
        -own.log_softmax(0)[one]
        for own, one in zip(torch.split(scores[:, 0], [2, 3, 2]), right.tolist(), strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(found, wanted)
    torch.autograd.backward(found.sum())
    assert scores.grad is not None
    assert torch.isfinite(scores.grad).all()


def test_accuracy_is_over_prompts() -> None:
    """The ending with the highest score counts, however many there are."""
    rows = [np.array([[0.1], [0.9]], np.float32), np.array([[3.0], [1.0], [2.0]], np.float32),
            np.array([[-5.0], [-4.0]], np.float32)]  # fmt: skip
    right = [np.array([1]), np.array([2]), np.array([1])]
    inputs = ModelInputs([[]] * 3, [""] * 3, [False] * 3, right)
    found = compute_metrics(rows, inputs, [], HEAD, task_of(metrics=["accuracy"]))
    assert found == {"accuracy": pytest.approx(2 / 3)}


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "read_rows", "used", "labels"),
    [("codah", 2776, 2776, [689, 684, 697, 706]), ("comve-b", 10_000, 9_997, None)],
)
def test_the_real_files_are_read_whole(
    labelled: Path, name: str, read_rows: int, used: int, labels: list[int] | None
) -> None:
    """CODAH has no bad row, and ComVE's training table three without a third ending."""
    folder = labelled / name
    task = TaskSettings.parse(
        {"name": name, **PUBLIC_TASKS[name].resolve_settings(folder)}, "the task"
    )
    examples, counts = read_examples(Path(task.train), task)
    assert (counts.num_read, counts.num_used) == (read_rows, used)
    assert counts.skipped == ({} if read_rows == used else {"an empty text": 3})
    if labels is not None:
        right = np.array([one.correct_index for one in examples], np.int64)
        assert np.bincount(right).tolist() == labels
    for file in task.heldout.values():
        held, counts = read_examples(Path(file), task)
        assert (len(held), counts.skipped) == (997, {})
