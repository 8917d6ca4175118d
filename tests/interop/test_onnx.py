"""ONNX export: onnxruntime gives the outputs of the PyTorch model, for all kinds of models."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from transformers import AutoTokenizer, BertConfig, BertModel

import bertsmith
from bertsmith import bundle
from bertsmith.bundle import HeadConfig, load, load_encoder, load_fine_tuned, save, save_fine_tuned
from bertsmith.bundle.any_model import is_bare_encoder
from bertsmith.errors import MissingExtraError, ModelError
from bertsmith.interop.onnx import write_onnx, writing
from bertsmith.interop.sentence_transformers import read_pooling
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BiLSTMSettings, ModelConfig
from bertsmith.model.packed import PackedBatch
from bertsmith.use.embed import embed
from tests.model.examples import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    WIDTH,
    draw_batch,
    make_prime_size_config,
    make_tokenizer,
    randomize_weights,
)

HEADS = [
    HeadConfig("single", ("bad", "fair", "good")),
    HeadConfig("multi", ("red", "green", "blue", "black", "white")),
    HeadConfig("regression"),
    HeadConfig("entities", ("O", "B-X", "I-X")),
    HeadConfig("tags", ("NN", "VB")),
    HeadConfig("span"),
]
#: Combinations of model options that cover each value at least once.
OPTION_COMBINATIONS: list[dict[str, Any]] = [
    {"activation": "gelu_tanh"},
    {"activation": "gelu", "norm": "pre"},
    {"activation": "relu", "attention": "causal"},
    {"activation": "elu", "norm": "pre", "attention": "causal", "positions": "sinusoidal"},
    {"positions": "sinusoidal", "nsp": False, "norm_eps": 0.1},
]
#: Sequence lengths of each batch: several lengths, a single token, a single sequence, and the
#: maximum length.
BATCHES = [(23, 5, 41, 1, 13), (1,), (7,), (MAX_POSITIONS,), (MAX_POSITIONS, 1, 42)]
Feed = dict[str, NDArray[np.int64]]


def make_feed(packed: PackedBatch, extra_padding: int = 0) -> Feed:
    """Return the inputs of the ONNX graph for a batch, int64 [B, S], padded with 0.

    Args:
        packed: The batch.
        extra_padding: Columns of padding after the longest sequence.
    """
    lengths = packed.cu_seqlens.diff().tolist()
    shape = (len(lengths), max(lengths) + extra_padding)
    ids, segments, mask = (np.zeros(shape, np.int64) for _ in range(3))
    for row, (first, last) in enumerate(pairwise(packed.cu_seqlens.tolist())):
        ids[row, : last - first] = packed.ids[first:last]
        segments[row, : last - first] = packed.segments[first:last]
        mask[row, : last - first] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def run_graph(file: Path, feed: Feed) -> dict[str, NDArray[np.float32]]:
    """Run a graph with onnxruntime and return its outputs by name."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def assert_close(
    actual: NDArray[np.float32], expected: torch.Tensor, feed: Feed | None = None
) -> None:
    """Check that outputs agree within 1e-4; with ``feed``, only those of tokens, not of padding."""
    values = actual if feed is None else actual[feed["attention_mask"] == 1]
    np.testing.assert_allclose(values, expected.numpy(), rtol=0, atol=1e-4)


def save_pretrained(folder: Path, config: ModelConfig) -> BertForPreTraining:
    """Save a pre-trained model with random weights and return it."""
    model = randomize_weights(BertForPreTraining(config)).eval()
    save(folder, model, make_tokenizer(config.vocab_size), {})
    return model


@pytest.fixture(
    params=OPTION_COMBINATIONS, ids=lambda options: " ".join(map(str, options.values()))
)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """Return a model config with one of the combinations of options."""
    return make_prime_size_config(**request.param)


