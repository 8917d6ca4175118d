"""A model with more words goes on with pre-training, on text that was prepared for it."""

from pathlib import Path

import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle.extend import extend_vocabulary as extend
from bertsmith.data.prepare import prepare
from bertsmith.errors import StoreError
from bertsmith.text.corpus import find_sources
from bertsmith.text.vocabulary_extension import extend_vocabulary
from bertsmith.train.pretraining.pretrain import pretrain
from tests.train.conftest import Train, assignments

#: Of the made-up words of the store, joined, and one that nothing is known of.
NEW = ("bade", "나룻배")


def test_an_extended_model_goes_on_with_pre_training(
    train: Train, store: Path, tmp_path: Path
) -> None:
    """It refuses the old store, goes on with a new one, and learns its new words' rows."""
    first = train("first", steps=2)
    assert first.model is not None
    old = bundle.load(first.model)
    new = extend(old, extend_vocabulary(old.tokenizer, NEW))
    bundle.save_model(tmp_path / "more", new)
    start = {"start_from": str(tmp_path / "more"), "steps": 3}
    chosen = [one for one in assignments() if not one.startswith("model.")]
    with pytest.raises(StoreError, match=r"another vocabulary .* run `bertsmith prepare` again"):
        pretrain(store, tmp_path / "run", assignments=chosen, **start)  # type: ignore[arg-type]
    text = (store.parent / "corpus.jsonl").read_text().replace("ba ", "bade 나룻배 ")
    (tmp_path / "more.jsonl").write_text(text)
    prepare(
        find_sources([str(tmp_path / "more.jsonl")]), new.tokenizer, tmp_path / "store", workers=1
    )
    result = pretrain(
        tmp_path / "store", tmp_path / "run",
        assignments=[*chosen, "optim.lr=1e-2"], **start,  # type: ignore[arg-type]
    )  # fmt: skip
    assert result.model is not None
    done = bundle.load(result.model)
    assert done.tokenizer.hash == new.tokenizer.hash
    before, after = (one.model.bert.embeddings.words.weight for one in (new, done))
    for word in NEW:
        row = done.tokenizer.token_to_id(word)
        assert row is not None
        assert row >= old.tokenizer.vocab_size
        assert not torch.equal(before[row], after[row])
