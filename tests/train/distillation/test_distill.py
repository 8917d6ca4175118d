"""Distillation of embedding models and fine-tuned models: learning, output, resuming, errors."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bertsmith import bundle
from bertsmith.errors import BertsmithError, SettingsError
from bertsmith.files import write_json
from bertsmith.interop.sentence_transformers import read_pooling
from bertsmith.model.bert import BertForPreTraining
from bertsmith.tasks.embedding_data import TextPrompts
from bertsmith.tasks.embedding_settings import EmbeddingSettings, TextColumns
from bertsmith.tasks.inputs import ExampleCounts
from bertsmith.train.distillation import teacher_cache
from bertsmith.train.distillation.distill import distill
from bertsmith.train.distillation.embedding_distillation import (
    compute_principal_components,
    read_texts,
)
from bertsmith.train.distillation.settings import choose_layers
from bertsmith.train.engine import loop
from bertsmith.train.engine.finetuning_run import FinetuneResult
from bertsmith.train.engine.step import take_step
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.train.latest_snapshot import write_latest_snapshot
from bertsmith.use.embed import Embedder, embed
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict import predict
from tests.train.conftest import RecordingProgress, make_tokenizer
from tests.train.embedding.conftest import WIDTH, make_rows, save_start_model, write_rows

#: Settings with which a small student learns fast.
FAST_SETTINGS: dict[str, dict[str, Any]] = {
    "optim": {"lr": 3e-3},
    "model": {"dropout": 0.0, "attention_dropout": 0.0},
    "run": {"threads": 1, "precision": "fp32"},
    "distill": {"layers": 1, "batch_size": 16},
    "schedule": {"epochs": 4.0},
}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of two layers with random weights, in the layout of sentence-transformers."""
    folder = tmp_path_factory.mktemp("teacher")
    SentenceTransformer(
        modules=[
            modules.Transformer(str(save_start_model(folder / "start"))),
            modules.Pooling(WIDTH, pooling_mode="mean"),
            modules.Normalize(),
        ]
    ).save(str(folder / "embedder"))
    return folder / "embedder"


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text file of 150 lines."""
    file = tmp_path_factory.mktemp("lines") / "lines.txt"
    file.write_text("".join(row["text"] + "\n" for row in make_rows("texts", 150)))
    return file


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of 120 texts with the labels "topic 0" to "topic 9"."""
    folder = tmp_path_factory.mktemp("labels")
    return write_rows(folder / "train.jsonl", make_rows("labeled_texts", 120))


