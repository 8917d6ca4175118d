"""Predictions of fine-tuned models equal those of transformers; errors, GLUE submissions."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bertsmith.bundle import HeadConfig, TaskKind, load, load_fine_tuned, save_fine_tuned
from bertsmith.errors import InputError, ModelError
from bertsmith.model.config import ModelConfig
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.evaluate import evaluate
from bertsmith.use.predict import predict
from bertsmith.use.rerank import rerank
from bertsmith.use.submission import format_glue_submission
from bertsmith.use.tag import tag
from tests.use.conftest import SENTENCES

#: Maximum number of tokens of the model.
MAX_POSITIONS = 41


def save_task_model(
    directory: Path,
    tokenizer: Tokenizer,
    head: HeadConfig,
    task: str = "rte",
    attention: Literal["bidirectional", "causal"] = "bidirectional",
) -> Path:
    """Save a random fine-tuned model."""
    torch.manual_seed(4)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=2,
        width=26,
        heads=2,
        feed_forward=37,
        max_positions=MAX_POSITIONS,
        init_range=0.3,
        attention=attention,
    )
    save_fine_tuned(directory, head.build_model(config), tokenizer, head, {"task": task})
    return directory


@pytest.mark.parametrize("kind", ["single", "multi", "regression"])
def test_predictions_equal_those_of_transformers(
    tmp_path: Path, tokenizer: Tokenizer, kind: TaskKind
) -> None:
    """Probabilities and scores of texts and pairs agree to 1e-5, also if they are truncated."""
    head = HeadConfig(kind, () if kind == "regression" else ("a", "b", "c"))
    directory = save_task_model(tmp_path / "m", tokenizer, head)
    texts: list[str | tuple[str, str]]
    texts = [
        *SENTENCES,
        (SENTENCES[0], SENTENCES[1]),
        "iron",
        SENTENCES[2] * 4,
        (SENTENCES[3] * 3, "hammer"),
    ]
    hf_tokenizer = AutoTokenizer.from_pretrained(directory)
    hf_model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    for text, prediction in zip(texts, predict(directory, texts), strict=True):
        parts = (text,) if isinstance(text, str) else text
        inputs = hf_tokenizer(
            *parts, truncation=True, max_length=MAX_POSITIONS, return_tensors="pt"
        )
        with torch.no_grad():
            logits = hf_model(**inputs).logits[0]
        if kind == "regression":
            assert prediction.score == pytest.approx(float(logits[0]), abs=1e-5)
            continue
        expected = logits.softmax(-1) if kind == "single" else logits.sigmoid()
        assert dict(prediction.labels) == pytest.approx(
            dict(zip(head.labels, expected.tolist(), strict=True)), abs=1e-5
        )
        probabilities = [probability for _, probability in prediction.labels]
        assert probabilities == sorted(probabilities, reverse=True)
        ids = hf_tokenizer(*parts)["input_ids"]
        assert prediction.is_truncated == (len(ids) > MAX_POSITIONS)


@pytest.mark.parametrize("kind", ["entities", "tags"])
def test_text_without_tokens_has_no_entities(
    tmp_path: Path, tokenizer: Tokenizer, kind: TaskKind
) -> None:
    """A zero-width space has no tokens and gets the tag O, without an effect on other texts."""
    directory = save_task_model(tmp_path / "m", tokenizer, HeadConfig(kind, ("O", "B-X", "I-X")))
    (without_tokens,) = tag(directory, ["\u200b"])
    batched_without_tokens, batched = tag(directory, ["\u200b", SENTENCES[0]])
    assert without_tokens == batched_without_tokens
    labels = [span.label for span in without_tokens.spans]
    assert labels == ([] if kind == "entities" else ["O"])
    (single,) = tag(directory, [SENTENCES[0]])
    assert [replace(span, probability=0.0) for span in batched.spans] == [
        replace(span, probability=0.0) for span in single.spans
    ]
    # Padding changes the order of summation in attention.
    assert [span.probability for span in batched.spans] == pytest.approx(
        [span.probability for span in single.spans], abs=1e-5
    )


def test_label_that_is_no_entity_tag_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A tagger with the label "PAD" is an error, even if it does not predict this label."""
    head = HeadConfig("entities", ("O", "B-X", "I-X", "PAD"))
    directory = save_task_model(tmp_path / "m", tokenizer, head)
    with pytest.raises(ModelError, match=r"m: the label 'PAD' .*id2label"):
        tag(directory, ["red"])
    (tmp_path / "a.txt").write_text("red B-X\n")
    with pytest.raises(ModelError, match="the label 'PAD' "):
        evaluate(directory, tmp_path / "a.txt", changes={"text_column": "0", "label_column": "1"})


