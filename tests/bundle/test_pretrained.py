"""The model directory: it can be read back, here and by transformers, and errors say why."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM, BertForPreTraining

from bertsmith import bundle, fill
from bertsmith.errors import ModelError, TokenizerError
from bertsmith.model.bert import BertForPreTraining as PreTrainingModel
from bertsmith.model.config import ModelConfig
from bertsmith.model.packed import pack_sequences
from tests.model.examples import (
    PreTrainingBatch,
    make_tokenizer,
    prime_config,
    random_batch,
    randomize_weights,
)


def written(directory: Path, **changes: Any) -> PreTrainingModel:
    """Write a model directory of a random model, and return the model."""
    config = prime_config(**changes)
    model = randomize_weights(PreTrainingModel(config)).eval()
    bundle.save(directory, model, make_tokenizer(config.vocab_size), {"recipe": "none"})
    return model


def logits(model: PreTrainingModel, batch: PreTrainingBatch) -> tuple[Tensor, Tensor | None]:
    """Return the logits of every word, and of the next sentence if the model has that head."""
    with torch.no_grad():
        hidden = model.bert(batch.packed)
        pairs = model.next_sentence_logits(hidden, batch.packed) if model.config.nsp else None
        return model.mlm(hidden), pairs


VARIANTS: list[dict[str, Any]] = [
    {},
    {"nsp": False},
    {"activation": "gelu"},
    {"activation": "relu"},
    {"activation": "elu"},
    {"norm": "pre"},
    {"attention": "causal", "nsp": False},
    {"norm": "pre", "attention": "causal", "activation": "elu", "positions": "sinusoidal"},
    {"positions": "sinusoidal"},
    {"dropout": 0.0, "norm_eps": 1e-5, "init_range": 0.5, "segments": 3, "max_positions": 53},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_what_is_saved_is_loaded(changes: dict[str, Any], tmp_path: Path) -> None:
    """Config, weights, tokenizer and info come back the same, for every kind of model."""
    model = written(tmp_path / "model", **changes)
    found = bundle.load(tmp_path / "model")
    assert found.config == model.config
    assert found.tokenizer.hash == make_tokenizer(101).hash
    assert found.info["recipe"] == "none"
    assert not found.model.training
    state = found.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, state[name]), name
    assert found.model.mlm.decoder.weight is found.model.bert.embeddings.words.weight
    # Saved again, every byte is the same.
    bundle.save(tmp_path / "again", found.model, found.tokenizer, found.info)
    for file in (tmp_path / "model").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_the_files_of_a_model_directory(tmp_path: Path) -> None:
    """The directory holds Hugging Face's files and bertsmith.json, and nothing else is left."""
    written(tmp_path / "model")
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
        "bertsmith.json",
        "README.md",
    }
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


#: A fresh process, so that nothing that was loaded before keeps a warning from being shown.
FRESH = """
import json, sys, warnings
import torch
warnings.simplefilter("error")
from transformers import AutoModelForPreTraining, AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging
logging.disable_progress_bar()
print("START", file=sys.stderr)
found = []
for place, kind in zip(sys.argv[1:], (AutoModelForPreTraining, AutoModelForMaskedLM)):
    model, loading = kind.from_pretrained(place, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(place)
    words = tokenizer("word3 word7 word0", "word95 nothing", return_tensors="pt")
    with torch.no_grad():
        output = model(**words)
    logits = getattr(output, "prediction_logits", getattr(output, "logits", None))
    found.append({
        "class": type(model).__name__,
        "faults": {key: sorted(map(str, value)) for key, value in loading.items() if value},
        "ids": words["input_ids"][0].tolist(),
        "segments": words["token_type_ids"][0].tolist(),
        "logits": logits[0].tolist(),
        "longest": tokenizer.model_max_length,
        "pad": tokenizer.pad_token_id,
    })
json.dump(found, sys.stdout)
"""


