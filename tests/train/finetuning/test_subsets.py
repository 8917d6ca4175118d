"""Subsets of the training file, and examples that are held out from it."""

from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import SettingsError
from bertsmith.tasks.settings import SQUAD_FIELDS, TaskSettings
from bertsmith.train.finetuning.task_data import read_task_data
from tests.train.finetuning.conftest import write_rows
from tests.train.finetuning.test_finetune import finetune_table, write_table


def test_subset_of_the_training_file_is_random(tmp_path: Path) -> None:
    """A subset is drawn with task.train_subset_seed in file order, or is the start of the file."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    task = TaskSettings(
        train_file=str(data), max_train_examples=10, validation_files={"dev": str(data)}
    )

    def draw_line_numbers(**changes: Any) -> list[int]:
        task_data = read_task_data(task.model_copy(update=changes))
        assert task_data.counts["train"].num_used == 10
        return [int(example.location.rpartition(" ")[2]) for example in task_data.train]

    lines = draw_line_numbers()
    assert lines == draw_line_numbers() == sorted(lines)
    assert lines != draw_line_numbers(train_subset_seed=1)
    assert max(lines) > 20
    assert draw_line_numbers(train_subset="first") == list(range(1, 11))


def test_label_missing_in_a_subset_is_valid(tmp_path: Path) -> None:
    """A held-out example may have a label that only unused training examples have."""
    rows = [{"text": "w", "label": ["a", "b"][n % 2]} for n in range(8)]
    rows.append({"text": "w", "label": "c"})
    file = str(write_rows(tmp_path / "t.jsonl", rows))
    task = TaskSettings(
        train_file=file, validation_files={"dev": file}, max_train_examples=4, train_subset="first"
    )
    task_data = read_task_data(task)
    assert {example.label for example in task_data.train} == {"a", "b"}
    assert {example.label for example in task_data.heldout["dev"]} == {"a", "b", "c"}


def test_random_subset_keeps_documents_together(tmp_path: Path) -> None:
    """With task.context="document", the subset has whole documents, except for the last one."""
    rows = [{"tokens": ["w"], "tags": ["NV"[n % 2]], "document": n // 5} for n in range(40)]
    file = str(write_rows(tmp_path / "t.jsonl", rows))
    task = TaskSettings(
        kind="tags",
        text_column="0",
        label_column="-1",
        train_file=file,
        validation_files={"dev": file},
        context="document",
        max_train_examples=12,
    )
    documents = [example.document for example in read_task_data(task).train]
    assert sorted(documents.count(document) for document in set(documents)) == [2, 5, 5]


def test_folds_partition_the_training_file(start_model: Path, tmp_path: Path) -> None:
    """Each example is held out in exactly one fold; the counts have the size of a subset."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    result = finetune_table(
        start_model,
        tmp_path / "run",
        data,
        "single",
        schedule={"steps": 1},
        task={"max_train_examples": 30, "validation_fraction": 0.2},
    )
    assert result.counts["train"]["num_used"] == 30
    assert result.counts["train"]["skipped"] == {"not among the task.max_train_examples = 30": 10}
    assert result.metrics["examples"] == 6, "20 % of the subset"
    write_table(data, "single", 41)
    task = TaskSettings(train_file=str(data), validation_fraction=0.2)
    folds = [read_task_data(task.model_copy(update={"validation_fold": fold})) for fold in range(5)]
    locations = [example.location for fold in folds for example in fold.heldout["heldout"]]
    assert len(locations) == len(set(locations)) == 41
    with pytest.raises(SettingsError, match=r"validation_fold is 5, but there are too few folds"):
        read_task_data(task.model_copy(update={"validation_fold": 5}))


@pytest.mark.parametrize("name", ["validation_fold", "validation_fraction"])
def test_fold_next_to_validation_files_is_an_error(
    start_model: Path, tmp_path: Path, name: str
) -> None:
    """With validation files, nothing is held out, so a fold or a fraction has no effect."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    with pytest.raises(SettingsError, match=rf"task\.{name} has no effect, because there are"):
        finetune_table(
            start_model,
            tmp_path / "run",
            data,
            "single",
            schedule={"steps": 1},
            task={"validation_files": {"dev": str(data)}, name: 1 if "fold" in name else 0.2},
        )


def test_examples_with_a_common_context_are_held_out_together(tmp_path: Path) -> None:
    """All questions about a context are held out together, and all sentences of a document."""
    answers = {"text": ["c"], "answer_start": [0]}
    questions = [
        {"id": str(n), "question": f"q {n}", "context": f"c {n // 4}", "answers": answers}
        for n in range(40)
    ]
    write_rows(tmp_path / "a.jsonl", questions)
    sentences = [
        ("-DOCSTART- O\n\n" if n % 5 == 0 else "") + f"w{n} {'O' if n % 2 else 'B-X'}\n\n"
        for n in range(40)
    ]
    (tmp_path / "b.txt").write_text("".join(sentences))
    span_task = TaskSettings.parse(
        {
            "kind": "span",
            **SQUAD_FIELDS,
            "train_file": str(tmp_path / "a.jsonl"),
            "validation_fraction": 0.2,
        },
        "the test",
    )
    task_data = read_task_data(span_task)
    contexts = {example.context for example in task_data.heldout["heldout"]}
    assert len(contexts) == 2
    assert not contexts & {example.context for example in task_data.train}
    entity_task = TaskSettings(
        kind="entities",
        train_file=str(tmp_path / "b.txt"),
        text_column="0",
        label_column="1",
        context="document",
        validation_fraction=0.25,
    )
    task_data = read_task_data(entity_task)
    documents = {example.document for example in task_data.heldout["heldout"]}
    assert len(documents) == 2
    assert not documents & {example.document for example in task_data.train}
