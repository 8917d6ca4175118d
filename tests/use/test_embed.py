"""Vectors of texts, tokens and words equal those of transformers; the fast mode is similar."""

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from bertsmith.bundle import HeadConfig, load_encoder, load_fine_tuned
from bertsmith.errors import InputError, ModelError, SettingsError
from bertsmith.interop.sentence_transformers.pooling import PoolingConfig
from bertsmith.model.bert import BertModel
from bertsmith.model.encoder import EncoderLayer
from bertsmith.model.ops.cpu import has_vnni
from bertsmith.model.ops.linear import round_up_num_rows
from bertsmith.model.ops.smoothquant import smoothquant_scales
from bertsmith.model.packed import PackedBatch
from bertsmith.model.task_models import BertForSequenceClassification
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.embed import Embedder, embed
from bertsmith.use.predict import predict
from bertsmith.use.quantization import quantize
from bertsmith.use.token_vectors import Floats
from bertsmith.use.vector_settings import VectorSettings
from tests.use.conftest import MAX_POSITIONS, WIDTH
from tests.use.test_predict import save_task_model

TEXTS = [
    "The forge stood where the two roads met.",
    "Every hammer had its own name, its own weight, and its own sound.",
    "",
    "struck",
    "the smith " * 60,
]


@pytest.fixture(scope="module")
def embedder(model_dir: Path) -> Embedder:
    """The random model with two layers."""
    return Embedder.load(model_dir)


@pytest.fixture(scope="module")
def hidden_states(model_dir: Path) -> list[list[Floats]]:
    """For each text, the hidden states [S, D] of embeddings and layers, from transformers."""
    model = AutoModel.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    states_by_text = []
    for text in TEXTS:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=MAX_POSITIONS)
        with torch.inference_mode():
            states = model(**inputs, output_hidden_states=True).hidden_states
        states_by_text.append([state[0].numpy() for state in states])
    return states_by_text


