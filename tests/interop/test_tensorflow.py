"""The original release, in and out: the same numbers, whatever form a checkpoint has."""

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertForPreTraining

from bertsmith import bundle
from bertsmith.bundle import FineTunedBundle, HeadConfig, PretrainedBundle
from bertsmith.errors import ModelError
from bertsmith.interop.tensorflow import read_tensorflow, write_tensorflow
from bertsmith.interop.tensorflow.checkpoint_v2 import CheckpointV2
from bertsmith.interop.tensorflow.names import is_training_state, to_official_name
from bertsmith.interop.tensorflow.reading import _stored_names, _match_weights
from bertsmith.interop.tensorflow.release import read_config
from bertsmith.interop.tensorflow.writing import write_checkpoint
from bertsmith.model.bert import BertForPreTraining as PreTrainingModel
from bertsmith.model.packed import pack_sequences
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from tests.interop.conftest import CONFIG, Script, write_config_and_vocab
from tests.interop.data import checkpoints
from tests.interop.original_weights import expected_state_dict, original_variables
from tests.model.examples import make_tokenizer, prime_config, random_batch, randomize_weights


def read(path: Path, **options: Any) -> PretrainedBundle:
    """Read a pre-trained release."""
    found = read_tensorflow(path, **options)
    assert isinstance(found, PretrainedBundle)
    return found


def assert_same(model: torch.nn.Module, expected: dict[str, torch.Tensor]) -> None:
    """Compare a model's state bit for bit, every name."""
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, weight in expected.items():
        assert torch.equal(state[name], weight), name


@pytest.mark.parametrize("form", ["v2", "v1", "object", "parts"])
def test_every_form_gives_the_same_weights(
    checkpoint_dir: Path, form: str, config_dir: Path
) -> None:
    """V1, V2 (one shard, or two with a tensor in parts) and object-based: each weight, bit for bit.

    The optimizer's averages and the step are left, and counted.
    """
    found = read(checkpoint_dir / form, files_from=config_dir)
    assert_same(found.model, expected_state_dict(checkpoints.make_variables()))
    assert found.model.mlm.decoder.weight is found.model.bert.embeddings.words.weight
    assert not found.model.training
    report = found.info["imported"]
    assert (report["new"], report["left"]) == ([], [])
    several = 2 * len(checkpoints.variable_shapes()) + 1
    left = {"v2": several, "v1": several, "object": 1, "parts": 0}[form]
    assert report["left_of_training"] == left
    assert (found.config.activation, found.config.norm_eps) == ("gelu_tanh", 1e-12)
    assert (found.config.dropout, found.config.init_range) == (0.17, 0.03)
    assert (found.config.segments, found.config.nsp) == (3, True)


def test_every_type_of_number_is_read(checkpoint_dir: Path, config_dir: Path) -> None:
    """float16, bfloat16 and float64 become float32, each with the value that it has."""
    kinds = (torch.float16, torch.bfloat16, torch.float64, torch.float32)
    values = {
        name: torch.tensor(array).to(kinds[index % 4]).float().numpy()
        for index, (name, array) in enumerate(checkpoints.make_variables().items())
    }
    assert_same(
        read(checkpoint_dir / "types", files_from=config_dir).model, expected_state_dict(values)
    )


def test_the_official_tf2_encoder_is_read(checkpoint_dir: Path, config_dir: Path) -> None:
    """Its names and its kernels with an axis of heads give the same encoder; the heads are new."""
    found = read(checkpoint_dir / "official", files_from=config_dir)
    state, expected = found.model.state_dict(), expected_state_dict(checkpoints.make_variables())
    new = found.info["imported"]["new"]
    assert set(new) == {name for name in expected if name.startswith(("mlm.", "nsp."))} - {
        "mlm.decoder.weight"
    }
    for name in set(expected) - set(new):
        assert torch.equal(state[name], expected[name]), name
    # What is new is the same at each reading, whatever was drawn before.
    torch.rand(3)
    assert_same(read(checkpoint_dir / "official", files_from=config_dir).model, state)
    assert found.info["imported"]["left"] == []


def test_official_names_of_the_whole_model(tmp_path: Path) -> None:
    """The official names of the pre-training heads, as its converter gives them, are known too."""
    values = {to_official_name(name): array for name, array in checkpoints.make_variables().items()}
    head = "predictions/transform/logits/kernel"
    values[head] = values[head].T
    write_checkpoint(tmp_path / "bert_model.ckpt", values.items())
    write_config_and_vocab(tmp_path)
    assert_same(read(tmp_path).model, expected_state_dict(checkpoints.make_variables()))


