"""Fine-tuning, evaluation and prediction for entities and other tags; BiLSTM features."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from bertsmith.bundle import WEIGHTS_FILE, load_fine_tuned
from bertsmith.errors import InputError, ModelError, SettingsError, TaskError
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict import predict
from bertsmith.use.predict_lines import predict_lines
from bertsmith.use.tag import tag
from tests.train.conftest import WORDS
from tests.train.finetuning.test_finetune import FAST_SETTINGS, NO_DROPOUT, write_table

NAMES, PLACES = WORDS[:6], WORDS[6:12]
#: Words that are not names. Punctuation is repeated, so that it is frequent in the training data.
OTHER_WORDS = [*WORDS[12:], *",." * 6]


def write_conll(path: Path, count: int, seed: int, *, two_word_names: bool = True) -> Path:
    """Write tagged sentences with names of one or two words and places of one word."""
    rng = np.random.default_rng(seed)
    sentences = []
    for index in range(count):
        lines = ["-DOCSTART- O O", ""] if index % 5 == 0 else []
        for _ in range(rng.integers(2, 6)):
            kind = rng.integers(0, 3)
            if kind == 0:
                first, second = rng.choice(NAMES, 2)
                lines += [f"{first} N B-PER", *([f"{second} N I-PER"] if two_word_names else [])]
            elif kind == 1:
                lines += [f"{rng.choice(PLACES)} N B-LOC"]
            lines += [f"{rng.choice(OTHER_WORDS)} V O"]
        sentences.append("\n".join(lines))
    path.write_text("\n\n".join(sentences) + "\n")
    return path


@pytest.mark.parametrize(
    ("kind", "context", "label"),
    [("entities", "sentence", "2"), ("entities", "document", "2"), ("tags", "sentence", "1")],
)
def test_tags_are_learned(
    start_model: Path, tmp_path: Path, kind: str, context: str, label: str
) -> None:
    """Held-out scores are high, ``evaluate`` gives the same score, and raw text can be tagged."""
    # There are fewer documents than sentences to learn from, so documents get an easier task.
    two_word_names = context == "sentence"
    data = write_conll(tmp_path / "train.txt", 300, 0, two_word_names=two_word_names)
    dev = write_conll(tmp_path / "dev.txt", 40, 1, two_word_names=two_word_names)
    task = {
        **FAST_SETTINGS["task"],
        "kind": kind,
        "context": context,
        "label_column": label,
        "max_seqlen": 32,
        "validation_files": {"dev": str(dev)},
    }
    values = {**FAST_SETTINGS, "model": NO_DROPOUT, "task": task, "schedule": {"epochs": 20.0}}
    result = finetune("tag", start_model, tmp_path / "run", data=data, values=values)
    metric = result.metric_names[0]
    # The score of entities is lower, because an entity is correct only if all of its tags are.
    assert result.metrics[metric] > (0.95 if kind == "tags" else 0.85)
    assert result.metrics["examples"] == 40
    assert result.model is not None
    assert evaluate(result.model, dev)[metric] == pytest.approx(result.metrics[metric])
    model = load_fine_tuned(result.model)
    assert model.head.kind == kind
    text = f"{WORDS[20]} {NAMES[0]} {NAMES[3]}, {WORDS[21]} {PLACES[2]}."
    [tagged] = tag(model, [text])
    assert all(text[span.start : span.end] == span.text for span in tagged.spans)
    [(value, line)] = predict_lines(model, [text])
    assert value["text"] == text
    if kind == "tags":
        assert [span.text for span in tagged.spans][:4] == [WORDS[20], NAMES[0], NAMES[3], ","]
        assert line.startswith(f"{WORDS[20]}/V {NAMES[0]}/N")
        return
    if not two_word_names:
        assert {span.label for span in tagged.spans} == {"PER", "LOC"}
        return
    spans = {(span.text, span.label): span.probability for span in tagged.spans}
    assert spans.keys() >= {(f"{NAMES[0]} {NAMES[3]}", "PER"), (PLACES[2], "LOC")}
    assert all(0.5 < probability <= 1 for probability in spans.values())
    assert f"[PER {NAMES[0]} {NAMES[3]}]" in line
    with pytest.raises(InputError, match="text 2 is empty"):
        tag(model, [text, " "])


@pytest.mark.parametrize("context", ["sentence", "document"])
def test_sentences_without_a_token_are_not_trained_on(
    start_model: Path, tmp_path: Path, context: str
) -> None:
    """Sentences without a token are left out, because a batch of them would have no loss."""
    data = write_conll(tmp_path / "train.txt", 8, 0)
    # A zero-width space is not a token.
    empty_sentences = "\n-DOCSTART-\n\u200b N O\n" * 8
    data.write_text(data.read_text() + empty_sentences)
    task = {
        "batch_size": 1,
        "label_column": "2",
        "context": context,
        "validation_files": {"dev": str(data)},
    }
    values = {**FAST_SETTINGS, "task": task, "schedule": {"epochs": 2.0}}
    result = finetune("tag", start_model, tmp_path / "run", data=data, values=values)
    assert result.counts["train"]["num_without_target"] == 8
    # There are eight sentences, or two documents of two windows each.
    num_inputs = 8 if context == "sentence" else 4
    assert result.steps == 2 * num_inputs, "two epochs with batches of one input"
    assert result.metrics["examples"] == 16
    assert math.isfinite(result.metrics["loss"])
    data.write_text(empty_sentences + "\n\u200b N B-X\n")
    with pytest.raises(TaskError, match=r"train\.txt: no training target is left after tokeniz"):
        finetune("tag", start_model, tmp_path / "other", data=data, values=values)


def test_long_texts_are_tagged_to_the_end(start_model: Path, tmp_path: Path) -> None:
    """A text that is ten times longer than the model's inputs is tagged up to its last word."""
    data = write_conll(tmp_path / "train.txt", 150, 0)
    task = {**FAST_SETTINGS["task"], "label_column": "2", "max_seqlen": 16}
    values = {**FAST_SETTINGS, "model": NO_DROPOUT, "task": task, "schedule": {"epochs": 16.0}}
    result = finetune("tag", start_model, tmp_path / "run", data=data, values=values)
    assert result.model is not None
    text = " ".join([WORDS[20], PLACES[1]] * 80)
    [tagged] = tag(result.model, [text])
    assert len(tagged.spans) > 75
    assert tagged.spans[-1].end == len(text)


