"""ONNX: onnxruntime computes what our model computes, for each kind of model and each switch."""

import json
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
from transformers import AutoTokenizer, BertConfig, BertModel

import bertsmith
from bertsmith import bundle
from bertsmith.bundle import HeadConfig, load, load_encoder, load_fine_tuned, save, save_fine_tuned
from bertsmith.errors import MissingExtraError, ModelError
from bertsmith.interop.onnx import write_onnx, writing
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import FeatureSettings, ModelConfig
from bertsmith.model.packed import PackedBatch
from tests.model.examples import make_tokenizer, prime_config, random_batch, randomize_weights

HEADS = [
    HeadConfig("single", ("bad", "fair", "good")),
    HeadConfig("multi", ("red", "green", "blue", "black", "white")),
    HeadConfig("regression"),
    HeadConfig("entities", ("O", "B-X", "I-X")),
    HeadConfig("tags", ("NN", "VB")),
    HeadConfig("span"),
]
#: Every value of each switch, in as few configs as hold them all; in a pre-norm or causal graph
#: every later part has its part.
SWITCHES: list[dict[str, Any]] = [
    {"activation": "gelu_tanh"},
    {"activation": "gelu", "norm": "pre"},
    {"activation": "relu", "attention": "causal"},
    {"activation": "elu", "norm": "pre", "attention": "causal", "positions": "sinusoidal"},
    {"positions": "sinusoidal", "nsp": False, "norm_eps": 0.1},
]
#: Lengths of the sequences: ragged, one token only, one sequence only, and the longest there is.
BATCHES = [(23, 5, 41, 1, 13), (1,), (7,), (43,), (43, 1, 42)]
Feed = dict[str, NDArray[np.int64]]


def fed(packed: PackedBatch, beyond: int = 0) -> Feed:
    """Return a batch as the graph takes it, int64 [B, S]; what is padded is 0.

    ``beyond``: padding after the longest sequence.
    """
    lengths = packed.cu_seqlens.diff().tolist()
    shape = (len(lengths), max(lengths) + beyond)
    ids, segments, mask = (np.zeros(shape, np.int64) for _ in range(3))
    for row, (first, last) in enumerate(pairwise(packed.cu_seqlens.tolist())):
        ids[row, : last - first] = packed.ids[first:last]
        segments[row, : last - first] = packed.segments[first:last]
        mask[row, : last - first] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def ran(file: Path, feed: Feed) -> dict[str, NDArray[np.float32]]:
    """Run a graph; return its outputs by name."""
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def close(found: NDArray[np.float32], wanted: torch.Tensor, feed: Feed | None = None) -> None:
    """Compare; with ``feed`` only where it is no padding."""
    real = found if feed is None else found[feed["attention_mask"] == 1]
    np.testing.assert_allclose(real, wanted.numpy(), rtol=0, atol=1e-4)


def pretrained(folder: Path, config: ModelConfig) -> BertForPreTraining:
    """Save a pre-trained model all of whose weights are random; return it."""
    model = randomize_weights(BertForPreTraining(config)).eval()
    save(folder, model, make_tokenizer(config.vocab_size), {})
    return model


@pytest.fixture(params=SWITCHES, ids=lambda own: " ".join(map(str, own.values())))
def config(request: pytest.FixtureRequest) -> ModelConfig:
    """A config with some switches turned."""
    return prime_config(**request.param)


@torch.no_grad()
def test_pretrained_logits(tmp_path: Path, config: ModelConfig) -> None:
    """Masked-LM logits of all tokens and next-sentence logits, to 1e-4, for batches of any form."""
    model = pretrained(tmp_path / "m", config)
    assert write_onnx(tmp_path / "m", tmp_path / "o") == writing._build_notes(load(tmp_path / "m"))
    for lengths in BATCHES:
        packed = random_batch(config, lengths).packed
        feed = fed(packed, beyond=43 - max(lengths))
        found = ran(tmp_path / "o" / "model.onnx", feed)
        hidden = model.bert(packed)
        close(found["logits"], model.mlm(hidden), feed)
        if config.nsp:
            close(found["seq_relationship_logits"], model.next_sentence_logits(hidden, packed))
        assert len(found) == 1 + config.nsp


