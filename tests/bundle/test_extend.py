"""A model grown with its vocabulary: what a new row is made of, and that nothing else moves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer, BertForTokenClassification

from bertsmith import bundle
from bertsmith.bundle import FineTunedBundle, HeadConfig, PretrainedBundle
from bertsmith.bundle.extend import extend_vocabulary as extend
from bertsmith.errors import ModelError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import FeatureSettings
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.vocabulary_extension import extend_vocabulary
from bertsmith.text.wordpiece import Tokenizer
from tests.model.examples import prime_config

#: "river" stands on two lines.
PIECES = "river the ferry ##man ##men 한 ##국 ##어 river cross ##es ."
WORDS = (*SPECIAL_TOKENS, *PIECES.split())
NEW = ("ferryman", "한국어", "##manmen", "zz")
#: Words of the old vocabulary only.
OLD_TEXT = "the river crosses the ferry . 한"


def made(folder: Path, spare: int = 0) -> PretrainedBundle:
    """Save and load a random pre-trained model; ``spare``: rows beyond the vocabulary."""
    torch.manual_seed(11)
    model = BertForPreTraining(prime_config(vocab_size=len(WORDS) + spare, init_range=0.3))
    with torch.no_grad():
        model.mlm.decoder.bias.normal_()
    bundle.save(folder, model, Tokenizer(TokenizerSpec(vocab=WORDS)), {"recipe": "fast"})
    return bundle.load(folder)


def packed_of(tokenizer: Tokenizer, text: str) -> PackedBatch:
    """Return one text as a model takes it."""
    ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    return pack_sequences([(ids, [0] * len(ids))])


def grown(found: Any, folder: Path) -> Any:
    """Extend a model by NEW, write it, and return what is read back."""
    new = extend(found, extend_vocabulary(found.tokenizer, NEW), "words.txt")
    bundle.save_model(folder, new)
    return bundle.load_model(folder)


def test_a_new_row_is_the_mean_of_its_pieces(tmp_path: Path) -> None:
    """Of the word table and of the decoder's bias; an unknown word starts from [UNK]."""
    old = made(tmp_path / "old")
    new = grown(old, tmp_path / "new")
    pieces = ["ferry ##man", "한 ##국 ##어", "##man ##men", "[UNK]"]
    for before, after in zip(
        (old.model.bert.embeddings.words.weight, old.model.mlm.decoder.bias),
        (new.model.bert.embeddings.words.weight, new.model.mlm.decoder.bias),
        strict=True,
    ):
        assert torch.equal(after[: len(WORDS)], before)
        for word, parts in zip(NEW, pieces, strict=True):
            rows = torch.stack([before[old.tokenizer.token_to_id(part)] for part in parts.split()])
            torch.testing.assert_close(after[new.tokenizer.id(word)], rows.mean(0))
    assert new.model.mlm.decoder.weight is new.model.bert.embeddings.words.weight
    assert new.config.vocab_size == len(WORDS) + len(NEW)


