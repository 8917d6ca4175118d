"""What fine-tuning makes of its data and settings: what it counts, tells and refuses.

These tests never look at how well a model learns.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith import bundle
from bertsmith.errors import RunError, SettingsError, TaskError
from bertsmith.progress import NullProgress
from bertsmith.tasks.settings import SQUAD_FIELDS, TaskSettings
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.finetuning.sweep import run_sweep
from bertsmith.train.finetuning.task_data import read_task_data
from tests.train.conftest import WORDS
from tests.train.finetuning.test_finetune import FAST_SETTINGS, finetune_table, start, write_table

__all__ = ["start"]


class RecordingProgress(NullProgress):
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.messages: list[str] = []

    def log(self, text: str) -> None:
        """Keep a line."""
        self.messages.append(text)


def test_a_held_out_file_with_an_unknown_label_is_refused(start: Path, tmp_path: Path) -> None:
    """File and line are named, and no run is begun."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    (tmp_path / "dev.jsonl").write_text('{"text": "w", "label": "perhaps"}\n')
    with pytest.raises(TaskError, match=r"dev\.jsonl, line 1: an unknown label: 'perhaps'"):
        finetune_table(start, tmp_path / "run", data, "single",
             task={"heldout": {"dev": str(tmp_path / "dev.jsonl")}})  # fmt: skip
    assert not (tmp_path / "run").exists()


def test_unknown_tokens_are_warned_about(start: Path, tmp_path: Path) -> None:
    """Before the first step, naming the worse file; the share of each file is in the counts."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    korean = [{"text": "겨울에는 날씨가 춥습니다", "label": label} for label in ("yes", "no")]
    (tmp_path / "dev.jsonl").write_text("\n".join(map(json.dumps, korean)) + "\n")
    told = RecordingProgress()
    task = {**FAST_SETTINGS["task"], "heldout": {"dev": str(tmp_path / "dev.jsonl")}}
    values = {**FAST_SETTINGS, "task": task, "schedule": {"steps": 1}}
    result = finetune("classify", start, tmp_path / "run", data=data, values=values, progress=told)
    (line,) = [line for line in told.messages if "[UNK]" in line]
    assert line.startswith("warning: 100.0% of the tokens of dev are [UNK]")
    assert result.counts["train"]["unknown_share"] == 0
    assert result.counts["dev"]["unknown_share"] == 1


def test_a_label_that_is_never_trained_on_is_told(start: Path, tmp_path: Path) -> None:
    """It is known and occurs in the held-out table only: a note, and a place in the counts."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    (tmp_path / "dev.jsonl").write_text('{"text": "w", "label": "perhaps"}\n')
    told = RecordingProgress()
    task = {"heldout": {"dev": str(tmp_path / "dev.jsonl")}, "labels": ["no", "perhaps", "yes"]}
    values = {**FAST_SETTINGS, "task": {**FAST_SETTINGS["task"], **task}, "schedule": {"steps": 1}}
    result = finetune("classify", start, tmp_path / "run", data=data, values=values, progress=told)
    assert result.counts["train"]["unseen"] == ["perhaps"]
    assert "unseen" not in result.counts["dev"]
    (line,) = [line for line in told.messages if "no example has" in line]
    assert line == "train: no example has the label 'perhaps', so the model cannot learn it"
    again = finetune("classify", start, tmp_path / "run", data=data, values=values)
    assert again.counts == result.counts