@torch.no_grad()
def test_pretrained_logits_equal_those_of_pytorch(tmp_path: Path, config: ModelConfig) -> None:
    """MLM and NSP logits of ONNX and PyTorch agree within 1e-4 for batches of different shapes."""
    model = save_pretrained(tmp_path / "m", config)
    assert write_onnx(tmp_path / "m", tmp_path / "o") == writing._build_notes(load(tmp_path / "m"))
    for lengths in BATCHES:
        packed = draw_batch(config, lengths).packed
        feed = make_feed(packed, extra_padding=config.max_positions - max(lengths))
        outputs = run_graph(tmp_path / "o" / "model.onnx", feed)
        hidden = model.bert(packed)
        assert_close(outputs["logits"], model.mlm(hidden), feed)
        if config.nsp:
            assert_close(
                outputs["seq_relationship_logits"], model.compute_nsp_logits(hidden, packed)
            )
        assert len(outputs) == (2 if config.nsp else 1)


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_fine_tuned_logits_equal_those_of_pytorch(
    tmp_path: Path, head: HeadConfig, config: ModelConfig
) -> None:
    """The logits of all heads agree within 1e-4; causal models pool the last token."""
    model = randomize_weights(head.build_model(config)).eval()
    save_fine_tuned(tmp_path / "m", model, make_tokenizer(config.vocab_size), head, {})
    write_onnx(tmp_path / "m", tmp_path / "o")
    for lengths in BATCHES:
        packed = draw_batch(config, lengths).packed
        feed = make_feed(packed)
        expected = model(packed)
        outputs = run_graph(tmp_path / "o" / "model.onnx", feed)
        if head.kind == "span":
            assert list(outputs) == ["start_logits", "end_logits"]
            assert_close(np.stack(list(outputs.values()), -1), expected, feed)
        else:
            assert list(outputs) == ["logits"]
            assert_close(
                outputs["logits"], expected, feed if head.kind in ("entities", "tags") else None
            )


@torch.no_grad()
def test_multiple_choice_logits_equal_those_of_pytorch(tmp_path: Path, config: ModelConfig) -> None:
    """The graph maps [B, choices, S] to [B, choices] and agrees within 1e-4."""
    head = HeadConfig("choice")
    model = randomize_weights(head.build_model(config)).eval()
    save_fine_tuned(tmp_path / "m", model, make_tokenizer(config.vocab_size), head, {})
    write_onnx(tmp_path / "m", tmp_path / "o")
    for prompts, num_choices in ((3, 2), (1, 5), (2, 1)):
        packed = draw_batch(config, (23, 5, 41, 1, 13, 7)[: prompts * num_choices]).packed
        feed = {
            name: array.reshape(prompts, num_choices, -1)
            for name, array in make_feed(packed).items()
        }
        outputs = run_graph(tmp_path / "o" / "model.onnx", feed)["logits"]
        assert_close(outputs, model(packed).reshape(prompts, num_choices))


@torch.no_grad()
def test_bare_encoder_returns_hidden_states(tmp_path: Path) -> None:
    """The graph of a BertModel of transformers returns its hidden states, within 1e-4."""
    config = make_prime_size_config(activation="gelu")
    raw = bundle.to_hf_config(config) | {"architectures": None}
    torch.manual_seed(2)
    BertModel(BertConfig(**raw)).save_pretrained(tmp_path / "m")
    make_tokenizer(config.vocab_size).save(tmp_path / "m")
    write_onnx(tmp_path / "m", tmp_path / "o")
    packed = draw_batch(config).packed
    feed = make_feed(packed)
    outputs = run_graph(tmp_path / "o" / "model.onnx", feed)
    assert list(outputs) == ["last_hidden_state"]
    assert_close(outputs["last_hidden_state"], load_encoder(tmp_path / "m").model(packed), feed)


def test_missing_heads_are_not_exported(tmp_path: Path) -> None:
    """Without MLM head, the graph returns only NSP logits; without both heads, hidden states."""
    save_pretrained(tmp_path / "m", make_prime_size_config())
    weights = tmp_path / "m" / "model.safetensors"
    state = load_file(weights)
    state = {
        name: tensor for name, tensor in state.items() if not name.startswith("cls.predictions")
    }
    save_file(state, weights)
    write_onnx(tmp_path / "m", tmp_path / "o")
    outputs = run_graph(
        tmp_path / "o" / "model.onnx", make_feed(draw_batch(make_prime_size_config()).packed)
    )
    assert list(outputs) == ["seq_relationship_logits"]
    encoder_state = {name: tensor for name, tensor in state.items() if not name.startswith("cls.")}
    save_file(encoder_state, weights)
    write_onnx(tmp_path / "m", tmp_path / "p")
    assert _list_outputs(tmp_path / "p") == ["last_hidden_state"]


