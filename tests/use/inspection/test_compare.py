"""Two models side by side: every kind of difference is told, and none where there is none."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertModel

from bertsmith import bundle
from bertsmith.bundle import HeadConfig, PretrainedBundle
from bertsmith.bundle.extend import extend_vocabulary as extend
from bertsmith.errors import InputError, ModelError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.vocabulary_extension import extend_vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.inspection.compare import DEFAULT_TEXTS, Comparison, compare, measure_difference

LAYERS = ["embeddings", "layer 1", "layer 2"]


def changed(
    loaded: PretrainedBundle, folder: Path, name: str, by: float, at: tuple[int, ...]
) -> Path:
    """Save the model with one number of one weight changed."""
    bundle.save(folder, loaded.model, loaded.tokenizer, {})
    other = bundle.load(folder)
    with torch.no_grad():
        other.model.state_dict()[name][at] += by
    bundle.save(folder, other.model, other.tokenizer, {})
    return folder


def apart(found: Comparison) -> list[str]:
    """Return the names of the tensors that are not equal bit for bit."""
    return [name for name, one in found.tensors.items() if one.max_abs_difference != 0]


def test_a_model_equals_itself(directory: Path, tmp_path: Path) -> None:
    """Config, vocabulary, every tensor and every output, on English and Korean and pairs."""
    shutil.copytree(directory, tmp_path / "copy")
    found = compare(directory, tmp_path / "copy", tolerance=0)
    assert found.is_equal
    assert (found.config, found.vocabulary.num_different_ids, apart(found)) == ({}, 0, [])
    assert list(found.outputs) == [*LAYERS, "pooler", "masked LM", "next sentence"]
    assert all(
        one.max_abs_difference == one.relative == 0 and one.scale > 0
        for one in found.outputs.values()
    )
    assert found.num_texts == len(DEFAULT_TEXTS)
    assert found.num_truncated == 0
    long = compare(directory, directory, ["the smith " * 40, "the\t" + "smith " * 80, "the smith"])
    assert (long.num_truncated, long.num_tokens) == (2, 61 + 61 + 4)


def test_one_number_of_one_tensor_is_found(
    directory: Path, loaded: PretrainedBundle, tmp_path: Path
) -> None:
    """Its tensor alone is named, with its difference; outputs differ from its layer on."""
    other = changed(loaded, tmp_path / "m", "bert.encoder.layers.1.up.weight", 0.5, (3, 4))
    found = compare(directory, other)
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    assert apart(found) == [name]
    assert found.tensors[name].max_abs_difference == pytest.approx(0.5)
    both = (loaded, bundle.load(other))
    weights = [one.model.state_dict()["bert.encoder.layers.1.up.weight"] for one in both]
    scale = max(float(weight.abs().max()) for weight in weights)
    assert found.tensors[name].relative == pytest.approx(0.5 / scale)
    assert found.outputs["layer 1"].max_abs_difference == 0
    assert all(
        found.outputs[output].max_abs_difference > 0  # type: ignore[operator]
        for output in ("layer 2", "pooler", "masked LM", "next sentence")
    )
    assert not found.is_equal
    assert compare(directory, other, tolerance=100).is_equal


def test_the_largest_difference_of_all_texts_counts(
    directory: Path, loaded: PretrainedBundle, tmp_path: Path
) -> None:
    """One word's row shows where a text has the word, in whichever batch."""
    word = loaded.tokenizer.token_to_id("hammer")
    assert word is not None
    other = changed(loaded, tmp_path / "m", "bert.embeddings.words.weight", 1.0, (word, 0))
    plain = ["The smith worked until dark."] * 100
    assert compare(directory, other, plain).outputs["embeddings"].max_abs_difference == 0
    for texts in (["hammer", *plain], [*plain, "hammer"]):
        found = compare(directory, other, texts)
        assert found.outputs["embeddings"].max_abs_difference > 0  # type: ignore[operator]


