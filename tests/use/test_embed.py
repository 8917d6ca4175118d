"""Vectors of texts, tokens and words beside what ``transformers`` computes of the same model.

These tests never compare speed.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from bertsmith.bundle import load_encoder
from bertsmith.errors import InputError, ModelError, SettingsError
from bertsmith.model.bert import BertModel
from bertsmith.model.encoder import EncoderLayer
from bertsmith.model.ops.cpu import has_vnni
from bertsmith.model.ops.linear import bucket_rows
from bertsmith.model.ops.smoothquant import smoothquant_scales
from bertsmith.model.packed import PackedBatch
from bertsmith.use.embed import Embedder, Floats, embed
from bertsmith.use.quantization import quantize

TEXTS = [
    "The forge stood where the two roads met.",
    "Every hammer had its own name, its own weight, and its own sound.",
    "",
    "struck",
    "the smith " * 60,
]


@pytest.fixture(scope="module")
def embedder(directory: Path) -> Embedder:
    """The random model of two layers."""
    return Embedder.load(directory)


@pytest.fixture(scope="module")
def states(directory: Path) -> list[list[Floats]]:
    """What transformers computes of each text by itself: all hidden states, [S, 26] each."""
    model, tokenizer = (
        AutoModel.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    found = []
    for text in TEXTS:
        asked = tokenizer(text, return_tensors="pt", truncation=True, max_length=61)
        with torch.inference_mode():
            said = model(**asked, output_hidden_states=True).hidden_states
        found.append([state[0].numpy() for state in said])
    return found


def close(found: Floats, wanted: list[Floats] | Floats) -> None:
    """Compare to 1e-5."""
    np.testing.assert_allclose(found, np.stack(list(wanted)), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layer", "state"), [(-1, 2), (-2, 1), (-3, 0), (0, 0), (1, 1), (2, 2)])
def test_a_layer_is_the_hidden_state_of_that_number(
    embedder: Embedder, states: list[list[Floats]], layer: int, state: int
) -> None:
    """-1 is the last layer, -L the one next to the input, 0 the embeddings; each token to 1e-5."""
    close(embedder.encode(TEXTS, layer=layer), [own[state].mean(0) for own in states])
    for own, wanted in zip(embedder.encode_tokens(TEXTS, layer=layer), states, strict=True):
        np.testing.assert_allclose(own.vectors, wanted[state], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("pooling", "of"),
    [
        ("mean", lambda x: x.mean(0)),
        ("max", lambda x: x.max(0)),
        ("mean-max", lambda x: np.concatenate([x.mean(0), x.max(0)])),
        ("first", lambda x: x[0]),
        ("last", lambda x: x[-1]),
    ],
)
def test_pooling_is_what_its_name_says(
    embedder: Embedder, states: list[list[Floats]], pooling: str, of: object
) -> None:
    """Each pooling of the second-to-last layer, and of the last, made a vector of length 1."""
    assert callable(of)
    close(embedder.encode(TEXTS, layer=-2, pooling=pooling), [of(own[1]) for own in states])
    found = embedder.encode(TEXTS, pooling=pooling, normalize=True)
    close(found, [of(own[2]) / np.linalg.norm(of(own[2])) for own in states])


def test_without_special_tokens_only_the_text_is_pooled(
    embedder: Embedder, states: list[list[Floats]]
) -> None:
    """[CLS] and [SEP] are left out, but where there is nothing else."""
    wanted = [own[2][1:-1] if len(own[2]) > 2 else own[2] for own in states]
    close(embedder.encode(TEXTS, special=False), [own.mean(0) for own in wanted])
    close(embedder.encode(TEXTS, special=False, pooling="max"), [own.max(0) for own in wanted])


def test_the_pooler_reads_the_last_layer(directory: Path, embedder: Embedder) -> None:
    """Asked for as "pooled", it is their pooler_output; of another layer it is refused."""
    model, tokenizer = (
        AutoModel.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )
    with torch.inference_mode():
        wanted = model(**tokenizer(TEXTS[0], return_tensors="pt")).pooler_output
    close(embedder.encode(TEXTS[:1], pooling="pooled"), wanted.numpy())
    with pytest.raises(SettingsError, match="the pooler was trained on the last layer"):
        embedder.encode(TEXTS, layer=1, pooling="pooled")


def test_a_model_without_a_pooler_says_so(directory_without_pairs: Path) -> None:
    """Nothing is drawn in its place."""
    with pytest.raises(ModelError, match="has no pooler"):
        embed(directory_without_pairs, TEXTS, pooling="pooled")


def test_a_lone_text_is_told(embedder: Embedder) -> None:
    """Its characters are no texts."""
    for ask in (
        embedder.encode,
        embedder.encode_tokens,
        lambda own: embedder.encode_word(own, "iron"),
    ):
        with pytest.raises(InputError, match=r"a list of texts, not one: put 'iron' into"):
            ask("iron")


def test_layers_are_joined_averaged_or_weighted(
    embedder: Embedder, states: list[list[Floats]]
) -> None:
    """In the order in which they are asked for."""
    joined = embedder.encode(TEXTS, layer=[-1, 0])
    close(joined, [np.concatenate([own[2], own[0]], -1).mean(0) for own in states])
    mean = embedder.encode(TEXTS, layer=[-1, -2], combine="mean")
    close(mean, [(own[2] + own[1]).mean(0) / 2 for own in states])
    summed = embedder.encode(TEXTS, layer=[-1, 1], combine="weighted", weights=[0.25, 2])
    close(summed, [(0.25 * own[2] + 2 * own[1]).mean(0) for own in states])
    first = embedder.encode(TEXTS, layer=[0, 1], pooling="first")
    close(first, [np.concatenate([own[0][0], own[1][0]]) for own in states])


def test_only_the_layers_that_are_asked_for_are_computed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer -2 of two runs one layer, the embeddings none; of [CLS] alone the last row is short."""
    embedder = Embedder.load(directory)
    rows: list[int] = []
    whole = EncoderLayer.forward

    def counted(self: EncoderLayer, *given: object) -> torch.Tensor:
        result = whole(self, *given)  # type: ignore[arg-type]
        rows.append(len(result))
        return result

    monkeypatch.setattr(EncoderLayer, "forward", counted)
    tokens = sum(map(len, embedder.tokenize(TEXTS[:2]).sequences))
    embedder.encode(TEXTS[:2], layer=-2)
    assert rows == [tokens]
    rows.clear()
    embedder.encode(TEXTS[:2], layer=0)
    assert rows == []
    embedder.encode(TEXTS[:2], pooling="first")
    assert rows == [tokens, 2]
    rows.clear()
    embedder.encode(TEXTS[:2], layer=1, pooling="first")
    assert rows == [2]


