"""Where a model looks: the attention probabilities of each head."""

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
from tests.use.conftest import TEXT
from tests.use.test_choose import made


def of_peer(directory: Path, texts: list[str], longest: int) -> Any:
    """Return what transformers says: tokens, segments and [L, N, S, S]."""
    words = AutoTokenizer.from_pretrained(directory)
    model = AutoModel.from_pretrained(directory, attn_implementation="eager").eval()
    inputs = words(*texts, truncation=True, max_length=longest, return_tensors="pt")
    with torch.no_grad():
        found = model(**inputs, output_attentions=True).attentions
    tokens = words.convert_ids_to_tokens(inputs["input_ids"][0])
    return tokens, inputs["token_type_ids"][0].tolist(), torch.cat(found).numpy()


def same(ours: AttentionMaps, theirs: Any) -> None:
    """Tokens and segments are equal, and the numbers to 1e-5."""
    assert (ours.tokens, ours.segments) == theirs[:2]
    assert ours.probabilities.dtype == np.float32
    np.testing.assert_allclose(ours.probabilities, theirs[2], atol=1e-5)


@pytest.mark.parametrize("texts", [TEXT[:1], TEXT[1:3], [TEXT[2] * 4]])
def test_the_same_as_the_peer(directory: Path, texts: list[str]) -> None:
    """A text, a pair and a text that is cut: transformers' output_attentions to 1e-5."""
    same(attention(bundle.load(directory), *texts), of_peer(directory, texts, 61))


def test_every_kind_of_model(directory: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Fine-tuned models and bare encoders, loaded or by their path, give the peer's numbers too."""
    tuned = made(tmp_path / "tuned", tokenizer)
    same(attention(bundle.load_fine_tuned(tuned), TEXT[3]), of_peer(tuned, [TEXT[3]], 41))
    theirs = of_peer(directory, TEXT[:2], 61)
    same(attention(bundle.load_encoder(directory), *TEXT[:2]), theirs)
    same(bertsmith.attention(directory, *TEXT[:2]), theirs)


def test_pre_norm_looks_at_what_was_normed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """In a pre-norm, causal model nobody looks ahead, and all layers' rows sum to 1."""
    torch.manual_seed(5)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=3, width=26, heads=2, feed_forward=37,
        max_positions=61, init_range=0.3, norm="pre", attention="causal",
    )  # fmt: skip
    model = BertForPreTraining(config).eval()
    bundle.save(tmp_path / "m", model, tokenizer, {})
    found = attention(tmp_path / "m", TEXT[0]).probabilities
    assert not np.triu(found, 1).any()
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)
    # By hand: the last layer is given what the two below it made, and norms it before it looks.
    states: list[Any] = []
    last = model.bert.encoder.layers[2]
    assert isinstance(last, EncoderLayer)
    last.attention_norm.register_forward_hook(lambda *told: states.append(told[2].clone()))
    attention(bundle.PretrainedBundle(model, tokenizer, config, tmp_path), TEXT[0])
    # A clone made in inference mode is no tensor for autograd.
    with torch.no_grad():
        query, key, _ = last.attention.query_key_value(states[0]).view(-1, 3, 2, 13).unbind(1)
    scores = torch.einsum("qnh,knh->nqk", query, key) / 13**0.5
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    wanted = scores.masked_fill(future, -torch.inf).softmax(-1).detach().numpy()
    np.testing.assert_allclose(found[2], wanted, atol=1e-5)


def test_what_is_too_long_is_cut_and_said(loaded: bundle.PretrainedBundle) -> None:
    """A text keeps its beginning; of a pair the border between both stays; how much is told."""
    whole = attention(loaded, TEXT[0])
    assert whole.left_out == 0
    short = attention(loaded, TEXT[0], max_seqlen=9)
    assert short.tokens == [*whole.tokens[:8], "[SEP]"]
    assert short.left_out == len(whole.tokens) - 9
    pair = attention(loaded, TEXT[0], TEXT[1], max_seqlen=11)
    assert pair.tokens[3:6] == [*whole.tokens[-3:-1], "[SEP]"]
    assert pair.probabilities.shape == (2, 2, 11, 11)


def test_what_cannot_be_asked(loaded: bundle.PretrainedBundle) -> None:
    """A text without a word is refused, and so is a length without room."""
    with pytest.raises(InputError, match="the text is empty"):
        attention(loaded, " \t")
    with pytest.raises(InputError, match="the second text is empty"):
        attention(loaded, "iron", "")
    with pytest.raises(InputError, match="too short for one token of each"):
        attention(loaded, "iron", "water", max_seqlen=4)
