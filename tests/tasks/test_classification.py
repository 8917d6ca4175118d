"""Reading, encoding and scoring texts with labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn import metrics as peer

from bertsmith.bundle import HeadConfig, TaskKind
from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks.classification import (
    TextExample,
    collect_labels,
    compute_class_report,
    compute_metrics,
    encode_examples,
    read_examples,
)
from bertsmith.tasks.families import resolve_metrics
from bertsmith.tasks.inputs import ExampleCounts, ModelInputs
from bertsmith.tasks.public import PUBLIC_TASKS
from bertsmith.tasks.settings import TaskSettings
from bertsmith.tasks.text_pairs import truncate_texts
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.wordpiece import SPECIAL_TOKENS, Tokenizer

TASK = TaskSettings(length=8)
WORDS = ("red", "green", "blue", "##s")


@pytest.fixture
def words() -> Tokenizer:
    """Three words and an ending."""
    return Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, *WORDS)))


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("single", "   ,1", r"line 3: an empty text in column 'text'"),
        ("single", "red,", r"line 3: an empty label"),
        ("single", "red,1,1", r"line 3: 3 columns where 2 are expected"),
        ("single", "red,9", r"line 3: an unknown label: '9'; known are '0', '1'"),
        ("regression", "red,much", r"line 3: a score that is no number: 'much'"),
        ("regression", "red,nan", r"line 3: a missing label: 'nan'"),
        ("regression", "red, ", r"line 3: an empty label"),
        ("multi", "red,1|7", r"line 3: an unknown label: '7'"),
        ("single", "red,NaN", r"line 3: a missing label: 'NaN'"),
        ("multi", "red,nan", r"line 3: a missing label: 'nan'"),
        ("multi", "red,1|NaN", r"line 3: a missing label: 'NaN'"),
    ],
)
def test_a_bad_row_is_told_or_counted(
    tmp_path: Path, kind: TaskKind, row: str, message: str
) -> None:
    """An error names file, line and fault; with skip_bad the row is counted under its fault."""
    file = tmp_path / "a.csv"
    file.write_text(f"text,label\nred,1\n{row}\ngreen,0\n")
    labels = None if kind == "regression" else ["0", "1"]
    with pytest.raises(TaskError, match=message):
        read_examples(file, TaskSettings(kind=kind), labels=labels)
    examples, counts = read_examples(file, TaskSettings(kind=kind, skip_bad=True), labels=labels)
    assert [example.texts for example in examples] == [("red",), ("green",)]
    assert (counts.num_read, counts.num_used, sum(counts.skipped.values())) == (3, 2, 1)
    assert list(counts.as_dict()["first_skipped"].values()) == [f"{file}, line 3"]


def test_nan_is_a_class_only_where_it_is_listed(tmp_path: Path) -> None:
    """Without labels "NaN" in any case is missing; listed in task.labels it is a class."""
    file = tmp_path / "a.csv"
    file.write_text("text,label\nred,NaN\ngreen,nan\nblue,na\nred,None\n")
    examples, counts = read_examples(file, TaskSettings(skip_bad=True))
    assert [example.label for example in examples] == ["na", "None"]
    assert counts.skipped == {"a missing label": 2}
    with pytest.raises(TaskError, match=r"has to be listed in task\.labels"):
        read_examples(file, TaskSettings())
    labels = ["NaN", "na", "None"]
    examples, counts = read_examples(file, TaskSettings(skip_bad=True), labels=labels)
    assert [example.label for example in examples] == labels
    assert counts.skipped == {"a missing label": 1}


def test_an_id_stands_once(tmp_path: Path) -> None:
    """In the column "id", unless it is said that none names the rows."""
    file = tmp_path / "a.csv"
    file.write_text("id,text,label\n7,red,1\n8,green,0\n7,blue,1\n")
    with pytest.raises(TaskError, match=r"line 4: an id that stood before: '7'; if the col"):
        read_examples(file, TaskSettings())
    examples, counts = read_examples(file, TaskSettings(skip_bad=True))
    assert len(examples) == 2
    assert counts.skipped == {"an id that stood before": 1}
    assert len(read_examples(file, TaskSettings(id=""))[0]) == 3


def test_scores_that_are_all_alike_teach_nothing(tmp_path: Path) -> None:
    """As one label alone."""
    file = tmp_path / "a.csv"
    file.write_text("text,label\nred,2\ngreen,2.0\n")
    examples, _ = read_examples(file, TaskSettings(kind="regression"))
    with pytest.raises(TaskError, match=r"every score is 2\.0; expected two different ones"):
        collect_labels(examples, str(file))


@pytest.mark.parametrize(
    ("kind", "text", "label", "message"),
    [
        ("single", 5, "1", "line 1: no text in column 'text', but a number: 5"),
        ("single", True, "1", "line 1: no text in column 'text', but true or false"),
        ("single", ["red"], "1", "line 1: no text in column 'text', but a list"),
        ("single", {"a": "red"}, "1", "line 1: no text in column 'text', but an object"),
        ("single", "red \ud83d", "1", "line 1: half a character"),
        ("single", "red", {"a": 1}, "line 1: a label that is no name"),
        ("single", "red", ["0", "1"], "line 1: several labels where one is expected"),
        ("single", "red", float("nan"), "line 1: a missing label: NaN"),
        ("single", "red", "g \ud83d", "line 1: half a character .* in column 'label'"),
        ("multi", "red", ["0", "\ud83d"], "line 1: half a character .* in column 'label'"),
        ("multi", "red", [float("inf")], "line 1: a label that is not finite: inf"),
        ("multi", "red", {"a": 1}, "line 1: a label that is no name"),
        ("multi", "red", ["0", ["1"]], r"line 1: a label that is no name: \['1'\]"),
        ("regression", "red", True, "line 1: a score that is no number: True"),
        ("regression", "red", [1.0], "line 1: a score that is no number"),
        ("regression", "red", float("nan"), "line 1: a missing label: NaN"),
    ],
)
def test_json_of_another_type_is_a_bad_row(
    tmp_path: Path, kind: TaskKind, text: Any, label: Any, message: str
) -> None:
    """What is no text never becomes one, and what is no label never becomes a name."""
    rows = [{"text": text, "label": label}, {"text": "red", "label": 1}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TaskError, match=message):
        read_examples(file, TaskSettings(kind=kind))
    ((example,), counts) = read_examples(file, TaskSettings(kind=kind, skip_bad=True))
    assert example.label == {"single": "1", "multi": {"1"}, "regression": 1.0}[kind]
    assert sum(counts.skipped.values()) == 1


def test_a_number_is_one_label_however_it_is_written(tmp_path: Path) -> None:
    """1, 1.0 and "1" are the same label: a column of whole numbers with gaps comes as floats."""
    file = tmp_path / "a.jsonl"
    values = (1, 1.0, "1", -0.0, 0.5)
    file.write_text("".join(json.dumps({"text": "red", "label": one}) + "\n" for one in values))
    found, _ = read_examples(file, TaskSettings())
    assert [example.label for example in found] == ["1", "1", "1", "0", "0.5"]


def test_a_missing_column_is_an_error_even_when_bad_rows_are_skipped(tmp_path: Path) -> None:
    """It is a fault of the command, not of a row; the message names the columns there are."""
    (tmp_path / "a.csv").write_text("words,label\nred,1\n")
    with pytest.raises(TaskError, match=r"no column 'text'; the columns are 'words', 'label'"):
        read_examples(tmp_path / "a.csv", TaskSettings(skip_bad=True))


def test_a_line_of_json_that_lacks_a_key_is_a_bad_row(tmp_path: Path) -> None:
    """Not so the first line: then it is the command that names a column that is not there."""
    good, bad = '{"text": "red", "label": 1}\n', '{"text": "red"}\n'
    (tmp_path / "a.jsonl").write_text("oops\n" + good + bad + good)
    (tmp_path / "b.jsonl").write_text("oops\n" + bad + good)
    examples, counts = read_examples(tmp_path / "a.jsonl", TaskSettings(skip_bad=True))
    assert (len(examples), counts.skipped["there is no column 'label'"]) == (2, 1)
    with pytest.raises(TaskError, match=r"b\.jsonl, line 2: there is no column 'label'"):
        read_examples(tmp_path / "b.jsonl", TaskSettings(skip_bad=True))
    (tmp_path / "a.jsonl").write_text(good + bad)
    with pytest.raises(TaskError, match=r"line 2: there is no column 'label'; the .*--skip-bad"):
        read_examples(tmp_path / "a.jsonl", TaskSettings())


def test_a_file_of_nothing_is_an_error(tmp_path: Path) -> None:
    """A header alone, or bad rows alone."""
    (tmp_path / "a.csv").write_text("text,label\n")
    with pytest.raises(TaskError, match="no example could be used, of 0"):
        read_examples(tmp_path / "a.csv", TASK)


def test_labels_in_order() -> None:
    """Numbers by size, names by the alphabet; one alone is an error."""

    def of(*labels: str) -> tuple[str, ...]:
        return collect_labels([TextExample(("x",), label, "") for label in labels], "f")

    assert of("10", "9", "-1", "9") == ("-1", "9", "10")
    assert of("b", "a", "10") == ("10", "a", "b")
    assert of("1", "01", "0") == ("0", "01", "1")
    assert of("²", "1") == ("1", "²")
    with pytest.raises(TaskError, match="every label is 'a'"):
        of("a", "a")


def test_inputs_are_those_of_the_paper(words: Tokenizer) -> None:
    """[CLS] A [SEP] B [SEP], segment 0 up to the first [SEP], and what was cut off is counted."""
    examples = [
        TextExample(("red greens", "blue"), "b", "f, line 1"),
        TextExample(("red", "green " * 9), "a", "f, line 2"),
    ]
    counts = ExampleCounts()
    found = encode_examples(examples, words, HeadConfig("single", ("a", "b")), TASK, counts)
    tokens = [words.ids_to_tokens(ids) for [(ids, _)] in found.sequences]
    assert tokens[0] == ["[CLS]", "red", "green", "##s", "[SEP]", "blue", "[SEP]"]
    assert found.sequences[0][0][1] == [0] * 5 + [1] * 2
    assert tokens[1] == ["[CLS]", "red", "[SEP]", *["green"] * 4, "[SEP]"]
    assert found.targets is not None
    assert np.concatenate(found.targets).tolist() == [1, 0]
    assert (counts.num_truncated, found.is_truncated) == (1, [False, True])


@pytest.mark.parametrize(
    ("sizes", "room", "wanted"),
    [((9, 3), 8, (5, 3)), ((3, 9), 8, (3, 5)), ((9, 9), 7, (3, 4)), ((9, 8), 7, (4, 3)),
     ((2, 2), 8, (2, 2)), ((9,), 4, (4,))],
)  # fmt: skip
def test_the_longer_text_is_cut(sizes: tuple[int, ...], room: int, wanted: tuple[int, ...]) -> None:
    """Each at its end, as tokenizers does (checked beside it below)."""
    assert tuple(map(len, truncate_texts([list(range(size)) for size in sizes], room))) == wanted


@pytest.mark.parametrize("sizes", [(9, 3), (3, 9), (9, 9), (9, 8), (8, 9), (5, 4)])
def test_cut_as_the_peer_cuts(words: Tokenizer, sizes: tuple[int, int], tmp_path: Path) -> None:
    """The same ids as AutoTokenizer with truncation, at odd and even lengths."""
    from transformers import AutoTokenizer

    words.save(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    texts = tuple(" ".join(["red"] * size) for size in sizes)
    for length in (8, 9, 10, 11):
        wanted = theirs(*texts, truncation=True, max_length=length)
        task = TaskSettings(length=length)
        found = encode_examples(
            [TextExample(texts, None, "")], words, HeadConfig("single"), task, ExampleCounts()
        )
        assert found.sequences == [[(wanted["input_ids"], wanted["token_type_ids"])]]


def scored(
    logits: list[list[float]], targets: Any, kind: TaskKind, **task: Any
) -> dict[str, float]:
    """Score logits [n, C] against targets [n] or [n, C]."""
    settings = TaskSettings(kind=kind, **task)
    settings = settings.model_copy(update={"metrics": resolve_metrics(settings)})
    rows = [np.array([row], np.float32) for row in logits]
    right = [np.array([one]) for one in targets]
    inputs = ModelInputs([[]] * len(rows), [""] * len(rows), [False] * len(rows), right)
    return compute_metrics(rows, inputs, [], HeadConfig(kind, tuple(settings.labels)), settings)


def test_scores() -> None:
    """One label by the largest logit, several by each above 0, numbers as they are."""
    logits = [[1.0, 2.0], [3.0, -1.0], [-1.0, -2.0]]
    one = scored(logits, [1, 0, 1], "single", metrics=["accuracy", "matthews"])
    assert one["accuracy"] == pytest.approx(2 / 3)
    many = scored(logits, [[1, 1], [1, 1], [0, 0]], "multi")
    assert many == {"f1": pytest.approx(6 / 7), "accuracy": pytest.approx(2 / 3)}
    number = scored([[row[0]] for row in logits], [1.0, 3.0, -1.0], "regression")
    assert number["pearson"] == pytest.approx(1.0)


def test_area_and_scores_of_one_label() -> None:
    """ROC-AUC ranks by probability; "f1:NAME" is the F1 of that label; less error is less."""
    chance = np.random.default_rng(1)
    logits = chance.normal(0, 3, (30, 3))
    logits += chance.normal(0, 9, (30, 1))
    classes = np.r_[np.arange(3), chance.integers(0, 3, 27)]
    names = ["roc_auc", "f1:c", "recall:a", "accuracy"]
    labels = ["a", "b", "c"]
    found = scored(logits.tolist(), classes.tolist(), "single", metrics=names, labels=labels)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert list(found) == names
    assert found["roc_auc"] == pytest.approx(
        peer.roc_auc_score(classes, shares, multi_class="ovr"), abs=1e-6
    )
    chosen = logits.argmax(-1)
    assert found["f1:c"] == pytest.approx(peer.f1_score(classes, chosen, average=None)[2])
    assert found["recall:a"] == pytest.approx(peer.recall_score(classes, chosen, average=None)[0])
    two = scored(
        logits[:, :2].tolist(), (classes > 0).astype(int).tolist(), "single", metrics=["roc_auc"]
    )
    assert two["roc_auc"] == pytest.approx(
        peer.roc_auc_score(classes > 0, logits[:, 1] - logits[:, 0])
    )
    right = chance.random((30, 3)) < 0.5
    names = ["macro_f1", "roc_auc", "precision:b"]
    many = scored(
        logits.tolist(), right.astype(int).tolist(), "multi", metrics=names, labels=labels
    )
    assert many["macro_f1"] == pytest.approx(peer.f1_score(right, logits > 0, average="macro"))
    assert many["roc_auc"] == pytest.approx(peer.roc_auc_score(right, logits), abs=1e-6)
    assert many["precision:b"] == pytest.approx(
        peer.precision_score(right, logits > 0, average=None)[1]
    )
    numbers = scored([[1.0], [4.0]], [2.0, 4.0], "regression", metrics=["mse", "f1_at_3.0", "mae"])
    assert numbers == {"mse": 0.5, "f1_at_3.0": 1.0, "mae": 0.5}


@pytest.mark.parametrize(
    ("kind", "labels", "metric", "known"),
    [
        ("single", [], "auc", "accuracy, f1, macro_f1, matthews, roc_auc, precision:LABEL"),
        ("single", ["a", "b"], "f1:c", "f1:LABEL"),
        ("regression", [], "f1:a", "pearson, spearman, mse, mae, f1_at_3.0"),
        ("span", [], "f1:a", "f1, exact, char_f1"),
        ("entities", ["O", "B-PER", "I-PER"], "f1:B-PER", "macro_f1, accuracy, precision:LABEL"),
        ("entities", [], "char_macro_f1", "macro_f1, accuracy, precision:LABEL"),
        ("choice", [], "f1:a", "accuracy"),
    ],
)
def test_unknown_metrics_are_refused(
    kind: TaskKind, labels: list[str], metric: str, known: str
) -> None:
    """The message names those that the kind of task has; a label has to be one of the task's."""
    with pytest.raises(SettingsError, match=rf"{metric!r} is no metric .*{known}"):
        resolve_metrics(TaskSettings(kind=kind, labels=labels, metrics=[metric]))