def test_wrong_kinds_and_tags_are_rejected(start_model: Path, tmp_path: Path) -> None:
    """A tagger cannot be used as a classifier, and unknown or invalid tags are errors."""
    data = write_conll(tmp_path / "train.txt", 20, 0)
    (tmp_path / "dev.txt").write_text("ba N B-ORG\n")
    values = {
        **FAST_SETTINGS,
        "schedule": {"steps": 1},
        "task": {**FAST_SETTINGS["task"], "label_column": "2"},
    }
    result = finetune("tag", start_model, tmp_path / "run", data=data, values=values)
    assert result.model is not None
    with pytest.raises(ModelError, match=r"'entities'; expected 'single'"):
        predict(result.model, ["ba"])
    values["task"]["validation_files"] = {"dev": str(tmp_path / "dev.txt")}
    with pytest.raises(TaskError, match=r"dev\.txt, line 1: an unknown label: 'B-ORG'"):
        finetune("tag", start_model, tmp_path / "other", data=data, values=values)
    values["task"] |= {"labels": ["X", "O", "B-PER", "I-PER", "B-LOC", "I-LOC"]}
    with pytest.raises(SettingsError, match=r"task\.labels: 'X' is not an entity tag"):
        finetune("tag", start_model, tmp_path / "other", data=data, values=values)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("family", ["tag", "classify"])
def test_bilstm_learns_on_a_frozen_encoder(start_model: Path, tmp_path: Path, family: str) -> None:
    """A BiLSTM learns the task without changing the encoder; transformers rejects the model."""
    task: dict[str, Any] = dict(FAST_SETTINGS["task"])
    if family == "tag":
        data = write_conll(tmp_path / "train.txt", 150, 0)
        task["label_column"] = "2"
    else:
        data = write_table(tmp_path / "train.jsonl", "single", 160)
    values = {
        **FAST_SETTINGS,
        "task": task,
        "schedule": {"epochs": 20.0},
        "model": NO_DROPOUT,
        "features": {"layers": "weighted-sum-all", "width": 16},
        "optim": {"lr": 1e-2},
    }
    result = finetune(family, start_model, tmp_path / "run", data=data, values=values)
    metric = result.metric_names[0]
    assert result.metrics[metric] > 0.9
    assert result.model is not None
    start_weights = load_file(start_model / WEIGHTS_FILE)
    weights = load_file(result.model / WEIGHTS_FILE)
    encoder_names = [name for name in weights if name.startswith("bert.")]
    assert len(encoder_names) > 20
    assert all(torch.equal(start_weights[name], weights[name]) for name in encoder_names)
    assert evaluate(result.model, data)[metric] > 0.9
    with pytest.raises(ValueError, match="bertsmith"):
        AutoModel.from_pretrained(result.model)
    values["run"] = {**FAST_SETTINGS["run"], "num_frozen_layers": 1}
    with pytest.raises(SettingsError, match=r"run\.num_frozen_layers"):
        finetune(family, start_model, tmp_path / "x", data=data, values=values)
