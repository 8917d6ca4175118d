"""Attention probabilities equal those of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import bertsmith
from bertsmith import bundle
from bertsmith.errors import InputError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.encoder import EncoderLayer
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.explain import AttentionMaps, attention
from tests.use.conftest import MAX_POSITIONS, SENTENCES
from tests.use.test_choose import MAX_POSITIONS as MAX_CHOICE_POSITIONS
from tests.use.test_choose import save_choice_model


def compute_hf_attention(directory: Path, texts: list[str], max_length: int) -> Any:
    """Compute tokens, segments and probabilities [L, N, S, S] with transformers."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    inputs = tokenizer(*texts, truncation=True, max_length=max_length, return_tensors="pt")
    with torch.no_grad():
        attentions = model(**inputs, output_attentions=True).attentions
    tokens = tokenizer.convert_ids_to_tokens(inputs["input_ids"][0])
    return tokens, inputs["token_type_ids"][0].tolist(), torch.cat(attentions).numpy()


def assert_same_attention(maps: AttentionMaps, expected: Any) -> None:
    """Assert that tokens and segments are equal, and that probabilities are equal to 1e-5."""
    assert (maps.tokens, maps.segments) == expected[:2]
    assert maps.probabilities.dtype == np.float32
    np.testing.assert_allclose(maps.probabilities, expected[2], atol=1e-5)


@pytest.mark.parametrize("texts", [SENTENCES[:1], SENTENCES[1:3], [SENTENCES[2] * 4]])
def test_attention_equals_that_of_transformers(model_dir: Path, texts: list[str]) -> None:
    """The probabilities of a text, a pair and a truncated text equal ``output_attentions``."""
    maps = attention(bundle.load(model_dir), *texts)
    assert_same_attention(maps, compute_hf_attention(model_dir, texts, MAX_POSITIONS))


def test_all_kinds_of_models_are_accepted(
    model_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Attention of a fine-tuned model, a bare encoder and a path equals that of transformers."""
    fine_tuned = save_choice_model(tmp_path / "tuned", tokenizer)
    maps = attention(bundle.load_fine_tuned(fine_tuned), SENTENCES[3])
    expected = compute_hf_attention(fine_tuned, [SENTENCES[3]], MAX_CHOICE_POSITIONS)
    assert_same_attention(maps, expected)
    expected = compute_hf_attention(model_dir, SENTENCES[:2], MAX_POSITIONS)
    assert_same_attention(attention(bundle.load_encoder(model_dir), *SENTENCES[:2]), expected)
    assert_same_attention(bertsmith.attention(model_dir, *SENTENCES[:2]), expected)


def test_causal_attention_does_not_see_later_tokens(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Probabilities of later tokens are 0, rows sum to 1, and the last layer equals the formula."""
    torch.manual_seed(5)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=3,
        width=26,
        heads=2,
        feed_forward=37,
        max_positions=61,
        init_range=0.3,
        norm="pre",
        attention="causal",
    )
    model = BertForPreTraining(config).eval()
    bundle.save(tmp_path / "m", model, tokenizer, {})
    probabilities = attention(tmp_path / "m", SENTENCES[0]).probabilities
    assert not np.triu(probabilities, 1).any()
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)
    # Recompute the last layer from its normalized input.
    normalized_inputs: list[Any] = []
    last_layer = model.bert.encoder.layers[2]
    assert isinstance(last_layer, EncoderLayer)
    last_layer.attention_norm.register_forward_hook(
        lambda _module, _inputs, output: normalized_inputs.append(output.clone())
    )
    attention(bundle.PretrainedBundle(model, tokenizer, config, tmp_path), SENTENCES[0])
    # Tensors created in inference mode cannot be used by autograd.
    with torch.no_grad():
        query_key_value = last_layer.attention.query_key_value(normalized_inputs[0])
        head_dim = config.width // config.heads
        query, key, _ = query_key_value.view(-1, 3, config.heads, head_dim).unbind(1)
    scores = torch.einsum("qnh,knh->nqk", query, key) / head_dim**0.5
    is_future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(is_future, -torch.inf).softmax(-1).detach().numpy()
    np.testing.assert_allclose(probabilities[2], expected, atol=1e-5)


def test_long_texts_are_truncated(pretrained: bundle.PretrainedBundle) -> None:
    """A long text loses tokens at its end, and a long pair at its start and end."""
    full = attention(pretrained, SENTENCES[0])
    assert full.num_removed_tokens == 0
    truncated = attention(pretrained, SENTENCES[0], max_seqlen=9)
    assert truncated.tokens == [*full.tokens[:8], "[SEP]"]
    assert truncated.num_removed_tokens == len(full.tokens) - 9
    pair = attention(pretrained, SENTENCES[0], SENTENCES[1], max_seqlen=11)
    # Without [CLS] and two [SEP] tokens there is room for four tokens of each text.
    assert pair.tokens[1:6] == [*full.tokens[-5:-1], "[SEP]"]
    assert pair.probabilities.shape == (2, 2, 11, 11)  # two layers with two heads


def test_empty_texts_and_small_lengths_are_errors(pretrained: bundle.PretrainedBundle) -> None:
    """An empty text is an error, and so is a length without room for a token of each text."""
    with pytest.raises(InputError, match="the text is empty"):
        attention(pretrained, " \t")
    with pytest.raises(InputError, match="the second text is empty"):
        attention(pretrained, "iron", "")
    for max_seqlen in (0, 4):
        message = f"max_seqlen {max_seqlen} is too small for one token of each"
        with pytest.raises(InputError, match=message):
            attention(pretrained, "iron", "water", max_seqlen=max_seqlen)
