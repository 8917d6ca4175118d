"""Log-probabilities of masked tokens equal those of transformers, one forward pass per token."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers import BertForMaskedLM as HfBertForMaskedLM

from bertsmith import bundle
from bertsmith.bundle import PretrainedBundle
from bertsmith.errors import InputError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.progress import NullProgress
from bertsmith.runtime.inference_batches import batch_by_length
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.wordpiece import SPECIAL_TOKENS, Tokenizer
from bertsmith.use import pseudo_log_likelihood
from bertsmith.use.pseudo_log_likelihood import (
    PLL_VARIANTS,
    PllVariant,
    compute_log_probabilities,
)
from tests.use.conftest import SENTENCES, save_random_model

LINES = [
    "The forge stood where the two roads met.",
    "iron",
    "Unbelievably, hammering blacksmiths questioned the waterwheel!",
    "Every hammer on the wall had its own name, its own weight, and its own sound.",
    "Zebra! Xylophone, and an unknown 字.",
    "it's well-known: the smith's hammer",
]
KOREAN_LINES = [
    "대장장이는 어두워질 때까지 대장간에서 일했다.",
    "망치마다 이름이 있었다.",
    "아이는 물을 날랐다",
]


def load_hf_tokenizer_and_model(model_dir: Path) -> tuple[Any, Any]:
    """Return the tokenizer and the BertForMaskedLM of a model directory."""
    model = HfBertForMaskedLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    return AutoTokenizer.from_pretrained(model_dir), model


def compute_hf_log_probabilities(
    hf_tokenizer_and_model: tuple[Any, Any], line: str, variant: PllVariant
) -> list[float]:
    """Compute each token's log-probability while it is masked, with one forward pass per token."""
    tokenizer, model = hf_tokenizer_and_model
    encoding = tokenizer(line)
    ids, words = encoding["input_ids"], encoding.word_ids()
    log_probabilities = []
    for position in range(1, len(ids) - 1):
        masked_ids = list(ids)
        masked_ids[position] = tokenizer.mask_token_id
        if variant == "within-word":
            for later_position in range(position + 1, len(ids)):
                if words[later_position] == words[position]:
                    masked_ids[later_position] = tokenizer.mask_token_id
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([masked_ids])).logits[0, position]
        log_probabilities.append(float(logits.log_softmax(-1)[ids[position]]))
    return log_probabilities


def compute_both_variants(
    model: PretrainedBundle, lines: Sequence[str]
) -> dict[PllVariant, list[list[float]]]:
    """Compute the log-probabilities of lines for both variants."""
    sequences = model.tokenizer.encode_batch(list(lines))
    return dict(compute_log_probabilities(model, sequences, PLL_VARIANTS, NullProgress()))


@pytest.fixture(scope="module")
def hf_tokenizer_and_model(model_dir: Path) -> tuple[Any, Any]:
    """The random model as transformers' tokenizer and BertForMaskedLM."""
    return load_hf_tokenizer_and_model(model_dir)


@pytest.mark.parametrize("variant", PLL_VARIANTS)
def test_log_probabilities_equal_a_loop_over_transformers(
    pretrained: PretrainedBundle, hf_tokenizer_and_model: tuple[Any, Any], variant: PllVariant
) -> None:
    """Each token's log-probability agrees to 1e-5 for both variants."""
    for line, values in zip(LINES, compute_both_variants(pretrained, LINES)[variant], strict=True):
        expected = compute_hf_log_probabilities(hf_tokenizer_and_model, line, variant)
        assert values == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("variant", PLL_VARIANTS)
def test_korean_words_are_masked_as_whole_words(tmp_path: Path, variant: PllVariant) -> None:
    """Korean words end at spaces and punctuation; here each syllable is a token."""
    syllables = sorted(set("".join(KOREAN_LINES)) - set(" "))
    pieces = [prefix + syllable for prefix in ("", "##") for syllable in syllables]
    tokenizer = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, *pieces)))
    directory = save_random_model(tmp_path / "model", tokenizer)
    model = bundle.load(directory)
    hf_tokenizer_and_model = load_hf_tokenizer_and_model(directory)
    for line, values in zip(
        KOREAN_LINES, compute_both_variants(model, KOREAN_LINES)[variant], strict=True
    ):
        expected = compute_hf_log_probabilities(hf_tokenizer_and_model, line, variant)
        assert values == pytest.approx(expected, abs=1e-5)


