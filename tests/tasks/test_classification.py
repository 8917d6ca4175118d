"""Reading, encoding and scoring labeled texts and text pairs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn import metrics as sklearn_metrics

from bertsmith.bundle import HeadConfig, TaskKind
from bertsmith.errors import SettingsError, TaskError
from bertsmith.tasks import text_pairs
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
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

TASK = TaskSettings(max_seqlen=8)
WORDS = ("red", "green", "blue", "##s")


@pytest.fixture
def tokenizer() -> Tokenizer:
    """A tokenizer for three words and a suffix."""
    return Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, *WORDS)))


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        ("single", "   ,1", r"line 3: an empty text in column 'text'"),
        ("single", "red,", r"line 3: an empty label"),
        ("single", "red,1,1", r"line 3: 3 columns where 2 are expected"),
        ("single", "red,9", r"line 3: an unknown label: '9'; known labels are '0', '1'"),
        ("regression", "red,much", r"line 3: a score that is not a number: 'much'"),
        ("regression", 'red,"-1,5"', r"'-1,5'; write a decimal point instead of the comma"),
        ("regression", "red,nan", r"line 3: a missing label: 'nan'"),
        ("regression", "red, ", r"line 3: an empty label"),
        ("regression", "red,-1e39", r"line 3: a score that exceeds the 32-bit range: '-1e39'"),
        ("multi", "red,1|7", r"line 3: an unknown label: '7'"),
        ("single", "red,NaN", r"line 3: a missing label: 'NaN'"),
        ("multi", "red,nan", r"line 3: a missing label: 'nan'"),
        ("multi", "red,1|NaN", r"line 3: a missing label: 'NaN'"),
    ],
)
def test_invalid_row_is_an_error_or_skipped(
    tmp_path: Path, kind: TaskKind, row: str, message: str
) -> None:
    """The error names file, line and reason; with skip_invalid the row is skipped and counted."""
    file = tmp_path / "a.csv"
    file.write_text(f"text,label\nred,1\n{row}\ngreen,0\n")
    labels = None if kind == "regression" else ["0", "1"]
    with pytest.raises(TaskError, match=message):
        read_examples(file, TaskSettings(kind=kind), labels=labels)
    examples, counts = read_examples(
        file, TaskSettings(kind=kind, skip_invalid=True), labels=labels
    )
    assert [example.texts for example in examples] == [("red",), ("green",)]
    assert (counts.num_read, counts.num_used, sum(counts.skipped.values())) == (3, 2, 1)
    assert list(counts.as_dict()["first_skipped"].values()) == [f"{file}, line 3"]


def test_reviews_of_nsmc_without_text_are_skipped(tmp_path: Path) -> None:
    """The training file of NSMC has a few rows with an empty text."""
    file = tmp_path / "ratings_train.txt"
    file.write_text("id\tdocument\tlabel\n1\t좋다\t1\n2\t\t0\n3\t별로\t0\n")
    task = TaskSettings.parse(PUBLIC_TASKS["nsmc"].fixed_settings, "the test")
    examples, counts = read_examples(file, task)
    assert [example.texts for example in examples] == [("좋다",), ("별로",)]
    assert sum(counts.skipped.values()) == 1


def test_split_rows_of_qqp_are_skipped_except_in_the_test_file(tmp_path: Path) -> None:
    """The official training file of QQP has rows that are split over two lines."""
    file = tmp_path / "train.tsv"
    columns = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    file.write_text(f"{columns}1\t2\t3\ta\tb\t1\n4\t5\tc\n6\t7\t8\td\te\t0\n")
    task = TaskSettings.parse(PUBLIC_TASKS["qqp"].fixed_settings, "the test")
    examples, counts = read_examples(file, task)
    assert [example.texts for example in examples] == [("a", "b"), ("d", "e")]
    assert sum(counts.skipped.values()) == 1
    with pytest.raises(TaskError, match="3 columns"):
        read_examples(file, PUBLIC_TASKS["qqp"].parse_test_settings(), labeled=False)


def test_duplicate_id_is_rejected(tmp_path: Path) -> None:
    """Values of the column "id" must be unique, unless task.id_column is empty."""
    file = tmp_path / "a.csv"
    file.write_text("id,text,label\n7,red,1\n8,green,0\n7,blue,1\n")
    with pytest.raises(TaskError, match=r"line 4: a duplicate id: '7'; if the column 'id'"):
        read_examples(file, TaskSettings())
    examples, counts = read_examples(file, TaskSettings(skip_invalid=True))
    assert len(examples) == 2
    assert counts.skipped == {"a duplicate id": 1}
    assert len(read_examples(file, TaskSettings(id_column=""))[0]) == 3
    # pandas writes its row numbers into a column without a name.
    file.write_text(",text,label\n0,red,1\n0,green,0\n")
    assert len(read_examples(file, TaskSettings(id_column=""))[0]) == 2


def test_equal_scores_are_rejected(tmp_path: Path) -> None:
    """A regression task needs at least two different scores."""
    file = tmp_path / "a.csv"
    file.write_text("text,label\nred,2\ngreen,2.0\n")
    examples, _ = read_examples(file, TaskSettings(kind="regression"))
    with pytest.raises(TaskError, match=r"every score is 2\.0; expected at least two different"):
        collect_labels(examples, str(file))


@pytest.mark.parametrize(
    ("kind", "text", "label", "message"),
    [
        ("single", 5, "1", "line 1: a value that is not text in column 'text': found a number: 5"),
        ("single", True, "1", "line 1: a value that is not text in column 'text': found a boolean"),
        ("single", ["red"], "1", "line 1: a value that is not text in column 'text': found a list"),
        (
            "single",
            {"a": "red"},
            "1",
            "line 1: a value that is not text in column 'text': found an object",
        ),
        ("single", "red \ud83d", "1", "line 1: a lone surrogate"),
        ("single", "red", {"a": 1}, "line 1: a label that is neither text nor a number"),
        ("single", "red", ["0", "1"], "line 1: several labels where one is expected"),
        ("single", "red", float("nan"), "line 1: a missing label: NaN"),
        ("single", "red", "g \ud83d", "line 1: a lone surrogate .* in column 'label'"),
        ("multi", "red", ["0", "\ud83d"], "line 1: a lone surrogate .* in column 'label'"),
        ("multi", "red", [0, 1, 0], "line 1: a label that occurs twice; give names of labels"),
        ("multi", "red", [float("inf")], "line 1: a label that is not finite: inf"),
        ("multi", "red", {"a": 1}, "line 1: a label that is neither text nor a number"),
        (
            "multi",
            "red",
            ["0", ["1"]],
            r"line 1: a label that is neither text nor a number: \['1'\]",
        ),
        ("regression", "red", True, "line 1: a score that is not a number: True"),
        ("regression", "red", [1.0], "line 1: a score that is not a number"),
        ("regression", "red", float("nan"), "line 1: a missing label: NaN"),
    ],
)
def test_wrong_json_type_is_an_error_or_skipped(
    tmp_path: Path, kind: TaskKind, text: Any, label: Any, message: str
) -> None:
    """Texts and labels of a wrong type are not converted; their rows are errors or skipped."""
    rows = [{"text": text, "label": label}, {"text": "red", "label": 1}]
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(TaskError, match=message):
        read_examples(file, TaskSettings(kind=kind))
    ((example,), counts) = read_examples(file, TaskSettings(kind=kind, skip_invalid=True))
    assert example.label == {"single": "1", "multi": {"1"}, "regression": 1.0}[kind]
    assert sum(counts.skipped.values()) == 1


def test_missing_column_is_an_error_even_with_skip_invalid(tmp_path: Path) -> None:
    """A missing column is a mistake in the settings, so no row is skipped."""
    (tmp_path / "a.csv").write_text("words,label\nred,1\n")
    with pytest.raises(TaskError, match=r"no column 'text'; the columns are 'words', 'label'"):
        read_examples(tmp_path / "a.csv", TaskSettings(skip_invalid=True))


def test_json_row_without_the_key_is_invalid(tmp_path: Path) -> None:
    """A row without the key can be skipped, also the first one, unless all rows lack it."""
    good, bad = '{"text": "red", "label": 1}\n', '{"text": "red"}\n'
    (tmp_path / "a.jsonl").write_text("oops\n" + good + bad + good)
    (tmp_path / "b.jsonl").write_text("oops\n" + bad + good)
    examples, counts = read_examples(tmp_path / "a.jsonl", TaskSettings(skip_invalid=True))
    assert (len(examples), counts.skipped["there is no column 'label'"]) == (2, 1)
    examples, counts = read_examples(tmp_path / "b.jsonl", TaskSettings(skip_invalid=True))
    assert (len(examples), counts.skipped["there is no column 'label'"]) == (1, 1)
    (tmp_path / "b.jsonl").write_text("oops\n" + bad + bad)
    message = (
        r"skipped \(3\), such as .*b\.jsonl, line 2: there is no column 'label'; the columns are"
    )
    with pytest.raises(TaskError, match=message):
        read_examples(tmp_path / "b.jsonl", TaskSettings(skip_invalid=True))
    (tmp_path / "a.jsonl").write_text(good + bad)
    with pytest.raises(
        TaskError, match=r"line 2: there is no column 'label'; the .*--skip-invalid"
    ):
        read_examples(tmp_path / "a.jsonl", TaskSettings())


def test_file_without_examples_is_rejected(tmp_path: Path) -> None:
    """A header alone is an error."""
    (tmp_path / "a.csv").write_text("text,label\n")
    with pytest.raises(TaskError, match="this file has no examples; expected"):
        read_examples(tmp_path / "a.csv", TASK)


def test_labels_are_sorted() -> None:
    """Integers are in numeric order, other names in alphabetical order; one label is an error."""

    def sort_labels(*labels: str) -> tuple[str, ...]:
        return collect_labels([TextExample(("x",), label, "") for label in labels], "f")

    assert sort_labels("10", "9", "-1", "9") == ("-1", "9", "10")
    assert sort_labels("b", "a", "10") == ("10", "a", "b")
    assert sort_labels("1", "01", "0") == ("0", "01", "1")
    assert sort_labels("²", "1") == ("1", "²")
    with pytest.raises(TaskError, match="every label is 'a'"):
        sort_labels("a", "a")


def test_inputs_follow_the_paper(tokenizer: Tokenizer) -> None:
    """Inputs are [CLS] A [SEP] B [SEP] with segments 0 and 1, and truncated ones are counted."""
    examples = [
        TextExample(("red greens", "blue"), "b", "f, line 1"),
        TextExample(("red", "green " * 9), "a", "f, line 2"),
    ]
    counts = ExampleCounts()
    head = HeadConfig("single", ("a", "b"))
    inputs = encode_examples(examples, tokenizer, head, TASK, counts)
    tokens = [tokenizer.ids_to_tokens(ids) for [(ids, _)] in inputs.sequences]
    assert tokens[0] == ["[CLS]", "red", "green", "##s", "[SEP]", "blue", "[SEP]"]
    assert inputs.sequences[0][0][1] == [0] * 5 + [1] * 2
    assert tokens[1] == ["[CLS]", "red", "[SEP]", *["green"] * 4, "[SEP]"]
    assert inputs.targets is not None
    assert np.concatenate(inputs.targets).tolist() == [1, 0]
    assert (counts.num_truncated, inputs.is_truncated) == (1, [False, True])


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "expected"),
    [((9, 3), 8, (5, 3)), ((3, 9), 8, (3, 5)), ((9, 9), 7, (3, 4)), ((9, 8), 7, (4, 3)),
     ((2, 2), 8, (2, 2)), ((9,), 4, (4,))],
)  # fmt: skip
def test_longer_text_is_truncated_first(
    lengths: tuple[int, ...], max_tokens: int, expected: tuple[int, ...]
) -> None:
    """Texts are truncated to the expected lengths; if both are long, each gets half the tokens."""
    texts = [list(range(length)) for length in lengths]
    assert tuple(map(len, truncate_texts(texts, max_tokens))) == expected


@pytest.mark.parametrize("lengths", [(9, 3), (3, 9), (9, 9), (9, 8), (8, 9), (5, 4)])
def test_truncation_equals_transformers(
    tokenizer: Tokenizer, lengths: tuple[int, int], tmp_path: Path
) -> None:
    """Ids and segments equal AutoTokenizer's with truncation, for odd and even lengths."""
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path)
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = tuple(" ".join(["red"] * length) for length in lengths)
    example = TextExample(texts, None, "")
    for max_length in (8, 9, 10, 11):
        expected = hf_tokenizer(*texts, truncation=True, max_length=max_length)
        task = TaskSettings(max_seqlen=max_length)
        inputs = encode_examples([example], tokenizer, HeadConfig("single"), task, ExampleCounts())
        assert inputs.sequences == [[(expected["input_ids"], expected["token_type_ids"])]]