@pytest.fixture(scope="module")
def classifier(labels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of two layers that classifies the topics well."""
    folder = tmp_path_factory.mktemp("classifier")
    values: Any = {
        "optim": {"lr": 2e-3}, "run": {"threads": 1, "precision": "fp32"},
        "schedule": {"epochs": 12.0}, "task": {"batch_size": 8},
        "model": {"dropout": 0.0, "attention_dropout": 0.0},
    }  # fmt: skip
    start = save_start_model(folder / "start")
    result = finetune("classify", start, folder / "run", data=labels, values=values)
    assert result.metrics["accuracy"] > 0.9
    return folder / "run"


def train(
    teacher: Path, out: Path, *data: Path, start_from: Path | None = None, **tables: dict[str, Any]
) -> FinetuneResult:
    """Distill with fast settings; keywords are tables of settings."""
    values = {name: FAST_SETTINGS.get(name, {}) | table for name, table in tables.items()}
    return distill(
        teacher, out, data=data, start_from=start_from, values={**FAST_SETTINGS, **values}
    )


def read_weights(result: FinetuneResult) -> bytes:
    """Return the bytes of the weights of a student."""
    assert result.model is not None
    return (result.model / bundle.WEIGHTS_FILE).read_bytes()


@pytest.mark.parametrize(
    ("distill_settings", "width"),
    [
        ({}, WIDTH),
        ({"embedding_loss": "mse"}, WIDTH),
        ({"layers": None, "size": "tiny"}, WIDTH),
        ({"layers": None, "student_layers": [2, 1, 2]}, WIDTH),
    ],
    ids=["cosine", "mse", "random", "layers"],
)
def test_embedding_student_approaches_its_teacher(
    embedder: Path, lines: Path, tmp_path: Path, distill_settings: dict[str, Any], width: int
) -> None:
    """Vectors of held-out texts are similar to the teacher's, also in sentence-transformers."""
    table = FAST_SETTINGS["distill"] | distill_settings
    result = train(embedder, tmp_path / "run", lines, distill=table)
    start = train(
        embedder, tmp_path / "start", lines, distill=table, optim={"lr": 1e-12},
        schedule={"steps": 1, "epochs": None},
    )  # fmt: skip
    assert result.model is not None
    assert start.metrics["teacher_cosine"] < 0.97
    assert result.metrics["teacher_cosine"] > (1 + start.metrics["teacher_cosine"]) / 2
    assert result.metrics["examples"] == 15
    texts = [row["text"] for row in make_rows("texts", 9, seed=1)]
    expected = SentenceTransformer(str(result.model), device="cpu").encode(texts)
    assert expected.shape == (9, width)
    np.testing.assert_allclose(embed(result.model, texts), expected, rtol=0, atol=1e-6)
    cosines = (embed(embedder, texts) * expected).sum(1)
    assert cosines.mean() == pytest.approx(result.metrics["teacher_cosine"], abs=0.05)


def test_principal_components_keep_the_width_of_the_student(
    lines: Path, tmp_path: Path, embedder: Path
) -> None:
    """With pca, a narrower student keeps its width and has the similarities of its teacher."""
    start = tmp_path / "narrow"
    encoder = bundle.load_encoder(embedder)
    config = encoder.config.model_copy(update={"width": 14, "heads": 2})
    torch.manual_seed(0)
    bundle.save(start, BertForPreTraining(config), encoder.tokenizer, {})
    table = {"layers": None, "projection": "pca"}
    result = train(
        embedder, tmp_path / "run", lines, start_from=start, distill=table, optim={"lr": 1e-2},
        schedule={"epochs": 16.0},
    )  # fmt: skip
    assert result.model is not None
    texts = [row["text"] for row in make_rows("texts", 40, seed=1)]
    vectors, expected = embed(result.model, texts), embed(embedder, texts)
    assert vectors.shape == (40, 14)
    similarities = [(x @ x.T)[np.triu_indices(40, 1)] for x in (vectors, expected)]
    assert np.corrcoef(similarities)[0, 1] > 0.5


def test_mistakes_are_found_before_the_run_is_created(
    lines: Path, tmp_path: Path, embedder: Path
) -> None:
    """Settings that cannot be changed in an existing run are checked before it exists."""
    wide = {"layers": None, "size": "tiny", "projection": "pca"}
    with pytest.raises(SettingsError, match=r"128 dimensions .* use --projection dense"):
        train(embedder, tmp_path / "run", lines, distill=wide)
    with pytest.raises(SettingsError, match="num_frozen_layers is 9"):
        train(embedder, tmp_path / "run", lines, run={"num_frozen_layers": 9})
    assert not (tmp_path / "run" / "settings.toml").exists()


def test_student_of_another_width_is_evaluated_in_bf16(
    lines: Path, tmp_path: Path, embedder: Path
) -> None:
    """The linear layer after pooling gives vectors in bf16, which NumPy does not have."""
    table = {"layers": None, "size": "tiny", "projection": "dense"}
    result = train(
        embedder, tmp_path / "run", lines, distill=table, run={"precision": "bf16"},
        schedule={"steps": 1, "epochs": None},
    )  # fmt: skip
    assert -1.0 <= result.metrics["teacher_cosine"] <= 1.0


def test_principal_components_keep_inner_products() -> None:
    """Vectors in a subspace keep all inner products in as many components as it has dimensions."""
    rng = np.random.default_rng(0)
    vectors = (rng.normal(size=(50, 3)) @ rng.normal(size=(3, 11))).astype(np.float16)
    components = compute_principal_components(vectors, np.arange(50), 3)
    projected = components.project(vectors)
    full = vectors.astype(np.float32)
    np.testing.assert_allclose(projected @ projected.T, full @ full.T, rtol=0, atol=0.05)
    assert components.energy == pytest.approx(1, abs=1e-3)


def test_scored_pairs_are_training_texts_and_a_validation_set(
    embedder: Path, tmp_path: Path
) -> None:
    """Both texts of each pair are trained on; the metrics are those of --dev."""
    table = write_rows(tmp_path / "train.jsonl", make_rows("scored_pairs", 30))
    dev = write_rows(tmp_path / "dev.jsonl", make_rows("scored_pairs", 20, seed=1))
    result = train(
        embedder, tmp_path / "run", table, distill={"validation_files": {"dev": str(dev)}},
        schedule={"epochs": 1.0},
    )  # fmt: skip
    assert result.metric_names == ["spearman", "pearson"]
    assert result.steps == 4, "60 texts in batches of 16"


@pytest.mark.parametrize("hard_weight", [0.0, 0.5])
def test_task_student_learns_from_its_teacher(
    classifier: Path, labels: Path, tmp_path: Path, hard_weight: float
) -> None:
    """A student with random weights is accurate; without hard_weight it needs no labels."""
    dev = write_rows(tmp_path / "dev.jsonl", make_rows("labeled_texts", 60, seed=1))
    train_file = labels
    if not hard_weight:
        rows = [json.loads(line) for line in labels.read_text().splitlines()]
        texts = [{"text": row["text"]} for row in rows]
        train_file = write_rows(tmp_path / "texts.jsonl", texts)
    table = {"layers": None, "size": "tiny", "hard_weight": hard_weight}
    validation = {"validation_files": {"dev": str(dev)}}
    result = train(
        classifier, tmp_path / "run", train_file, distill=table | validation, optim={"lr": 1e-3},
        schedule={"epochs": 12.0},
    )  # fmt: skip
    assert result.model is not None
    assert result.metrics["accuracy"] > 0.9
    assert evaluate(result.model, data=dev)["accuracy"] == result.metrics["accuracy"]
    teacher_config, config = (
        json.loads((path / "config.json").read_text())
        for path in (bundle.locate_model(classifier), result.model)
    )
    assert config["id2label"] == teacher_config["id2label"]
    model = AutoModelForSequenceClassification.from_pretrained(result.model).eval()
    tokens = AutoTokenizer.from_pretrained(result.model)("ba be bi", return_tensors="pt")
    with torch.no_grad():
        expected = model(**tokens).logits[0].softmax(-1).tolist()
    probabilities = dict(predict(result.model, ["ba be bi"])[0].labels)
    for index, label in config["id2label"].items():
        assert probabilities[label] == pytest.approx(expected[int(index)], abs=1e-5)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = next(entry for entry in map(json.loads, lines) if entry["kind"] == "train")
    assert ("hard_loss" in json.dumps(losses)) == bool(hard_weight)


def test_layers_of_the_teacher_are_copied(classifier: Path, labels: Path, tmp_path: Path) -> None:
    """A student of given layers starts from their weights, and from the embeddings and the head."""
    result = train(
        classifier, tmp_path / "run", labels, distill={"layers": None, "student_layers": [2]},
        optim={"lr": 1e-12}, schedule={"steps": 1, "epochs": None},
    )  # fmt: skip
    assert result.model is not None
    teacher, student = (
        load_file(path / bundle.WEIGHTS_FILE)
        for path in (bundle.locate_model(classifier), result.model)
    )
    for name, weight in student.items():
        torch.testing.assert_close(weight, teacher[name.replace("layer.0.", "layer.1.")])


@pytest.mark.parametrize(
    ("objective", "schedule"),
    [("embedding", {"epochs": 2.0}), ("task", {"epochs": 2.0}), ("task", {"steps": 14})],
    ids=["embedding", "task", "steps"],
)
def test_interrupted_run_ends_with_the_same_bytes(
    embedder: Path,
    classifier: Path,
    labels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    objective: str,
    schedule: dict[str, float],
) -> None:
    """A run interrupted while the teacher computes and in an epoch ends with the same weights."""
    teacher = embedder if objective == "embedding" else classifier
    monkeypatch.setattr(teacher_cache, "_CHUNK_ROWS", 50)
    tables: dict[str, Any] = {
        "checkpoint": {"steps": 2}, "schedule": {"epochs": None, **schedule},
        "model": {"dropout": 0.1, "attention_dropout": 0.1},
    }  # fmt: skip
    expected = train(teacher, tmp_path / "uninterrupted", labels, **tables)

    def stop_after(function: Any, num_calls: int) -> Any:
        remaining = num_calls

        def call(*arguments: Any, **keywords: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                raise KeyboardInterrupt
            return function(*arguments, **keywords)

        return call

    run = tmp_path / "interrupted"
    with monkeypatch.context() as patch:
        patch.setattr(f"{teacher_cache.__name__}.write_json", stop_after(write_json, 1))
        with pytest.raises(KeyboardInterrupt):
            train(teacher, run, labels, **tables)
    state = json.loads((run / "teacher" / "state.json").read_text())
    assert state["num_rows"] == 50
    with monkeypatch.context() as patch:
        patch.setattr(loop, "take_step", stop_after(take_step, 9))
        with pytest.raises(KeyboardInterrupt):
            train(teacher, run, labels, **tables)
    write_latest_snapshot(run, tmp_path / "snapshot")
    assert bundle.load_encoder(tmp_path / "snapshot").config.layers == 1
    resumed = train(teacher, run, labels, **tables)
    assert read_weights(resumed) == read_weights(expected)
    assert resumed.metrics == expected.metrics


def test_teacher_outputs_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size is logged first; cached rows are reused unless the teacher or the data differ."""
    monkeypatch.setattr(teacher_cache, "_CHUNK_ROWS", 4)
    calls: list[tuple[int, int]] = []

    def compute_rows(start: int, end: int) -> np.ndarray[Any, Any]:
        calls.append((start, end))
        return np.arange(start, end, dtype=np.float32)[:, None] * np.ones(3, np.float32)

    progress = RecordingProgress()
    cache = teacher_cache.cache_outputs(tmp_path, 10, 3, "a", compute_rows, progress)
    assert calls == [(0, 4), (4, 8), (8, 10)]
    assert cache.dtype == np.float16
    assert cache[:, 1].tolist() == list(range(10))
    assert "10 x 3 in 16 bits, 0.0 MB in" in progress.messages[0]
    teacher_cache.cache_outputs(tmp_path, 10, 3, "a", compute_rows, progress)
    assert (len(calls), len(progress.messages)) == (3, 1)
    teacher_cache.cache_outputs(tmp_path, 10, 3, "b", compute_rows, progress)
    assert len(calls) == 6
    with pytest.raises(BertsmithError, match="rows 0 to 3 are not finite numbers of 16 bits"):
        teacher_cache.cache_outputs(
            tmp_path / "large", 10, 3, "a", lambda start, end: np.full((end - start, 3), 1e5),
            progress,
        )  # fmt: skip
    # The scores of a regression can be as large as the labels.
    cache = teacher_cache.cache_outputs(
        tmp_path, 10, 3, "b", lambda start, end: np.full((end - start, 3), 1e5 + 1), progress,
        np.float32,
    )  # fmt: skip
    assert cache.dtype == np.float32
    assert cache.max() == 1e5 + 1


def test_layers_are_spread_evenly() -> None:
    """The first and the last layer are always among them."""
    assert choose_layers(12, 6) == [1, 3, 5, 8, 10, 12]
    assert choose_layers(6, 3) == [1, 4, 6]
    assert choose_layers(6, 1) == [1]
    assert choose_layers(4, 4) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("teacher_name", "distill_settings", "message"),
    [
        ("embedder", {"layers": None}, "no student: give one of --layers"),
        ("embedder", {"size": "tiny"}, "size and layers both choose the student"),
        ("embedder", {"layers": 3}, "distill.layers is 3, but the teacher has 2 layers"),
        ("embedder", {"layers": None, "student_layers": [1, 7]}, "student_layers has 7, but"),
        ("embedder", {"layers": None, "size": "minute"}, "size is 'minute'; choose one of tiny"),
        ("embedder", {"objective": "task"}, "needs a fine-tuned teacher"),
        ("embedder", {"hard_weight": 0.5}, "hard_weight: not used by the objective embedding"),
        ("embedder", {"max_seqlen": 99}, "distill.max_seqlen is 99, but the teacher takes"),
        ("classifier", {"projection": "pca"}, "projection: not used by the objective task"),
        ("classifier", {"train_files": []}, "no training file"),
        ("classifier", {"text_column": "body"}, "body"),
    ],
)
def test_unsuitable_settings_are_errors(
    request: pytest.FixtureRequest,
    labels: Path,
    tmp_path: Path,
    teacher_name: str,
    distill_settings: dict[str, Any],
    message: str,
) -> None:
    """The error says what is wrong, and no run directory is left behind."""
    teacher = request.getfixturevalue(teacher_name)
    data = [] if "train_files" in distill_settings else [labels]
    with pytest.raises(BertsmithError, match=message):
        train(teacher, tmp_path / "run", *data, distill=distill_settings)
    assert not (tmp_path / "run").exists()


def test_other_tokenizers_are_rejected(
    embedder: Path, labels: Path, tmp_path: Path, classifier: Path
) -> None:
    """A student with another vocabulary than its teacher cannot be trained."""
    encoder = bundle.load_encoder(embedder)
    tokenizer = make_tokenizer(("xa",))
    config = encoder.config.model_copy(update={"vocab_size": tokenizer.vocab_size})
    bundle.save(tmp_path / "other", BertForPreTraining(config), tokenizer, {})
    for teacher in (embedder, classifier):
        with pytest.raises(BertsmithError, match=r"tokenizer .* differs from the teacher's"):
            train(
                teacher, tmp_path / "run", labels, start_from=tmp_path / "other",
                distill={"layers": None},
            )  # fmt: skip


def test_student_learns_the_vectors_of_documents(
    embedder: Path, lines: Path, tmp_path: Path
) -> None:
    """Lines have the document prompt if there is no default prompt.

    The agreement is that of the vectors that the teacher and the student have in an index.
    """
    teacher = shutil.copytree(embedder, tmp_path / "teacher")
    write_json(
        teacher / "config_sentence_transformers.json",
        {
            "prompts": {"query": "ba be ", "document": "bo bi "},
            "truncate_dim": 5,
            "matryoshka_dims": [WIDTH, 5],
        },
    )
    result = train(
        teacher, tmp_path / "run", lines, distill={"validation_fraction": 0.2},
        schedule={"steps": 1, "epochs": None},
    )  # fmt: skip
    assert result.model is not None
    texts = lines.read_text().splitlines()
    expected = Embedder.load(teacher).with_document_prompt().encode(texts)
    outputs = np.load(tmp_path / "run" / "teacher" / "outputs.npy")
    np.testing.assert_allclose(outputs[:, :5], expected, rtol=0, atol=1e-3)
    vectors = Embedder.load(result.model).with_document_prompt().encode(texts)
    assert vectors.shape == expected.shape == (len(texts), 5)
    heldout = np.random.default_rng(0).permutation(len(texts))[: round(0.2 * len(texts))]
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    cosines = (vectors * expected).sum(1) / norms
    assert result.metrics["teacher_cosine"] == pytest.approx(cosines[heldout].mean(), abs=1e-3)
    assert cosines.mean() < 0.99
    pooling = read_pooling(result.model)
    assert pooling is not None
    assert pooling.matryoshka_dims == ()


def test_lists_of_negatives_are_training_texts(tmp_path: Path) -> None:
    """Tables as `bertsmith mine` writes them are read; errors name the option of a column."""

    def tokenize(texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
        return [[len(text)] for text in texts]

    mined = {"anchor": "ba", "positive": "be", "negatives": ["bi", "bo"]}
    table = write_rows(tmp_path / "mined.jsonl", [mined, {**mined, "negatives": ["bi"]}])
    settings, prompts = EmbeddingSettings(), TextPrompts(query="query ", document="text ")
    texts, _ = read_texts([table], settings, tokenize, prompts)
    assert texts.ids.tolist() == [len("query ba"), *[len("text be")] * 3]
    write_rows(table, [{**mined, "negatives": [7]}])
    with pytest.raises(BertsmithError, match="not text in column 'negatives'"):
        read_texts([table], settings, tokenize, prompts)
    table = tmp_path / "pairs.csv"
    table.write_text("ba,be\nbi,bo\n")
    for name, option in (("pair", "--pair"), ("negatives", "--negatives")):
        columns: dict[str, Any] = {"text": "ba", "pair": "be", "negatives": []}
        columns[name] = ["lost"] if name == "negatives" else "lost"
        settings = EmbeddingSettings(columns=TextColumns(**columns))
        with pytest.raises(BertsmithError, match=f"no column 'lost'.*{option}"):
            read_texts([table], settings, tokenize, prompts)


def test_text_file_with_the_columns_is_a_table(tmp_path: Path) -> None:
    """A .txt file is read as a table if its first line names the columns, else line by line."""

    def tokenize(texts: Sequence[str], counts: ExampleCounts) -> list[list[int]]:
        return [[len(text)] for text in texts]

    settings = EmbeddingSettings(columns=TextColumns(text="document"))
    table, lines = tmp_path / "ratings.txt", tmp_path / "lines.txt"
    table.write_text("id\tdocument\tlabel\n17\tbabe\t1\n")
    lines.write_text("ba\nbabibo\n")
    texts, _ = read_texts([table], settings, tokenize, TextPrompts())
    assert texts.ids.tolist() == [4]
    texts, _ = read_texts([lines], settings, tokenize, TextPrompts())
    assert texts.ids.tolist() == [2, 6]


def test_at_least_one_text_is_trained_on(embedder: Path, tmp_path: Path) -> None:
    """A large validation_fraction leaves a training text."""
    (tmp_path / "lines.txt").write_text("ba\nbe\n")
    result = train(
        embedder, tmp_path / "run", tmp_path / "lines.txt", distill={"validation_fraction": 0.9},
        schedule={"steps": 1, "epochs": None},
    )  # fmt: skip
    assert result.metrics["examples"] == 1


def test_empty_data_is_an_error(embedder: Path, tmp_path: Path) -> None:
    """A file without texts, or with a single one, cannot train a student."""
    (tmp_path / "lines.txt").write_text("\n\n")
    with pytest.raises(BertsmithError, match="this file has no examples"):
        train(embedder, tmp_path / "run", tmp_path / "lines.txt")
    (tmp_path / "lines.txt").write_text("ba\nba\n")
    with pytest.raises(BertsmithError, match="1 distinct text is too few to hold one out"):
        train(embedder, tmp_path / "run", tmp_path / "lines.txt")
