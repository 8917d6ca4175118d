"""Import and export of the original BERT release in all checkpoint formats."""

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig
from transformers import BertForPreTraining as HFBertForPreTraining

from bertsmith import bundle
from bertsmith.bundle import FineTunedBundle, HeadConfig, PretrainedBundle, TaskKind
from bertsmith.errors import ModelError
from bertsmith.interop.tensorflow.checkpoint_v2 import CheckpointV2
from bertsmith.interop.tensorflow.names import is_training_state, to_official_name
from bertsmith.interop.tensorflow.reading import (
    _map_to_stored_names,
    _match_weights,
    read_tensorflow,
)
from bertsmith.interop.tensorflow.release import read_config
from bertsmith.interop.tensorflow.writing import write_checkpoint, write_tensorflow
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BiLSTMSettings
from bertsmith.model.packed import pack_sequences
from bertsmith.text.tokenizer_spec import AddedTokenSpec, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from tests.interop.conftest import CONFIG, RunScript, write_config_and_vocab
from tests.interop.data import checkpoints
from tests.interop.original_weights import convert_from_original, convert_to_original
from tests.model.examples import (
    FEED_FORWARD,
    MAX_POSITIONS,
    NUM_HEADS,
    VOCAB_SIZE,
    WIDTH,
    draw_batch,
    make_prime_size_config,
    make_tokenizer,
    randomize_weights,
)


def read_pretrained(path: Path, **options: Any) -> PretrainedBundle:
    """Read a checkpoint and check that it is a pre-trained model."""
    imported = read_tensorflow(path, **options)
    assert isinstance(imported, PretrainedBundle)
    return imported


def assert_same_weights(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Compare all weights bit by bit."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(state[name], weight), name


@pytest.mark.parametrize("checkpoint_format", ["v2", "v1", "object", "parts"])
def test_all_formats_give_the_same_weights(
    checkpoint_dir: Path, checkpoint_format: str, config_dir: Path
) -> None:
    """V1, V2 and object-based checkpoints give the exact weights, also if tensors are sharded.

    Optimizer state is not read, but its tensors are counted.
    """
    imported = read_pretrained(checkpoint_dir / checkpoint_format, files_from=config_dir)
    assert_same_weights(imported.model, convert_from_original(checkpoints.make_variables()))
    assert imported.model.mlm.decoder.weight is imported.model.bert.embeddings.words.weight
    assert not imported.model.training
    report = imported.info["imported"]
    assert (report["newly_initialized"], report["unused"]) == ([], [])
    num_training_tensors = 2 * len(checkpoints.variable_shapes()) + 1
    num_ignored = {"v2": num_training_tensors, "v1": num_training_tensors, "object": 1, "parts": 0}
    assert report["num_training_state_tensors"] == num_ignored[checkpoint_format]
    assert (imported.config.activation, imported.config.norm_eps) == ("gelu_tanh", 1e-12)
    assert (imported.config.dropout, imported.config.init_range) == (0.17, 0.03)
    assert (imported.config.segments, imported.config.nsp) == (3, True)


def test_float_types_are_converted(checkpoint_dir: Path, config_dir: Path) -> None:
    """Tensors in float16, bfloat16 and float64 are read as float32 with the same values."""
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.float32)
    values = {
        name: torch.tensor(array).to(dtypes[index % len(dtypes)]).float().numpy()
        for index, (name, array) in enumerate(checkpoints.make_variables().items())
    }
    assert_same_weights(
        read_pretrained(checkpoint_dir / "types", files_from=config_dir).model,
        convert_from_original(values),
    )


def test_official_tf2_encoder_is_read(checkpoint_dir: Path, config_dir: Path) -> None:
    """Encoders with the names and shapes of the official TF2 code are read."""
    imported = read_pretrained(checkpoint_dir / "official", files_from=config_dir)
    state = imported.model.state_dict()
    expected = convert_from_original(checkpoints.make_variables())
    new_names = set(imported.info["imported"]["newly_initialized"])
    head_names = {name for name in expected if name.startswith(("mlm.", "nsp."))}
    # The decoder of the masked-LM head is tied to the word embeddings.
    assert new_names == head_names - {"mlm.decoder.weight"}
    for name in set(expected) - new_names:
        assert torch.equal(state[name], expected[name]), name
    # The initialization does not depend on the state of the global random generator.
    torch.rand(3)
    assert_same_weights(
        read_pretrained(checkpoint_dir / "official", files_from=config_dir).model, state
    )
    assert imported.info["imported"]["unused"] == []


