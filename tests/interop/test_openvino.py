"""OpenVINO exports: layout, equal hidden states, quantization to 8 bits, and errors."""

import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bertsmith import bundle
from bertsmith.bundle import EncoderBundle, hash_model_files, load_encoder, locate_model
from bertsmith.bundle.directory import OPENVINO_FILE, find_openvino_model
from bertsmith.errors import BertsmithError, InputError, MissingExtraError, ModelError
from bertsmith.interop.openvino import OpenVINOEncoder
from bertsmith.interop.openvino.writing import write_openvino
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece

REASON = "pip install 'bertsmith[openvino]'"
openvino = pytest.importorskip("openvino", reason=REASON)
nncf = pytest.importorskip("nncf", reason=REASON)

TEXTS = [
    "The forge stood where the two roads met, and the smith worked there until dark.",
    "Every hammer on the wall had its own name, its own weight, and its own sound.",
    "When the iron was white he lifted it, turned it once, and struck.",
    "Some questions had answers; others were answered by the hammer alone.",
    "struck",
]
MAX_POSITIONS = 59


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A tokenizer with 211 tokens."""
    return train_wordpiece(iter(TEXTS * 3), 211)


def save_model(directory: Path, tokenizer: Tokenizer, **changes: object) -> Path:
    """Save a random model with distinct prime sizes; return its directory."""
    torch.manual_seed(5)
    config = ModelConfig.model_validate({
        "vocab_size": tokenizer.vocab_size, "layers": 3, "width": 38, "heads": 2,
        "feed_forward": 71, "max_positions": MAX_POSITIONS, "init_range": 0.1, **changes,
    })  # fmt: skip
    bundle.save(directory, BertForPreTraining(config), tokenizer, {})
    return directory


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The directory of a random model."""
    return save_model(tmp_path_factory.mktemp("model") / "smith", tokenizer)