def test_untrained_heads_of_an_imported_encoder_are_not_exported(tmp_path: Path) -> None:
    """An imported TensorFlow encoder has new heads, which are not trained."""
    save_pretrained(tmp_path / "m", make_prime_size_config())
    info = json.loads((tmp_path / "m" / "bertsmith.json").read_text())
    outputs = {}
    for heads in ("mlm.", "nsp."), ("nsp.",), ("mlm.",):
        info["imported"] = {"newly_initialized": [f"{head}x" for head in heads]}
        (tmp_path / "m" / "bertsmith.json").write_text(json.dumps(info))
        write_onnx(tmp_path / "m", tmp_path / "".join(heads))
        outputs[heads] = _list_outputs(tmp_path / "".join(heads))
    assert outputs == {
        ("mlm.", "nsp."): ["last_hidden_state"],
        ("nsp.",): ["logits"],
        ("mlm.",): ["seq_relationship_logits"],
    }


def test_stored_weights_determine_the_exported_heads(tmp_path: Path) -> None:
    """Without a class in config.json, stored heads are exported; unused weights are reported."""
    save_pretrained(tmp_path / "m", make_prime_size_config())
    change_json(tmp_path / "m" / "config.json", architectures=None)
    weights_file = tmp_path / "m" / "model.safetensors"
    save_file(load_file(weights_file) | {"extra.weight": torch.zeros(2)}, weights_file)
    assert not is_bare_encoder(tmp_path / "m")
    (note,) = write_onnx(tmp_path / "m", tmp_path / "o")
    assert note.endswith("m: unused weights: extra.weight")
    assert _list_outputs(tmp_path / "o") == ["logits", "seq_relationship_logits"]


def test_stored_maximum_length_is_exported(tmp_path: Path) -> None:
    """The graph and its tokenizer have the length to which the model truncates inputs."""
    save_pretrained(tmp_path / "m", make_prime_size_config())
    change_json(tmp_path / "m" / "tokenizer_config.json", model_max_length=9)
    write_onnx(tmp_path / "m", tmp_path / "o")
    assert read_graph_metadata(tmp_path / "o")["max_length"] == "9"
    assert AutoTokenizer.from_pretrained(tmp_path / "o").model_max_length == 9


@torch.no_grad()
def test_modules_of_an_embedding_model_are_exported(tmp_path: Path) -> None:
    """The graph, and the modules that sentence-transformers reads, give the model's vectors."""
    config = make_prime_size_config(activation="gelu")
    save_pretrained(tmp_path / "m", config)
    torch.manual_seed(3)
    SentenceTransformer(
        modules=[
            modules.Transformer(str(tmp_path / "m"), max_seq_length=7),
            modules.Pooling(WIDTH, pooling_mode=("mean", "cls")),
            modules.Dense(2 * WIDTH, 11),
            modules.Normalize(),
        ],
        prompts={"query": "word3 "},
        default_prompt_name="query",
        device="cpu",
    ).save(str(tmp_path / "embedder"))
    (note,) = write_onnx(tmp_path / "embedder", tmp_path / "o")
    assert "backend='onnx'" in note
    assert read_graph_metadata(tmp_path / "o")["max_length"] == "7"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "o")
    assert tokenizer.model_max_length == 7
    exported = read_pooling(tmp_path / "o")
    assert exported is not None
    assert (exported.max_seq_length, exported.prompt) == (7, "word3 ")
    texts = ["word4", " ".join(f"word{number}" for number in range(5, 15))]
    inputs = tokenizer(
        [exported.prompt + text for text in texts],
        padding=True, truncation=True, return_tensors="pt",
    )  # fmt: skip
    feed = {name: value.numpy() for name, value in inputs.items()}
    hidden = run_graph(tmp_path / "o" / "model.onnx", feed)["last_hidden_state"]
    features = {"token_embeddings": torch.from_numpy(hidden), **inputs}
    features = modules.Pooling.load(str(tmp_path / "o" / "1_Pooling"))(features)
    features = modules.Dense.load(str(tmp_path / "o" / "2_Dense"))(features)
    vectors = modules.Normalize()(features)["sentence_embedding"].numpy()
    np.testing.assert_allclose(vectors, embed(tmp_path / "embedder", texts), rtol=0, atol=1e-5)