@pytest.mark.parametrize("name", ["", "bert_model.ckpt", "bert_model.ckpt.index",
                                  "bert_model.ckpt.data-00000-of-00001"])  # fmt: skip
def test_a_path_may_be_folder_prefix_or_file(tmp_path: Path, name: str) -> None:
    """A release is found by its folder, the checkpoint's prefix, or one of its files."""
    write_checkpoint(tmp_path / "bert_model.ckpt", checkpoints.make_variables().items())
    write_config_and_vocab(tmp_path)
    assert_same(read(tmp_path / name).model, expected_state_dict(checkpoints.make_variables()))


def test_the_file_checkpoint_chooses_among_several(tmp_path: Path) -> None:
    """Of several checkpoints the one that TensorFlow's own note names is read, in this folder."""
    values = checkpoints.make_variables()
    write_config_and_vocab(tmp_path)
    write_checkpoint(tmp_path / "model.ckpt-1", values.items())
    write_checkpoint(
        tmp_path / "model.ckpt-2", [(name, array + 1) for name, array in values.items()]
    )
    with pytest.raises(ModelError, match=r"several checkpoints \(model\.ckpt-1, model\.ckpt-2\)"):
        read(tmp_path)
    (tmp_path / "checkpoint").write_text('model_checkpoint_path: "/far/away/../model.ckpt-2"\n')
    state = expected_state_dict({name: array + 1 for name, array in values.items()})
    assert_same(read(tmp_path).model, state)


def saved(directory: Path, **changes: Any) -> PreTrainingModel:
    """Save a random model and return it."""
    config = prime_config(**changes)
    model = randomize_weights(PreTrainingModel(config)).eval()
    bundle.save(directory, model, make_tokenizer(config.vocab_size), {"recipe": "none"})
    return model


