"""Two models side by side: every kind of difference is told, and none where there is none."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertModel

from bertsmith import bundle
from bertsmith.bundle import Bundle, Head
from bertsmith.bundle.extend import extend
from bertsmith.errors import ModelError, QuestionError
from bertsmith.model.bert import PreTrainingModel
from bertsmith.text.tokenizer_spec import Recipe
from bertsmith.text.vocabulary_extension import extended
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.inspection.compare import SENTENCES, Comparison, compare, measure

LAYERS = ["embeddings", "layer 1", "layer 2"]


def changed(loaded: Bundle, folder: Path, name: str, by: float, at: tuple[int, ...]) -> Path:
    """Save the model with one number of one weight changed."""
    bundle.save(folder, loaded.model, loaded.tokenizer, {})
    other = bundle.load(folder)
    with torch.no_grad():
        other.model.state_dict()[name][at] += by
    bundle.save(folder, other.model, other.tokenizer, {})
    return folder


def apart(found: Comparison) -> list[str]:
    """Return the names of the tensors that are not equal bit for bit."""
    return [name for name, one in found.tensors.items() if one.largest != 0]


def test_a_model_equals_itself(directory: Path, tmp_path: Path) -> None:
    """Config, vocabulary, every tensor and every output, on English and Korean and pairs."""
    shutil.copytree(directory, tmp_path / "copy")
    found = compare(directory, tmp_path / "copy", tolerance=0)
    assert found.equal
    assert (found.config, found.vocabulary.differing, apart(found)) == ({}, 0, [])
    assert list(found.outputs) == [*LAYERS, "pooler", "masked LM", "next sentence"]
    assert all(one.largest == one.relative == 0 and one.scale > 0 for one in found.outputs.values())
    assert found.texts == len(SENTENCES)
    assert found.cut_off == 0
    long = compare(directory, directory, ["the smith " * 40, "the\t" + "smith " * 80, "the smith"])
    assert (long.cut_off, long.tokens) == (2, 61 + 61 + 4)


def test_one_number_of_one_tensor_is_found(directory: Path, loaded: Bundle, tmp_path: Path) -> None:
    """Its tensor alone is named, with its difference; outputs differ from its layer on."""
    other = changed(loaded, tmp_path / "m", "bert.encoder.layers.1.up.weight", 0.5, (3, 4))
    found = compare(directory, other)
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    assert apart(found) == [name]
    assert found.tensors[name].largest == pytest.approx(0.5)
    both = (loaded, bundle.load(other))
    weights = [one.model.state_dict()["bert.encoder.layers.1.up.weight"] for one in both]
    scale = max(float(weight.abs().max()) for weight in weights)
    assert found.tensors[name].relative == pytest.approx(0.5 / scale)
    assert found.outputs["layer 1"].largest == 0
    assert all(
        found.outputs[output].largest > 0  # type: ignore[operator]
        for output in ("layer 2", "pooler", "masked LM", "next sentence")
    )
    assert not found.equal
    assert compare(directory, other, tolerance=100).equal


def test_the_largest_difference_of_all_texts_counts(
    directory: Path, loaded: Bundle, tmp_path: Path
) -> None:
    """One word's row shows where a text has the word, in whichever batch."""
    word = loaded.tokenizer.id("hammer")
    assert word is not None
    other = changed(loaded, tmp_path / "m", "bert.embeddings.words.weight", 1.0, (word, 0))
    plain = ["The smith worked until dark."] * 100
    assert compare(directory, other, plain).outputs["embeddings"].largest == 0
    for texts in (["hammer", *plain], [*plain, "hammer"]):
        found = compare(directory, other, texts)
        assert found.outputs["embeddings"].largest > 0  # type: ignore[operator]


def test_an_extended_model_differs_in_size_alone(
    directory: Path, loaded: Bundle, tmp_path: Path
) -> None:
    """Sizes and new ids are told, and outputs are equal on the words that both know."""
    words = ["blacksmiths", "대장장이"]
    bundle.save_either(tmp_path / "m", extend(loaded, extended(loaded.tokenizer, words)))
    size = loaded.tokenizer.vocab_size
    found = compare(directory, tmp_path / "m")
    assert found.config == {"vocab_size": (size, size + 2)}
    assert found.vocabulary.first == [(size, None, words[0]), (size + 1, None, words[1])]
    assert apart(found) == ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias"]
    assert found.tensors["cls.predictions.bias"].shapes == ([size], [size + 2])
    assert all(one.within(1e-5) for one in found.outputs.values())
    assert not found.equal
    cut = compare(directory, tmp_path / "m", ["the smith", "Blacksmiths sang", "blacksmiths"])
    assert cut.texts == 1
    assert [text for text, *_ in cut.otherwise] == ["Blacksmiths sang", "blacksmiths"]
    assert cut.otherwise[1][2] == ["blacksmiths"]