def test_long_texts_are_encoded_in_parts(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few long texts are encoded together, and the inputs are the same."""
    examples = [TextExample(("red " * length, "blue"), None, "") for length in (1, 30, 20, 2, 40)]
    task = TaskSettings(max_seqlen=8)
    encode = partial(encode_examples, examples, tokenizer, HeadConfig("single"), task)
    expected = encode(ExampleCounts())
    sizes: list[int] = []
    encode_batch = Tokenizer.encode_batch

    def record(self: Tokenizer, texts: list[str]) -> list[list[int]]:
        sizes.append(sum(map(len, texts)))
        return encode_batch(self, texts)

    monkeypatch.setattr(Tokenizer, "encode_batch", record)
    monkeypatch.setattr(text_pairs, "_CHUNK_CHARACTERS", 100)
    inputs = encode(ExampleCounts())
    assert (inputs.sequences, inputs.is_truncated) == (expected.sequences, expected.is_truncated)
    assert sizes == [8 + 124, 84 + 12 + 164]


def compute_logit_metrics(
    logits: list[list[float]], targets: Any, kind: TaskKind, **settings: Any
) -> dict[str, float]:
    """Compute metrics of logits [n, C] for targets [n] or [n, C]."""
    task = TaskSettings(kind=kind, **settings)
    task = task.model_copy(update={"metrics": resolve_metrics(task)})
    outputs = [np.array([row], np.float32) for row in logits]
    unit_targets = [np.array([target]) for target in targets]
    num_units = len(outputs)
    inputs = ModelInputs([[]] * num_units, [""] * num_units, [False] * num_units, unit_targets)
    return compute_metrics(outputs, inputs, [], HeadConfig(kind, tuple(task.labels)), task)


def test_threshold_of_several_labels_applies_to_metrics_and_report() -> None:
    """A label is predicted if the sigmoid of its logit exceeds task.label_threshold."""
    # Sigmoids: 0.73 and 0.27, 0.62 and 0.38.
    logits = [[1.0, -1.0], [0.5, -0.5]]
    targets = [[1, 0], [0, 1]]

    def compute_accuracy(threshold: float) -> float:
        task = TaskSettings(
            kind="multi", labels=["a", "b"], metrics=["accuracy", "recall:b"],
            label_threshold=threshold,
        )  # fmt: skip
        outputs = [np.array([row], np.float32) for row in logits]
        unit_targets = [np.array([target]) for target in targets]
        inputs = ModelInputs([[]] * 2, [""] * 2, [False] * 2, unit_targets)
        scores = compute_metrics(outputs, inputs, [], HeadConfig("multi", ("a", "b")), task)
        assert scores["recall:b"] == float(threshold < 0.38)
        return scores["accuracy"]

    assert [compute_accuracy(threshold) for threshold in (0.3, 0.5, 0.7)] == [0.5, 0.5, 0.5]
    assert compute_accuracy(0.26) == 0.0


def test_predictions_are_derived_from_logits() -> None:
    """A label is predicted by argmax, multiple labels by logits above 0, a score is the logit."""
    logits = [[1.0, 2.0], [3.0, -1.0], [-1.0, -2.0]]
    single = compute_logit_metrics(logits, [1, 0, 1], "single", metrics=["accuracy", "matthews"])
    assert single["accuracy"] == pytest.approx(2 / 3)
    multi = compute_logit_metrics(logits, [[1, 1], [1, 1], [0, 0]], "multi")
    # 3 of 3 predicted and 4 true labels are correct: F1 = 2 * 3 / (3 + 4).
    assert multi == {"f1": pytest.approx(6 / 7), "accuracy": pytest.approx(2 / 3)}
    regression = compute_logit_metrics([[row[0]] for row in logits], [1.0, 3.0, -1.0], "regression")
    assert regression["pearson"] == pytest.approx(1.0)


def draw_logits(rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw the logits of 30 examples and 3 classes, with a large offset for each example."""
    return rng.normal(0, 3, (30, 3)) + rng.normal(0, 9, (30, 1))


def test_single_label_metrics_equal_scikit_learn() -> None:
    """ROC-AUC ranks by probability, and "f1:NAME" is the F1 of one label."""
    rng = np.random.default_rng(1)
    logits = draw_logits(rng)
    classes = np.r_[np.arange(3), rng.integers(0, 3, 27)]
    names = ["roc_auc", "f1:c", "recall:a", "accuracy"]
    labels = ["a", "b", "c"]
    scores = compute_logit_metrics(
        logits.tolist(), classes.tolist(), "single", metrics=names, labels=labels
    )
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    assert list(scores) == names
    assert scores["roc_auc"] == pytest.approx(
        sklearn_metrics.roc_auc_score(classes, probabilities, multi_class="ovr"), abs=1e-6
    )
    predicted = logits.argmax(-1)
    class_f1 = sklearn_metrics.f1_score(classes, predicted, average=None)
    assert scores["f1:c"] == pytest.approx(class_f1[2])
    class_recall = sklearn_metrics.recall_score(classes, predicted, average=None)
    assert scores["recall:a"] == pytest.approx(class_recall[0])


def test_binary_roc_auc_equals_scikit_learn() -> None:
    """With two classes, examples are ranked by the difference of the logits."""
    rng = np.random.default_rng(1)
    logits = draw_logits(rng)
    is_positive = rng.random(30) < 0.6
    scores = compute_logit_metrics(
        logits[:, :2].tolist(), is_positive.astype(int).tolist(), "single", metrics=["roc_auc"]
    )
    assert scores["roc_auc"] == pytest.approx(
        sklearn_metrics.roc_auc_score(is_positive, logits[:, 1] - logits[:, 0])
    )


def test_multilabel_metrics_equal_scikit_learn() -> None:
    """Macro F1, ROC-AUC and the precision of one label agree."""
    rng = np.random.default_rng(1)
    logits = draw_logits(rng)
    labels = ["a", "b", "c"]
    indicators = rng.random((30, 3)) < 0.5
    names = ["macro_f1", "roc_auc", "precision:b"]
    scores = compute_logit_metrics(
        logits.tolist(), indicators.astype(int).tolist(), "multi", metrics=names, labels=labels
    )
    assert scores["macro_f1"] == pytest.approx(
        sklearn_metrics.f1_score(indicators, logits > 0, average="macro")
    )
    assert scores["roc_auc"] == pytest.approx(
        sklearn_metrics.roc_auc_score(indicators, logits), abs=1e-6
    )
    assert scores["precision:b"] == pytest.approx(
        sklearn_metrics.precision_score(indicators, logits > 0, average=None)[1]
    )


def test_regression_metrics_are_computed_by_name() -> None:
    """The requested metrics are returned; one of the two scores is wrong by 1."""
    names = ["mse", "f1_at_3.0", "mae"]
    scores = compute_logit_metrics([[1.0], [4.0]], [2.0, 4.0], "regression", metrics=names)
    assert scores == {"mse": 0.5, "f1_at_3.0": 1.0, "mae": 0.5}


@pytest.mark.parametrize(
    ("kind", "labels", "metric", "supported"),
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
def test_unknown_metric_is_rejected(
    kind: TaskKind, labels: list[str], metric: str, supported: str
) -> None:
    """The message lists the metrics of the kind; the label of a metric must be one of the task."""
    with pytest.raises(SettingsError, match=rf"{metric!r} is not a metric .*{supported}"):
        resolve_metrics(TaskSettings(kind=kind, labels=labels, metrics=[metric]))


def test_only_single_label_reports_have_a_confusion_matrix() -> None:
    """Multi-label reports have only the scores of each label; regression reports are empty."""
    logits = [[1.0, 2.0], [3.0, -1.0], [-1.0, -2.0]]

    def compute_report(targets: Any, kind: TaskKind) -> dict[str, Any]:
        outputs = [np.array([row], np.float32) for row in logits]
        unit_targets = [np.array([target]) for target in targets]
        inputs = ModelInputs([[]] * 3, [""] * 3, [False] * 3, unit_targets)
        head = HeadConfig(kind, ("a", "b"))
        return compute_class_report(outputs, inputs, [], head, TaskSettings(kind=kind))

    single = compute_report([1, 0, 1], "single")
    assert single["confusion"] == {"a": {"a": 1}, "b": {"a": 1, "b": 1}}
    assert single["classes"]["a"] == {"precision": 0.5, "recall": 1.0, "f1": 2 / 3, "support": 1}
    multi = compute_report([[1, 1], [1, 1], [0, 0]], "multi")
    assert "confusion" not in multi
    assert multi["classes"]["b"] == {"precision": 1.0, "recall": 0.5, "f1": 2 / 3, "support": 2}
    assert compute_report([1.0, 2.0, 3.0], "regression") == {}


@pytest.mark.parametrize("name", PUBLIC_TASKS)
def test_settings_of_public_tasks_are_valid(name: str) -> None:
    """The settings are valid, and test files have the same kind of task as training files."""
    values = PUBLIC_TASKS[name].resolve_settings(Path("f"))
    task = TaskSettings.parse({"name": name, **values}, "the task")
    assert resolve_metrics(task) == task.metrics
    assert PUBLIC_TASKS[name].parse_test_settings().kind == task.kind
