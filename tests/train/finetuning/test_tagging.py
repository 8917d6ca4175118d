"""Fine-tuning learns to tag, entities and plain, and what it learnt is found again in raw text."""

import math
from pathlib import Path

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
from tests.train.finetuning.test_finetune import FAST_SETTINGS, NO_DROPOUT, start, write_table

__all__ = ["start"]

NAMES, PLACES = WORDS[:6], WORDS[6:12]
#: The marks are seen often enough to be known: what was never seen is tagged by chance.
OTHERS = [*WORDS[12:], *",." * 6]


def conll(path: Path, count: int, seed: int, *, pairs: bool = True) -> Path:
    """Write sentences with names, one or two words from a list, and places from another."""
    chance = np.random.default_rng(seed)
    blocks = []
    for number in range(count):
        lines = ["-DOCSTART- O O", ""] if number % 5 == 0 else []
        for _ in range(chance.integers(2, 6)):
            kind = chance.integers(0, 3)
            if kind == 0:
                first, second = chance.choice(NAMES, 2)
                lines += [f"{first} N B-PER", *([f"{second} N I-PER"] if pairs else [])]
            elif kind == 1:
                lines += [f"{chance.choice(PLACES)} N B-LOC"]
            lines += [f"{chance.choice(OTHERS)} V O"]
        blocks.append("\n".join(lines))
    path.write_text("\n\n".join(blocks) + "\n")
    return path


@pytest.mark.parametrize(
    ("kind", "context", "label"),
    [("entities", "sentence", "2"), ("entities", "document", "2"), ("tags", "sentence", "1")],
)
def test_tags_are_learnt(start: Path, tmp_path: Path, kind: str, context: str, label: str) -> None:
    """Scores near 1 on fresh sentences, by finetune's own figures and by evaluate."""
    # Whole documents are fewer inputs; to tell that all names are single words, they are enough.
    pairs = context == "sentence"
    data = conll(tmp_path / "train.txt", 300, 0, pairs=pairs)
    fresh = conll(tmp_path / "fresh.txt", 40, 1, pairs=pairs)
    task = {**FAST_SETTINGS["task"], "kind": kind, "context": context, "label": label, "length": 32,
            "heldout": {"dev": str(fresh)}}  # fmt: skip
    values = {**FAST_SETTINGS, "model": NO_DROPOUT, "task": task,
              "schedule": {"epochs": 20.0}}  # fmt: skip
    result = finetune("tag", start, tmp_path / "run", data=data, values=values)
    # An entity is found only where each of its words is.
    assert result.figures[result.metrics[0]] > (0.95 if kind == "tags" else 0.85)
    assert result.figures["examples"] == 40
    assert result.model is not None
    again = evaluate(result.model, fresh)
    assert again[result.metrics[0]] == pytest.approx(result.figures[result.metrics[0]])
    found = load_fine_tuned(result.model)
    assert found.head.kind == kind
    text = f"{WORDS[20]} {NAMES[0]} {NAMES[3]}, {WORDS[21]} {PLACES[2]}."
    [said] = tag(found, [text])
    assert all(text[one.start : one.end] == one.text for one in said.spans)
    [(value, line)] = predict_lines(found, [text])
    assert value["text"] == text
    if kind == "tags":
        assert [one.text for one in said.spans][:4] == [WORDS[20], NAMES[0], NAMES[3], ","]
        assert line.startswith(f"{WORDS[20]}/V {NAMES[0]}/N")
        return
    if not pairs:
        assert {one.label for one in said.spans} == {"PER", "LOC"}
        return
    spans = {(one.text, one.label): one.probability for one in said.spans}
    assert spans.keys() >= {(f"{NAMES[0]} {NAMES[3]}", "PER"), (PLACES[2], "LOC")}
    assert all(0.5 < share <= 1 for share in spans.values())
    assert f"[PER {NAMES[0]} {NAMES[3]}]" in line
    with pytest.raises(InputError, match="text 2 is empty"):
        tag(found, [text, " "])