def test_an_extended_model_differs_in_size_alone(
    directory: Path, loaded: PretrainedBundle, tmp_path: Path
) -> None:
    """Sizes and new ids are told, and outputs are equal on the words that both know."""
    words = ["blacksmiths", "대장장이"]
    bundle.save_model(tmp_path / "m", extend(loaded, extend_vocabulary(loaded.tokenizer, words)))
    size = loaded.tokenizer.vocab_size
    found = compare(directory, tmp_path / "m")
    assert found.config == {"vocab_size": (size, size + 2)}
    assert found.vocabulary.examples == [(size, None, words[0]), (size + 1, None, words[1])]
    assert apart(found) == ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"]
    assert found.tensors["cls.predictions.bias"].shapes == ([size], [size + 2])
    assert all(one.is_within(1e-5) for one in found.outputs.values())
    assert not found.is_equal
    cut = compare(directory, tmp_path / "m", ["the smith", "Blacksmiths sang", "blacksmiths"])
    assert cut.num_texts == 1
    assert [text for text, *_ in cut.tokenized_differently] == ["Blacksmiths sang", "blacksmiths"]
    assert cut.tokenized_differently[1][2] == ["blacksmiths"]


def test_ids_in_another_order_change_no_output(
    directory: Path, loaded: PretrainedBundle, tmp_path: Path
) -> None:
    """Two words that change places, with their rows, differ as ids and tensors; outputs agree."""
    vocab = list(loaded.tokenizer.vocab)
    one, other = vocab.index("hammer"), vocab.index("smith")
    vocab[one], vocab[other] = vocab[other], vocab[one]
    state = loaded.model.state_dict()
    for name in ("bert.embeddings.words.weight", "mlm.decoder.bias"):
        state[name] = state[name].clone()
        state[name][[one, other]] = state[name][[other, one]]
    state["mlm.decoder.weight"] = state["bert.embeddings.words.weight"]
    model = BertForPreTraining(loaded.config)
    model.load_state_dict(state)
    bundle.save(tmp_path / "m", model, Tokenizer(TokenizerSpec(vocab=tuple(vocab))), {})
    texts = ["The smith struck with the hammer."]
    found = compare(directory, tmp_path / "m", texts)
    assert found.vocabulary.num_different_ids == 2
    assert not compare(directory, tmp_path / "m", texts, tolerance=1000).is_equal
    assert not found.config
    assert all(measure.is_within(1e-5) for measure in found.outputs.values())


def test_another_way_of_cleaning_is_a_difference(
    directory: Path, loaded: PretrainedBundle, tmp_path: Path
) -> None:
    """The same words under other rules are told, though the texts at hand come out the same."""
    cased = Tokenizer(TokenizerSpec(vocab=loaded.tokenizer.vocab, lowercase=False))
    bundle.save(tmp_path / "m", loaded.model, cased, {})
    found = compare(directory, tmp_path / "m", ["the smith"])
    assert found.vocabulary.settings == {"lowercase": (True, False)}
    assert not found.tokenized_differently
    assert not found.is_equal


def test_other_sizes_and_heads_are_told(
    directory: Path, loaded: PretrainedBundle, tmp_path: Path
) -> None:
    """Another width, depth and length, no next sentence: shapes and what one lacks, no crash."""
    config = loaded.config.model_copy(
        update={"width": 22, "layers": 1, "max_positions": 17, "segments": 1, "nsp": False}
    )
    bundle.save(tmp_path / "m", BertForPreTraining(config), loaded.tokenizer, {})
    found = compare(directory, tmp_path / "m")
    assert set(found.config) == {"width", "layers", "max_positions", "segments", "nsp"}
    assert found.outputs["embeddings"].shapes == ([26], [22])
    assert found.outputs["layer 2"].shapes == ([26], None)
    assert found.outputs["next sentence"].shapes == ([2], None)
    assert found.outputs["masked LM"].max_abs_difference is not None
    assert found.tensors["bert.pooler.dense.weight"].shapes[1] is None
    assert found.num_skipped_pairs == 2
    assert not found.is_equal


