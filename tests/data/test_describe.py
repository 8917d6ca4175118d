"""What a store looks like to a reader."""

import json
from pathlib import Path

from bertsmith.data.describe import describe_store
from bertsmith.data.prepare import prepare
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Store
from bertsmith.text.corpus import find_sources
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

TOKENIZER = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, ".", "one", "two", "three", "##s")))


def make(path: Path, documents: int) -> Store:
    """Make a store of equal sentences in different documents."""
    lines = [json.dumps({"text": "Ones twos. " * number}) for number in range(1, documents + 1)]
    (path / "text.jsonl").write_text("\n".join(lines))
    prepare(find_sources([str(path / "text.jsonl")]), TOKENIZER, path / "store", workers=1)
    return Store.open(path / "store")


def test_facts_and_examples(tmp_path: Path) -> None:
    """Counts, source, and examples with their masks and pair labels marked."""
    text = describe_store(make(tmp_path, 20), DataSettings(length=16), examples=20)
    assert "10 words, lower case" in text
    assert "train: 20 documents" in text
    assert "heldout: 2 documents" in text
    assert "text.jsonl" in text
    assert "B follows A" in text
    assert "B from another document" in text
    assert "A: [CLS] " in text
    assert "{[MASK]→" in text
    assert text == describe_store(
        Store.open(tmp_path / "store"), DataSettings(length=16), examples=20
    )


def test_a_store_without_examples(tmp_path: Path) -> None:
    """A store too small for pairs is described all the same, and says why there are none."""
    text = describe_store(make(tmp_path, 1))
    assert "train: 1 documents, 1 sentences" in text
    assert "no examples: " in text
    assert "one segment" in describe_store(Store.open(tmp_path / "store"), DataSettings(nsp=False))
