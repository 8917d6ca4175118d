"""Model directories of pre-trained models."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM
from transformers import BertForPreTraining as HFBertForPreTraining
from transformers.activations import ACT2FN

from bertsmith import bundle, fill
from bertsmith.bundle.weight_names import map_to_hf_names
from bertsmith.errors import ModelError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.model.ops.activations import ACTIVATIONS
from bertsmith.model.packed import pack_sequences
from bertsmith.text.wordpiece import Tokenizer
from tests.bundle.conftest import edit_config, save_random_model
from tests.model.examples import (
    FEED_FORWARD,
    MAX_POSITIONS,
    NUM_HEADS,
    VOCAB_SIZE,
    WIDTH,
    PreTrainingBatch,
    draw_batch,
    make_prime_size_config,
    make_tokenizer,
)
from tests.text.test_vocabulary_extension import HalvingSegmenter


def compute_logits(
    model: BertForPreTraining, batch: PreTrainingBatch
) -> tuple[Tensor, Tensor | None]:
    """Return the masked-LM logits of all tokens, and the next-sentence logits or None."""
    with torch.no_grad():
        hidden = model.bert(batch.packed)
        nsp_logits = model.compute_nsp_logits(hidden, batch.packed) if model.config.nsp else None
        return model.mlm(hidden), nsp_logits


#: Config fields that differ from the default config, for every option of the architecture.
CONFIG_CHANGES: list[dict[str, Any]] = [
    {},
    {"nsp": False},
    {"activation": "gelu"},
    {"activation": "relu"},
    {"activation": "elu"},
    {"norm": "pre"},
    {"attention": "causal", "nsp": False},
    {"norm": "pre", "attention": "causal", "activation": "elu", "positions": "sinusoidal"},
    {"positions": "sinusoidal"},
    {"classifier_dropout": 0.0},
    {"dropout": 0.0, "norm_eps": 1e-5, "init_range": 0.5, "segments": 3, "max_positions": 53},
]


@pytest.mark.parametrize("config_changes", CONFIG_CHANGES, ids=str)
def test_saved_model_is_loaded_unchanged(config_changes: dict[str, Any], tmp_path: Path) -> None:
    """A loaded model equals the saved one, and saving it again writes the same bytes."""
    model = save_random_model(tmp_path / "model", **config_changes)
    loaded = bundle.load(tmp_path / "model")
    assert loaded.config == model.config
    assert loaded.tokenizer.hash == make_tokenizer().hash
    assert loaded.info["recipe"] == "none"
    assert not loaded.model.training
    state = loaded.model.state_dict()
    assert state.keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, state[name]), name
    assert loaded.model.mlm.decoder.weight is loaded.model.bert.embeddings.words.weight
    bundle.save(tmp_path / "copy", loaded.model, loaded.tokenizer, loaded.info)
    for file in (tmp_path / "model").iterdir():
        assert file.read_bytes() == (tmp_path / "copy" / file.name).read_bytes(), file.name


def test_model_directory_has_the_expected_files(tmp_path: Path) -> None:
    """Saving writes Hugging Face's files and bertsmith.json, and leaves no temporary files."""
    save_random_model(tmp_path / "model")
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


def test_model_card_of_a_converted_model_does_not_claim_its_training(tmp_path: Path) -> None:
    """The card names the source, and the class without heads if the heads are not trained."""
    save_random_model(tmp_path / "model")
    loaded = bundle.load(tmp_path / "model")
    imported: dict[str, Any] = {"newly_initialized": ["mlm.bias"]}
    imported["source"] = "a TensorFlow checkpoint in V2 format"
    bundle.save(tmp_path / "m", loaded.model, loaded.tokenizer, {"imported": imported})
    card = (tmp_path / "m" / "README.md").read_text()
    assert "Converted with Bertsmith from a TensorFlow checkpoint in V2 format: a plain" in card
    assert 'pipeline_tag: "feature-extraction"' in card
    assert "from transformers import AutoModel, AutoTokenizer" in card
    imported["source"] = "/home/me/uncased/bert_model.ckpt"
    bundle.save(tmp_path / "p", loaded.model, loaded.tokenizer, {"imported": imported})
    card = (tmp_path / "p" / "README.md").read_text()
    assert "Converted with Bertsmith from `bert_model.ckpt`: a plain BERT" in card
    assert "/home/me" not in card
    bundle.save(tmp_path / "n", loaded.model, loaded.tokenizer, {"provenance": {}})
    card = (tmp_path / "n" / "README.md").read_text()
    assert "Trained with Bertsmith: a plain BERT" in card
    assert 'pipeline_tag: "fill-mask"' in card


