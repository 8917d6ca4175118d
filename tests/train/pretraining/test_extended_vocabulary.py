"""Continued pre-training of a model with an extended vocabulary."""

from pathlib import Path

import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle.extend import extend_vocabulary as extend_model
from bertsmith.data.prepare import prepare
from bertsmith.errors import StoreError
from bertsmith.text.corpus import find_sources
from bertsmith.text.vocabulary_extension import extend_vocabulary
from bertsmith.train.pretraining.pretrain import pretrain
from tests.train.conftest import TrainFunction, make_assignments

#: New words: a compound of two words of the vocabulary, and a word of unknown characters.
NEW_WORDS = ("bade", "나룻배")


def test_extended_model_is_pretrained_further(
    train: TrainFunction, store: Path, tmp_path: Path
) -> None:
    """A model with new words cannot use the old store, and learns the words from a new store."""
    result = train("first", steps=2)
    assert result.model is not None
    original = bundle.load(result.model)
    extension = extend_vocabulary(original.tokenizer, NEW_WORDS)
    extended = extend_model(original, extension)
    bundle.save_model(tmp_path / "extended", extended)
    start = {"start_from": str(tmp_path / "extended"), "steps": 3}
    options = [option for option in make_assignments() if not option.startswith("model.")]
    with pytest.raises(StoreError, match=r"another vocabulary .* run `bertsmith prepare` again"):
        pretrain(store, tmp_path / "run", assignments=options, **start)  # type: ignore[arg-type]
    text = (store.parent / "corpus.jsonl").read_text().replace("ba ", "bade 나룻배 ")
    (tmp_path / "new.jsonl").write_text(text)
    sources = find_sources([str(tmp_path / "new.jsonl")])
    prepare(sources, extended.tokenizer, tmp_path / "store", workers=1)
    result = pretrain(
        tmp_path / "store",
        tmp_path / "run",
        assignments=[*options, "optim.lr=1e-2"],
        **start,  # type: ignore[arg-type]
    )
    assert result.model is not None
    trained = bundle.load(result.model)
    assert trained.tokenizer.hash == extended.tokenizer.hash
    old_embeddings = extended.model.bert.embeddings.words.weight
    new_embeddings = trained.model.bert.embeddings.words.weight
    for word in NEW_WORDS:
        token_id = trained.tokenizer.token_to_id(word)
        assert token_id is not None
        assert token_id >= original.tokenizer.vocab_size
        assert not torch.equal(old_embeddings[token_id], new_embeddings[token_id])