@pytest.mark.parametrize(
    ("head", "output"),
    [
        (HeadConfig("single", ("a", "b", "c")), "sequence output"),
        (HeadConfig("tags", ("N", "V")), "token output"),
        (HeadConfig("span"), "token output"),
    ],
    ids=["single", "tags", "span"],
)
def test_fine_tuned_models_are_compared_with_their_heads(
    directory: Path, tmp_path: Path, head: HeadConfig, output: str
) -> None:
    """The output layer is asked too; labels and a pre-trained model beside it are told."""
    started = bundle.load_for_fine_tuning(directory, head)
    for name in ("one", "two"):
        bundle.save_fine_tuned(tmp_path / name, started.model, started.tokenizer, head, {})
        with torch.no_grad():
            started.model.state_dict()["spans.bias" if head.kind == "span" else "output.bias"] += (
                0.25
            )
    same = compare(tmp_path / "one", tmp_path / "one", tolerance=0)
    assert same.is_equal
    assert output in same.outputs
    found = compare(tmp_path / "one", tmp_path / "two")
    assert found.outputs[output].max_abs_difference == pytest.approx(0.25, abs=1e-5)
    assert found.outputs["layer 2"].max_abs_difference == 0
    beside = compare(directory, tmp_path / "one")
    assert beside.config["head"] == ("pre-training", head.kind)
    assert beside.outputs["layer 2"].max_abs_difference == 0
    assert beside.outputs[output].shapes[0] is None
    if head.labels:
        assert beside.config["labels"] == ((), head.labels)


def test_a_bare_encoder_is_compared_as_far_as_it_goes(
    directory: Path, loaded: PretrainedBundle, tmp_path: Path
) -> None:
    """A directory of transformers' BertModel: its hidden states and pooler, and no head."""
    peer = BertModel.from_pretrained(directory)
    peer.save_pretrained(tmp_path / "m")
    loaded.tokenizer.save(tmp_path / "m")
    found = compare(directory, tmp_path / "m", tolerance=0)
    assert found.config["head"] == ("pre-training", "none")
    assert found.outputs["layer 2"].max_abs_difference == 0
    assert found.outputs["pooler"].max_abs_difference == 0
    assert found.outputs["masked LM"].shapes[1] is None
    assert found.tensors["bert.pooler.dense.weight"].max_abs_difference == 0
    assert {name for name in apart(found) if not name.startswith("cls.")} == set()
    assert compare(tmp_path / "m", tmp_path / "m", tolerance=0).is_equal
    headless = BertModel.from_pretrained(directory, add_pooling_layer=False)
    headless.save_pretrained(tmp_path / "n")
    loaded.tokenizer.save(tmp_path / "n")
    assert compare(tmp_path / "m", tmp_path / "n").outputs["pooler"].shapes == ([26], None)


def test_numbers_that_are_none_are_no_equals() -> None:
    """NaN equals NaN alone; the same infinity is no difference; an empty tensor has none."""
    nan, infinite = torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])
    assert measure_difference(nan, nan.clone()).max_abs_difference == 0
    assert measure_difference(infinite, infinite.clone()).max_abs_difference == 0
    for one, other in ((nan, infinite), (nan, torch.ones(2)), (infinite, -infinite)):
        assert measure_difference(one, other).max_abs_difference == math.inf
        assert not measure_difference(one, other).is_within(1e9)
    assert measure_difference(torch.empty(0, 3), torch.empty(0, 3)).max_abs_difference == 0
    assert measure_difference(torch.ones(2), torch.ones(3)).max_abs_difference is None


def test_what_cannot_be_compared_is_refused(directory: Path, tmp_path: Path) -> None:
    """A path without a model, and texts without a word."""
    with pytest.raises(ModelError, match="no such file"):
        compare(directory, tmp_path / "nothing")
    with pytest.raises(InputError, match="no text"):
        compare(directory, directory, ["", " "])