def test_model_card_of_many_files_is_short(tmp_path: Path) -> None:
    """The card names the first 10 of 600 training files."""
    save_random_model(tmp_path / "model")
    loaded = bundle.load(tmp_path / "model")
    sources = [f"{number}.txt" for number in range(600)]
    info = {"provenance": {"sources": sources}}
    bundle.save(tmp_path / "copy", loaded.model, loaded.tokenizer, info)
    card = (tmp_path / "copy" / "README.md").read_text()
    assert "- `9.txt`\n- … and 590 more\n" in card
    assert "`10.txt`" not in card


def test_model_card_says_that_texts_must_be_segmented(tmp_path: Path) -> None:
    """Other libraries do not run the segmenter of a model."""
    config = make_prime_size_config()
    spec = replace(make_tokenizer().spec, segmenter=("halves", "1.0"))
    tokenizer = Tokenizer(spec, HalvingSegmenter())
    bundle.save(tmp_path / "model", BertForPreTraining(config), tokenizer, {})
    card = (tmp_path / "model" / "README.md").read_text()
    assert "```\n\nSegment texts before tokenization: this model was trained with a seg" in card


#: Script that loads model directories with transformers and prints the results as JSON. It runs in
#: a new process, because Python shows most warnings only once per process.
LOADING_SCRIPT = """
import json, sys, warnings
import torch
warnings.simplefilter("error")
from transformers import AutoModelForPreTraining, AutoModelForMaskedLM, AutoTokenizer
from transformers.utils import logging
logging.disable_progress_bar()
print("START", file=sys.stderr)
results = []
for path, auto_class in zip(sys.argv[1:], (AutoModelForPreTraining, AutoModelForMaskedLM)):
    model, loading_info = auto_class.from_pretrained(path, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(path)
    inputs = tokenizer("word3 word7 word0", "word95 nothing", return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs)
    logits = getattr(output, "prediction_logits", getattr(output, "logits", None))
    results.append({
        "class": type(model).__name__,
        "problems": {key: sorted(map(str, value)) for key, value in loading_info.items() if value},
        "ids": inputs["input_ids"][0].tolist(),
        "segments": inputs["token_type_ids"][0].tolist(),
        "logits": logits[0].tolist(),
        "max_length": tokenizer.model_max_length,
        "pad_id": tokenizer.pad_token_id,
    })
json.dump(results, sys.stdout)
"""


def test_transformers_loads_model_without_warnings(tmp_path: Path) -> None:
    """Auto classes select the right class, report no missing keys, and compute equal logits."""
    models = [save_random_model(tmp_path / str(nsp), nsp=nsp) for nsp in (True, False)]
    command = [
        sys.executable,
        "-c",
        LOADING_SCRIPT,
        str(tmp_path / "True"),
        str(tmp_path / "False"),
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert process.returncode == 0, process.stderr
    assert process.stderr.rpartition("START")[2].strip() == ""
    results = json.loads(process.stdout)
    assert [result["class"] for result in results] == ["BertForPreTraining", "BertForMaskedLM"]
    tokenizer = make_tokenizer()
    a, b = (tokenizer.encode(text) for text in ("word3 word7 word0", "word95 nothing"))
    ids = [tokenizer.cls_id, *a, tokenizer.sep_id, *b, tokenizer.sep_id]
    segments = [0] * (len(a) + 2) + [1] * (len(b) + 1)
    for model, result in zip(models, results, strict=True):
        assert result["problems"] == {}
        assert (result["max_length"], result["pad_id"]) == (MAX_POSITIONS, tokenizer.pad_id)
        assert (result["ids"], result["segments"]) == (ids, segments)
        with torch.no_grad():
            expected = model.mlm(model.bert(pack_sequences([(ids, segments)])))
        torch.testing.assert_close(torch.tensor(result["logits"]), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("hf_class", [HFBertForPreTraining, BertForMaskedLM])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "gelu_pytorch_tanh", "relu"])