@pytest.mark.parametrize("context", ["sentence", "document"])
def test_sentences_of_no_token_are_left_out_of_training(
    start: Path, tmp_path: Path, context: str
) -> None:
    """Each stands in a document of its own; in a batch alone it would have no mean loss."""
    data = conll(tmp_path / "train.txt", 8, 0)
    gone = "\n-DOCSTART-\n\u200b N O\n" * 8
    data.write_text(data.read_text() + gone)
    task = {"batch": 1, "label": "2", "context": context, "heldout": {"dev": str(data)}}
    values = {**FAST_SETTINGS, "task": task, "schedule": {"epochs": 2.0}}
    result = finetune("tag", start, tmp_path / "run", data=data, values=values)
    assert result.counts["train"]["untaught"] == 8
    assert result.steps == 2 * (
        8 if context == "sentence" else 4
    )  # In two documents of two windows.
    assert result.figures["examples"] == 16
    assert math.isfinite(result.figures["loss"])
    data.write_text(gone + "\n\u200b N B-X\n")
    with pytest.raises(TaskError, match=r"train\.txt: the tokenizer leaves nothing that could"):
        finetune("tag", start, tmp_path / "other", data=data, values=values)


def test_long_texts_are_tagged_to_their_end(start: Path, tmp_path: Path) -> None:
    """A text of ten times the model's length has its entities everywhere, the last word's too."""
    data = conll(tmp_path / "train.txt", 150, 0)
    task = {**FAST_SETTINGS["task"], "label": "2", "length": 16}
    values = {**FAST_SETTINGS, "model": NO_DROPOUT, "task": task, "schedule": {"epochs": 16.0}}
    result = finetune("tag", start, tmp_path / "run", data=data, values=values)
    assert result.model is not None
    text = " ".join([WORDS[20], PLACES[1]] * 80)
    [said] = tag(result.model, [text])
    assert len(said.spans) > 75
    assert said.spans[-1].end == len(text)


def test_a_tagger_is_no_classifier_and_the_other_way_round(start: Path, tmp_path: Path) -> None:
    """Each is refused by the other's function; so are a strange tag in dev and a strange label."""
    data = conll(tmp_path / "train.txt", 20, 0)
    (tmp_path / "dev.txt").write_text("ba N B-ORG\n")
    values = {
        **FAST_SETTINGS,
        "schedule": {"steps": 1},
        "task": {**FAST_SETTINGS["task"], "label": "2"},
    }
    result = finetune("tag", start, tmp_path / "run", data=data, values=values)
    assert result.model is not None
    with pytest.raises(ModelError, match=r"'entities'; expected 'single'"):
        predict(result.model, ["ba"])
    values["task"]["heldout"] = {"dev": str(tmp_path / "dev.txt")}
    with pytest.raises(TaskError, match=r"dev\.txt, line 1: an unknown label: 'B-ORG'"):
        finetune("tag", start, tmp_path / "other", data=data, values=values)
    values["task"] |= {"labels": ["X", "O", "B-PER", "I-PER", "B-LOC", "I-LOC"]}
    with pytest.raises(SettingsError, match=r"task\.labels: 'X' is no entity's tag"):
        finetune("tag", start, tmp_path / "other", data=data, values=values)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("family", ["tag", "classify"])
def test_a_frozen_encoder_serves_a_bilstm(start: Path, tmp_path: Path, family: str) -> None:
    """Both families learn, the encoder keeps its bytes, and only we load the directory."""
    if family == "tag":
        data, own = conll(tmp_path / "train.txt", 150, 0), {"label": "2"}
    else:
        data, own = write_table(tmp_path / "train.jsonl", "single", 160), {}
    values = {
        **FAST_SETTINGS,
        "task": {**FAST_SETTINGS["task"], **own},
        "schedule": {"epochs": 20.0},
    }
    values |= {
        "model": NO_DROPOUT,
        "features": {"layers": "weighted-sum-all", "width": 16},
        "optim": {"lr": 1e-2},
    }
    result = finetune(family, start, tmp_path / "run", data=data, values=values)
    assert result.figures[result.metrics[0]] > 0.9
    assert result.model is not None
    before, after = (load_file(path / WEIGHTS_FILE) for path in (start, result.model))
    encoder = [name for name in after if name.startswith("bert.")]
    assert len(encoder) > 20
    assert all(torch.equal(before[name], after[name]) for name in encoder)
    again = evaluate(result.model, data)
    assert again[result.metrics[0]] > 0.9
    with pytest.raises(ValueError, match="bertsmith"):
        AutoModel.from_pretrained(result.model)
    with pytest.raises(SettingsError, match=r"run\.freeze"):
        finetune(family, start, tmp_path / "x", data=data,
                 values={**values, "run": {**FAST_SETTINGS["run"], "freeze": 1}})  # fmt: skip
