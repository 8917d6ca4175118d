"""Extension of a model's vocabulary: new embeddings, unchanged outputs, and records."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForPreTraining, AutoTokenizer, BertForTokenClassification

from bertsmith import bundle
from bertsmith.bundle import FineTunedBundle, HeadConfig, PretrainedBundle
from bertsmith.bundle.extend import extend_vocabulary
from bertsmith.errors import ModelError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import BiLSTMSettings
from bertsmith.model.packed import PackedBatch, pack_sequences
from bertsmith.text import vocabulary_extension
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from tests.model.examples import make_prime_size_config

#: Tokens of the vocabulary after the special tokens. The token "river" occurs twice.
PIECES = "river the ferry ##man ##men 한 ##국 ##어 river cross ##es ."
WORDS = (*SPECIAL_TOKENS, *PIECES.split())
#: Words that are added to the vocabulary. No subtokens of "zz" are in the old vocabulary.
NEW_WORDS = ("ferryman", "한국어", "##manmen", "zz")
#: Text that contains none of the new words.
OLD_TEXT = "the river crosses the ferry . 한"


def create_pretrained(directory: Path, num_spare_rows: int = 0) -> PretrainedBundle:
    """Save and load a random pre-trained model with unused rows of the word embeddings."""
    torch.manual_seed(11)
    config = make_prime_size_config(vocab_size=len(WORDS) + num_spare_rows, init_range=0.3)
    model = BertForPreTraining(config)
    with torch.no_grad():
        model.mlm.decoder.bias.normal_()
    bundle.save(directory, model, Tokenizer(TokenizerSpec(vocab=WORDS)), {"recipe": "fast"})
    return bundle.load(directory)


def encode_packed(tokenizer: Tokenizer, text: str) -> PackedBatch:
    """Return the token ids of "[CLS] text [SEP]" as a batch of one sequence."""
    ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    return pack_sequences([(ids, [0] * len(ids))])


def extend_and_reload(old: Any, directory: Path) -> Any:
    """Extend a model by ``NEW_WORDS``, save it, and load it again."""
    new = extend_vocabulary(
        old, vocabulary_extension.extend_vocabulary(old.tokenizer, NEW_WORDS), "words.txt"
    )
    bundle.save_model(directory, new)
    return bundle.load_model(directory)


def test_new_embedding_is_the_mean_of_its_subtokens(tmp_path: Path) -> None:
    """The embedding and the decoder bias of a new token are means over its subtokens.

    A token without subtokens in the old vocabulary gets the embedding and the bias of [UNK].
    """
    old = create_pretrained(tmp_path / "old")
    new = extend_and_reload(old, tmp_path / "new")
    subtokens = ["ferry ##man", "한 ##국 ##어", "##man ##men", "[UNK]"]
    for old_rows, new_rows in zip(
        (old.model.bert.embeddings.words.weight, old.model.mlm.decoder.bias),
        (new.model.bert.embeddings.words.weight, new.model.mlm.decoder.bias),
        strict=True,
    ):
        assert torch.equal(new_rows[: len(WORDS)], old_rows)
        for word, parts in zip(NEW_WORDS, subtokens, strict=True):
            rows = torch.stack(
                [old_rows[old.tokenizer.token_to_id(part)] for part in parts.split()]
            )
            torch.testing.assert_close(new_rows[new.tokenizer.token_to_id(word)], rows.mean(0))
    assert new.model.mlm.decoder.weight is new.model.bert.embeddings.words.weight
    assert new.config.vocab_size == len(WORDS) + len(NEW_WORDS)


@torch.no_grad()
def test_text_without_new_words_gives_identical_outputs(tmp_path: Path) -> None:
    """Extension does not change hidden states, and logits of old tokens agree within 1e-5."""
    old = create_pretrained(tmp_path / "old")
    new = extend_and_reload(old, tmp_path / "new")
    old_batch = encode_packed(old.tokenizer, OLD_TEXT)
    new_batch = encode_packed(new.tokenizer, OLD_TEXT)
    assert torch.equal(old_batch.ids, new_batch.ids)
    for old_hidden, new_hidden in zip(
        old.model.bert.iter_hidden_states(old_batch),
        new.model.bert.iter_hidden_states(new_batch),
        strict=True,
    ):
        assert torch.equal(old_hidden, new_hidden)
    logits = old.model.mlm(old_hidden), new.model.mlm(new_hidden)[:, : len(WORDS)]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    assert len(encode_packed(new.tokenizer, "ferryman 한국어").ids) == 4


@torch.no_grad()
def test_transformers_loads_extended_model(tmp_path: Path) -> None:
    """An extended model has the same token ids and outputs in transformers, and no missing keys."""
    new = extend_and_reload(create_pretrained(tmp_path / "old"), tmp_path / "new")
    hf_model, loading_info = AutoModelForPreTraining.from_pretrained(
        tmp_path / "new", output_loading_info=True, attn_implementation="eager"
    )
    assert not loading_info["missing_keys"]
    assert not loading_info["unexpected_keys"]
    text = "The ferryman crosses 한국어 . zz river"
    hf_inputs = AutoTokenizer.from_pretrained(tmp_path / "new")(text, return_tensors="pt")
    packed = encode_packed(new.tokenizer, text)
    assert torch.equal(hf_inputs["input_ids"][0], packed.ids)
    hidden = hf_model.eval().bert(**hf_inputs).last_hidden_state[0]
    torch.testing.assert_close(new.model.bert(packed), hidden, rtol=0, atol=1e-5)
    logits = hf_model(**hf_inputs).prediction_logits[0]
    torch.testing.assert_close(new.model.mlm(hidden), logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("head", "features"),
    [
        (HeadConfig("single", ("bad", "good")), None),
        (HeadConfig("entities", ("O", "B-X", "I-X")), None),
        (HeadConfig("span"), None),
        (HeadConfig("choice"), None),
        (HeadConfig("tags", ("N", "V")), BiLSTMSettings(layers="last", width=7)),
    ],
    ids=["single", "entities", "span", "choice", "features"],
)
@torch.no_grad()
def test_fine_tuned_model_keeps_its_head(
    tmp_path: Path, head: HeadConfig, features: BiLSTMSettings | None
) -> None:
    """Extension does not change labels, task kind, or outputs for text without new words."""
    torch.manual_seed(13)
    config = make_prime_size_config(vocab_size=len(WORDS), init_range=0.3)
    model = head.build_model(config, features).eval()
    tokenizer = Tokenizer(TokenizerSpec(vocab=WORDS))
    bundle.save_fine_tuned(tmp_path / "old", model, tokenizer, head, {"task": "x"})
    old = bundle.load_model(tmp_path / "old")
    new = extend_and_reload(old, tmp_path / "new")
    assert isinstance(new, FineTunedBundle)
    assert new.head == head
    assert new.info["task"] == "x"
    old_batch = encode_packed(old.tokenizer, OLD_TEXT)
    new_batch = encode_packed(new.tokenizer, OLD_TEXT)
    assert torch.equal(old.model(old_batch), new.model(new_batch))
    assert new.model.bert.embeddings.words.num_embeddings == len(WORDS) + len(NEW_WORDS)
    if head.kind == "entities":
        hf_model = BertForTokenClassification.from_pretrained(tmp_path / "new")
        assert hf_model.config.id2label == dict(enumerate(head.labels))


def test_spare_rows_are_used_first(tmp_path: Path) -> None:
    """New tokens get the unused rows of the word embeddings first; then rows are added."""
    for num_spare_rows, vocab_size in (
        (3, len(WORDS) + len(NEW_WORDS)),
        (9, len(WORDS) + 9),
    ):
        old = create_pretrained(tmp_path / f"old{num_spare_rows}", num_spare_rows)
        new = extend_and_reload(old, tmp_path / f"new{num_spare_rows}")
        assert new.config.vocab_size == vocab_size
        embeddings = new.model.bert.embeddings.words.weight
        rows = [old.tokenizer.token_to_id("ferry"), old.tokenizer.token_to_id("##man")]
        expected = old.model.bert.embeddings.words.weight[rows].mean(0)
        torch.testing.assert_close(embeddings[len(WORDS)], expected)


def test_extensions_are_recorded(tmp_path: Path) -> None:
    """bertsmith.json lists each extension and contains the hash of the new tokenizer."""
    new = extend_and_reload(create_pretrained(tmp_path / "old"), tmp_path / "new")
    newest = extend_vocabulary(
        new, vocabulary_extension.extend_vocabulary(new.tokenizer, ["rivers"]), "more.txt"
    )
    bundle.save_model(tmp_path / "newest", newest)
    info = bundle.load(tmp_path / "newest").info
    assert info["recipe"] == "fast"
    assert info["vocab_extensions"] == [
        {"num_words": 4, "first_id": len(WORDS), "source": "words.txt"},
        {"num_words": 1, "first_id": len(WORDS) + 4, "source": "more.txt"},
    ]
    assert info["tokenizer"]["hash"] == newest.tokenizer.hash


def test_extension_for_another_vocabulary_is_rejected(tmp_path: Path) -> None:
    """An extension that was made for another vocabulary is an error."""
    old = create_pretrained(tmp_path / "old")
    other = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, "the", *WORDS[6:])))
    with pytest.raises(ModelError, match="another vocabulary"):
        extend_vocabulary(old, vocabulary_extension.extend_vocabulary(other, ["ferries"]))
