"""The fast mode: predictions in 8 or 16 bits are similar, and CUDA uses flash attention."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import bertsmith
from bertsmith.bundle import HeadConfig, PretrainedBundle, TaskKind, load_fine_tuned
from bertsmith.model.bert import BertModel
from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.model.feature_based import BertWithBiLSTM
from bertsmith.model.packed import pack_sequences
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use import model_setup
from bertsmith.use.fill import fill
from bertsmith.use.model_setup import set_up_encoder
from bertsmith.use.pair import pair
from bertsmith.use.predict import predict
from bertsmith.use.quantization import Int8Linear, choose_16_bit_dtype, quantize, quantize_model
from bertsmith.use.score import score
from bertsmith.use.tag import tag
from tests.use.conftest import SENTENCES
from tests.use.test_predict import save_task_model


@pytest.fixture(params=["bf16", "int8"])
def arithmetic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The arithmetic that the fast mode uses in this test."""
    monkeypatch.setattr("bertsmith.use.quantization.has_bf16", lambda: request.param == "bf16")
    return request.param


@pytest.mark.usefixtures("arithmetic")
def test_fast_predictions_of_a_pretrained_model_are_similar(model_dir: Path) -> None:
    """Probabilities of words and pairs, and scores, change a little in the fast mode."""
    text, (a, b) = "the [MASK] stood where the roads met", SENTENCES[:2]
    words, fast_words = (
        dict(fill(model_dir, text, 1000, fast=fast)[0].predictions) for fast in (False, True)
    )
    assert words != fast_words
    assert max(abs(words[word] - fast_words[word]) for word in words) < 0.05
    probability, fast_probability = (pair(model_dir, a, b, fast=fast) for fast in (False, True))
    assert 0 < abs(probability - fast_probability) < 0.1
    scores, fast_scores = (score(model_dir, SENTENCES, fast=fast) for fast in (False, True))
    for exact, approximate in zip(scores, fast_scores, strict=True):
        assert 0 < abs(exact.per_token - approximate.per_token) < 0.2


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("kind", ["single", "multi", "regression", "tags"])
def test_fast_predictions_of_a_fine_tuned_model_are_similar(
    tmp_path: Path, tokenizer: Tokenizer, kind: TaskKind
) -> None:
    """Probabilities and scores of fine-tuned models change a little in the fast mode."""
    head = HeadConfig(kind, () if kind == "regression" else ("a", "b", "c"))
    directory = save_task_model(tmp_path / "m", tokenizer, head)

    def compute(*, fast: bool) -> list[float]:
        if kind == "tags":
            texts = tag(directory, SENTENCES, fast=fast)
            return [span.probability for text in texts for span in text.spans]
        predictions = predict(directory, SENTENCES, fast=fast)
        if kind == "regression":
            return [prediction.score or 0.0 for prediction in predictions]
        return [dict(prediction.labels)[label] for prediction in predictions for label in "abc"]

    exact, fast = np.array(compute(fast=False)), np.array(compute(fast=True))
    assert (exact != fast).any()
    assert np.abs(exact - fast).max() < 0.2


def test_converted_model_has_float32_heads(pretrained: PretrainedBundle, arithmetic: str) -> None:
    """Only the encoder is converted, in a copy, and a converted model is not converted again."""
    state = {name: value.clone() for name, value in pretrained.model.state_dict().items()}
    fast = bertsmith.quantize_model(pretrained)
    assert quantize_model(fast) is fast
    assert quantize(fast.model.bert) is fast.model.bert
    for head in (fast.model.mlm, fast.model.nsp, fast.model.pooler):
        assert head is not None
        assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert torch.equal(fast.model.mlm.decoder.weight, pretrained.model.mlm.decoder.weight)
    num_int8_layers = sum(isinstance(module, Int8Linear) for module in fast.model.modules())
    encoder_dtype = fast.model.bert.embeddings.words.weight.dtype
    if arithmetic == "bf16":
        assert (num_int8_layers, encoder_dtype) == (0, torch.bfloat16)
    else:
        assert (num_int8_layers, encoder_dtype) == (2 * 4, torch.float32)
    assert pretrained.model.bert.output_dtype is None
    for name, value in pretrained.model.state_dict().items():
        assert torch.equal(value, state[name]), name