def test_pooling_of_a_sparse_model_is_left_to_the_user(tmp_path: Path) -> None:
    """A sparse model (SPLADE) is exported with a note and with its maximum length."""
    save_pretrained(tmp_path / "m", make_prime_size_config(nsp=False))
    entries = [
        {"path": "", "type": "sentence_transformers.sparse_encoder.models.MLMTransformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.sparse_encoder.models.SpladePooling"},
    ]
    (tmp_path / "m" / "modules.json").write_text(json.dumps(entries))
    (tmp_path / "m" / "sentence_bert_config.json").write_text('{"max_seq_length": 7}')
    (tmp_path / "m" / "1_Pooling").mkdir()
    (tmp_path / "m" / "1_Pooling" / "config.json").write_text("{}")
    (note,) = write_onnx(tmp_path / "m", tmp_path / "o")
    assert "compute the sparse vectors (SPLADE)" in note
    assert _list_outputs(tmp_path / "o") == ["logits"]
    assert read_graph_metadata(tmp_path / "o")["max_length"] == "7"


def change_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON object in a file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read_graph_metadata(directory: Path) -> dict[str, str]:
    """Return the metadata of an exported model."""
    entries = onnx.load(directory / "model.onnx").metadata_props
    return {entry.key: entry.value for entry in entries}


def _list_outputs(directory: Path) -> list[str]:
    """Return the names of the outputs of an exported model."""
    return [output.name for output in onnx.load(directory / "model.onnx").graph.output]


