"""The description of a store that ``inspect`` prints."""

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


def make_store(path: Path, num_documents: int) -> Store:
    """Prepare a store of documents with 1, 2, 3, ... equal sentences."""
    lines = [
        json.dumps({"text": "Ones twos. " * num_sentences})
        for num_sentences in range(1, num_documents + 1)
    ]
    (path / "text.jsonl").write_text("\n".join(lines))
    prepare(find_sources([str(path / "text.jsonl")]), TOKENIZER, path / "store", workers=1)
    return Store.open(path / "store")


def test_description_has_metadata_and_examples(tmp_path: Path) -> None:
    """The description has counts, the source, and examples with masks and NSP labels."""
    text = describe_store(make_store(tmp_path, 20), DataSettings(max_seqlen=16), examples=20)
    assert "10 words, lower case" in text
    # A long document is cut, so the splits have more than 20 documents together.
    assert "train: 20 documents" in text
    assert "heldout: 2 documents" in text
    assert "text.jsonl" in text
    assert "B follows A" in text
    assert "B from another document" in text
    assert "A: [CLS] " in text
    assert "{[MASK]→" in text
    sentence_order = DataSettings(max_seqlen=16, pair_objective="sop")
    assert "A follows B" in describe_store(Store.open(tmp_path / "store"), sentence_order)
    reopened = Store.open(tmp_path / "store")
    assert text == describe_store(reopened, DataSettings(max_seqlen=16), examples=20)


def test_store_too_small_for_examples_is_described(tmp_path: Path) -> None:
    """A store too small for pairs is described, with the reason why there are no examples."""
    text = describe_store(make_store(tmp_path, 1))
    assert "train: 1 document, 1 sentence" in text
    assert "no examples: " in text
    store = Store.open(tmp_path / "store")
    assert "one segment" in describe_store(store, DataSettings(nsp=False))