@pytest.mark.usefixtures("arithmetic")
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "elu"])
def test_bf16_mode_computes_the_activation_of_the_model(
    monkeypatch: pytest.MonkeyPatch, activation: Any
) -> None:
    """The feed-forward network of the fast encoder has the activation function of the config."""
    monkeypatch.setattr("bertsmith.use.quantization.has_bf16", lambda: True)
    config = ModelConfig(vocab_size=11, layers=1, width=24, heads=2, activation=activation)
    layer: Any = BertModel(config).encoder.layers[0]
    torch.nn.init.normal_(layer.up.bias)
    encoder = BertModel(config)
    encoder.encoder.layers[0].load_state_dict(layer.state_dict())
    fast_layer: Any = quantize(encoder).encoder.layers[0]
    x = torch.randn(37, 24)
    with torch.no_grad():
        expected = layer.activation(layer.up(x))
        hidden = fast_layer.activation(fast_layer.up(x.bfloat16())).float()
    assert hidden.shape == expected.shape
    torch.testing.assert_close(hidden, expected, atol=0.02, rtol=0.02)
    assert (hidden < -0.1).any() == (activation != "relu")


def test_bilstm_reads_float32_states_of_a_converted_encoder(tokenizer: Tokenizer) -> None:
    """A BiLSTM on a converted encoder computes float32 outputs."""
    config = ModelConfig(vocab_size=tokenizer.vocab_size, layers=4, width=26, heads=2)
    features = BiLSTMSettings(width=5)
    model = BertWithBiLSTM(config, 3, features, is_sequence_level=False).eval()
    model.bert = quantize(model.bert)
    with torch.no_grad():
        outputs = model(pack_sequences([([5, 6, 7], [0, 0, 0])]))
    assert outputs.dtype == torch.float32


def test_loaded_model_is_converted_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """A loaded model without ``fast`` is used as it is."""
    directory = save_task_model(tmp_path / "m", tokenizer, HeadConfig("single", ("a", "b")))
    bundle = load_fine_tuned(directory)
    assert model_setup.set_up_model(bundle) is bundle
    assert predict(quantize_model(bundle), ["iron"]) == predict(bundle, ["iron"], fast=True)


@pytest.mark.parametrize(
    ("capability", "heads", "dtype", "kernel"),
    [
        ((8, 0), 4, torch.bfloat16, "varlen"),
        ((9, 0), 4, torch.bfloat16, "varlen"),
        ((7, 5), 4, torch.float16, "padded"),
        ((9, 0), 32, torch.bfloat16, "padded"),
    ],
)
def test_fast_mode_on_cuda(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    heads: int,
    dtype: torch.dtype,
    kernel: str,
) -> None:
    """From compute capability 8.0 on it is bf16, with `varlen` if the head width allows it.

    Before, it is fp16 with `padded`. In float32, the kernel is `padded`. In both cases TF32 is
    allowed, and deterministic algorithms are turned off.
    """
    calls = []
    monkeypatch.setattr(model_setup, "configure_determinism", lambda **call: calls.append(call))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert choose_16_bit_dtype(torch.device("cuda")) == dtype
    config = ModelConfig(vocab_size=50, width=64, heads=heads)
    kernels = []
    for weight_dtype in (torch.float32, dtype):
        with FakeTensorMode():
            weight = torch.empty(50, 64, device="cuda", dtype=weight_dtype)
        embeddings = SimpleNamespace(words=SimpleNamespace(weight=weight))
        encoder: Any = SimpleNamespace(embeddings=embeddings, config=config, kernel="padded")
        set_up_encoder(encoder)
        kernels.append(encoder.kernel)
    assert kernels == ["padded", kernel]
    assert calls == [{"is_cuda": True}] * 2


def test_inference_on_the_cpu_changes_no_global_setting(
    monkeypatch: pytest.MonkeyPatch, pretrained: PretrainedBundle
) -> None:
    """On the CPU, neither the kernel nor the precision of PyTorch's products is changed."""
    monkeypatch.setattr(
        model_setup, "configure_determinism", lambda **_: pytest.fail("a setting was changed")
    )
    fill(pretrained, "the [MASK]")
    assert pretrained.model.bert.kernel == "padded"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_predictions_on_cuda_are_similar(pretrained: PretrainedBundle, model_dir: Path) -> None:
    """Scores on CUDA equal those on the CPU up to TF32, and up to 16 bits in the fast mode."""
    expected = score(pretrained, SENTENCES)
    model = bertsmith.load(model_dir, device="cuda")
    for fast, tolerance in ((False, 0.02), (True, 0.2)):
        for exact, approximate in zip(expected, score(model, SENTENCES, fast=fast), strict=True):
            assert abs(exact.per_token - approximate.per_token) < tolerance