def test_neighbours_and_batches_change_nothing(embedder: Embedder) -> None:
    """One text at a time, all at once, in batches of 32 tokens: the same vectors to 1e-6."""
    whole = embedder.encode(TEXTS)
    small = embedder.encode(TEXTS, batch_tokens=32)
    alone = np.concatenate([embedder.encode([text]) for text in TEXTS])
    np.testing.assert_allclose(small, whole, rtol=0, atol=1e-6)
    np.testing.assert_allclose(alone, whole, rtol=0, atol=1e-6)
    assert embedder.encode([]).shape == (0, 26)


@pytest.mark.parametrize("fast", [False, True])
def test_batches_at_once_change_nothing(directory: Path, fast: bool) -> None:
    """Four threads with a batch each give what one thread gives, each text its own."""
    texts = [" ".join(TEXTS[: 1 + number % len(TEXTS)]) for number in range(40)]
    embedder = Embedder.load(directory, fast=fast)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            found.append(embedder.encode(texts, batch_tokens=64))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(found[0], found[1], rtol=0, atol=1e-5)
    assert not np.allclose(found[0][0], found[0][1], atol=1e-3)


def test_tokens_tell_where_they_stand(embedder: Embedder) -> None:
    """Ids, words and characters fit together; a text that is too long says that it was cut."""
    one, long = embedder.encode_tokens([TEXTS[1], TEXTS[4]])
    assert one.tokens == embedder.tokenizer.ids_to_tokens(one.ids)
    assert (one.tokens[0], one.tokens[-1]) == ("[CLS]", "[SEP]")
    assert one.offsets[0] == (0, 0)
    places = one.offsets[1:-1]
    assert "".join(TEXTS[1][a:b] for a, b in places) == TEXTS[1].replace(" ", "")
    assert all(before[1] <= after[0] for before, after in pairwise(places))
    assert len(one.vectors) == len(one.ids) == len(one.offsets)
    assert not one.is_truncated
    assert long.is_truncated
    assert len(long.vectors) == 61
    bare = embedder.encode_tokens([TEXTS[1]], special=False)[0]
    assert bare.ids == one.ids[1:-1]
    np.testing.assert_allclose(bare.vectors, one.vectors[1:-1], rtol=0, atol=1e-5)