def test_model_saved_by_transformers_gives_equal_outputs(
    hf_class: Any, activation: str, tmp_path: Path
) -> None:
    """A model saved by transformers is loaded with the same config values and logits."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=MAX_POSITIONS,
        hidden_act=activation,
        hidden_dropout_prob=0.17,
        attention_probs_dropout_prob=0,
        initializer_range=0.3,
        layer_norm_eps=1e-7,
    )
    hf_model = hf_class(config).eval()
    with torch.no_grad():
        for weight in hf_model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    hf_model.save_pretrained(tmp_path)
    make_tokenizer().save(tmp_path)
    (tmp_path / "bertsmith.json").unlink()
    loaded = bundle.load(tmp_path)
    assert loaded.config.nsp == (hf_class is HFBertForPreTraining)
    assert loaded.config.dropout == 0.17
    assert loaded.config.attention_dropout == 0.0
    assert loaded.config.norm_eps == 1e-7
    batch = draw_batch(loaded.config, (17,))
    mlm_logits, nsp_logits = compute_logits(loaded.model, batch)
    with torch.no_grad():
        output = hf_model(batch.packed.ids[None], token_type_ids=batch.packed.segments[None])
    expected = output.prediction_logits if loaded.config.nsp else output.logits
    torch.testing.assert_close(mlm_logits, expected[0], rtol=1e-5, atol=1e-5)
    if nsp_logits is not None:
        expected = output.seq_relationship_logits
        torch.testing.assert_close(nsp_logits, expected, rtol=1e-5, atol=1e-5)


def test_config_without_architectures_is_loaded(tmp_path: Path) -> None:
    """A model with ``architectures: null`` in its config has no next-sentence head."""
    save_random_model(tmp_path / "model", nsp=False)
    edit_config(tmp_path / "model", architectures=None)
    assert not bundle.load(tmp_path / "model").config.nsp


@pytest.mark.parametrize(
    "config_changes", [{"norm": "pre"}, {"attention": "causal"}, {"activation": "elu"}], ids=str
)
def test_transformers_rejects_non_bert_architectures(
    config_changes: dict[str, Any], tmp_path: Path
) -> None:
    """Models with pre-norm, causal attention or ELU get a model_type unknown to transformers.

    Their card has no code for transformers.
    """
    save_random_model(tmp_path / "model", **config_changes)
    hf_config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert hf_config["model_type"] == "bertsmith"
    with pytest.raises(ValueError, match="model type `bertsmith`"):
        AutoModel.from_pretrained(tmp_path / "model")
    card = (tmp_path / "model" / "README.md").read_text()
    assert "a BERT that only Bertsmith loads" in card
    assert 'model = bertsmith.load("path or hub id")' in card
    assert not re.search("transformers|Hugging Face|library_name|pipeline_tag", card)


def test_left_to_right_model_is_saved_but_cannot_fill_masks(tmp_path: Path) -> None:
    """Filling a mask with a left-to-right model is an error, because it predicts the next token."""
    save_random_model(tmp_path / "causal", attention="causal", nsp=False)
    info_file = tmp_path / "causal" / bundle.INFO_FILE
    info = json.loads(info_file.read_text())
    info["provenance"] = {"settings": {"data": {"objective": "left-to-right"}}}
    info_file.write_text(json.dumps(info))
    bundle.save_model(tmp_path / "copy", bundle.load(tmp_path / "causal"))
    with pytest.raises(ModelError, match="it predicts the next word, not a masked one"):
        fill(tmp_path / "copy", "a [MASK]")


def test_transformers_loads_sinusoidal_positions(tmp_path: Path) -> None:
    """Sinusoidal positions are stored as a table, with which transformers gives equal logits."""
    model = save_random_model(tmp_path / "model", positions="sinusoidal")
    hf_model = HFBertForPreTraining.from_pretrained(tmp_path / "model").eval()
    batch = draw_batch(model.config, (31,))
    mlm_logits, _ = compute_logits(model, batch)
    with torch.no_grad():
        output = hf_model(batch.packed.ids[None], token_type_ids=batch.packed.segments[None])
    torch.testing.assert_close(mlm_logits, output.prediction_logits[0], rtol=1e-5, atol=1e-5)
    assert bundle.load(tmp_path / "model").config.positions == "sinusoidal"


def test_pad_token_id_follows_the_vocabulary(tmp_path: Path) -> None:
    """config.json contains the id of [PAD] in the vocabulary, and transformers uses this id."""
    tokenizer = make_tokenizer()
    reversed_spec = type(tokenizer.spec)(vocab=tokenizer.vocab[::-1])
    reversed_tokenizer = type(tokenizer)(reversed_spec)
    bundle.save(
        tmp_path / "model", BertForPreTraining(make_prime_size_config()), reversed_tokenizer, {}
    )
    hf_config = json.loads((tmp_path / "model" / "config.json").read_text())
    # [PAD] is the first token of the tokenizer and the last one of the reversed vocabulary.
    assert hf_config["pad_token_id"] == reversed_tokenizer.pad_id == VOCAB_SIZE - 1
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert hf_tokenizer.pad_token_id == VOCAB_SIZE - 1
    hf_ids = hf_tokenizer("word3", add_special_tokens=False)["input_ids"]
    assert hf_ids == reversed_tokenizer.encode("word3")


def test_16_bit_weights_are_loaded_as_float32(tmp_path: Path) -> None:
    """bfloat16 weights are converted to float32 without loss."""
    save_random_model(tmp_path / "model")
    weights_file = tmp_path / "model" / "model.safetensors"
    state = {name: value.bfloat16() for name, value in load_file(weights_file).items()}
    save_file(state, weights_file)
    model = bundle.load(tmp_path / "model").model
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    word_embeddings = state["bert.embeddings.word_embeddings.weight"].float()
    assert torch.equal(model.bert.embeddings.words.weight, word_embeddings)


@pytest.mark.parametrize(
    "name", ["gelu", "gelu_python", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_python_tanh"]
)
def test_names_of_gelu_give_the_values_of_transformers(tmp_path: Path, name: str) -> None:
    """Each name that transformers has for the two forms of GELU is read as the same form."""
    save_random_model(tmp_path / "model")
    edit_config(tmp_path / "model", hidden_act=name)
    activation = bundle.load(tmp_path / "model").config.activation
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[activation](x), ACT2FN[name](x), rtol=0, atol=1e-9)


def test_run_directory_is_loaded_as_its_model(tmp_path: Path) -> None:
    """Loading a run directory loads its model; loading an unfinished run is an error."""
    save_random_model(tmp_path / "run" / "model")
    (tmp_path / "run" / "checkpoints").mkdir()
    assert bundle.load(tmp_path / "run").path == tmp_path / "run" / "model"
    shutil.rmtree(tmp_path / "run" / "model")
    with pytest.raises(ModelError, match="has not written its model yet; repeat the run's command"):
        bundle.load(tmp_path / "run")


def test_stored_names_are_distinct_and_complete() -> None:
    """Parameters are stored once; the fused query, key and value weight is three tensors."""
    model = BertForPreTraining(ModelConfig(vocab_size=11, width=6, heads=2, layers=3))
    groups = map_to_hf_names(model.state_dict()).values()
    names = [name for group in groups for name in group]
    assert len(names) == len(set(names))
    assert {len(group) for group in groups} == {1, 3}
    stored = bundle.to_hf_state_dict(model.state_dict())
    assert sum(value.numel() for value in stored.values()) == sum(
        value.numel() for value in model.parameters()
    )