def test_official_names_of_heads_are_read(tmp_path: Path) -> None:
    """The official TF2 names of the pre-training heads are supported too."""
    values = {to_official_name(name): array for name, array in checkpoints.make_variables().items()}
    # The official NSP weight is [in, out], unlike the original one.
    nsp_weight = "predictions/transform/logits/kernel"
    values[nsp_weight] = values[nsp_weight].T
    write_checkpoint(tmp_path / "bert_model.ckpt", values.items())
    write_config_and_vocab(tmp_path)
    assert_same_weights(
        read_pretrained(tmp_path).model, convert_from_original(checkpoints.make_variables())
    )


@pytest.mark.parametrize("name", ["", "bert_model.ckpt", "bert_model.ckpt.index",
                                  "bert_model.ckpt.data-00000-of-00001"])  # fmt: skip
def test_checkpoint_is_found_by_folder_prefix_or_file(tmp_path: Path, name: str) -> None:
    """A release can be given by its folder, its prefix, or one of its files."""
    write_checkpoint(tmp_path / "bert_model.ckpt", checkpoints.make_variables().items())
    write_config_and_vocab(tmp_path)
    assert_same_weights(
        read_pretrained(tmp_path / name).model, convert_from_original(checkpoints.make_variables())
    )


def test_checkpoint_file_selects_the_checkpoint(tmp_path: Path) -> None:
    """Of several checkpoints, the one named in the file "checkpoint" is read."""
    values = checkpoints.make_variables()
    write_config_and_vocab(tmp_path)
    write_checkpoint(tmp_path / "model.ckpt-1", values.items())
    write_checkpoint(
        tmp_path / "model.ckpt-2", [(name, array + 1) for name, array in values.items()]
    )
    with pytest.raises(ModelError, match=r"several checkpoints \(model\.ckpt-1, model\.ckpt-2\)"):
        read_pretrained(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/far/away/../model.ckpt-2"\n')
    state = convert_from_original({name: array + 1 for name, array in values.items()})
    assert_same_weights(read_pretrained(tmp_path).model, state)


def save_random_model(directory: Path, **changes: Any) -> BertForPreTraining:
    """Save a random model and return it."""
    config = make_prime_size_config(**changes)
    model = randomize_weights(BertForPreTraining(config)).eval()
    bundle.save(directory, model, make_tokenizer(config.vocab_size), {"recipe": "none"})
    return model


@pytest.mark.parametrize(
    "changes", [{}, {"nsp": False}, {"activation": "relu"}, {"positions": "sinusoidal"}], ids=str
)
def test_round_trip_is_exact(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Export and import preserve the config, the tokenizer and all bits of the weights."""
    model = save_random_model(tmp_path / "model", **changes)
    write_tensorflow(tmp_path / "model", tmp_path / "release")
    imported = read_pretrained(tmp_path / "release")
    assert_same_weights(imported.model, model.state_dict())
    assert imported.config == model.config
    assert imported.tokenizer.hash == make_tokenizer().hash
    assert imported.info["recipe"] == "none"
    assert (
        imported.info["imported"]["unused"] == imported.info["imported"]["newly_initialized"] == []
    )


def test_tensorflow_reads_exported_checkpoints(tmp_path: Path, run_tensorflow: RunScript) -> None:
    """TensorFlow reads the variables of the original BERT, with all bits of their values.

    The model has so many layers that the index of the checkpoint has several blocks.
    """
    save_random_model(tmp_path / "model", layers=11)
    write_tensorflow(tmp_path / "model", tmp_path / "release")
    prefix = tmp_path / "release" / "bert_model.ckpt"
    run_tensorflow("read", prefix)
    values = dict(np.load(f"{prefix}.npz"))
    assert_same_weights(bundle.load(tmp_path / "model").model, convert_from_original(values))
    # 14 variables outside the layers and 16 per layer: nothing else is written.
    assert len(values) == 14 + 16 * 11
    assert {array.dtype for array in values.values()} == {np.dtype("float32")}


def test_imported_weights_give_the_logits_of_transformers(tmp_path: Path) -> None:
    """Imported random weights give the logits of transformers within 1e-5."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=NUM_HEADS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=MAX_POSITIONS,
        hidden_act="gelu_new",
        initializer_range=0.3,
    )
    reference = HFBertForPreTraining(config).eval()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    write_checkpoint(
        tmp_path / "bert_model.ckpt", convert_to_original(reference.state_dict()).items()
    )
    sizes = {key: getattr(config, key) for key in CONFIG if key != "hidden_act"}
    write_config_and_vocab(tmp_path, **sizes)
    imported = read_pretrained(tmp_path)
    assert (
        imported.info["imported"]["unused"] == imported.info["imported"]["newly_initialized"] == []
    )
    batch = draw_batch(imported.config, (17,))
    with torch.no_grad():
        output = reference(batch.packed.ids[None], token_type_ids=batch.packed.segments[None])
        hidden = imported.model.bert(batch.packed)
        mlm_logits = imported.model.mlm(hidden)
        nsp_logits = imported.model.compute_nsp_logits(hidden, batch.packed)
    torch.testing.assert_close(mlm_logits, output.prediction_logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nsp_logits, output.seq_relationship_logits, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def chinese_release(tmp_path_factory: pytest.TempPathFactory, shared_text: Path) -> Path:
    """Return the index, config and vocabulary of the original Chinese BERT-base, without data."""
    folder = tmp_path_factory.mktemp("chinese")
    with tarfile.open(shared_text.parent / "labelled.tar.xz") as archive:
        for member in archive:
            if member.name.startswith("labelled/tf-checkpoint-index/") and member.isfile():
                archive.extract(member, folder, filter="data")
    return folder / "labelled" / "tf-checkpoint-index"


@pytest.mark.data
def test_index_of_a_real_release_matches(chinese_release: Path) -> None:
    """All 206 tensors of a real BERT-base match a weight and its shape."""
    index = CheckpointV2(chinese_release / "bert_model.ckpt.index")
    config = read_config(chinese_release / "bert_config.json", nsp=True, positions="learned")
    assert (config.vocab_size, config.layers, config.activation) == (21128, 12, "gelu_tanh")
    with torch.device("meta"):
        model = BertForPreTraining(config)
    sources = _match_weights(model, index, _map_to_stored_names(index))
    assert set(sources) == set(model.state_dict()) - {"mlm.decoder.weight"}
    assert {name for group in sources.values() for name in group} == set(index.shapes)
    assert len(index.shapes) == 206
    assert index.shapes["bert/encoder/layer_11/intermediate/dense/kernel"] == (768, 3072)
    with pytest.raises(
        ModelError, match=r"data-00000-of-00001: no such file, but it should contain tensor 'bert"
    ):
        read_pretrained(chinese_release)


@pytest.mark.parametrize(
    ("head", "output_name"),
    [(HeadConfig("single", ("bad", "fine", "good")), "output_weights"),
     (HeadConfig("regression"), "output_weights"),
     (HeadConfig("span"), "cls/squad/output_weights")],
    ids=["single", "regression", "span"],
)  # fmt: skip
def test_fine_tuned_round_trip_is_exact(tmp_path: Path, head: HeadConfig, output_name: str) -> None:
    """Export and import preserve the head and all bits of the weights of fine-tuned models."""
    torch.manual_seed(0)
    model = head.build_model(make_prime_size_config()).eval()
    bundle.save_fine_tuned(tmp_path / "model", model, make_tokenizer(), head, {})
    write_tensorflow(tmp_path / "model", tmp_path / "release")
    imported = read_tensorflow(tmp_path / "release")
    assert isinstance(imported, FineTunedBundle)
    assert imported.head == head
    assert_same_weights(imported.model, model.state_dict())
    shapes = CheckpointV2(tmp_path / "release" / "bert_model.ckpt.index").shapes
    assert shapes[output_name] == (head.num_outputs, model.config.width)
    # Without bertsmith.json the labels have default names.
    (tmp_path / "release" / "bertsmith.json").unlink()
    reloaded = read_tensorflow(tmp_path / "release")
    assert isinstance(reloaded, FineTunedBundle)
    assert reloaded.head.labels == tuple(f"LABEL_{index}" for index in range(len(head.labels)))


def test_encoder_is_read_without_heads(tmp_path: Path) -> None:
    """Missing heads are initialized, and heads of other tasks are reported as unused."""
    values = {
        name: array for name, array in checkpoints.make_variables().items() if "cls/" not in name
    }
    values["another/head/kernel"] = np.ones((2, 2), dtype=np.float32)
    write_checkpoint(tmp_path / "bert_model.ckpt", values.items())
    imported = read_pretrained(write_config_and_vocab(tmp_path))
    assert imported.info["imported"]["unused"] == ["another/head/kernel"]
    assert "mlm.decoder.bias" in imported.info["imported"]["newly_initialized"]
    assert "nsp.classifier.weight" in imported.info["imported"]["newly_initialized"]
    words = torch.tensor(values["bert/embeddings/word_embeddings"])
    assert torch.equal(imported.model.bert.embeddings.words.weight, words)
    assert torch.equal(imported.model.mlm.decoder.weight, words)


def test_checkpoint_without_nsp_is_read(tmp_path: Path) -> None:
    """A checkpoint without pooler and NSP head gives a model without them."""
    values = {
        name: array
        for name, array in checkpoints.make_variables().items()
        if "pooler" not in name and "seq_relationship" not in name
    }
    write_checkpoint(tmp_path / "bert_model.ckpt", values.items())
    imported = read_pretrained(write_config_and_vocab(tmp_path))
    assert imported.config.nsp is False
    assert imported.info["imported"]["newly_initialized"] == []


@pytest.mark.parametrize(
    ("folder_name", "has_capital", "option", "lowercase", "note"),
    [
        ("uncased_L-2", True, None, True, "name contains 'uncased'"),
        ("multi_cased_L-2", False, None, False, "name contains 'cased'"),
        ("chinese_L-12_H-768_A-12", True, None, True, "name contains 'chinese_L'"),
        ("uncased_L-2", True, False, False, "as requested"),
        ("mine", False, None, True, "no word in the vocabulary has a capital"),
        ("mine", True, None, False, "words in the vocabulary have capital"),
    ],
)
def test_lowercasing_is_detected(
    tmp_path: Path,
    folder_name: str,
    has_capital: bool,
    option: bool | None,
    lowercase: bool,
    note: str,
) -> None:
    """An option, the folder's name or the vocabulary, in this order, decides on lowercasing.

    If text is lowercased, accents are stripped, as in the original code.
    """
    folder = write_config_and_vocab(tmp_path / folder_name)
    write_checkpoint(folder / "bert_model.ckpt", checkpoints.make_variables().items())
    if has_capital:
        text = (folder / "vocab.txt").read_text()
        (folder / "vocab.txt").write_text(text.replace("word5", "Word5"))
    imported = read_pretrained(folder, lowercase=option)
    assert imported.tokenizer.lowercase is lowercase
    assert imported.tokenizer.strip_accents is lowercase
    assert imported.tokenizer.spec.is_plain_bert
    assert note in imported.info["imported"]["case"]
    word1_id = imported.tokenizer.vocab.index("word1")
    assert imported.tokenizer.encode("Wörd1" if lowercase else "word1") == [word1_id]


UNSUPPORTED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"norm": "pre"}, "only supports norm = 'post'"),
    ({"attention": "causal"}, "only supports attention = 'bidirectional'"),
    ({"norm_eps": 1e-5}, "only supports norm_eps = 1e-12"),
    ({"activation": "gelu"}, "its gelu is the tanh form"),
    ({"activation": "elu"}, "does not support activation 'elu'"),
]