def test_ids_in_another_order_change_no_output(
    directory: Path, loaded: Bundle, tmp_path: Path
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
    model = PreTrainingModel(loaded.config)
    model.load_state_dict(state)
    bundle.save(tmp_path / "m", model, Tokenizer(Recipe(vocab=tuple(vocab))), {})
    texts = ["The smith struck with the hammer."]
    found = compare(directory, tmp_path / "m", texts)
    assert found.vocabulary.differing == 2
    assert not compare(directory, tmp_path / "m", texts, tolerance=1000).equal
    assert not found.config
    assert all(measure.within(1e-5) for measure in found.outputs.values())


def test_another_way_of_cleaning_is_a_difference(
    directory: Path, loaded: Bundle, tmp_path: Path
) -> None:
    """The same words under other rules are told, though the texts at hand come out the same."""
    cased = Tokenizer(Recipe(vocab=loaded.tokenizer.vocab, lowercase=False))
    bundle.save(tmp_path / "m", loaded.model, cased, {})
    found = compare(directory, tmp_path / "m", ["the smith"])
    assert found.vocabulary.choices == {"lowercase": (True, False)}
    assert not found.otherwise
    assert not found.equal


def test_other_sizes_and_heads_are_told(directory: Path, loaded: Bundle, tmp_path: Path) -> None:
    """Another width, depth and length, no next sentence: shapes and what one lacks, no crash."""
    config = loaded.config.model_copy(
        update={"width": 22, "layers": 1, "max_positions": 17, "segments": 1, "nsp": False}
    )
    bundle.save(tmp_path / "m", PreTrainingModel(config), loaded.tokenizer, {})
    found = compare(directory, tmp_path / "m")
    assert set(found.config) == {"width", "layers", "max_positions", "segments", "nsp"}
    assert found.outputs["embeddings"].shapes == ([26], [22])
    assert found.outputs["layer 2"].shapes == ([26], None)
    assert found.outputs["next sentence"].shapes == ([2], None)
    assert found.outputs["masked LM"].largest is not None
    assert found.tensors["bert.pooler.dense.weight"].shapes[1] is None
    assert found.without_pairs == 2
    assert not found.equal


@pytest.mark.parametrize(
    ("head", "output"),
    [
        (Head("single", ("a", "b", "c")), "sequence output"),
        (Head("tags", ("N", "V")), "token output"),
        (Head("span"), "token output"),
    ],
    ids=["single", "tags", "span"],
)
def test_fine_tuned_models_are_compared_with_their_heads(
    directory: Path, tmp_path: Path, head: Head, output: str
) -> None:
    """The output layer is asked too; labels and a pre-trained model beside it are told."""
    started = bundle.start_task(directory, head)
    for name in ("one", "two"):
        bundle.save_task(tmp_path / name, started.model, started.tokenizer, head, {})
        with torch.no_grad():
            started.model.state_dict()["spans.bias" if head.kind == "span" else "output.bias"] += (
                0.25
            )
    same = compare(tmp_path / "one", tmp_path / "one", tolerance=0)
    assert same.equal
    assert output in same.outputs
    found = compare(tmp_path / "one", tmp_path / "two")
    assert found.outputs[output].largest == pytest.approx(0.25, abs=1e-5)
    assert found.outputs["layer 2"].largest == 0
    beside = compare(directory, tmp_path / "one")
    assert beside.config["head"] == ("pre-training", head.kind)
    assert beside.outputs["layer 2"].largest == 0
    assert beside.outputs[output].shapes[0] is None
    if head.labels:
        assert beside.config["labels"] == ((), head.labels)


def test_a_bare_encoder_is_compared_as_far_as_it_goes(
    directory: Path, loaded: Bundle, tmp_path: Path
) -> None:
    """A directory of transformers' BertModel: its hidden states and pooler, and no head."""
    peer = BertModel.from_pretrained(directory)
    peer.save_pretrained(tmp_path / "m")
    loaded.tokenizer.save(tmp_path / "m")
    found = compare(directory, tmp_path / "m", tolerance=0)
    assert found.config["head"] == ("pre-training", "none")
    assert found.outputs["layer 2"].largest == 0
    assert found.outputs["pooler"].largest == 0
    assert found.outputs["masked LM"].shapes[1] is None
    assert found.tensors["bert.pooler.dense.weight"].largest == 0
    assert {name for name in apart(found) if not name.startswith("cls.")} == set()
    assert compare(tmp_path / "m", tmp_path / "m", tolerance=0).equal
    headless = BertModel.from_pretrained(directory, add_pooling_layer=False)
    headless.save_pretrained(tmp_path / "n")
    loaded.tokenizer.save(tmp_path / "n")
    assert compare(tmp_path / "m", tmp_path / "n").outputs["pooler"].shapes == ([26], None)


def test_numbers_that_are_none_are_no_equals() -> None:
    """NaN equals NaN alone; the same infinity is no difference; an empty tensor has none."""
    nan, infinite = torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])
    assert measure(nan, nan.clone()).largest == 0
    assert measure(infinite, infinite.clone()).largest == 0
    for one, other in ((nan, infinite), (nan, torch.ones(2)), (infinite, -infinite)):
        assert measure(one, other).largest == math.inf
        assert not measure(one, other).within(1e9)
    assert measure(torch.empty(0, 3), torch.empty(0, 3)).largest == 0
    assert measure(torch.ones(2), torch.ones(3)).largest is None


def test_what_cannot_be_compared_is_refused(directory: Path, tmp_path: Path) -> None:
    """A path without a model, and texts without a word."""
    with pytest.raises(ModelError, match="no such file"):
        compare(directory, tmp_path / "nothing")
    with pytest.raises(QuestionError, match="no text"):
        compare(directory, directory, ["", " "])