def test_graph_has_the_documented_inputs_outputs_and_opset(tmp_path: Path) -> None:
    """The model passes the checker and has the documented opset, axes and types."""
    save_pretrained(tmp_path / "m", make_prime_size_config())
    write_onnx(tmp_path / "m", tmp_path / "o")
    file = tmp_path / "o" / "model.onnx"
    onnx.checker.check_model(file, full_check=True)
    proto = onnx.load(file)
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", writing.OPSET)]
    session = onnxruntime.InferenceSession(file)
    assert {node.name: (node.type, node.shape) for node in session.get_inputs()} == {
        name: ("tensor(int64)", ["batch_size", "sequence_length"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    assert {node.name: node.shape for node in session.get_outputs()} == {
        "logits": ["batch_size", "sequence_length", VOCAB_SIZE],
        "seq_relationship_logits": ["batch_size", 2],
    }
    # The word embeddings are stored once, although the MLM decoder also uses them.
    shapes = [tuple(tensor.dims) for tensor in proto.graph.initializer]
    assert shapes.count((VOCAB_SIZE, WIDTH)) == 1
    assert (WIDTH, VOCAB_SIZE) not in shapes


def test_opset_is_the_newest_supported(tmp_path: Path) -> None:
    """The next opset is rejected by onnxruntime. If this fails, increase ``writing.OPSET``."""
    save_pretrained(tmp_path / "m", make_prime_size_config())
    write_onnx(tmp_path / "m", tmp_path / "o")
    proto = onnx.load(tmp_path / "o" / "model.onnx")
    proto.opset_import[0].version += 1
    with pytest.raises(Exception, match="opset"):
        onnxruntime.InferenceSession(proto.SerializeToString())


def test_export_is_deterministic(tmp_path: Path) -> None:
    """Two exports of a model have the same bytes, in float32 and int8."""
    save_pretrained(tmp_path / "m", make_prime_size_config())
    for int8 in (False, True):
        for name in ("a", "b"):
            write_onnx(tmp_path / "m", tmp_path / f"{name}{int8}", int8=int8)
        files = sorted((tmp_path / f"a{int8}").iterdir())
        assert len(files) == 6
        for file in files:
            assert file.read_bytes() == (tmp_path / f"b{int8}" / file.name).read_bytes(), file


def test_metadata_and_tokenizer_are_exported(tmp_path: Path) -> None:
    """The graph has metadata of the model, and transformers can load the exported tokenizer."""
    head = HEADS[0]
    torch.manual_seed(1)
    save_fine_tuned(
        tmp_path / "m", head.build_model(make_prime_size_config()), make_tokenizer(), head, {}
    )
    for int8, name in ((False, "model.onnx"), (True, "model_quantized.onnx")):
        out = tmp_path / f"o{int8}"
        write_onnx(tmp_path / "m", out, int8=int8)
        assert {file.name for file in out.glob("*onnx*")} == {name}
        assert not [file for file in out.iterdir() if file.is_dir()]
        model_meta = onnxruntime.InferenceSession(out / name).get_modelmeta()
        metadata = model_meta.custom_metadata_map
        assert model_meta.producer_name == "bertsmith"
        assert onnx.load(out / name).producer_version == bertsmith.__version__
        assert metadata["kind"] == "single"
        assert metadata["max_length"] == str(MAX_POSITIONS)
        assert metadata["lowercase"] == "true"
        assert json.loads(metadata["labels"]) == list(head.labels)
        assert (out / "config.json").read_bytes() == (tmp_path / "m" / "config.json").read_bytes()
        tokenizer = AutoTokenizer.from_pretrained(out)
        expected_ids = tokenizer.convert_tokens_to_ids(["[CLS]", "word3", "word4", "[SEP]"])
        assert tokenizer("word3 word4")["input_ids"] == expected_ids
        assert tokenizer.model_max_length == MAX_POSITIONS


def test_large_weights_go_to_an_external_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights above the size limit are in a second file, and the outputs do not change."""
    save_pretrained(tmp_path / "m", make_prime_size_config())
    feed = make_feed(draw_batch(make_prime_size_config()).packed)
    for int8, name in ((False, "model.onnx"), (True, "model_quantized.onnx")):
        single_file, split = tmp_path / f"single {int8}", tmp_path / f"split {int8}"
        write_onnx(tmp_path / "m", single_file, int8=int8)
        with monkeypatch.context() as patch:
            patch.setattr(writing, "_MAX_FILE_BYTES", 5000)
            write_onnx(tmp_path / "m", split, int8=int8)
        files = sorted(file.name for file in split.glob("*onnx*"))
        assert files == [name, f"{name}.data"]
        onnx.checker.check_model(split / name, full_check=True)
        # The path of the external file is relative, so the folder can be moved.
        moved = split.rename(tmp_path / f"moved {int8}")
        for output, expected in run_graph(single_file / name, feed).items():
            assert np.array_equal(run_graph(moved / name, feed)[output], expected), output


def test_unsupported_exports_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A BiLSTM, a folder in use, and missing packages are errors."""
    head = HEADS[0]
    tokenizer = make_tokenizer()
    features = BiLSTMSettings(layers="last", width=5)
    save_fine_tuned(
        tmp_path / "f", head.build_model(make_prime_size_config(), features), tokenizer, head, {}
    )
    with pytest.raises(ModelError, match="models with a BiLSTM"):
        write_onnx(tmp_path / "f", tmp_path / "o")
    save_pretrained(tmp_path / "m", make_prime_size_config())
    with pytest.raises(ModelError, match="already exists"):
        write_onnx(tmp_path / "m", tmp_path / "f")
    monkeypatch.setitem(sys.modules, "onnxruntime.quantization", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bertsmith\[onnx\]'"):
        write_onnx(tmp_path / "m", tmp_path / "o", int8=True)
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bertsmith\[onnx\]'"):
        write_onnx(tmp_path / "m", tmp_path / "o")
    assert not (tmp_path / "o").exists()
    assert load_fine_tuned(tmp_path / "f").head == head