@pytest.mark.parametrize(
    "changes", [{}, {"nsp": False}, {"activation": "relu"}, {"positions": "sinusoidal"}], ids=str
)
def test_out_and_in_again_is_the_same(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Written and read back, config, tokenizer and every bit of the weights are the same."""
    model = saved(tmp_path / "model", **changes)
    write_tensorflow(tmp_path / "model", tmp_path / "release")
    found = read(tmp_path / "release")
    assert_same(found.model, model.state_dict())
    assert found.config == model.config
    assert found.tokenizer.hash == make_tokenizer(101).hash
    assert found.info["recipe"] == "none"
    assert found.info["imported"]["left"] == found.info["imported"]["new"] == []


def test_tensorflow_reads_what_is_written(tmp_path: Path, run_tensorflow: Script) -> None:
    """Real TensorFlow finds exactly the original's names, and every value bit for bit.

    A release with enough layers that its index has several blocks.
    """
    saved(tmp_path / "model", layers=11)
    write_tensorflow(tmp_path / "model", tmp_path / "release")
    prefix = tmp_path / "release" / "bert_model.ckpt"
    run_tensorflow("read", prefix)
    values = dict(np.load(f"{prefix}.npz"))
    assert_same(bundle.load(tmp_path / "model").model, expected_state_dict(values))
    # Three of each layer's pieces are one here: all that is written was looked at.
    assert len(values) == 14 + 16 * 11
    assert {array.dtype for array in values.values()} == {np.dtype("float32")}


def test_weights_of_transformers_give_the_same_logits(tmp_path: Path) -> None:
    """Random weights of BertForPreTraining under the original's names: both logits to 1e-5."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=101, hidden_size=21, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=37, max_position_embeddings=43, hidden_act="gelu_new",
        initializer_range=0.3,
    )  # fmt: skip
    theirs = BertForPreTraining(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    write_checkpoint(tmp_path / "bert_model.ckpt", original_variables(theirs.state_dict()).items())
    sizes = {key: getattr(config, key) for key in CONFIG if key != "hidden_act"}
    write_config_and_vocab(tmp_path, **sizes)
    found = read(tmp_path)
    assert found.info["imported"]["left"] == found.info["imported"]["new"] == []
    batch = random_batch(found.config, (17,))
    with torch.no_grad():
        output = theirs(batch.packed.ids[None], token_type_ids=batch.packed.segments[None])
        hidden = found.model.bert(batch.packed)
        words = found.model.mlm(hidden)
        pairs = found.model.next_sentence_logits(hidden, batch.packed)
    torch.testing.assert_close(words, output.prediction_logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pairs, output.seq_relationship_logits, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def chinese(tmp_path_factory: pytest.TempPathFactory, shared_text: Path) -> Path:
    """The index, config and vocabulary of the original's Chinese BERT-base, without its data."""
    folder = tmp_path_factory.mktemp("chinese")
    with tarfile.open(shared_text.parent / "labelled.tar.xz") as pack:
        for member in pack:
            if member.name.startswith("labelled/tf-checkpoint-index/") and member.isfile():
                pack.extract(member, folder, filter="data")
    return folder / "labelled" / "tf-checkpoint-index"


@pytest.mark.data
def test_the_index_of_a_real_release(chinese: Path) -> None:
    """Each of the 206 tensors of a real BERT-base has its place here, in its shape."""
    index = CheckpointV2(chinese / "bert_model.ckpt.index")
    config = read_config(chinese / "bert_config.json", nsp=True, positions="learned")
    assert (config.vocab_size, config.layers, config.activation) == (21128, 12, "gelu_tanh")
    with torch.device("meta"):
        model = PreTrainingModel(config)
    plan = _match_weights(model, index, _stored_names(index))
    assert set(plan) == set(model.state_dict()) - {"mlm.decoder.weight"}
    assert {name for group in plan.values() for name in group} == set(index.shapes)
    assert len(index.shapes) == 206
    assert index.shapes["bert/encoder/layer_11/intermediate/dense/kernel"] == (768, 3072)
    with pytest.raises(ModelError, match=r"data-00000-of-00001: no such file, but tensor 'bert"):
        read(chinese)


@pytest.mark.parametrize("kind", ["single", "span"])
def test_fine_tuned_models_go_out_and_in(tmp_path: Path, kind: str) -> None:
    """A classifier with its labels and a span model keep every bit and every answer."""
    labels = ("bad", "fine", "good") if kind == "single" else ()
    head = HeadConfig("single", labels) if kind == "single" else HeadConfig("span")
    torch.manual_seed(0)
    model = head.build_model(prime_config()).eval()
    bundle.save_fine_tuned(tmp_path / "model", model, make_tokenizer(101), head, {})
    write_tensorflow(tmp_path / "model", tmp_path / "release")
    found = read_tensorflow(tmp_path / "release")
    assert isinstance(found, FineTunedBundle)
    assert found.head == head
    assert_same(found.model, model.state_dict())
    output = {"single": "output_weights", "span": "cls/squad/output_weights"}[kind]
    shapes = CheckpointV2(tmp_path / "release" / "bert_model.ckpt.index").shapes
    assert shapes[output] == (3 if kind == "single" else 2, 21)
    # Without our own file its labels have no names.
    (tmp_path / "release" / "bertsmith.json").unlink()
    again = read_tensorflow(tmp_path / "release")
    assert isinstance(again, FineTunedBundle)
    assert again.head.labels == tuple(f"LABEL_{index}" for index in range(len(labels)))


def test_an_encoder_can_be_taken_from_any_checkpoint(tmp_path: Path) -> None:
    """Without heads, or with one of another task, the encoder is read and the rest is named."""
    values = {
        name: array for name, array in checkpoints.make_variables().items() if "cls/" not in name
    }
    values["another/head/kernel"] = np.ones((2, 2), dtype=np.float32)
    write_checkpoint(tmp_path / "bert_model.ckpt", values.items())
    found = read(write_config_and_vocab(tmp_path))
    assert found.info["imported"]["left"] == ["another/head/kernel"]
    assert "mlm.decoder.bias" in found.info["imported"]["new"]
    assert "nsp.classifier.weight" in found.info["imported"]["new"]
    words = torch.tensor(values["bert/embeddings/word_embeddings"])
    assert torch.equal(found.model.bert.embeddings.words.weight, words)
    assert torch.equal(found.model.mlm.decoder.weight, words)


def test_a_model_without_next_sentence(tmp_path: Path) -> None:
    """A checkpoint without pooler and next-sentence head gives a model without them."""
    values = {
        name: array
        for name, array in checkpoints.make_variables().items()
        if "pooler" not in name and "seq_relationship" not in name
    }
    write_checkpoint(tmp_path / "bert_model.ckpt", values.items())
    found = read(write_config_and_vocab(tmp_path))
    assert found.config.nsp is False
    assert found.info["imported"]["new"] == []


@pytest.mark.parametrize(
    ("folder", "capital", "option", "lowered", "told"),
    [
        ("uncased_L-2", True, None, True, "name contains 'uncased'"),
        ("multi_cased_L-2", False, None, False, "name contains 'cased'"),
        ("chinese_L-12_H-768_A-12", True, None, True, "name contains 'chinese_L'"),
        ("uncased_L-2", True, False, False, "as requested"),
        ("mine", False, None, True, "no word in the vocabulary has a capital"),
        ("mine", True, None, False, "words in the vocabulary have capital"),
    ],
)
def test_the_case_is_found_and_told(
    tmp_path: Path, folder: str, capital: bool, option: bool | None, lowered: bool, told: str
) -> None:
    """The option, the folder's name, the vocabulary, in this order; and it is said which.

    Accents go with the case, as in the original's code, and Hangul with them.
    """
    place = write_config_and_vocab(tmp_path / folder)
    write_checkpoint(place / "bert_model.ckpt", checkpoints.make_variables().items())
    if capital:
        text = (place / "vocab.txt").read_text()
        (place / "vocab.txt").write_text(text.replace("word5", "Word5"))
    found = read(place, lowercase=option)
    assert found.tokenizer.lowercase is lowered
    assert found.tokenizer.strip_accents is lowered
    assert found.tokenizer.spec.is_plain_bert
    assert told in found.info["imported"]["case"]
    assert found.tokenizer.encode("Wörd1" if lowered else "word1") == [6]


UNSAYABLE: list[tuple[dict[str, Any], str]] = [
    ({"norm": "pre"}, "only supports norm = 'post'"),
    ({"attention": "causal"}, "only supports attention = 'bidirectional'"),
    ({"norm_eps": 1e-5}, "only supports norm_eps = 1e-12"),
    ({"activation": "gelu"}, "its gelu is the tanh form"),
    ({"activation": "elu"}, "does not support activation 'elu'"),
]


@pytest.mark.parametrize(("changes", "said"), UNSAYABLE, ids=str)
def test_what_the_original_cannot_be_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    """Pre-norm, causal attention, another epsilon or activation: an error, and no folder."""
    saved(tmp_path / "model", **changes)
    with pytest.raises(ModelError, match=said):
        write_tensorflow(tmp_path / "model", tmp_path / "release")
    assert not (tmp_path / "release").exists()


def test_tasks_and_tokenizers_that_the_original_lacks(tmp_path: Path) -> None:
    """A tagger, and Hangul kept whole without accents, are refused; other doubts are told."""
    head = HeadConfig("tags", ("A", "B"))
    bundle.save_fine_tuned(
        tmp_path / "tagger", head.build_model(prime_config()), make_tokenizer(101), head, {}
    )
    with pytest.raises(ModelError, match="not 'tags'"):
        write_tensorflow(tmp_path / "tagger", tmp_path / "release")
    vocab = make_tokenizer(101).vocab
    whole = Tokenizer(TokenizerSpec(vocab=vocab, strip_accents=True, whole_hangul=True))
    bundle.save(tmp_path / "whole", PreTrainingModel(prime_config()), whole, {})
    with pytest.raises(ModelError, match="the original's tokenizer cannot"):
        write_tensorflow(tmp_path / "whole", tmp_path / "release")
    for lowercase, accents, notes in ((True, False, 1), (True, True, 0), (False, False, 0)):
        recipe = TokenizerSpec(
            vocab=vocab, lowercase=lowercase, strip_accents=accents, whole_hangul=not accents
        )
        directory = tmp_path / f"{lowercase}-{accents}"
        bundle.save(directory, PreTrainingModel(prime_config()), Tokenizer(recipe), {})
        assert len(write_tensorflow(directory, directory / "release")) == notes
        assert read(directory / "release").tokenizer.spec == recipe


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    """A folder that holds something is refused, and left as it is."""
    saved(tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("my own")
    with pytest.raises(ModelError, match="something is there already"):
        write_tensorflow(tmp_path / "model", tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine"]


def test_what_belongs_to_training() -> None:
    """Averages, steps and slots are told from weights, in the names of TensorFlow 1 and 2."""
    for name in ("bert/pooler/dense/bias/adam_m", "global_step", "save_counter", "beta1_power"):
        assert is_training_state(name)
    assert not any(is_training_state(name) for name in checkpoints.variable_shapes())


def test_an_imported_model_answers(tmp_path: Path, config_dir: Path) -> None:
    """Saved as a model directory and loaded again, it gives the same logits."""
    found = read(Path(__file__).parent / "data" / "v1", files_from=config_dir)
    bundle.save(tmp_path / "model", found.model, found.tokenizer, found.info)
    again = bundle.load(tmp_path / "model")
    packed = pack_sequences([([5, 6, 7], [0, 1, 2])])
    with torch.no_grad():
        expected = found.model.mlm(found.model.bert(packed))
        assert torch.equal(again.model.mlm(again.model.bert(packed)), expected)
    assert again.info["imported"]["from"] == "a TensorFlow checkpoint in V1 format"