@torch.no_grad()
@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.kind)
def test_fine_tuned_logits(tmp_path: Path, head: HeadConfig, config: ModelConfig) -> None:
    """Each kind of fine-tuned model, to 1e-4; a causal one is read at its last real token."""
    model = randomize_weights(head.build_model(config)).eval()
    save_fine_tuned(tmp_path / "m", model, make_tokenizer(config.vocab_size), head, {})
    write_onnx(tmp_path / "m", tmp_path / "o")
    for lengths in BATCHES:
        packed = random_batch(config, lengths).packed
        feed, wanted = fed(packed), model(packed)
        found = ran(tmp_path / "o" / "model.onnx", feed)
        if head.kind == "span":
            assert list(found) == ["start_logits", "end_logits"]
            close(np.stack(list(found.values()), -1), wanted, feed)
        else:
            assert list(found) == ["logits"]
            close(found["logits"], wanted, feed if head.kind in ("entities", "tags") else None)


@torch.no_grad()
def test_choice_logits(tmp_path: Path, config: ModelConfig) -> None:
    """Multiple choice takes [B, endings, S] and gives [B, endings], to 1e-4."""
    head = HeadConfig("choice")
    model = randomize_weights(head.build_model(config)).eval()
    save_fine_tuned(tmp_path / "m", model, make_tokenizer(config.vocab_size), head, {})
    write_onnx(tmp_path / "m", tmp_path / "o")
    for prompts, endings in ((3, 2), (1, 5), (2, 1)):
        packed = random_batch(config, (23, 5, 41, 1, 13, 7)[: prompts * endings]).packed
        feed = {name: own.reshape(prompts, endings, -1) for name, own in fed(packed).items()}
        found = ran(tmp_path / "o" / "model.onnx", feed)["logits"]
        close(found, model(packed).reshape(prompts, endings))


@torch.no_grad()
def test_a_bare_encoder_gives_hidden_states(tmp_path: Path) -> None:
    """Transformers' BertModel, whose weights' names have no prefix, to 1e-4."""
    config = prime_config(activation="gelu")
    raw = bundle.to_hf_config(config) | {"architectures": None}
    torch.manual_seed(2)
    BertModel(BertConfig(**raw)).save_pretrained(tmp_path / "m")
    make_tokenizer(config.vocab_size).save(tmp_path / "m")
    write_onnx(tmp_path / "m", tmp_path / "o")
    packed = random_batch(config).packed
    feed = fed(packed)
    found = ran(tmp_path / "o" / "model.onnx", feed)
    assert list(found) == ["last_hidden_state"]
    close(found["last_hidden_state"], load_encoder(tmp_path / "m").model(packed), feed)


def test_a_head_that_is_not_in_the_files_is_not_written(tmp_path: Path) -> None:
    """Without a masked-LM head only the next sentence is told; with neither it is refused."""
    pretrained(tmp_path / "m", prime_config())
    weights = tmp_path / "m" / "model.safetensors"
    kept = {k: v for k, v in load_file(weights).items() if not k.startswith("cls.predictions")}
    save_file(kept, weights)
    write_onnx(tmp_path / "m", tmp_path / "o")
    found = ran(tmp_path / "o" / "model.onnx", fed(random_batch(prime_config()).packed))
    assert list(found) == ["seq_relationship_logits"]
    save_file({k: v for k, v in kept.items() if not k.startswith("cls.")}, weights)
    with pytest.raises(ModelError, match="has no masked-LM head"):
        write_onnx(tmp_path / "m", tmp_path / "p")