def test_labels_are_counted_and_a_useless_classifier_is_reported(
    start: Path, tmp_path: Path
) -> None:
    """Counts come before the first step, the comparison with the majority after the last.

    It works with any metric, also with one that is not the accuracy.
    """
    rows = [{"text": WORDS[0], "label": "yes" if n % 10 else "no"} for n in range(40)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = RecordingProgress()
    task = {**FAST_SETTINGS["task"], "metrics": ["macro_f1"]}
    values = {**FAST_SETTINGS, "task": {**task, "heldout": {"dev": str(tmp_path / "t.jsonl")}},
              "schedule": {"steps": 1}}  # fmt: skip
    finetune("classify", start, tmp_path / "run", data=tmp_path / "t.jsonl", values=values,
             progress=progress)  # fmt: skip
    assert "train: 2 labels: yes 36 (90.0%), no 4 (10.0%)" in progress.messages
    assert "dev: 2 labels: yes 36 (90.0%), no 4 (10.0%)" in progress.messages
    warnings = [line for line in progress.messages if line.startswith("warning: ")]
    assert warnings[0].startswith("warning: train: 90.0% of the examples have the label 'yes'")
    assert "is no better than always answering 'yes' (0.9000)" in warnings[1]
    assert len(warnings) == 2


def test_a_held_out_file_that_is_trained_on_is_told(start: Path, tmp_path: Path) -> None:
    """It is taken, since somebody may want it, but not without a word."""
    data, told = write_table(tmp_path / "train.jsonl", "single", 20), RecordingProgress()
    (tmp_path / "link.jsonl").symlink_to(data)
    task = {**FAST_SETTINGS["task"], "heldout": {"dev": str(tmp_path / "link.jsonl")}}
    values = {**FAST_SETTINGS, "task": task, "schedule": {"steps": 1}}
    finetune("classify", start, tmp_path / "run", data=data, values=values, progress=told)
    assert any(line.startswith("dev: this is the training file itself") for line in told.messages)


def test_f1_is_for_two_labels(start: Path, tmp_path: Path) -> None:
    """Of three it would be that of the second one, and nobody asked for it."""
    lines = [{"text": f"w {n}", "label": f"l{n % 3}"} for n in range(20)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(SettingsError, match=r"'f1' is no metric .* with 3 labels; .* macro_f1"):
        finetune_table(
            start, tmp_path / "run", tmp_path / "t.jsonl", "single", task={"metrics": ["f1"]}
        )
    assert not (tmp_path / "run").exists()


def test_training_examples_of_one_class_are_refused(start: Path, tmp_path: Path) -> None:
    """Also where the held-out examples have the other class, and where the labels are known."""
    one = "".join(json.dumps({"text": f"w {n}", "label": "no"}) + "\n" for n in range(19))
    other = '{"text": "w", "label": "yes"}\n'
    (tmp_path / "train.jsonl").write_text(one)
    (tmp_path / "dev.jsonl").write_text(one + other)
    task = {"heldout": {"dev": str(tmp_path / "dev.jsonl")}, "labels": ["no", "yes"]}
    with pytest.raises(TaskError, match=r"train\.jsonl: every label is 'no'; expected two"):
        finetune_table(start, tmp_path / "run", tmp_path / "train.jsonl", "single", task=task)
    # Of twenty rows the one that is held out by 1/20 is this one.
    held = int(np.random.default_rng(0).permutation(20)[0])
    rows = one.splitlines(keepends=True)
    (tmp_path / "all.jsonl").write_text("".join([*rows[:held], other, *rows[held:]]))
    with pytest.raises(TaskError, match="without what is held out: every label is 'no'"):
        finetune_table(start, tmp_path / "run", tmp_path / "all.jsonl", "single",
             task={"heldout_share": 0.05})  # fmt: skip
    assert not (tmp_path / "run").exists()


def refuse(word: str) -> None:
    """Stand for a reader of JSON that takes only what the standard has."""
    raise ValueError(word)


def test_a_metric_that_is_no_number_is_null_on_disk(start: Path, tmp_path: Path) -> None:
    """The correlation with a constant is NaN: every file is JSON, and the result NaN again."""
    data = write_table(tmp_path / "train.jsonl", "regression", 20)
    dev = tmp_path / "dev.jsonl"
    dev.write_text("".join(f'{{"text": "w {word}", "label": 2}}\n' for word in WORDS[:3]))
    task = {"heldout": {"dev": str(dev)}}
    changes: dict[str, Any] = {"schedule": {"steps": 2}, "task": task}
    once = finetune_table(start, tmp_path / "run", data, "regression", **changes)
    again = finetune_table(start, tmp_path / "run", data, "regression", **changes)
    assert once.model is not None
    for result in (once, again):
        assert math.isnan(result.figures["pearson"])
        assert math.isfinite(result.figures["loss"])
    for file in (tmp_path / "run" / "result.json", once.model / bundle.INFO_FILE):
        json.loads(file.read_text(), parse_constant=refuse)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["figures"]["pearson"] is None
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    values = {
        **FAST_SETTINGS,
        **changes,
        "task": {**FAST_SETTINGS["task"], **task, "kind": "regression"},
    }
    several = tmp_path / "several"
    run_sweep("classify", start, several, seeds=2, data=data, values=values)
    json.loads((several / "results.json").read_text(), parse_constant=refuse)


def test_what_is_cut_of_a_held_out_share_is_counted(start: Path, tmp_path: Path) -> None:
    """With the table that it was read from: all its texts are too long, and all are counted."""
    data = tmp_path / "train.jsonl"
    lines = [{"text": "w " * 20, "label": str(number % 2)} for number in range(20)]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = finetune_table(start, tmp_path / "run", data, "single", schedule={"steps": 1},
                  task={"length": 12})  # fmt: skip
    assert result.counts["train"]["cut_off"] == 20


def test_what_cannot_be_is_refused(start: Path, tmp_path: Path) -> None:
    """An unknown task, another shape, too long inputs, other settings in the same run."""
    data = write_table(tmp_path / "train.jsonl", "single", 20)
    with pytest.raises(SettingsError, match="unknown task 'cole'"):
        finetune("cole", start, tmp_path / "run", data=data)
    with pytest.raises(SettingsError, match="'matthew' is no metric of the kind 'single'"):
        finetune_table(start, tmp_path / "run", data, "single", task={"metrics": ["matthew"]})
    with pytest.raises(SettingsError, match=r"run\.freeze is 99"):
        finetune_table(start, tmp_path / "run", data, "single", run={"freeze": 99})
    assert not (tmp_path / "run" / "settings.toml").exists()
    with pytest.raises(SettingsError, match=r"model\.width"):
        finetune_table(start, tmp_path / "run", data, "single", model={"width": 64})
    with pytest.raises(SettingsError, match=r"shorten task\.length"):
        finetune_table(start, tmp_path / "run", data, "single", task={"length": 5000})
    finetune_table(start, tmp_path / "run", data, "single", schedule={"steps": 1})
    with pytest.raises(RunError, match=r"task\.batch: 8 there, 4 now"):
        finetune_table(
            start, tmp_path / "run", data, "single", schedule={"steps": 1}, task={"batch": 4}
        )


@pytest.mark.parametrize(
    ("task", "said", "message"),
    [
        ("answer", {"endings": ["x", "y"]}, "endings: answer does not read it, only choose"),
        ("tag", {"pair": "other"}, "pair: tag does not read it, only classify, answer, choose"),
        ("classify", {"context": "document"}, "context: classify does not read it, only tag"),
        (
            "answer",
            {"text": "nosuch"},
            r"text: the fields of SQuAD's form, as in .*own\.json, have",
        ),
    ],
)
def test_what_nothing_reads_is_refused(
    start: Path, tmp_path: Path, task: str, said: dict[str, Any], message: str
) -> None:
    """A column or a setting of another family is an error before any file is read."""
    with pytest.raises(SettingsError, match=rf"task\.{message}"):
        finetune(task, start, tmp_path / "run", data=tmp_path / "own.json", values={"task": said})


def test_part_of_the_training_file_is_random(tmp_path: Path) -> None:
    """A subset drawn by its own seed, in the file's order; the first rows where it is asked for."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    task = TaskSettings(train=str(data), examples=10, heldout={"dev": str(data)})

    def drawn(**changes: Any) -> list[int]:
        found = read_task_data(task.model_copy(update=changes))
        assert found.counts["train"].num_used == 10
        return [int(one.where.rpartition(" ")[2]) for one in found.train]

    assert drawn() == drawn() == sorted(drawn())
    assert drawn() != drawn(examples_seed=1)
    assert max(drawn()) > 20
    assert drawn(examples_draw="first") == list(range(1, 11))


def test_a_label_that_a_subset_lacks_is_no_error(tmp_path: Path) -> None:
    """It is a label of the training file, so a held-out example may have it."""
    rows = [{"text": "w", "label": ["a", "b"][n % 2]} for n in range(8)]
    rows.append({"text": "w", "label": "c"})
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "t.jsonl")
    task = TaskSettings(train=file, heldout={"dev": file}, examples=4, examples_draw="first")
    found = read_task_data(task)
    assert {one.label for one in found.train} == {"a", "b"}
    assert {one.label for one in found.heldout["dev"]} == {"a", "b", "c"}


def test_documents_stay_together_in_a_random_subset(tmp_path: Path) -> None:
    """Where documents are the context whole ones are drawn, the last one up to the number."""
    rows = [{"tokens": ["w"], "tags": ["NV"[n % 2]], "document": n // 5} for n in range(40)]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = str(tmp_path / "t.jsonl")
    task = TaskSettings(kind="tags", text="0", label="-1", train=file, heldout={"dev": file},
                        context="document", examples=12)  # fmt: skip
    documents = [one.document for one in read_task_data(task).train]
    assert sorted(documents.count(one) for one in set(documents)) == [2, 5, 5]


def test_part_of_the_training_file(start: Path, tmp_path: Path) -> None:
    """A number of examples is trained on, and the rest is counted; each fold is held out once."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    result = finetune_table(start, tmp_path / "run", data, "single", schedule={"steps": 1},
                  task={"examples": 30, "heldout_share": 0.2})  # fmt: skip
    assert result.counts["train"]["used"] == 30
    assert result.counts["train"]["skipped"] == {"not among the task.examples = 30": 10}
    assert result.figures["examples"] == 6
    write_table(data, "single", 41)
    task = TaskSettings(train=str(data), heldout_share=0.2)
    held = [read_task_data(task.model_copy(update={"heldout_fold": fold})) for fold in range(5)]
    texts = [one.where for own in held for one in own.heldout["heldout"]]
    assert len(texts) == len(set(texts)) == 41
    with pytest.raises(SettingsError, match=r"heldout_fold is 5, but shares of 0.2 end before"):
        read_task_data(task.model_copy(update={"heldout_fold": 5}))


def test_a_column_of_scores_is_not_learnt_as_classes(start: Path, tmp_path: Path) -> None:
    """The error suggests regression; whoever says that each number is a class is obeyed."""
    data = tmp_path / "scores.csv"
    rows = [f"{WORDS[n % 9]},{n % 7 / 2}" for n in range(28)]
    data.write_text("\n".join(["text,label", *rows]) + "\n")
    with pytest.raises(TaskError, match=r"7 different numbers .*--kind regression"):
        finetune("classify", start, tmp_path / "run", data=data, values={"task": {}})
    assert not (tmp_path / "run").exists()
    result = finetune(
        "classify", start, tmp_path / "run", data=data,
        values={**FAST_SETTINGS, "task": {"kind": "single"}, "schedule": {"steps": 1}},
    )  # fmt: skip
    assert result.figures["examples"] == 3


def test_what_belongs_together_is_held_out_together(tmp_path: Path) -> None:
    """Questions of one context, and the sentences of one document where that is their context."""
    answers = {"text": ["c"], "answer_start": [0]}
    asked = [{"id": str(n), "question": f"q {n}", "context": f"c {n // 4}", "answers": answers}
             for n in range(40)]  # fmt: skip
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(one) + "\n" for one in asked))
    lines = [("-DOCSTART- O\n\n" if n % 5 == 0 else "") + f"w{n} {'O' if n % 2 else 'B-X'}\n\n"
             for n in range(40)]  # fmt: skip
    (tmp_path / "b.txt").write_text("".join(lines))
    own = {"kind": "span", **SQUAD_FIELDS, "train": str(tmp_path / "a.jsonl"), "heldout_share": 0.2}
    span = TaskSettings.parse(own, "the test")
    found = read_task_data(span)
    contexts = {one.context for one in found.heldout["heldout"]}
    assert len(contexts) == 2
    assert not contexts & {one.context for one in found.train}
    tags = TaskSettings(kind="entities", train=str(tmp_path / "b.txt"), text="0", label="1",
                        context="document", heldout_share=0.25)  # fmt: skip
    found = read_task_data(tags)
    documents = {one.document for one in found.heldout["heldout"]}
    assert len(documents) == 2
    assert not documents & {one.document for one in found.train}


@pytest.mark.parametrize(
    ("said", "told"),
    [({"task": {"examples": 30}}, r"task\.examples: 30 there, None now"),
     ({"features": {"layers": "last", "width": 8}}, "features: "),
     ({"run": {"freeze": 1}}, r"run\.freeze: 1 there, None now")],
)  # fmt: skip
def test_a_setting_that_is_left_out_is_another_run(
    start: Path, tmp_path: Path, said: dict[str, Any], told: str
) -> None:
    """Going on without it would train on other data, or another model, than the file says."""
    data = write_table(tmp_path / "train.jsonl", "single", 40)
    first = {**said, "run": {"threads": 1, **said.get("run", {})}}
    finetune_table(start, tmp_path / "run", data, "single", schedule={"steps": 1}, **first)
    with pytest.raises(RunError, match=told):
        finetune_table(start, tmp_path / "run", data, "single", schedule={"steps": 1})
