"""Comparison of two models: all kinds of differences are found, and none in equal models."""

import math
import shutil
from pathlib import Path

import pytest
import torch
from transformers import BertModel

from bertsmith import bundle
from bertsmith.bundle import HeadConfig, PretrainedBundle
from bertsmith.bundle.extend import extend_vocabulary as extend_model
from bertsmith.errors import InputError, ModelError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.vocabulary_extension import extend_vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.inspection.compare import DEFAULT_TEXTS, Comparison, compare, measure_difference
from tests.use.conftest import MAX_POSITIONS, WIDTH

#: Names of the hidden states of the random model among the outputs.
HIDDEN_STATES = ["embeddings", "layer 1", "layer 2"]


def save_changed_copy(
    pretrained: PretrainedBundle, folder: Path, name: str, change: float, index: tuple[int, ...]
) -> Path:
    """Save a copy of the model with one element of one weight changed."""
    bundle.save(folder, pretrained.model, pretrained.tokenizer, {})
    copy = bundle.load(folder)
    with torch.no_grad():
        copy.model.state_dict()[name][index] += change
    bundle.save(folder, copy.model, copy.tokenizer, {})
    return folder


def find_different_tensors(comparison: Comparison) -> list[str]:
    """Return the names of the weights that are not bitwise equal."""
    return [
        name
        for name, difference in comparison.tensors.items()
        if difference.max_abs_difference != 0
    ]


def test_model_equals_its_copy(model_dir: Path, tmp_path: Path) -> None:
    """A copy has no differences; truncated texts are counted."""
    shutil.copytree(model_dir, tmp_path / "copy")
    comparison = compare(model_dir, tmp_path / "copy", tolerance=0)
    assert comparison.is_equal
    assert comparison.config == {}
    assert comparison.vocabulary.num_different_ids == 0
    assert find_different_tensors(comparison) == []
    assert list(comparison.outputs) == [*HIDDEN_STATES, "pooler", "masked LM", "next sentence"]
    for difference in comparison.outputs.values():
        assert difference.max_abs_difference == difference.relative_difference == 0
        assert difference.scale > 0
    assert comparison.num_texts == len(DEFAULT_TEXTS)
    assert comparison.num_truncated == 0
    long_texts = ["the smith " * 40, "the\t" + "smith " * 80, "the smith"]
    comparison = compare(model_dir, model_dir, long_texts)
    assert comparison.num_truncated == 2
    # The third text has 4 tokens: [CLS] the smith [SEP].
    assert comparison.num_tokens == 2 * MAX_POSITIONS + 4


def test_one_changed_element_is_found(
    model_dir: Path, pretrained: PretrainedBundle, tmp_path: Path
) -> None:
    """If an element of layer 2 is changed, its weight and the outputs from layer 2 on differ."""
    name = "bert.encoder.layers.1.up.weight"
    hf_name = "bert.encoder.layer.1.intermediate.dense.weight"
    changed_dir = save_changed_copy(pretrained, tmp_path / "m", name, 0.5, (3, 4))
    comparison = compare(model_dir, changed_dir)
    assert find_different_tensors(comparison) == [hf_name]
    assert comparison.tensors[hf_name].max_abs_difference == pytest.approx(0.5)
    models = (pretrained.model, bundle.load(changed_dir).model)
    scale = max(float(model.state_dict()[name].abs().max()) for model in models)
    assert comparison.tensors[hf_name].relative_difference == pytest.approx(0.5 / scale)
    assert comparison.outputs["layer 1"].max_abs_difference == 0
    assert all(
        comparison.outputs[output].max_abs_difference > 0  # type: ignore[operator]
        for output in ("layer 2", "pooler", "masked LM", "next sentence")
    )
    assert not comparison.is_equal
    assert compare(model_dir, changed_dir, tolerance=100).is_equal


def test_output_difference_is_the_maximum_over_texts(
    model_dir: Path, pretrained: PretrainedBundle, tmp_path: Path
) -> None:
    """A changed word embedding is found if the first or the last of 101 texts has the word."""
    token_id = pretrained.tokenizer.token_to_id("hammer")
    assert token_id is not None
    changed_dir = save_changed_copy(
        pretrained, tmp_path / "m", "bert.embeddings.words.weight", 1.0, (token_id, 0)
    )
    texts_without_word = ["The smith worked until dark."] * 100
    comparison = compare(model_dir, changed_dir, texts_without_word)
    assert comparison.outputs["embeddings"].max_abs_difference == 0
    for texts in (["hammer", *texts_without_word], [*texts_without_word, "hammer"]):
        difference = compare(model_dir, changed_dir, texts).outputs["embeddings"]
        assert difference.max_abs_difference > 0  # type: ignore[operator]