@pytest.fixture(scope="module")
def exported(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's graph in float32."""
    out = tmp_path_factory.mktemp("openvino") / "out"
    assert write_openvino(model_dir, out) == []
    return out


@pytest.fixture(scope="module")
def quantized(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's graph in 8 bits."""
    out = tmp_path_factory.mktemp("openvino") / "out"
    notes = write_openvino(model_dir, out, calibration=["", *TEXTS, " \t"])
    assert notes[0].startswith("only 5 texts for calibration")
    return out


@pytest.fixture(scope="module")
def original(model_dir: Path) -> EncoderBundle:
    """The model in PyTorch."""
    return load_encoder(model_dir)


def pack_texts(texts: list[str], tokenizer: Tokenizer) -> PackedBatch:
    """Return texts as a batch; the second half of each is in segment 1."""
    sequences = [[tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id] for text in texts]
    return pack_sequences(
        [(ids, [int(index >= len(ids) // 2) for index in range(len(ids))]) for ids in sequences]
    )


def compute_hidden(original: EncoderBundle, batch: PackedBatch) -> NDArray[np.float32]:
    """Return the last hidden states of the model in PyTorch, float32 [T, D]."""
    with torch.inference_mode():
        hidden: NDArray[np.float32] = original.model(batch).numpy()
    return hidden


def load_float32(directory: Path, original: EncoderBundle) -> OpenVINOEncoder:
    """Load a graph that computes in float32 what is not quantized."""
    return OpenVINOEncoder(directory, original.config, "f32")


def test_directory_has_the_layout_of_sentence_transformers(exported: Path) -> None:
    """The graph is where sentence-transformers looks for it, and there are no other weights."""
    assert (exported / "openvino/openvino_model.xml").is_file()
    assert (exported / "openvino/openvino_model.bin").is_file()
    assert not list(exported.rglob("*.safetensors"))
    assert sorted(path.name for path in exported.iterdir()) == [
        "1_Pooling", "bertsmith.json", "config.json",
        "config_sentence_transformers.json", "modules.json", "openvino",
        "sentence_bert_config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt",
    ]  # fmt: skip
    graph = openvino.Core().read_model(exported / OPENVINO_FILE)
    names = ["attention_mask", "input_ids", "token_type_ids"]
    assert sorted(node.get_any_name() for node in graph.inputs) == names
    assert [node.get_any_name() for node in graph.outputs] == ["last_hidden_state"]
    info = json.loads((exported / "bertsmith.json").read_text())
    assert info["openvino"] == {"source": "smith", "bits": 32}


def test_hidden_states_equal_pytorch(exported: Path, original: EncoderBundle) -> None:
    """In float32, hidden states differ by at most 1e-5, in batches and in single texts."""
    encoder = load_float32(exported, original)
    for texts in (TEXTS, TEXTS[4:], TEXTS[::-1]):
        batch = pack_texts(texts, original.tokenizer)
        expected = compute_hidden(original, batch)
        np.testing.assert_allclose(encoder(batch).numpy(), expected, rtol=0, atol=1e-5)


def test_longest_sequence_has_the_maximum_length(exported: Path, original: EncoderBundle) -> None:
    """A sequence may have as many tokens as the model has positions."""
    ids = [original.tokenizer.cls_id, *range(7, 5 + MAX_POSITIONS), original.tokenizer.sep_id]
    batch = pack_sequences([(ids[:MAX_POSITIONS], [0] * MAX_POSITIONS), ([2, 9, 3], [0] * 3)])
    hidden = load_float32(exported, original)(batch).numpy()
    np.testing.assert_allclose(hidden, compute_hidden(original, batch), rtol=0, atol=1e-5)


def test_threads_compute_at_the_same_time(exported: Path, original: EncoderBundle) -> None:
    """More threads than there are requests get the results of their own batches."""
    encoder = load_float32(exported, original)
    batches = [pack_texts([text], original.tokenizer) for text in TEXTS] * 8
    with ThreadPoolExecutor(9) as pool:
        for batch, hidden in zip(batches, pool.map(encoder, batches), strict=True):
            expected = compute_hidden(original, batch)
            np.testing.assert_allclose(hidden.numpy(), expected, rtol=0, atol=1e-5)


def test_8_bit_graph_is_close_to_float32(
    exported: Path, quantized: Path, original: EncoderBundle
) -> None:
    """Hidden states have a cosine of at least 0.99, also in padded batches; weights are 8-bit."""
    encoder = load_float32(quantized, original)
    for texts in (TEXTS, TEXTS[4:]):
        batch = pack_texts(texts, original.tokenizer)
        hidden, expected = encoder(batch).numpy(), compute_hidden(original, batch)
        norms = np.linalg.norm(hidden, axis=1) * np.linalg.norm(expected, axis=1)
        cosines = (hidden * expected).sum(1) / norms
        assert cosines.min() >= 0.99, cosines.min()
        assert np.abs(hidden - expected).max() > 1e-4
    graph = openvino.Core().read_model(quantized / OPENVINO_FILE)
    types = [
        node.get_element_type().to_string()
        for node in graph.get_ops()
        if node.get_type_name() == "Constant" and len(node.get_output_shape(0)) == 2
    ]
    # Three layers have four linear layers each; the embeddings of words and segments are quantized.
    assert types.count("i8") == 14
    bin_files = [path / "openvino/openvino_model.bin" for path in (exported, quantized)]
    assert bin_files[1].stat().st_size < 0.5 * bin_files[0].stat().st_size


def test_padding_has_no_influence_in_8_bits(quantized: Path, original: EncoderBundle) -> None:
    """The hidden states of a short text are the same next to a long text."""
    encoder = load_float32(quantized, original)
    alone = encoder(pack_texts(TEXTS[4:], original.tokenizer)).numpy()
    padded = encoder(pack_texts([TEXTS[4], TEXTS[0]], original.tokenizer)).numpy()
    np.testing.assert_allclose(padded[: len(alone)], alone, rtol=0, atol=1e-4)


def test_export_prints_nothing_to_stdout(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """NNCF's progress bars are not shown, and its telemetry is disabled."""
    write_openvino(model_dir, tmp_path / "out", calibration=TEXTS)
    captured = capsys.readouterr()
    assert not captured.out
    from openvino_telemetry import Telemetry

    assert Telemetry().consent is False


def test_interrupted_export_leaves_nothing(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C during the quantization, there is neither a directory nor a temporary one."""

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(nncf, "quantize", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_openvino(model_dir, tmp_path / "out", calibration=TEXTS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("package", "calibration"), [("openvino", None), ("onnx", None), ("nncf", TEXTS)]
)
def test_missing_package_is_an_error(
    model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    calibration: list[str] | None,
) -> None:
    """The error has the command that installs the package, and nothing is written."""
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"'{package}'.*pip install 'bertsmith\["):
        write_openvino(model_dir, tmp_path / "out", calibration=calibration)
    assert list(tmp_path.iterdir()) == []


def test_loading_without_openvino_is_an_error(
    exported: Path, original: EncoderBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the command that installs OpenVINO."""
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bertsmith\[openvino\]'"):
        load_float32(exported, original)


def test_unsuitable_input_is_an_error(
    model_dir: Path, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """Blank texts, a pre-norm model, an existing directory and an OpenVINO directory fail."""
    with pytest.raises(InputError, match="calibration: no text that is not blank"):
        write_openvino(model_dir, tmp_path / "out", calibration=["", " "])
    pre_norm = save_model(tmp_path / "pre-norm", tokenizer, norm="pre")
    with pytest.raises(ModelError, match="cannot represent this model"):
        write_openvino(pre_norm, tmp_path / "out")
    with pytest.raises(ModelError, match="already exists"):
        write_openvino(model_dir, pre_norm)
    assert not (tmp_path / "out").exists()


def test_other_uses_name_the_original_model(exported: Path, tmp_path: Path) -> None:
    """Loading the weights is an error that names the original model."""
    for function in (locate_model, load_encoder, bundle.load):
        with pytest.raises(ModelError, match=r"no weights.*use the original model, smith"):
            function(exported)
    copy = shutil.copytree(exported, tmp_path / "copy")
    (copy / "bertsmith.json").unlink()
    with pytest.raises(ModelError, match=r"use the original model$"):
        locate_model(copy)
    with pytest.raises(ModelError, match="use the original model, smith"):
        write_openvino(exported, tmp_path / "out")


def test_directory_with_weights_uses_its_weights(
    exported: Path, model_dir: Path, tmp_path: Path
) -> None:
    """A graph next to weights, as in models on the hub, is not used."""
    copy = shutil.copytree(exported, tmp_path / "copy")
    assert find_openvino_model(copy) == copy
    assert find_openvino_model(copy / "config.json") == copy
    shutil.copy(model_dir / "model.safetensors", copy)
    assert find_openvino_model(copy) is None


def test_hash_detects_changes_of_the_graph(exported: Path, quantized: Path, tmp_path: Path) -> None:
    """The hash of a directory depends on the graph and its weights."""
    copy = shutil.copytree(exported, tmp_path / "copy")
    assert hash_model_files(copy) == hash_model_files(exported)
    shutil.copy(quantized / "openvino/openvino_model.bin", copy / "openvino")
    assert hash_model_files(copy) != hash_model_files(exported)


def test_damaged_graphs_are_errors(exported: Path, original: EncoderBundle, tmp_path: Path) -> None:
    """A truncated file, missing weights and the graph of another model are reported."""
    copy = shutil.copytree(exported, tmp_path / "copy")
    graph, weights = copy / OPENVINO_FILE, copy / "openvino/openvino_model.bin"
    text = graph.read_text()

    def find_error(config: ModelConfig) -> str:
        with pytest.raises(BertsmithError) as error:
            OpenVINOEncoder(copy, config)
        assert "export the model again" in str(error.value)
        return str(error.value)

    wide = original.config.model_copy(update={"width": 40})
    assert "hidden states have width 38, but config.json says 40" in find_error(wide)
    graph.write_text(text.replace("last_hidden_state", "logits"))
    assert "found the inputs" in find_error(original.config)
    graph.write_text(text[: len(text) // 2])
    assert "not a readable OpenVINO graph" in find_error(original.config)
    graph.write_text(text)
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "not a readable OpenVINO graph" in find_error(original.config)
    weights.unlink()
    assert "not a readable OpenVINO graph" in find_error(original.config)