def test_inputs_outputs_and_opset(tmp_path: Path) -> None:
    """The checker passes; opset, file form, axes and types are as documented; both may vary."""
    pretrained(tmp_path / "m", prime_config())
    write_onnx(tmp_path / "m", tmp_path / "o")
    file = tmp_path / "o" / "model.onnx"
    onnx.checker.check_model(file, full_check=True)
    proto = onnx.load(file)
    assert [(own.domain, own.version) for own in proto.opset_import] == [("", writing.OPSET)]
    session = onnxruntime.InferenceSession(file)
    assert {own.name: (own.type, own.shape) for own in session.get_inputs()} == {
        name: ("tensor(int64)", ["batch_size", "sequence_length"])
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    assert {own.name: own.shape for own in session.get_outputs()} == {
        "logits": ["batch_size", "sequence_length", 101],
        "seq_relationship_logits": ["batch_size", 2],
    }
    # The word table is stored once, though it is the output layer of masked LM too.
    sizes = [tuple(own.dims) for own in proto.graph.initializer]
    assert sizes.count((101, 21)) == 1
    assert (21, 101) not in sizes


def test_the_opset_is_the_newest_that_the_runtime_takes(tmp_path: Path) -> None:
    """The next one is refused: when this fails, write the next one."""
    pretrained(tmp_path / "m", prime_config())
    write_onnx(tmp_path / "m", tmp_path / "o")
    proto = onnx.load(tmp_path / "o" / "model.onnx")
    proto.opset_import[0].version += 1
    with pytest.raises(Exception, match="opset"):
        onnxruntime.InferenceSession(proto.SerializeToString())


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    """Writing twice makes equal files, fp32 and int8."""
    pretrained(tmp_path / "m", prime_config())
    for int8 in (False, True):
        for name in ("a", "b"):
            write_onnx(tmp_path / "m", tmp_path / f"{name}{int8}", int8=int8)
        files = sorted((tmp_path / f"a{int8}").iterdir())
        assert len(files) == 6
        for file in files:
            assert file.read_bytes() == (tmp_path / f"b{int8}" / file.name).read_bytes(), file


def test_metadata_and_tokenizer_stand_beside_it(tmp_path: Path) -> None:
    """Kind, labels, longest length, case and producer; transformers' tokenizer; fp32 and int8."""
    head = HEADS[0]
    torch.manual_seed(1)
    save_fine_tuned(tmp_path / "m", head.build_model(prime_config()), make_tokenizer(101), head, {})
    for int8, name in ((False, "model.onnx"), (True, "model_quantized.onnx")):
        out = tmp_path / f"o{int8}"
        write_onnx(tmp_path / "m", out, int8=int8)
        assert {file.name for file in out.glob("*onnx*")} == {name}
        assert not [file for file in out.iterdir() if file.is_dir()]
        meta = onnxruntime.InferenceSession(out / name).get_modelmeta()
        told = meta.custom_metadata_map
        assert meta.producer_name == "bertsmith"
        assert onnx.load(out / name).producer_version == bertsmith.__version__
        assert told["kind"] == "single"
        assert told["max_length"] == "43"
        assert told["lowercase"] == "true"
        assert json.loads(told["labels"]) == list(head.labels)
        assert (out / "config.json").read_bytes() == (tmp_path / "m" / "config.json").read_bytes()
        words = AutoTokenizer.from_pretrained(out)
        assert words("word3 word4")["input_ids"] == [2, 8, 9, 3]
        assert words.model_max_length == 43


def test_weights_beyond_a_file_stand_in_one_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller limit, in place of 2 GB, weights go into a second file; answers are equal."""
    pretrained(tmp_path / "m", prime_config())
    feed = fed(random_batch(prime_config()).packed)
    for int8, name in ((False, "model.onnx"), (True, "model_quantized.onnx")):
        whole, parted = tmp_path / f"whole {int8}", tmp_path / f"parted {int8}"
        write_onnx(tmp_path / "m", whole, int8=int8)
        with monkeypatch.context() as patch:
            patch.setattr(writing, "_MAX_FILE_BYTES", 5000)
            write_onnx(tmp_path / "m", parted, int8=int8)
        files = sorted(file.name for file in parted.glob("*onnx*"))
        assert files == [name, f"{name}.data"]
        onnx.checker.check_model(parted / name, full_check=True)
        # Away from where it was written: the second file is named relative to the first.
        moved = parted.rename(tmp_path / f"moved {int8}")
        for output, wanted in ran(whole / name, feed).items():
            assert np.array_equal(ran(moved / name, feed)[output], wanted), output


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A BiLSTM on features, a folder that is in use, packages that are not there."""
    head, words = HEADS[0], make_tokenizer(101)
    features = FeatureSettings(layers="last", width=5)
    save_fine_tuned(tmp_path / "f", head.build_model(prime_config(), features), words, head, {})
    with pytest.raises(ModelError, match="models with a BiLSTM"):
        write_onnx(tmp_path / "f", tmp_path / "o")
    pretrained(tmp_path / "m", prime_config())
    with pytest.raises(ModelError, match="something is there already"):
        write_onnx(tmp_path / "m", tmp_path / "f")
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime.quantization", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bertsmith\[onnx\]'"):
        write_onnx(tmp_path / "m", tmp_path / "o", int8=True)
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'bertsmith\[onnx\]'"):
        write_onnx(tmp_path / "m", tmp_path / "o")
    assert not (tmp_path / "o").exists()
    assert load_fine_tuned(tmp_path / "f").head == head