def test_a_word_is_the_mean_of_its_pieces(embedder: Embedder) -> None:
    """In each text where it stands, twice where it stands twice, whatever its case."""
    texts = ["Weight and sound, weight and name.", "its own weight"]
    found = embedder.encode_word(texts, "weight")
    assert [(own.text, texts[own.text][own.start : own.end]) for own in found] == [
        (0, "Weight"), (0, "weight"), (1, "weight"),
    ]  # fmt: skip
    [last] = embedder.encode_tokens([texts[1]])
    pieces = [n for n, (start, end) in enumerate(last.offsets) if start < 14 and end > 8]
    np.testing.assert_allclose(found[2].vector, last.vectors[pieces].mean(0), rtol=0, atol=1e-6)
    # A word that another one begins with counts only where there is no whole one.
    assert [own.end for own in embedder.encode_word(["hammers and a hammer"], "hammer")] == [20]
    assert [own.end for own in embedder.encode_word(["two hammers"], "hammer")] == [10]
    with pytest.raises(InputError, match="text 2: the word 'hammer' is not in 'its own weight'"):
        embedder.encode_word(["a hammer", "its own weight"], "hammer")
    with pytest.raises(InputError, match="text 1: the word 'name' stands beyond the 61 tokens"):
        embedder.encode_word([TEXTS[4] + " name"], "name")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": 3}, r"there is no layer 3 in a model of 2; expected -2 \(next to the input\)"),
        ({"layer": -4}, "there is no layer -4"),
        ({"layer": []}, "layers"),
        ({"pooling": "middle"}, "pooling"),
        ({"combine": "weighted"}, "weights belong to"),
        ({"layer": [1, 2], "combine": "weighted", "weights": [1]}, "1 weights for 2 layers"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    embedder: Embedder, settings: dict[str, object], message: str
) -> None:
    """Each names what was found and what is expected."""
    with pytest.raises(SettingsError, match=message):
        embedder.encode(TEXTS, **settings)  # type: ignore[arg-type]


def test_vectors_a_token_are_no_array(embedder: Embedder) -> None:
    """``encode`` cannot return them: it says which method does."""
    with pytest.raises(InputError, match=r"tokens\(\)"):
        embedder.encode(TEXTS, pooling="none")


@pytest.mark.parametrize("vnni", [True, False])
def test_the_quick_form_is_nearly_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch, vnni: bool
) -> None:
    """A cosine of 0.995 in every vector, with all 8 bits or one less; the model stays as it was."""
    if vnni and not has_vnni():
        pytest.skip("without VNNI, sums of 8-bit products may be clipped")
    monkeypatch.setattr("bertsmith.use.quantization.has_vnni", lambda: vnni)
    monkeypatch.setattr("bertsmith.use.quantization.has_bf16", lambda: False)
    bundle = load_encoder(directory)
    before = {name: own.clone() for name, own in bundle.model.state_dict().items()}
    quick = Embedder(bundle, fast=True)
    assert quick.encoder is not bundle.model
    found, wanted = quick.encode(TEXTS, normalize=True), embed(bundle, TEXTS, normalize=True)
    assert (found * wanted).sum(-1).min() > 0.995
    assert (found != wanted).any()
    assert all(torch.equal(own, before[name]) for name, own in bundle.model.state_dict().items())


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_the_quick_form_of_every_norm(
    directory: Path, monkeypatch: pytest.MonkeyPatch, norm: str
) -> None:
    """Each Linear's columns are evened out by the LayerNorm that it reads."""
    monkeypatch.setattr("bertsmith.use.quantization.has_bf16", lambda: False)
    config = load_encoder(directory).config.model_copy(update={"norm": norm})
    torch.manual_seed(3)
    model = BertModel(config).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, 1.0 if "norm.weight" in name else 0.0, 0.3)
    quick = quantize(model)
    above: Any = model.embeddings.norm
    plain: Any
    own: Any
    for plain, own in zip(model.encoder.layers, quick.encoder.layers, strict=True):
        first, second = plain.attention_norm, plain.feed_forward_norm
        read = (above, first) if norm == "post" else (first, second)
        looking = plain.attention.query_key_value.weight[: 2 * config.width]
        found = own.attention.query_key_value.looking.inverse, own.up.inverse
        for scale, weight, inverse in zip(read, (looking, plain.up.weight), found, strict=True):
            size = scale.weight.abs() + scale.bias.abs() / 4
            torch.testing.assert_close(1 / inverse, smoothquant_scales(size, weight))
        above = second
    ids = torch.randint(5, 90, (40,))
    zeros = torch.zeros_like(ids)
    packed = PackedBatch(ids=ids, segments=zeros, positions=torch.arange(40),
                    cu_seqlens=torch.tensor([0, 40], dtype=torch.int32), max_seqlen=40)  # fmt: skip
    # With gradients on, as a caller may leave them.
    wanted, found_vectors = model(packed), quick(packed)
    assert nn.functional.cosine_similarity(found_vectors, wanted).min() > 0.99


def test_the_quick_form_prepares_for_few_sizes() -> None:
    """PyTorch keeps something for each number of rows: there are few of them, and few are idle."""
    rows = [bucket_rows(tokens) for tokens in range(1, 2049)]
    assert len(set(rows)) < 50
    assert all(0 <= own - tokens < max(16, tokens / 8) for tokens, own in enumerate(rows, 1))
