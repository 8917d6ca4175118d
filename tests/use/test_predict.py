"""What a fine-tuned model says: probabilities, order, cut texts, submissions."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bertsmith.bundle import HeadConfig, TaskKind, load, load_fine_tuned, save_fine_tuned
from bertsmith.errors import InputError, ModelError
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict import predict
from bertsmith.use.submission import glue_submission
from bertsmith.use.tag import tag
from tests.use.conftest import TEXT


def made(directory: Path, tokenizer: Tokenizer, head: HeadConfig, task: str = "rte") -> Path:
    """Save a random fine-tuned model."""
    torch.manual_seed(4)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=2, width=26, heads=2, feed_forward=37,
        max_positions=41, init_range=0.3,
    )  # fmt: skip
    save_fine_tuned(directory, head.build_model(config), tokenizer, head, {"task": task})
    return directory


@pytest.mark.parametrize("kind", ["single", "multi", "regression"])
def test_the_same_as_the_peer(tmp_path: Path, tokenizer: Tokenizer, kind: TaskKind) -> None:
    """Texts and pairs of mixed length, in their order: transformers' tokenizer and model agree."""
    head = HeadConfig(kind, () if kind == "regression" else ("a", "b", "c"))
    directory = made(tmp_path / "m", tokenizer, head)
    texts: list[str | tuple[str, str]]
    texts = [*TEXT, (TEXT[0], TEXT[1]), "iron", TEXT[2] * 4, (TEXT[3] * 3, "hammer")]
    words = AutoTokenizer.from_pretrained(directory)
    peer = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    for given, answer in zip(texts, predict(directory, texts), strict=True):
        parts = (given,) if isinstance(given, str) else given
        inputs = words(*parts, truncation=True, max_length=41, return_tensors="pt")
        with torch.no_grad():
            logits = peer(**inputs).logits[0]
        if kind == "regression":
            assert answer.score == pytest.approx(float(logits[0]), abs=1e-5)
            continue
        shares = logits.softmax(-1) if kind == "single" else logits.sigmoid()
        assert dict(answer.labels) == pytest.approx(
            dict(zip(head.labels, shares.tolist(), strict=True)), abs=1e-5
        )
        assert [share for _, share in answer.labels] == sorted(shares.tolist(), reverse=True) or (
            answer.labels[0][1] == pytest.approx(float(shares.max()), abs=1e-5)
        )
        whole = words(*parts)["input_ids"]
        assert answer.cut_off == (len(whole) > 41)


@pytest.mark.parametrize("kind", ["entities", "tags"])
def test_a_text_of_no_token_has_no_entity(
    tmp_path: Path, tokenizer: Tokenizer, kind: TaskKind
) -> None:
    """The tokenizer leaves nothing of a zero-width space: alone or beside others it is outside."""
    directory = made(tmp_path / "m", tokenizer, HeadConfig(kind, ("O", "B-X", "I-X")))
    (alone,) = tag(directory, ["\u200b"])
    beside, other = tag(directory, ["\u200b", TEXT[0]])
    assert alone == beside
    assert [one.label for one in alone.spans] == ([] if kind == "entities" else ["O"])
    (lone,) = tag(directory, [TEXT[0]])
    assert [replace(one, probability=0.0) for one in other.spans] == [
        replace(one, probability=0.0) for one in lone.spans
    ]
    # Padded to another length, attention adds up in another order.
    wanted = [one.probability for one in lone.spans]
    assert [one.probability for one in other.spans] == pytest.approx(wanted, abs=1e-5)


def test_a_label_that_is_no_entitys_is_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Another maker's label for padding: the model is refused at once, whatever it says."""
    directory = made(tmp_path / "m", tokenizer, HeadConfig("entities", ("O", "B-X", "I-X", "PAD")))
    with pytest.raises(ModelError, match=r"m: the label 'PAD' is not an entity tag; .*id2label"):
        tag(directory, ["red"])
    (tmp_path / "a.txt").write_text("red B-X\n")
    with pytest.raises(ModelError, match="the label 'PAD' is not an entity tag"):
        evaluate(directory, tmp_path / "a.txt", changes={"text": "0", "label": "1"})


def test_an_empty_text_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Its number is named, also beyond the first window."""
    directory = made(tmp_path / "m", tokenizer, HeadConfig("single", ("a", "b")))
    with pytest.raises(InputError, match="text 3 is empty"):
        predict(directory, ["iron", ("a", "b"), ("iron", " ")])


def test_a_lone_text_or_a_loaded_model_is_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A text has characters, which are no texts; what ``load`` reads has no head for it."""
    directory = made(tmp_path / "m", tokenizer, HeadConfig("single", ("a", "b")))
    with pytest.raises(InputError, match=r"a list of texts, not one: put 'iron' into \[ \]"):
        predict(directory, "iron")
    with pytest.raises(ModelError, match="Bundle: not a fine-tuned model; give the path"):
        predict(load(directory), ["iron"])  # type: ignore[arg-type] # the mistake itself


def test_a_submission_has_a_row_each(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A header, then index and label in the order of the test file; CoLA's has other columns."""
    (tmp_path / "rte.tsv").write_text(
        "index\tsentence1\tsentence2\n7\tiron\twhite\n8\tboy\twater\n"
    )
    head = HeadConfig("single", ("entailment", "not_entailment"))
    bundle = load_fine_tuned(made(tmp_path / "m", tokenizer, head))
    lines = list(glue_submission(bundle, tmp_path / "rte.tsv"))
    said = [
        answer.labels[0][0] for answer in predict(bundle, [("iron", "white"), ("boy", "water")])
    ]
    assert lines == ["index\tprediction", f"0\t{said[0]}", f"1\t{said[1]}"]
    (tmp_path / "cola.tsv").write_text("index\tsentence\n0\tiron\n")
    cola = load_fine_tuned(
        made(tmp_path / "c", tokenizer, HeadConfig("single", ("0", "1")), "cola")
    )
    assert list(glue_submission(cola, tmp_path / "cola.tsv"))[1][:2] == "0\t"
    own = load_fine_tuned(made(tmp_path / "o", tokenizer, head, "classify"))
    with pytest.raises(ModelError, match="fine-tuned on 'classify', which has no test file"):
        list(glue_submission(own, tmp_path / "rte.tsv"))