RANDOM_SENTENCES = st.lists(
    st.one_of(
        st.sampled_from(" ".join(SENTENCES).split()),
        st.text("abcdefghij'-.,字", min_size=1, max_size=9),
    ),
    min_size=1,
    max_size=6,
).map(" ".join)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(sentences=st.lists(RANDOM_SENTENCES, min_size=1, max_size=3))
def test_random_sentences_equal_a_loop_over_transformers(
    pretrained: PretrainedBundle, hf_tokenizer_and_model: tuple[Any, Any], sentences: list[str]
) -> None:
    """Log-probabilities of random sentences, computed together, agree to 1e-5."""
    max_tokens = pretrained.config.max_positions - 2
    sentences = [
        sentence
        for sentence in sentences
        if 0 < len(pretrained.tokenizer.encode(sentence)) <= max_tokens
    ]
    results = compute_both_variants(pretrained, sentences)
    for variant in PLL_VARIANTS:
        for sentence, values in zip(sentences, results[variant], strict=True):
            expected = compute_hf_log_probabilities(hf_tokenizer_and_model, sentence, variant)
            assert values == pytest.approx(expected, abs=1e-5)


def test_batch_and_chunk_sizes_do_not_change_results(
    pretrained: PretrainedBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results are the same with one sequence per batch and one row of logits per chunk."""
    expected = compute_both_variants(pretrained, LINES)
    monkeypatch.setattr(pseudo_log_likelihood, "choose_batch_tokens", lambda *_: 1)
    monkeypatch.setattr(pseudo_log_likelihood, "MAX_CHUNK_LOGITS", 1)
    results = compute_both_variants(pretrained, LINES)
    for variant in PLL_VARIANTS:
        for values, expected_values in zip(results[variant], expected[variant], strict=True):
            assert values == pytest.approx(expected_values, abs=1e-5)


def test_repeated_sequences_and_masks_are_computed_once(
    pretrained: PretrainedBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repeated line adds no copies; variants share copies with the same masked tokens."""
    lengths: list[int] = []

    def record_lengths(copy_lengths: Sequence[int], max_tokens: int) -> Any:
        lengths.extend(copy_lengths)
        return batch_by_length(copy_lengths, max_tokens)

    monkeypatch.setattr(pseudo_log_likelihood, "batch_by_length", record_lengths)
    results = compute_both_variants(pretrained, [LINES[3], LINES[0], LINES[3]])
    is_continuation = pretrained.tokenizer.is_continuation
    num_copies = 0
    for line in (LINES[0], LINES[3]):
        ids = pretrained.tokenizer.encode(line)
        # A second copy is needed only for a token whose next token continues its word.
        num_copies += len(ids) + int(is_continuation[ids[1:]].sum())
    assert len(lengths) == num_copies
    for variant in PLL_VARIANTS:
        assert results[variant][0] == results[variant][2]


def test_probabilities_sum_to_one_over_the_vocabulary_of_the_tokenizer(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Outputs of the decoder beyond the tokenizer's vocabulary get no probability."""
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size + 11,
        layers=1,
        width=6,
        heads=2,
        feed_forward=7,
        max_positions=5,
        init_range=1.0,
    )
    bundle.save(tmp_path / "model", BertForPreTraining(config), tokenizer, {})
    # The only token of each sequence is masked, so all sequences give the same distribution.
    sequences = [[token_id] for token_id in range(tokenizer.vocab_size)]
    results = compute_log_probabilities(
        bundle.load(tmp_path / "model"), sequences, ["original"], NullProgress()
    )
    total = math.fsum(math.exp(values[0]) for values in results["original"])
    assert total == pytest.approx(1, abs=1e-5)


def test_unknown_variants_are_errors(pretrained: PretrainedBundle) -> None:
    """The error for an unknown variant contains the valid variants."""
    with pytest.raises(InputError, match=r"'within_word'; expected 'original' or 'within-word'"):
        compute_log_probabilities(pretrained, [[7]], ["within_word"], NullProgress())  # type: ignore[list-item]