@torch.no_grad()
def test_text_without_new_words_gives_the_same_bits(tmp_path: Path) -> None:
    """Hidden states are equal bit for bit, and so are the logits of the old words."""
    old = made(tmp_path / "old")
    new = grown(old, tmp_path / "new")
    before, after = packed_of(old.tokenizer, OLD_TEXT), packed_of(new.tokenizer, OLD_TEXT)
    assert torch.equal(before.ids, after.ids)
    for one, other in zip(
        old.model.bert.hidden_states(before), new.model.bert.hidden_states(after), strict=True
    ):
        assert torch.equal(one, other)
    logits = old.model.mlm(one), new.model.mlm(other)[:, : len(WORDS)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    assert len(packed_of(new.tokenizer, "ferryman 한국어").ids) == 4


@torch.no_grad()
def test_transformers_loads_it(tmp_path: Path) -> None:
    """No missing or unexpected key, the new words whole, and the hidden states of ours."""
    new = grown(made(tmp_path / "old"), tmp_path / "new")
    peer, told = AutoModelForPreTraining.from_pretrained(
        tmp_path / "new", output_loading_info=True, attn_implementation="eager"
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    text = "The ferryman crosses 한국어 . zz river"
    given = AutoTokenizer.from_pretrained(tmp_path / "new")(text, return_tensors="pt")
    packed = packed_of(new.tokenizer, text)
    assert torch.equal(given["input_ids"][0], packed.ids)
    hidden = peer.eval().bert(**given).last_hidden_state[0]
    torch.testing.assert_close(new.model.bert(packed), hidden, rtol=0, atol=1e-5)
    logits = peer(**given).prediction_logits[0]
    torch.testing.assert_close(new.model.mlm(hidden), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("head", "features"),
    [
        (HeadConfig("single", ("bad", "good")), None),
        (HeadConfig("entities", ("O", "B-X", "I-X")), None),
        (HeadConfig("span"), None),
        (HeadConfig("choice"), None),
        (HeadConfig("tags", ("N", "V")), FeatureSettings(layers="last", width=7)),
    ],
    ids=["single", "entities", "span", "choice", "features"],
)
@torch.no_grad()
def test_a_task_keeps_its_head(
    tmp_path: Path, head: HeadConfig, features: FeatureSettings | None
) -> None:
    """Labels, kind and what the model says of text without new words stay, bit for bit."""
    torch.manual_seed(13)
    model = head.build_model(prime_config(vocab_size=len(WORDS), init_range=0.3), features).eval()
    bundle.save_fine_tuned(
        tmp_path / "old", model, Tokenizer(TokenizerSpec(vocab=WORDS)), head, {"task": "x"}
    )
    old = bundle.load_model(tmp_path / "old")
    new = grown(old, tmp_path / "new")
    assert isinstance(new, FineTunedBundle)
    assert new.head == head
    assert new.info["task"] == "x"
    before, after = packed_of(old.tokenizer, OLD_TEXT), packed_of(new.tokenizer, OLD_TEXT)
    assert torch.equal(old.model(before), new.model(after))
    assert new.model.bert.embeddings.words.num_embeddings == len(WORDS) + len(NEW)
    if head.kind == "entities":
        peer = BertForTokenClassification.from_pretrained(tmp_path / "new")
        assert peer.config.id2label == dict(enumerate(head.labels))


def test_rows_to_spare_are_taken_first(tmp_path: Path) -> None:
    """A model with more rows than words gives its unused ones, whatever stood in them."""
    for spare, size in ((3, len(WORDS) + 4), (9, len(WORDS) + 9)):
        old = made(tmp_path / f"old{spare}", spare)
        new = grown(old, tmp_path / f"new{spare}")
        assert new.config.vocab_size == size
        table = new.model.bert.embeddings.words.weight
        rows = [old.tokenizer.token_to_id("ferry"), old.tokenizer.token_to_id("##man")]
        expected = old.model.bert.embeddings.words.weight[rows].mean(0)
        torch.testing.assert_close(table[len(WORDS)], expected)


def test_extensions_are_told_in_the_directory(tmp_path: Path) -> None:
    """bertsmith.json names each one, beside what was there; the hash is the new tokenizer's."""
    new = grown(made(tmp_path / "old"), tmp_path / "new")
    again = extend(new, extend_vocabulary(new.tokenizer, ["rivers"]), "more.txt")
    bundle.save_model(tmp_path / "again", again)
    info = bundle.load(tmp_path / "again").info
    assert info["recipe"] == "fast"
    assert info["extended"] == [
        {"words": 4, "first": len(WORDS), "source": "words.txt"},
        {"words": 1, "first": len(WORDS) + 4, "source": "more.txt"},
    ]
    assert info["tokenizer"]["hash"] == again.tokenizer.hash


def test_words_chosen_for_another_vocabulary_are_refused(tmp_path: Path) -> None:
    """The pieces' ids would be other words' rows."""
    old = made(tmp_path / "old")
    other = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, "the", *WORDS[6:])))
    with pytest.raises(ModelError, match="another vocabulary"):
        extend(replace(old), extend_vocabulary(other, ["ferries"]))