def test_report_by_label() -> None:
    """Of one label scores and confusions, of several scores by label, of numbers nothing."""
    logits = [[1.0, 2.0], [3.0, -1.0], [-1.0, -2.0]]

    def reported(targets: Any, kind: TaskKind) -> dict[str, Any]:
        rows = [np.array([row], np.float32) for row in logits]
        right = [np.array([target]) for target in targets]
        inputs = ModelInputs([[]] * 3, [""] * 3, [False] * 3, right)
        return compute_class_report(rows, inputs, [], HeadConfig(kind, ("a", "b")))

    one = reported([1, 0, 1], "single")
    assert one["confusion"] == {"a": {"a": 1}, "b": {"a": 1, "b": 1}}
    assert one["classes"]["a"] == {"precision": 0.5, "recall": 1.0, "f1": 2 / 3, "support": 1}
    several = reported([[1, 1], [1, 1], [0, 0]], "multi")
    assert "confusion" not in several
    assert several["classes"]["b"] == {"precision": 1.0, "recall": 0.5, "f1": 2 / 3, "support": 2}
    assert reported([1.0, 2.0, 3.0], "regression") == {}


@pytest.mark.parametrize("name", PUBLIC_TASKS)
def test_public_tasks_name_metrics_that_exist(name: str) -> None:
    """The settings of each public task are valid, and so are its metrics and its test file's."""
    task = TaskSettings.parse(
        {"name": name, **PUBLIC_TASKS[name].resolve_settings(Path("f"))}, "the task"
    )
    assert resolve_metrics(task) == task.metrics
    assert PUBLIC_TASKS[name].parse_test_settings().kind == task.kind