def test_extended_vocabulary_is_reported(
    model_dir: Path, pretrained: PretrainedBundle, tmp_path: Path
) -> None:
    """Added words are differences; outputs are compared on the words that both models have."""
    words = ["blacksmiths", "대장장이"]
    extended = extend_model(pretrained, extend_vocabulary(pretrained.tokenizer, words))
    bundle.save_model(tmp_path / "m", extended)
    size = pretrained.tokenizer.vocab_size
    comparison = compare(model_dir, tmp_path / "m")
    assert comparison.config == {"vocab_size": (size, size + 2)}
    assert comparison.vocabulary.examples == [(size, None, words[0]), (size + 1, None, words[1])]
    assert find_different_tensors(comparison) == [
        "bert.embeddings.word_embeddings.weight",
        "cls.predictions.bias",
    ]
    assert comparison.tensors["cls.predictions.bias"].shapes == ([size], [size + 2])
    assert all(difference.is_within(1e-5) for difference in comparison.outputs.values())
    assert not comparison.is_equal
    texts = ["the smith", "Blacksmiths sang", "blacksmiths"]
    comparison = compare(model_dir, tmp_path / "m", texts)
    assert comparison.num_texts == 1
    skipped_texts = [text for text, *_ in comparison.tokenized_differently]
    assert skipped_texts == ["Blacksmiths sang", "blacksmiths"]
    assert comparison.tokenized_differently[1][2] == ["blacksmiths"]


def test_reordered_ids_do_not_change_outputs(
    model_dir: Path, pretrained: PretrainedBundle, tmp_path: Path
) -> None:
    """If two words swap their ids and embeddings, the ids differ and the outputs are equal."""
    vocab = list(pretrained.tokenizer.vocab)
    first, second = vocab.index("hammer"), vocab.index("smith")
    vocab[first], vocab[second] = vocab[second], vocab[first]
    state = pretrained.model.state_dict()
    for name in ("bert.embeddings.words.weight", "mlm.decoder.bias"):
        state[name] = state[name].clone()
        state[name][[first, second]] = state[name][[second, first]]
    state["mlm.decoder.weight"] = state["bert.embeddings.words.weight"]
    model = BertForPreTraining(pretrained.config)
    model.load_state_dict(state)
    tokenizer = Tokenizer(TokenizerSpec(vocab=tuple(vocab)))
    bundle.save(tmp_path / "m", model, tokenizer, {})
    texts = ["The smith struck with the hammer."]
    comparison = compare(model_dir, tmp_path / "m", texts)
    assert comparison.vocabulary.num_different_ids == 2
    assert not compare(model_dir, tmp_path / "m", texts, tolerance=1000).is_equal
    assert not comparison.config
    assert all(difference.is_within(1e-5) for difference in comparison.outputs.values())


def test_tokenizer_settings_are_compared(
    model_dir: Path, pretrained: PretrainedBundle, tmp_path: Path
) -> None:
    """Different lowercasing is reported even if it does not affect the texts."""
    cased = Tokenizer(TokenizerSpec(vocab=pretrained.tokenizer.vocab, lowercase=False))
    bundle.save(tmp_path / "m", pretrained.model, cased, {})
    comparison = compare(model_dir, tmp_path / "m", ["the smith"])
    assert comparison.vocabulary.settings == {"lowercase": (True, False)}
    assert not comparison.tokenized_differently
    assert not comparison.is_equal


def test_different_shapes_and_heads_are_reported(
    model_dir: Path, pretrained: PretrainedBundle, tmp_path: Path
) -> None:
    """Models with different width, number of layers, maximum length and heads are compared."""
    config = pretrained.config.model_copy(
        update={"width": 22, "layers": 1, "max_positions": 17, "segments": 1, "nsp": False}
    )
    bundle.save(tmp_path / "m", BertForPreTraining(config), pretrained.tokenizer, {})
    comparison = compare(model_dir, tmp_path / "m")
    assert set(comparison.config) == {"width", "layers", "max_positions", "segments", "nsp"}
    assert comparison.outputs["embeddings"].shapes == ([WIDTH], [22])
    assert comparison.outputs["layer 2"].shapes == ([WIDTH], None)
    assert comparison.outputs["next sentence"].shapes == ([2], None)
    assert comparison.outputs["masked LM"].max_abs_difference is not None
    assert comparison.tensors["bert.pooler.dense.weight"].shapes[1] is None
    assert comparison.num_skipped_pairs == 2
    assert not comparison.is_equal


