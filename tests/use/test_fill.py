"""Predictions for [MASK] tokens equal those of transformers; segments, batches and errors."""

from pathlib import Path
from typing import Any

import pytest
import torch

import bertsmith
from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.use.fill import fill, iter_fillings
from tests.use.conftest import MAX_POSITIONS

TEXTS = [
    "the [MASK] stood where the roads met",
    "Every [MASK] on the [MASK] had its own name, its own [MASK].",
    "[MASK]",
    "the smith[MASK] worked",
]


def compute_hf_mask_probabilities(
    hf_tokenizer_and_model: tuple[Any, Any], text: str
) -> torch.Tensor:
    """Compute the probabilities at the [MASK] tokens with transformers, [masks, V]."""
    tokenizer, model = hf_tokenizer_and_model
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).prediction_logits[0]
    is_mask = inputs["input_ids"][0] == tokenizer.mask_token_id
    probabilities: torch.Tensor = logits.softmax(-1)[is_mask]
    return probabilities


def test_probabilities_equal_those_of_transformers(
    pretrained: PretrainedBundle, hf_tokenizer_and_model: tuple[Any, Any]
) -> None:
    """The probability of each token at each mask agrees to 1e-5; they are in decreasing order."""
    vocab_size = pretrained.config.vocab_size
    fillings_by_text = iter_fillings(pretrained, TEXTS, top=vocab_size)
    for text, fillings in zip(TEXTS, fillings_by_text, strict=True):
        rows = compute_hf_mask_probabilities(hf_tokenizer_and_model, text)
        assert len(rows) == len(fillings) == text.count("[MASK]")
        for row, filling in zip(rows, fillings, strict=True):
            words, probabilities = zip(*filling.predictions, strict=True)
            assert list(probabilities) == sorted(probabilities, reverse=True)
            expected = row[[pretrained.tokenizer.token_to_id(word) for word in words]]
            torch.testing.assert_close(torch.tensor(probabilities), expected, rtol=0, atol=1e-5)


def test_batching_does_not_change_fillings(pretrained: PretrainedBundle) -> None:
    """360 texts of different lengths get the same predictions together as one by one."""
    batched = list(iter_fillings(pretrained, TEXTS * 90, top=3))
    single = [fill(pretrained, text, top=3) for text in TEXTS]
    assert len(batched) == 360
    for index, fillings in enumerate(batched):
        for filling, expected in zip(fillings, single[index % len(TEXTS)], strict=True):
            assert [word for word, _ in filling.predictions] == [
                word for word, _ in expected.predictions
            ]
            probabilities = [probability for _, probability in filling.predictions]
            expected_probabilities = [probability for _, probability in expected.predictions]
            assert probabilities == pytest.approx(expected_probabilities, abs=1e-6)


def test_list_of_texts_is_filled(pretrained: PretrainedBundle) -> None:
    """``fill`` of a list returns the result of each text."""
    assert fill(pretrained, TEXTS[:1], top=2) == [fill(pretrained, TEXTS[0], top=2)]
    assert len(fill(pretrained, TEXTS)) == len(TEXTS)
    assert fill(pretrained, []) == []


def test_start_is_the_first_character_of_the_mask(pretrained: PretrainedBundle) -> None:
    """``start`` is the index of the first character of [MASK] in the text."""
    for text, fillings in zip(TEXTS, iter_fillings(pretrained, TEXTS), strict=True):
        for filling in fillings:
            assert text[filling.start :].startswith("[MASK]")
        assert len({filling.start for filling in fillings}) == text.count("[MASK]")


def test_paths_and_loaded_models_are_accepted(
    pretrained: PretrainedBundle, model_dir: Path
) -> None:
    """``bertsmith.fill`` accepts a Path, a string and a loaded model."""
    expected = fill(pretrained, TEXTS[0])
    assert bertsmith.fill(model_dir, TEXTS[0]) == expected
    assert bertsmith.fill(str(model_dir), TEXTS[0]) == expected
    assert len(expected[0].predictions) == 5


def test_text_after_sep_is_segment_b(
    pretrained: PretrainedBundle, hf_tokenizer_and_model: tuple[Any, Any]
) -> None:
    """Text after a literal [SEP] gets segment 1, as in pre-training."""
    tokenizer, model = hf_tokenizer_and_model
    inputs = tokenizer("the smith", "the [MASK] met", return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).prediction_logits[0]
    is_mask = inputs["input_ids"][0] == tokenizer.mask_token_id
    max_probability = logits[is_mask].softmax(-1).max()
    (filling,) = fill(pretrained, "the smith [SEP] the [MASK] met", top=1)
    assert filling.predictions[0][1] == pytest.approx(float(max_probability), abs=1e-5)


def test_models_without_nsp_use_segment_a_only(model_dir_without_nsp: Path) -> None:
    """Changing the untrained embedding of segment B does not change the predictions."""
    bundle = bertsmith.load(model_dir_without_nsp)
    text = "the smith [SEP] the [MASK] met"
    before = fill(bundle, text)
    with torch.no_grad():
        bundle.model.bert.embeddings.segments.weight[1] += 5.0
    assert fill(bundle, text) == before


def test_rows_beyond_the_vocabulary_are_ignored(model_dir: Path) -> None:
    """Outputs of the decoder beyond the tokenizer's vocabulary get no probability."""
    bundle = bertsmith.load(model_dir)
    with torch.no_grad():
        bundle.model.mlm.decoder.bias[-40:] += 100.0
    vocab = bundle.tokenizer.vocab[:-40]
    small_tokenizer = type(bundle.tokenizer)(type(bundle.tokenizer.spec)(vocab=vocab))
    small_vocab_bundle = PretrainedBundle(bundle.model, small_tokenizer, bundle.config, bundle.path)
    (filling,) = fill(small_vocab_bundle, "[MASK]", top=1000)
    assert len(filling.predictions) == len(vocab)
    assert sum(probability for _, probability in filling.predictions) == pytest.approx(
        1.0, abs=1e-5
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the smith", r"text 2: no \[MASK\] in 'the smith'; put"),
        ("the [mask]", r"text 2: .*but \[mask\]: write it in capitals"),
        ("", r"text 2: no \[MASK\]"),
        (
            "smith " * MAX_POSITIONS + "[MASK]",
            rf"text 2: \d+ tokens, but this model takes at most {MAX_POSITIONS - 2}",
        ),
    ],
)
def test_errors_name_the_text(pretrained: PretrainedBundle, text: str, message: str) -> None:
    """A text without a mask, or longer than the model's maximum, is an error with its number.

    The texts before it are filled.
    """
    fillings = iter_fillings(pretrained, [TEXTS[0], text, TEXTS[1]], top=1)
    assert next(fillings) == fill(pretrained, TEXTS[0], top=1)
    with pytest.raises(InputError, match=message):
        next(fillings)


def test_text_of_maximum_length_is_accepted(pretrained: PretrainedBundle) -> None:
    """A text may have 2 tokens fewer than the model has positions, for [CLS] and [SEP]."""
    max_tokens = pretrained.config.max_positions - 2
    assert len(fill(pretrained, "[MASK]" * max_tokens, top=1)) == max_tokens
    with pytest.raises(InputError, match="shorten it"):
        fill(pretrained, "[MASK]" * (max_tokens + 1))


def test_fewer_than_one_prediction_is_an_error(pretrained: PretrainedBundle) -> None:
    """``top=0`` is an error, because at least one prediction is needed."""
    with pytest.raises(InputError, match="at least one word"):
        fill(pretrained, "[MASK]", top=0)