@pytest.mark.parametrize(("changes", "message"), UNSUPPORTED_CONFIGS, ids=str)
def test_unsupported_models_are_not_exported(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Models with options that the original BERT lacks are rejected, and nothing is written."""
    save_random_model(tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=message):
        write_tensorflow(tmp_path / "model", tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_unsupported_tasks_and_tokenizers_are_not_exported(tmp_path: Path) -> None:
    """Taggers and special Hangul handling are errors; differences in accents are notes."""
    head = HeadConfig("tags", ("A", "B"))
    bundle.save_fine_tuned(
        tmp_path / "tagger",
        head.build_model(make_prime_size_config()),
        make_tokenizer(),
        head,
        {},
    )
    with pytest.raises(ModelError, match="not 'tags'"):
        write_tensorflow(tmp_path / "tagger", tmp_path / "release")
    vocab = make_tokenizer().vocab
    composed = Tokenizer(TokenizerSpec(vocab=vocab, strip_accents=True, keep_hangul_syllables=True))
    bundle.save(tmp_path / "composed", BertForPreTraining(make_prime_size_config()), composed, {})
    added = Tokenizer(TokenizerSpec(vocab=vocab, added=(AddedTokenSpec(vocab[-1]),)))
    bundle.save(tmp_path / "added", BertForPreTraining(make_prime_size_config()), added, {})
    message = r"does not support this model's tokenizer \(.*, or has added tokens\)"
    for name in ("composed", "added"):
        with pytest.raises(ModelError, match=message):
            write_tensorflow(tmp_path / name, tmp_path / "release")
    for lowercase, accents, notes in ((True, False, 1), (True, True, 0), (False, False, 0)):
        spec = TokenizerSpec(
            vocab=vocab,
            lowercase=lowercase,
            strip_accents=accents,
            keep_hangul_syllables=not accents,
        )
        directory = tmp_path / f"{lowercase}-{accents}"
        bundle.save(directory, BertForPreTraining(make_prime_size_config()), Tokenizer(spec), {})
        assert len(write_tensorflow(directory, directory / "release")) == notes
        assert read_pretrained(directory / "release").tokenizer.spec == spec


@pytest.mark.parametrize("kind", ["single", "span"])
def test_bilstm_is_not_exported(tmp_path: Path, kind: TaskKind) -> None:
    """A model with a BiLSTM between encoder and head is rejected, and nothing is written."""
    head = HeadConfig(kind, ("A", "B") if kind == "single" else ())
    model = head.build_model(make_prime_size_config(), BiLSTMSettings(width=4, layers="last"))
    bundle.save_fine_tuned(tmp_path / "model", model, make_tokenizer(), head, {})
    with pytest.raises(ModelError, match=r"has no BiLSTM \(features\)"):
        write_tensorflow(tmp_path / "model", tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_stored_weights_determine_the_exported_heads(tmp_path: Path) -> None:
    """A class in config.json is not needed; unused weights are reported, a missing head too."""
    model = save_random_model(tmp_path / "model")
    config_file = tmp_path / "model" / "config.json"
    config = json.loads(config_file.read_text())
    del config["architectures"]
    config_file.write_text(json.dumps(config))
    weights_file = tmp_path / "model" / "model.safetensors"
    state = load_file(weights_file)
    save_file(state | {"extra.weight": torch.zeros(2)}, weights_file)
    note, *_ = write_tensorflow(tmp_path / "model", tmp_path / "release")
    assert note.endswith("model: unused weights: extra.weight")
    assert_same_weights(read_pretrained(tmp_path / "release").model, model.state_dict())
    encoder = {name: tensor for name, tensor in state.items() if not name.startswith("cls.")}
    save_file(encoder, weights_file)
    with pytest.raises(ModelError, match="this model has no masked-LM head"):
        write_tensorflow(tmp_path / "model", tmp_path / "headless")


def test_existing_files_are_not_overwritten(tmp_path: Path) -> None:
    """A folder that is not empty is an error and does not change."""
    save_random_model(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("my own")
    with pytest.raises(ModelError, match="already exists"):
        write_tensorflow(tmp_path / "model", tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine"]


def test_training_state_is_recognized() -> None:
    """Optimizer moments and step counters are distinguished from weights."""
    for name in ("bert/pooler/dense/bias/adam_m", "global_step", "save_counter", "beta1_power"):
        assert is_training_state(name)
    assert not any(is_training_state(name) for name in checkpoints.variable_shapes())


def test_imported_model_can_be_saved(tmp_path: Path, config_dir: Path) -> None:
    """An imported model gives the same logits after it is saved and loaded."""
    imported = read_pretrained(Path(__file__).parent / "data" / "v1", files_from=config_dir)
    bundle.save(tmp_path / "model", imported.model, imported.tokenizer, imported.info)
    reloaded = bundle.load(tmp_path / "model")
    packed = pack_sequences([([5, 6, 7], [0, 1, 2])])
    with torch.no_grad():
        expected = imported.model.mlm(imported.model.bert(packed))
        assert torch.equal(reloaded.model.mlm(reloaded.model.bert(packed)), expected)
    assert reloaded.info["imported"]["source"] == "a TensorFlow checkpoint in V1 format"