def test_invalid_text_is_an_error(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The error for an empty text contains the number of the text.

    Tuples of three texts and texts that are not valid Unicode are errors as well.
    """
    directory = save_task_model(tmp_path / "m", tokenizer, HeadConfig("single", ("a", "b")))
    with pytest.raises(InputError, match="text 3 is empty"):
        predict(directory, ["iron", ("a", "b"), ("iron", " ")])
    with pytest.raises(InputError, match="text 1 has 3 parts; expected a text or a pair of texts"):
        predict(directory, [("a", "b", "c")])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"a text has a lone surrogate .*'iron \\\\ud800'; give"):
        predict(directory, ["water", "iron \ud800"])


def test_wrong_argument_types_are_errors(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A single string, and a model that is not fine-tuned, are errors."""
    directory = save_task_model(tmp_path / "m", tokenizer, HeadConfig("single", ("a", "b")))
    with pytest.raises(InputError, match=r"a list of texts, got one text: put 'iron' into \[ \]"):
        predict(directory, "iron")
    with pytest.raises(ModelError, match="PretrainedBundle: not a fine-tuned model; give the path"):
        predict(load(directory), ["iron"])  # type: ignore[arg-type]


def test_glue_submission_has_a_row_per_example(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A submission has a row with index and label for each example, for pairs and single texts."""
    (tmp_path / "rte.tsv").write_text(
        "index\tsentence1\tsentence2\n7\tiron\twhite\n8\tboy\twater\n"
    )
    head = HeadConfig("single", ("entailment", "not_entailment"))
    bundle = load_fine_tuned(save_task_model(tmp_path / "m", tokenizer, head))
    lines = list(format_glue_submission(bundle, tmp_path / "rte.tsv"))
    predictions = predict(bundle, [("iron", "white"), ("boy", "water")])
    labels = [prediction.labels[0][0] for prediction in predictions]
    assert lines == ["index\tprediction", f"0\t{labels[0]}", f"1\t{labels[1]}"]
    (tmp_path / "cola.tsv").write_text("index\tsentence\n0\tiron\n")
    cola_head = HeadConfig("single", ("0", "1"))
    cola = load_fine_tuned(save_task_model(tmp_path / "c", tokenizer, cola_head, "cola"))
    assert list(format_glue_submission(cola, tmp_path / "cola.tsv"))[1][:2] == "0\t"
    custom = load_fine_tuned(save_task_model(tmp_path / "o", tokenizer, head, "classify"))
    with pytest.raises(ModelError, match="fine-tuned on 'classify', which has no test file"):
        list(format_glue_submission(custom, tmp_path / "rte.tsv"))


def test_classifier_cannot_rerank(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A model with several outputs is an error that says how to train a reranker."""
    heads = {
        "a classifier with 3 labels": HeadConfig("single", ("a", "b", "c")),
        "of the kind 'span'": HeadConfig("span"),
    }
    for description, head in heads.items():
        directory = save_task_model(tmp_path / head.kind, tokenizer, head)
        with pytest.raises(ModelError) as error:
            rerank(directory, "the smith", ["the hammer"])
        assert str(error.value) == (
            f"{directory}: this model is {description}, but reranking needs a model with one "
            "output; train one with `bertsmith finetune rerank`, or use `bertsmith predict`"
        )