def assert_close(vectors: Floats, expected: list[Floats] | Floats) -> None:
    """Assert that vectors differ by at most 1e-5."""
    np.testing.assert_allclose(vectors, np.stack(list(expected)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layer", "index"), [(-1, 2), (-2, 1), (-3, 0), (0, 0), (1, 1), (2, 2)])
def test_layer_numbers_select_hidden_states(
    embedder: Embedder, hidden_states: list[list[Floats]], layer: int, index: int
) -> None:
    """Layer 0 is the embeddings, 1 the layer next to the input, and -1 the last layer."""
    expected_means = [states[index].mean(0) for states in hidden_states]
    assert_close(embedder.encode(TEXTS, layer=layer), expected_means)
    token_vectors = embedder.encode_tokens(TEXTS, layer=layer)
    for text, states in zip(token_vectors, hidden_states, strict=True):
        np.testing.assert_allclose(text.vectors, states[index], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "pool"),
    [
        ("mean", lambda x: x.mean(0)),
        ("max", lambda x: x.max(0)),
        ("mean-max", lambda x: np.concatenate([x.mean(0), x.max(0)])),
        ("first", lambda x: x[0]),
        ("last", lambda x: x[-1]),
    ],
)
def test_pooling_gives_the_expected_vectors(
    embedder: Embedder,
    hidden_states: list[list[Floats]],
    pooling: str,
    pool: Callable[[Floats], Floats],
) -> None:
    """Each pooling equals its NumPy formula over hidden states, also with normalization."""
    vectors = embedder.encode(TEXTS, layer=-2, pooling=pooling)
    assert_close(vectors, [pool(states[1]) for states in hidden_states])
    normalized = embedder.encode(TEXTS, pooling=pooling, normalize=True)
    assert_close(
        normalized, [pool(states[2]) / np.linalg.norm(pool(states[2])) for states in hidden_states]
    )


def test_pooling_can_exclude_special_tokens(
    embedder: Embedder, hidden_states: list[list[Floats]]
) -> None:
    """Without special tokens, pooling uses [CLS] and [SEP] only if the text is empty."""
    inner_states = [
        states[2][1:-1] if len(states[2]) > 2 else states[2] for states in hidden_states
    ]
    mean = embedder.encode(TEXTS, include_special_tokens=False)
    assert_close(mean, [states.mean(0) for states in inner_states])
    maximum = embedder.encode(TEXTS, include_special_tokens=False, pooling="max")
    assert_close(maximum, [states.max(0) for states in inner_states])
    first = embedder.encode(TEXTS, include_special_tokens=False, pooling="first")
    assert_close(first, [states[0] for states in inner_states])
    last = embedder.encode(TEXTS, include_special_tokens=False, pooling="last")
    assert_close(last, [states[-1] for states in inner_states])
    with pytest.raises(SettingsError, match=r"the pooler reads \[CLS\]"):
        embedder.encode(TEXTS, include_special_tokens=False, pooling="pooled")


def test_pooled_vectors_equal_the_pooler_output(model_dir: Path, embedder: Embedder) -> None:
    """Pooling "pooled" gives transformers' pooler_output, and is an error for other layers."""
    model = AutoModel.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    with torch.inference_mode():
        expected = model(**tokenizer(TEXTS[0], return_tensors="pt")).pooler_output
    assert_close(embedder.encode(TEXTS[:1], pooling="pooled"), expected.numpy())
    with pytest.raises(SettingsError, match="the pooler was trained on the last layer"):
        embedder.encode(TEXTS, layer=1, pooling="pooled")


def test_pooled_vectors_of_a_causal_classifier_depend_on_the_text(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The pooler of a left-to-right model reads the last token, as in fine-tuning."""
    head = HeadConfig("single", ("a", "b"))
    directory = save_task_model(tmp_path / "m", tokenizer, head, attention="causal")
    bundle = load_fine_tuned(directory)
    pooled = embed(bundle, TEXTS[:2], pooling="pooled")
    assert isinstance(bundle.model, BertForSequenceClassification)
    with torch.inference_mode():
        logits = bundle.model.output(torch.from_numpy(pooled))
    probabilities = [
        [probability for _, probability in sorted(prediction.labels)]
        for prediction in predict(bundle, TEXTS[:2])
    ]
    assert_close(logits.softmax(-1).numpy(), np.array(probabilities))
    assert np.abs(pooled[0] - pooled[1]).max() > 0.01


def test_missing_pooler_is_an_error(model_dir_without_nsp: Path) -> None:
    """Pooling "pooled" of a model without pooler weights is an error."""
    with pytest.raises(ModelError, match="has no pooler"):
        embed(model_dir_without_nsp, TEXTS, pooling="pooled")


def test_single_string_is_an_error(embedder: Embedder) -> None:
    """A string instead of a list of texts is an error."""
    for encode in (
        embedder.encode,
        embedder.encode_tokens,
        lambda text: embedder.encode_word(text, "iron"),
    ):
        with pytest.raises(InputError, match=r"a list of texts, got one text: put 'iron' into"):
            encode("iron")


def test_several_layers_are_combined(embedder: Embedder, hidden_states: list[list[Floats]]) -> None:
    """Layers are concatenated in the given order, averaged, or summed with weights."""
    concatenated = embedder.encode(TEXTS, layer=[-1, 0])
    assert_close(
        concatenated,
        [np.concatenate([states[2], states[0]], -1).mean(0) for states in hidden_states],
    )
    mean = embedder.encode(TEXTS, layer=[-1, -2], combine="mean")
    assert_close(mean, [(states[2] + states[1]).mean(0) / 2 for states in hidden_states])
    weighted = embedder.encode(TEXTS, layer=[-1, 1], combine="weighted", weights=[0.25, 2])
    assert_close(weighted, [(0.25 * states[2] + 2 * states[1]).mean(0) for states in hidden_states])
    first = embedder.encode(TEXTS, layer=[0, 1], pooling="first")
    assert_close(first, [np.concatenate([states[0][0], states[1][0]]) for states in hidden_states])


def test_only_required_layers_are_computed(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers above the requested one are not computed; "first" needs only [CLS] in the last."""
    embedder = Embedder.load(model_dir)
    rows_per_call: list[int] = []
    original_forward = EncoderLayer.forward

    def recording_forward(self: EncoderLayer, *args: object) -> torch.Tensor:
        output = original_forward(self, *args)  # type: ignore[arg-type]
        rows_per_call.append(len(output))
        return output

    monkeypatch.setattr(EncoderLayer, "forward", recording_forward)
    num_tokens = sum(map(len, embedder.tokenize(TEXTS[:2]).sequences))
    embedder.encode(TEXTS[:2], layer=-2)
    assert rows_per_call == [num_tokens]
    rows_per_call.clear()
    embedder.encode(TEXTS[:2], layer=0)
    assert rows_per_call == []
    embedder.encode(TEXTS[:2], pooling="first")
    assert rows_per_call == [num_tokens, 2]
    rows_per_call.clear()
    embedder.encode(TEXTS[:2], layer=1, pooling="first")
    assert rows_per_call == [2]


def test_batching_does_not_change_vectors(embedder: Embedder) -> None:
    """Batches of one text, of 32 tokens, and of all texts give the same vectors to 1e-6."""
    vectors = embedder.encode(TEXTS)
    small_batches = embedder.encode(TEXTS, batch_tokens=32)
    single_texts = np.concatenate([embedder.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(small_batches, vectors, rtol=0, atol=1e-6)
    np.testing.assert_allclose(single_texts, vectors, rtol=0, atol=1e-6)
    assert embedder.encode([]).shape == (0, WIDTH)


def test_encode_batch_gives_the_vectors_of_encode(embedder: Embedder) -> None:
    """``encode_batch`` gives the vectors of ``encode``, or of ``encode_tokens`` without pooling."""
    sequences = embedder.tokenize(TEXTS).sequences
    spec = embedder.resolve_settings(VectorSettings())
    np.testing.assert_allclose(
        embedder.encode_batch(sequences, spec), embedder.encode(TEXTS), rtol=0, atol=1e-6
    )
    token_spec = embedder.resolve_settings(VectorSettings(pooling="none"))
    matrices = embedder.encode_batch(sequences, token_spec)
    for matrix, tokens in zip(matrices, embedder.encode_tokens(TEXTS), strict=True):
        np.testing.assert_allclose(matrix, tokens.vectors, rtol=0, atol=1e-6)


@pytest.mark.parametrize("fast", [False, True])
def test_threads_do_not_change_vectors(model_dir: Path, fast: bool) -> None:
    """Batches computed in four threads give the same vectors as one thread, in input order."""
    texts = [" ".join(TEXTS[: 1 + number % len(TEXTS)]) for number in range(40)]
    embedder = Embedder.load(model_dir, fast=fast)
    previous_num_threads = torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 4):
            torch.set_num_threads(num_threads)
            results.append(embedder.encode(texts, batch_tokens=64))
            assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(previous_num_threads)
    np.testing.assert_allclose(results[0], results[1], rtol=0, atol=1e-5)
    # The vectors of the texts differ, so a wrong order would be detected.
    assert not np.allclose(results[0][0], results[0][1], atol=1e-3)


def test_tokens_match_their_offsets(embedder: Embedder) -> None:
    """The offsets of the tokens cover the text; truncation is reported."""
    text, long_text = embedder.encode_tokens([TEXTS[1], TEXTS[4]])
    assert text.tokens == embedder.tokenizer.ids_to_tokens(text.ids)
    assert (text.tokens[0], text.tokens[-1]) == ("[CLS]", "[SEP]")
    assert text.offsets[0] == (0, 0)
    inner_offsets = text.offsets[1:-1]
    assert "".join(TEXTS[1][start:end] for start, end in inner_offsets) == TEXTS[1].replace(" ", "")
    assert all(previous[1] <= following[0] for previous, following in pairwise(inner_offsets))
    assert len(text.vectors) == len(text.ids) == len(text.offsets)
    assert not text.is_truncated
    assert long_text.is_truncated
    assert len(long_text.vectors) == MAX_POSITIONS
    without_special = embedder.encode_tokens([TEXTS[1]], include_special_tokens=False)[0]
    assert without_special.ids == text.ids[1:-1]
    np.testing.assert_allclose(without_special.vectors, text.vectors[1:-1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("prompt", ["", "İİ: "])
def test_lowercasing_does_not_change_offsets(embedder: Embedder, prompt: str) -> None:
    """If a model lowercases before a cased tokenizer, "İ" is two characters of one source.

    Words are found in any case.
    """
    text = "İİİ Hammer, the weight"
    lowercasing = copy.copy(embedder)
    lowercasing.tokenizer = Tokenizer(replace(embedder.tokenizer.spec, lowercase=False))
    lowercasing.text_config = PoolingConfig(
        lowercase=True, prompts={"p": prompt}, default_prompt_name="p"
    )
    [tokens] = lowercasing.encode_tokens([text], include_special_tokens=False)
    surfaces = [
        (token, text[start:end].lower())
        for token, (start, end) in zip(tokens.tokens, tokens.offsets, strict=True)
    ]
    for token, surface in surfaces:
        assert token == "[UNK]" or token.removeprefix("##") == surface or surface in ("i̇", "")
    assert tokens.offsets[-1][1] == len(text)
    [word] = lowercasing.encode_word([text], "hammer")
    assert text[word.start : word.end] == "Hammer"
    inside = [index for index, (start, end) in enumerate(tokens.offsets) if start < 10 and end > 4]
    expected = tokens.vectors[inside].mean(0)
    np.testing.assert_allclose(word.vector, expected, rtol=0, atol=1e-5)
    assert lowercasing.find_word([text], "HAMMER") == {0: [(word.start, word.end)]}


def test_words_of_many_texts_are_computed_in_parts(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few texts at a time give the same vectors in the same order."""
    texts = ["its own weight", "Weight and sound, weight and name.", "the weight"]
    expected = embedder.encode_word(texts, "weight")
    monkeypatch.setattr("bertsmith.use.embed._WORD_TEXTS", 2)
    words = embedder.encode_word(texts, "weight")
    assert [(word.text_index, word.start) for word in words] == [(0, 8), (1, 0), (1, 18), (2, 4)]
    for word, same in zip(words, expected, strict=True):
        np.testing.assert_allclose(word.vector, same.vector, rtol=0, atol=1e-6)


def test_word_vector_is_the_mean_of_its_tokens(embedder: Embedder) -> None:
    """Occurrences are found in any case, and as a prefix only if there is no full match."""
    texts = ["Weight and sound, weight and name.", "its own weight"]
    words = embedder.encode_word(texts, "weight")
    assert [(word.text_index, texts[word.text_index][word.start : word.end]) for word in words] == [
        (0, "Weight"),
        (0, "weight"),
        (1, "weight"),
    ]
    [tokens] = embedder.encode_tokens([texts[1]])
    token_indices = [
        index
        for index, (start, end) in enumerate(tokens.offsets)
        # "weight" has the characters [8, 14) of "its own weight".
        if start < 14 and end > 8
    ]
    expected = tokens.vectors[token_indices].mean(0)
    np.testing.assert_allclose(words[2].vector, expected, rtol=0, atol=1e-6)
    [full_match] = embedder.encode_word(["hammers and a hammer"], "hammer")
    assert full_match.end == len("hammers and a hammer")
    [prefix_match] = embedder.encode_word(["two hammers"], "hammer")
    assert prefix_match.end == len("two hammer")
    with pytest.raises(InputError, match="text 2: the word 'hammer' is not in 'its own weight'"):
        embedder.encode_word(["a hammer", "its own weight"], "hammer")
    with pytest.raises(
        InputError,
        match=f"text 1: the word 'name' is beyond the model's limit of {MAX_POSITIONS} tokens",
    ):
        embedder.encode_word([TEXTS[4] + " name"], "name")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"layer": 3},
            r"there is no layer 3 in a model of 2 layers; expected -2 \(next to the input\)",
        ),
        ({"layer": -4}, "there is no layer -4"),
        ({"layer": []}, "layers"),
        ({"pooling": "middle"}, "pooling"),
        ({"combine": "weighted"}, "give one weight per layer"),
        ({"layer": [1, 2], "combine": "weighted", "weights": [1]}, "1 weights for 2 layers"),
    ],
)
def test_invalid_settings_are_errors(
    embedder: Embedder, settings: dict[str, object], message: str
) -> None:
    """Invalid layers, pooling, combinations and weights are errors."""
    with pytest.raises(SettingsError, match=message):
        embedder.encode(TEXTS, **settings)  # type: ignore[arg-type]


def test_encode_without_pooling_is_an_error(embedder: Embedder) -> None:
    """``encode`` with pooling "none" is an error that suggests ``encode_tokens``."""
    with pytest.raises(InputError, match=r"encode_tokens\(\)"):
        embedder.encode(TEXTS, pooling="none")


@pytest.mark.parametrize("vnni", [True, False])
def test_fast_vectors_are_similar(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, vnni: bool
) -> None:
    """Fast vectors have a cosine similarity above 0.995; the original model is not changed."""
    if vnni and not has_vnni():
        pytest.skip("this CPU has no VNNI, so sums of 8-bit products may be clipped")
    monkeypatch.setattr("bertsmith.use.quantization.has_vnni", lambda: vnni)
    monkeypatch.setattr("bertsmith.use.quantization.has_bf16", lambda: False)
    bundle = load_encoder(model_dir)
    state_before = {name: value.clone() for name, value in bundle.model.state_dict().items()}
    fast_embedder = Embedder(bundle, fast=True)
    assert fast_embedder.encoder is not bundle.model
    fast_vectors = fast_embedder.encode(TEXTS, normalize=True)
    vectors = embed(bundle, TEXTS, normalize=True)
    assert (fast_vectors * vectors).sum(-1).min() > 0.995
    assert (fast_vectors != vectors).any()
    state_after = bundle.model.state_dict()
    assert all(torch.equal(value, state_before[name]) for name, value in state_after.items())


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_quantization_uses_the_preceding_norm(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, norm: str
) -> None:
    """The SmoothQuant scales are those of the LayerNorm before the Linear layer."""
    monkeypatch.setattr("bertsmith.use.quantization.has_bf16", lambda: False)
    config = load_encoder(model_dir).config.model_copy(update={"norm": norm})
    torch.manual_seed(3)
    model = BertModel(config).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm.weight" in name else 0.0, 0.3)
    quantized = quantize(model)
    previous_norm: Any = model.embeddings.norm
    layer: Any
    quantized_layer: Any
    for layer, quantized_layer in zip(model.encoder.layers, quantized.encoder.layers, strict=True):
        attention_norm, feed_forward_norm = layer.attention_norm, layer.feed_forward_norm
        input_norms = (
            (previous_norm, attention_norm)
            if norm == "post"
            else (attention_norm, feed_forward_norm)
        )
        query_key_weight = layer.attention.query_key_value.weight[: 2 * config.width]
        quantized_linears = (
            quantized_layer.attention.query_key_value.query_key,
            quantized_layer.up,
        )
        for input_norm, weight, quantized_linear in zip(
            input_norms, (query_key_weight, layer.up.weight), quantized_linears, strict=True
        ):
            column_scale = input_norm.weight.abs() + input_norm.bias.abs() / 4
            expected = smoothquant_scales(column_scale, weight)
            torch.testing.assert_close(1 / quantized_linear.inverse_scales, expected)
        previous_norm = feed_forward_norm
    ids = torch.randint(5, 90, (40,))
    batch = PackedBatch(
        ids=ids,
        segments=torch.zeros_like(ids),
        positions=torch.arange(40),
        cu_seqlens=torch.tensor([0, 40], dtype=torch.int32),
        max_seqlen=40,
    )
    # Gradients are enabled, as in code without torch.no_grad.
    assert nn.functional.cosine_similarity(quantized(batch), model(batch)).min() > 0.99


def test_row_counts_are_bucketed() -> None:
    """The row counts 1 to 2,048 are rounded up to fewer than 50 different row counts.

    The number of added rows is less than 16 or an eighth of the row count, whichever is larger.
    """
    rounded_counts = [round_up_num_rows(num_rows) for num_rows in range(1, 2049)]
    assert len(set(rounded_counts)) < 50
    assert all(
        0 <= rounded - num_rows < max(16, num_rows / 8)
        for num_rows, rounded in enumerate(rounded_counts, 1)
    )
