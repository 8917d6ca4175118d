"""Next-sentence probabilities equal those of transformers; truncation and errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import bertsmith
from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError, ModelError
from bertsmith.use.pair import iter_pair_predictions, pair, truncate_pair

PAIRS = [
    ("The forge stood there.", "The smith worked until dark."),
    ("iron", "When the iron was white he lifted it, turned it once, and struck."),
    ("Every hammer on the wall had its own name", "own sound"),
]


def compute_hf_probability(
    hf_tokenizer_and_model: tuple[Any, Any], ids: list[int], length_a: int
) -> float:
    """Compute the probability of label 0 with transformers; A has the first ``length_a`` ids."""
    segments = [0] * length_a + [1] * (len(ids) - length_a)
    with torch.no_grad():
        output = hf_tokenizer_and_model[1](
            input_ids=torch.tensor([ids]), token_type_ids=torch.tensor([segments])
        )
    return float(output.seq_relationship_logits.softmax(-1)[0, 0])


def test_probabilities_equal_those_of_transformers(
    pretrained: PretrainedBundle, hf_tokenizer_and_model: tuple[Any, Any]
) -> None:
    """The probability of label 0 agrees to 1e-5, for one pair and for 300 pairs together."""
    tokenizer, model = hf_tokenizer_and_model
    batched = [
        prediction.next_sentence_probability
        for prediction in iter_pair_predictions(pretrained, PAIRS * 100)
    ]
    assert len(batched) == 300
    for index, (a, b) in enumerate(PAIRS):
        with torch.no_grad():
            logits = model(**tokenizer(a, b, return_tensors="pt")).seq_relationship_logits
        expected = float(logits.softmax(-1)[0, 0])
        assert pair(pretrained, a, b) == pytest.approx(expected, abs=1e-5)
        assert batched[index::3] == pytest.approx([expected] * 100, abs=1e-5)
    assert len({round(probability, 4) for probability in batched[:3]}) == 3


def test_swapping_the_texts_changes_the_probability(
    pretrained: PretrainedBundle, model_dir: Path
) -> None:
    """(A, B) and (B, A) have different probabilities. ``bertsmith.pair`` accepts a path."""
    a, b = PAIRS[0]
    assert bertsmith.pair(model_dir, a, b) == pair(pretrained, a, b)
    assert abs(pair(pretrained, a, b) - pair(pretrained, b, a)) > 1e-4


def test_long_pairs_keep_the_tokens_around_the_boundary(
    pretrained: PretrainedBundle, hf_tokenizer_and_model: tuple[Any, Any]
) -> None:
    """A long pair loses tokens at the start of A and at the end of B; their number is reported."""
    tokenizer = pretrained.tokenizer
    text_a, text_b = "the smith worked " * 30, "every hammer on the wall " * 30
    a, b = tokenizer.encode(text_a), tokenizer.encode(text_b)
    max_tokens = pretrained.config.max_positions - 3
    truncated_a, truncated_b = a[-max_tokens // 2 :], b[: max_tokens // 2]
    ids = [tokenizer.cls_id, *truncated_a, tokenizer.sep_id, *truncated_b, tokenizer.sep_id]
    assert len(ids) == pretrained.config.max_positions
    expected = compute_hf_probability(hf_tokenizer_and_model, ids, len(truncated_a) + 2)
    (prediction,) = iter_pair_predictions(pretrained, [(text_a, text_b)])
    assert prediction.next_sentence_probability == pytest.approx(expected, abs=1e-5)
    assert prediction.num_removed_tokens == len(a) + len(b) - max_tokens


def truncate_one_by_one(a: list[int], b: list[int], max_tokens: int) -> tuple[list[int], list[int]]:
    """Remove tokens one by one from the longer list, or from B if both are equally long."""
    a, b = list(a), list(b)
    while len(a) + len(b) > max_tokens:
        if len(a) > len(b):
            del a[0]
        else:
            del b[-1]
    return a, b


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 40))
def test_truncate_pair_equals_token_by_token(length_a: int, length_b: int, max_tokens: int) -> None:
    """``truncate_pair`` has the same result as removing tokens one by one."""
    a, b = list(range(length_a)), list(range(100, 100 + length_b))
    assert truncate_pair(a, b, max_tokens) == truncate_one_by_one(a, b, max_tokens)


def test_special_tokens_in_texts_are_plain_text(
    pretrained: PretrainedBundle, hf_tokenizer_and_model: tuple[Any, Any]
) -> None:
    """The characters "[SEP]" in a text are not read as a special token that separates segments."""
    tokenizer = pretrained.tokenizer
    a, b = "the [SEP] smith", "[MASK] worked"
    ids_a, ids_b = tokenizer.encode(a), tokenizer.encode(b)
    assert tokenizer.sep_id not in ids_a
    ids = [tokenizer.cls_id, *ids_a, tokenizer.sep_id, *ids_b, tokenizer.sep_id]
    expected = compute_hf_probability(hf_tokenizer_and_model, ids, len(ids_a) + 2)
    assert pair(pretrained, a, b) == pytest.approx(expected, abs=1e-5)


def test_model_without_nsp_head_is_an_error(model_dir_without_nsp: Path) -> None:
    """``pair`` with a model that has no next-sentence head is an error."""
    with pytest.raises(ModelError, match="no next-sentence head"):
        pair(model_dir_without_nsp, *PAIRS[0])


@pytest.mark.parametrize(("a", "b", "name"), [("", "x", "A"), ("x", "  ", "B")])
def test_empty_text_is_an_error(pretrained: PretrainedBundle, a: str, b: str, name: str) -> None:
    """The error for an empty text contains the number of the pair and A or B."""
    with pytest.raises(InputError, match=f"pair 2: text {name} is empty"):
        list(iter_pair_predictions(pretrained, [PAIRS[0], (a, b)]))


def test_model_trained_on_sentence_order_is_rejected(pretrained: PretrainedBundle) -> None:
    """The head of such a model does not predict whether B follows A, so ``pair`` is an error."""
    info = {"provenance": {"settings": {"data": {"pair_objective": "sop"}}}}
    with pytest.raises(ModelError, match=r"trained on sentence order.*pair_objective=nsp"):
        pair(replace(pretrained, info=info), *PAIRS[0])
    info = {"provenance": {"settings": {"data": {"pair_objective": "nsp"}}}}
    assert 0 < pair(replace(pretrained, info=info), *PAIRS[0]) < 1
