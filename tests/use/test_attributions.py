"""Attributions equal those computed with transformers; errors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from bertsmith.bundle import HeadConfig, TaskKind
from bertsmith.errors import BertsmithError
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.attributions import attribute
from bertsmith.use.predict import predict
from tests.use.conftest import SENTENCES
from tests.use.test_predict import MAX_POSITIONS, save_task_model

PAIR = ("the smith worked", "until dark")


def compute_hf_attributions(
    directory: Path, kind: TaskKind, text: str | tuple[str, str], column: int | None
) -> Any:
    """Replace each token by [MASK] in transformers; return the score and the attributions."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    parts = (text,) if isinstance(text, str) else text
    inputs = tokenizer(*parts, truncation=True, max_length=MAX_POSITIONS, return_tensors="pt")
    ids = inputs.pop("input_ids")

    def compute_scores(token_ids: torch.Tensor) -> Any:
        with torch.no_grad():
            logits = model(token_ids, **inputs).logits[0]
        if kind == "regression":
            return logits
        return logits.sigmoid() if kind == "multi" else logits.softmax(-1)

    scores = compute_scores(ids)
    column = int(scores.argmax()) if column is None else column
    values = []
    for index, token_id in enumerate(ids[0].tolist()):
        masked = ids.clone()
        if token_id not in (tokenizer.cls_token_id, tokenizer.sep_token_id):
            masked[0, index] = tokenizer.mask_token_id
        values.append(float(scores[column] - compute_scores(masked)[column]))
    return float(scores[column]), values


@pytest.mark.parametrize("kind", ["single", "multi", "regression"])
def test_attributions_equal_those_of_transformers(
    tmp_path: Path, tokenizer: Tokenizer, kind: TaskKind
) -> None:
    """For texts and pairs, the predicted label and a selected one; [CLS] and [SEP] have 0."""
    labels = () if kind == "regression" else ("a", "b", "c")
    directory = save_task_model(tmp_path / "m", tokenizer, HeadConfig(kind, labels))
    for text, column in ((SENTENCES[0], None), (PAIR, None if not labels else 1)):
        label = None if column is None else labels[column]
        result = attribute(directory, text, label)
        score, values = compute_hf_attributions(directory, kind, text, column)
        np.testing.assert_allclose(result.values, values, rtol=0, atol=1e-5)
        assert result.score == pytest.approx(score, abs=1e-5)
        assert result.values[0] == result.values[-1] == 0
        assert max(map(abs, result.values)) > 0.01
        assert (result.tokens[0], result.tokens[-1]) == ("[CLS]", "[SEP]")
        assert set(result.segments) == ({0} if isinstance(text, str) else {0, 1})
        (prediction,) = predict(directory, [text])
        if label is None and labels:
            assert result.label == prediction.labels[0][0]
            assert result.score == pytest.approx(prediction.labels[0][1])
    assert attribute(directory, SENTENCES[2] * 4).is_truncated


def test_invalid_texts_and_labels_are_errors(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Empty texts, unknown labels and too many tokens are rejected."""
    head = HeadConfig("single", ("a", "b"))
    directory = save_task_model(tmp_path / "m", tokenizer, head)
    for text, label, message in (
        (" ", None, "the text is empty"),
        # The label is checked before the text is encoded.
        (SENTENCES[0], "c", "label is 'c'; expected one of a, b"),
        (SENTENCES[0], None, "attributions are limited to 5 tokens, got"),
    ):
        with pytest.raises(BertsmithError, match=message):
            attribute(directory, text, label, max_tokens=5)