def test_a_fresh_transformers_reads_it(tmp_path: Path) -> None:
    """Its Auto classes choose the class, miss no key, find none too many, and warn of nothing."""
    models = [written(tmp_path / str(nsp), nsp=nsp) for nsp in (True, False)]
    command = [sys.executable, "-c", FRESH, str(tmp_path / "True"), str(tmp_path / "False")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.rpartition("START")[2].strip() == ""
    results = json.loads(done.stdout)
    assert [result["class"] for result in results] == ["BertForPreTraining", "BertForMaskedLM"]
    tokenizer = make_tokenizer(101)
    a, b = (tokenizer.encode(text) for text in ("word3 word7 word0", "word95 nothing"))
    ids = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
    segments = [0] * (len(a) + 2) + [1] * (len(b) + 1)
    for model, result in zip(models, results, strict=True):
        assert result["faults"] == {}
        assert (result["longest"], result["pad"]) == (43, 0)
        assert (result["ids"], result["segments"]) == (ids, segments)
        with torch.no_grad():
            expected = model.mlm(model.bert(pack_sequences([(ids, segments)])))
        torch.testing.assert_close(torch.tensor(result["logits"]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [BertForPreTraining, BertForMaskedLM])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_what_transformers_writes_is_loaded(kind: Any, activation: str, tmp_path: Path) -> None:
    """A directory that transformers saved gives the same numbers here."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=101,
        hidden_size=21,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=37,
        max_position_embeddings=43,
        hidden_act=activation,
        hidden_dropout_prob=0.17,
        attention_probs_dropout_prob=0,
        initializer_range=0.3,
        layer_norm_eps=1e-7,
    )
    theirs = kind(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    theirs.save_pretrained(tmp_path)
    make_tokenizer(101).save(tmp_path)
    (tmp_path / "bertsmith.json").unlink()
    found = bundle.load(tmp_path)
    assert found.config.nsp == (kind is BertForPreTraining)
    assert found.config.dropout == 0.17
    assert found.config.attention_dropout == 0.0
    assert found.config.norm_eps == 1e-7
    batch = random_batch(found.config, (17,))
    words, pairs = logits(found.model, batch)
    with torch.no_grad():
        output = theirs(batch.packed.ids[None], token_type_ids=batch.packed.segments[None])
    expected = output.prediction_logits if found.config.nsp else output.logits
    torch.testing.assert_close(words, expected[0], rtol=1e-5, atol=1e-5)
    if pairs is not None:
        torch.testing.assert_close(pairs, output.seq_relationship_logits, rtol=1e-5, atol=1e-5)


def test_a_config_without_classes_is_loaded(tmp_path: Path) -> None:
    """``architectures: null``, as configs saved alone have it, is a model without next sentence."""
    written(tmp_path / "model", nsp=False)
    edit(tmp_path / "model", architectures=None)
    assert not bundle.load(tmp_path / "model").config.nsp


@pytest.mark.parametrize(
    "changes", [{"norm": "pre"}, {"attention": "causal"}, {"activation": "elu"}], ids=str
)
def test_what_plain_bert_cannot_say_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Pre-norm, causal attention and ELU have a model type that transformers refuses to load."""
    written(tmp_path / "model", **changes)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["model_type"] == "bertsmith"
    with pytest.raises(ValueError, match="model type `bertsmith`"):
        AutoModel.from_pretrained(tmp_path / "model")


def test_a_model_of_the_next_word_is_written_and_fills_no_mask(tmp_path: Path) -> None:
    """It has the head that the files are to have, and would answer another question."""
    written(tmp_path / "left", attention="causal", nsp=False)
    file = tmp_path / "left" / bundle.INFO_FILE
    told = json.loads(file.read_text())
    told["provenance"] = {"settings": {"data": {"objective": "left-to-right"}}}
    file.write_text(json.dumps(told))
    bundle.save_model(tmp_path / "again", bundle.load(tmp_path / "left"))
    with pytest.raises(ModelError, match="it says the next word, not a masked one"):
        fill(tmp_path / "again", "a [MASK]")


def test_sinusoidal_positions_just_work(tmp_path: Path) -> None:
    """A sinusoidal table is a position table: transformers loads it, with the same numbers."""
    model = written(tmp_path / "model", positions="sinusoidal")
    theirs = BertForPreTraining.from_pretrained(tmp_path / "model").eval()
    batch = random_batch(model.config, (31,))
    words, _ = logits(model, batch)
    with torch.no_grad():
        output = theirs(batch.packed.ids[None], token_type_ids=batch.packed.segments[None])
    torch.testing.assert_close(words, output.prediction_logits[0], rtol=1e-5, atol=1e-5)
    assert bundle.load(tmp_path / "model").config.positions == "sinusoidal"


def test_the_tokenizer_is_the_same_in_transformers(tmp_path: Path) -> None:
    """[PAD] has the tokenizer's id in config.json, wherever the vocabulary has it."""
    plain = make_tokenizer(101)
    turned = type(plain)(type(plain.spec)(vocab=plain.vocab[::-1]))
    bundle.save(tmp_path / "model", PreTrainingModel(prime_config()), turned, {})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["pad_token_id"] == turned.pad_id == 100
    theirs = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs.pad_token_id == 100
    assert theirs("word3", add_special_tokens=False)["input_ids"] == turned.encode("word3")


def test_weights_in_16_bits_are_loaded_as_float32(tmp_path: Path) -> None:
    """A directory in bfloat16 loads, and is worked with in float32."""
    written(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    state = {name: value.bfloat16() for name, value in load_file(weights).items()}
    save_file(state, weights)
    found = bundle.load(tmp_path / "model").model
    assert {weight.dtype for weight in found.parameters()} == {torch.float32}
    words = state["bert.embeddings.word_embeddings.weight"].float()
    assert torch.equal(found.bert.embeddings.words.weight, words)


def edit(directory: Path, **changes: Any) -> None:
    """Change keys of config.json; None writes null."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def without(name: str) -> Callable[[Path], None]:
    """Return what takes a tensor out of the weights."""

    def change(directory: Path) -> None:
        state = load_file(directory / "model.safetensors")
        del state[name]
        save_file(state, directory / "model.safetensors")

    return change


def shorter_vocabulary(directory: Path) -> None:
    """Let config and weights know fewer words than the tokenizer."""
    config = prime_config(vocab_size=97)
    other = directory.parent / "other"
    bundle.save(other, PreTrainingModel(config), make_tokenizer(97), {})
    for name in ("config.json", "model.safetensors"):
        shutil.copy(other / name, directory / name)


FAULTS: list[tuple[str, Callable[[Path], None], str]] = [
    ("no weights", lambda d: (d / "model.safetensors").unlink(), r"no config\.json with model\.sa"),
    ("no config", lambda d: (d / "config.json").unlink(), r"not a model directory"),
    ("nothing", shutil.rmtree, r"no such file or directory"),
    ("cut weights", lambda d: cut(d / "model.safetensors"), r"not a readable safetensors file"),
    ("cut config", lambda d: cut(d / "config.json"), r"config\.json: not readable as JSON"),
    ("list", lambda d: change(d, "[1]"), r"expected a JSON object, found a list"),
    ("cut info", lambda d: cut(d / "bertsmith.json"), r"bertsmith\.json: not readable as JSON"),
    ("shape", lambda d: edit(d, intermediate_size=41), r"has shape \(37, 21\); .* \(41, 21\)"),
    ("positions", lambda d: edit(d, max_position_embeddings=47), r"position_embeddings.*\(47, 21"),
    (
        "layers",
        lambda d: edit(d, num_hidden_layers=3),
        r"tensor 'bert\.encoder\.layer\.2\.",
    ),
    ("tensor", without("bert.pooler.dense.bias"), r"'bert\.pooler\.dense\.bias' is missing"),
    (
        "key",
        without("bert.encoder.layer.1.attention.self.key.weight"),
        r"layer\.1\.attention\.self\.key\.weight' is missing",
    ),
    ("words", shorter_vocabulary, r"the tokenizer has 101 words, but the model only 97"),
    ("activation", lambda d: edit(d, hidden_act="swish"), r"hidden_act is 'swish'; known here: ge"),
    ("kind", lambda d: edit(d, model_type="roberta"), r"model_type is 'roberta'; expected 'bert'"),
    ("type", lambda d: edit(d, hidden_size="21"), r"config\.json: width: .*found '21'"),
    ("heads", lambda d: edit(d, num_attention_heads=4), r"width 21 is not a multiple of heads 4"),
    ("decoder", lambda d: edit(d, is_decoder=True), r"is_decoder is True; only False"),
    ("untied", lambda d: edit(d, tie_word_embeddings=False), r"tie_word_embeddings is False"),
    (
        "relative",
        lambda d: edit(d, position_embedding_type="relative_key"),
        r"position_embedding_type is 'relative_key'; only 'absolute'",
    ),
]


def cut(path: Path) -> None:
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(directory: Path, text: str) -> None:
    """Write another config.json."""
    (directory / "config.json").write_text(text)


@pytest.mark.parametrize(
    ("break_it", "message"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS]
)
def test_a_fault_is_named(break_it: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    """What is missing, broken or does not fit is a ModelError that names the file and the fault."""
    written(tmp_path / "model")
    break_it(tmp_path / "model")
    with pytest.raises(ModelError, match=message) as found:
        bundle.load(tmp_path / "model")
    assert str(tmp_path / "model") in str(found.value)


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    """A config.json without a size that has no default says which."""
    written(tmp_path / "model")
    change(tmp_path / "model", '{"model_type": "bert", "vocab_size": 101}')
    with pytest.raises(ModelError, match="hidden_size is missing"):
        bundle.load(tmp_path / "model")


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    """A model directory without a vocabulary says so."""
    written(tmp_path / "model")
    for name in ("tokenizer.json", "vocab.txt"):
        (tmp_path / "model" / name).unlink()
    with pytest.raises(TokenizerError, match="no tokenizer"):
        bundle.load(tmp_path / "model")


def test_a_run_is_taken_for_its_model(tmp_path: Path) -> None:
    """Where a model directory is asked for, a RUN with one inside does; one without says so."""
    written(tmp_path / "run" / "model")
    (tmp_path / "run" / "checkpoints").mkdir()
    assert bundle.load(tmp_path / "run").path == tmp_path / "run" / "model"
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(ModelError, match="has not written its model yet; give the same"):
        bundle.load(tmp_path / "run")


@pytest.mark.parametrize("place", ["save_tensors", "write_json", "tokenizer", "rename"])
def test_a_failed_save_loses_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where saving fails, at any step, what stood there before still stands, whole and alone."""
    model = written(tmp_path / "model")
    before = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    tokenizer = make_tokenizer(101)
    rename = Path.replace

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space left on device")

    def fail_to_rename(self: Path, target: Path) -> Path:
        if target == tmp_path / "model" and self.suffix == ".tmp":
            raise OSError("no space left on device")
        return rename(self, target)

    if place == "tokenizer":
        monkeypatch.setattr(tokenizer, "save", fail)
    elif place == "rename":
        monkeypatch.setattr(Path, "replace", fail_to_rename)
    else:
        monkeypatch.setattr(bundle.pretrained, place, fail)
    with pytest.raises(OSError, match="no space left"):
        bundle.save(tmp_path / "model", randomize_weights(model, seed=1), tokenizer, {})
    assert {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()} == before
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_names_on_disk_are_all_different() -> None:
    """Each tensor of a model has names of its own on disk, three for queries, keys and values."""
    model = PreTrainingModel(ModelConfig(vocab_size=11, width=6, heads=2, layers=3))
    names = bundle.names.names(list(model.state_dict()))
    theirs = [name for group in names.values() for name in group]
    assert len(theirs) == len(set(theirs))
    assert {len(group) for group in names.values()} == {1, 3}
    found = bundle.to_hf_state_dict(model.state_dict())
    assert sum(value.numel() for value in found.values()) == sum(
        value.numel() for value in model.parameters()
    )