@pytest.mark.parametrize(
    ("head", "output"),
    [
        (HeadConfig("single", ("a", "b", "c")), "sequence output"),
        (HeadConfig("tags", ("N", "V")), "token output"),
        (HeadConfig("span"), "token output"),
    ],
    ids=["single", "tags", "span"],
)
def test_fine_tuned_heads_are_compared(
    model_dir: Path, tmp_path: Path, head: HeadConfig, output: str
) -> None:
    """Outputs of task heads are compared; a pre-trained model has a different head."""
    fine_tuned = bundle.load_for_fine_tuning(model_dir, head)
    bias_name = "spans.bias" if head.kind == "span" else "output.bias"
    for name in ("first", "second"):
        bundle.save_fine_tuned(tmp_path / name, fine_tuned.model, fine_tuned.tokenizer, head, {})
        with torch.no_grad():
            fine_tuned.model.state_dict()[bias_name] += 0.25
    comparison = compare(tmp_path / "first", tmp_path / "first", tolerance=0)
    assert comparison.is_equal
    assert output in comparison.outputs
    comparison = compare(tmp_path / "first", tmp_path / "second")
    assert comparison.outputs[output].max_abs_difference == pytest.approx(0.25, abs=1e-5)
    assert comparison.outputs["layer 2"].max_abs_difference == 0
    comparison = compare(model_dir, tmp_path / "first")
    assert comparison.config["head"] == ("pre-training", head.kind)
    assert comparison.outputs["layer 2"].max_abs_difference == 0
    assert comparison.outputs[output].shapes[0] is None
    if head.labels:
        assert comparison.config["labels"] == ((), head.labels)


def test_bare_encoder_is_compared_without_heads(
    model_dir: Path, pretrained: PretrainedBundle, tmp_path: Path
) -> None:
    """Hidden states and pooler output of transformers' BertModel are compared, without heads."""
    hf_encoder = BertModel.from_pretrained(model_dir)
    hf_encoder.save_pretrained(tmp_path / "m")
    pretrained.tokenizer.save(tmp_path / "m")
    comparison = compare(model_dir, tmp_path / "m", tolerance=0)
    assert comparison.config["head"] == ("pre-training", "none")
    assert comparison.outputs["layer 2"].max_abs_difference == 0
    assert comparison.outputs["pooler"].max_abs_difference == 0
    assert comparison.outputs["masked LM"].shapes[1] is None
    assert comparison.tensors["bert.pooler.dense.weight"].max_abs_difference == 0
    different_names = find_different_tensors(comparison)
    assert all(name.startswith("cls.") for name in different_names)
    assert compare(tmp_path / "m", tmp_path / "m", tolerance=0).is_equal
    hf_encoder_without_pooler = BertModel.from_pretrained(model_dir, add_pooling_layer=False)
    hf_encoder_without_pooler.save_pretrained(tmp_path / "n")
    pretrained.tokenizer.save(tmp_path / "n")
    comparison = compare(tmp_path / "m", tmp_path / "n")
    assert comparison.outputs["pooler"].shapes == ([WIDTH], None)


def test_nan_equals_only_nan_and_infinity_only_infinity() -> None:
    """NaN equals only NaN, and infinity only infinity; empty tensors are equal."""
    with_nan, with_infinity = torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.inf])
    assert measure_difference(with_nan, with_nan.clone()).max_abs_difference == 0
    assert measure_difference(with_infinity, with_infinity.clone()).max_abs_difference == 0
    for a, b in (
        (with_nan, with_infinity),
        (with_nan, torch.ones(2)),
        (with_infinity, -with_infinity),
    ):
        assert measure_difference(a, b).max_abs_difference == math.inf
        assert not measure_difference(a, b).is_within(1e9)
    zeros, all_nan = torch.zeros(2), torch.full((2,), math.nan)
    assert measure_difference(zeros, all_nan).relative_difference == math.inf
    assert measure_difference(torch.empty(0, 3), torch.empty(0, 3)).max_abs_difference == 0
    assert measure_difference(torch.ones(2), torch.ones(3)).max_abs_difference is None


def test_missing_model_and_empty_texts_are_errors(model_dir: Path, tmp_path: Path) -> None:
    """A path without a model, and texts without words, are errors."""
    with pytest.raises(ModelError, match="no such file"):
        compare(model_dir, tmp_path / "nothing")
    with pytest.raises(InputError, match="no text"):
        compare(model_dir, model_dir, ["", " "])
