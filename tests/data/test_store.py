"""The token store: what is written is read back, and what is broken is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.data.plan import Plan
from bertsmith.data.store import (
    SPLITS,
    Manifest,
    Split,
    SplitWriter,
    Store,
    bits_for,
    write_manifest,
)
from bertsmith.data.unigram import unigram_entropy, word_counts
from bertsmith.errors import StoreError
from bertsmith.text.recipe import SPECIAL, Recipe
from bertsmith.text.wordpiece import Tokenizer

TOKENIZER = Tokenizer(Recipe(vocab=(*SPECIAL, *(f"w{number}" for number in range(92)))))


def write_store(path: Path, splits: dict[str, Split], vocab_size: int = 97) -> Store:
    """Write a store of splits in memory, each in two pieces, and open it."""
    path.mkdir()
    bits = bits_for(vocab_size)
    counts = {}
    for name in SPLITS:
        split, writer = splits[name], SplitWriter(path, name, bits)
        sentence_sizes, document_sizes = np.diff(split.sentences), np.diff(split.documents)
        half = len(document_sizes) // 2
        sentences = int(split.documents[half])
        tokens = int(split.sentences[sentences])
        writer.append(split.ids[:tokens], sentence_sizes[:sentences], document_sizes[:half])
        writer.append(split.ids[tokens:], sentence_sizes[sentences:], document_sizes[half:])
        counts[name] = writer.close()
    TOKENIZER.save(path / "tokenizer")
    plan = Plan(vocabulary_hash=TOKENIZER.hash)
    manifest = Manifest(bits=bits, vocab_size=vocab_size, lowercase=True, plan=plan, splits=counts)
    write_manifest(path, manifest)
    return Store.open(path)


@pytest.fixture
def store(tmp_path: Path, make_split: Callable[..., Split]) -> Store:
    """A small store."""
    splits = {"train": make_split(20), "heldout": make_split(3, seed=1)}
    return write_store(tmp_path / "store", splits)


@pytest.mark.parametrize(("vocab_size", "kind"), [(97, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_what_is_written_is_read(
    tmp_path: Path, make_split: Callable[..., Split], vocab_size: int, kind: str
) -> None:
    """Ids and offsets come back, in 16 bits up to 65,536 words and in 32 bits beyond."""
    splits = {"train": make_split(20), "heldout": make_split(3, seed=1)}
    splits["train"].ids[0] = vocab_size - 1
    store = write_store(tmp_path / "store", splits, vocab_size)
    for name in SPLITS:
        found = store.split(name)
        assert found.ids.dtype == np.dtype(kind)
        for part in ("ids", "sentences", "documents"):
            assert (getattr(found, part) == getattr(splits[name], part)).all()
        assert found.counts == store.manifest.splits[name]


def test_the_arrays_are_mapped(store: Store) -> None:
    """A split is mapped into memory and cannot be written to."""
    assert not store.split("train").ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        store.split("train").ids[0] = 1


def test_an_empty_split_can_be_read(tmp_path: Path, make_split: Callable[..., Split]) -> None:
    """A store without held-out documents opens, and the split holds nothing."""
    store = write_store(tmp_path / "store", {"train": make_split(4), "heldout": Split.of([])})
    assert store.split("heldout").counts.documents == 0


def test_the_writer_refuses_what_does_not_add_up(tmp_path: Path) -> None:
    """Sizes that do not fit, and empty sentences or documents, never reach the disk."""
    writer = SplitWriter(tmp_path, "train", 16)
    for sentences, documents in (([3], [1]), ([2], [2]), ([2, 0], [2]), ([2], [1, 0])):
        with pytest.raises(ValueError, match=r"add up|empty"):
            writer.append(np.array([5, 6]), np.array(sentences), np.array(documents))


@pytest.mark.parametrize("part", ["ids", "sentences", "documents"])
def test_a_cut_off_file_is_refused(store: Store, part: str) -> None:
    """A file that is shorter than the manifest says is named, with both sizes."""
    file = store.path / f"train.{part}"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(StoreError, match=rf"train\.{part}: {size - 2:,} bytes, expected {size:,}"):
        Store.open(store.path)
    file.unlink()
    with pytest.raises(StoreError, match=rf"train\.{part}: missing"):
        Store.open(store.path)


def test_offsets_that_do_not_fit_are_refused(store: Store) -> None:
    """Offsets that end elsewhere than the ids do are refused."""
    file = store.path / "train.sentences"
    content = bytearray(file.read_bytes())
    content[-8:] = (7).to_bytes(8, "little")
    file.write_bytes(content)
    with pytest.raises(StoreError, match="do not fit the ids"):
        Store.open(store.path).split("train")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "store format 2, expected 1"),
        ({"bits": 8}, "not a manifest"),
        (
            {"splits": {"heldout": {"documents": 1, "sentences": 1, "tokens": 1}}},
            "'train' are missing",
        ),
    ],
)
def test_a_wrong_manifest_is_refused(store: Store, changes: dict[str, Any], message: str) -> None:
    """Another format version, a value out of range or missing counts are told."""
    file = store.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(StoreError, match=message):
        Store.open(store.path)


def test_what_is_no_store_is_told(tmp_path: Path, store: Store) -> None:
    """No folder, a folder of something else, an unfinished store and broken JSON are told apart."""
    with pytest.raises(StoreError, match="no such store"):
        Store.open(tmp_path / "nothing")
    with pytest.raises(StoreError, match="not a store"):
        Store.open(tmp_path)
    (tmp_path / "parts").mkdir()
    with pytest.raises(StoreError, match="unfinished"):
        Store.open(tmp_path)
    (store.path / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="not valid JSON"):
        Store.open(store.path)


def test_another_tokenizer_is_refused(store: Store) -> None:
    """The store's own tokenizer is accepted; one with another word or case is not."""
    assert store.tokenizer().hash == TOKENIZER.hash
    words = (*TOKENIZER.vocab[:-1], "other")
    for recipe in (Recipe(vocab=words), Recipe(vocab=TOKENIZER.vocab, lowercase=False)):
        with pytest.raises(StoreError, match="another vocabulary"):
            store.check_tokenizer(Tokenizer(recipe))
    Tokenizer(Recipe(vocab=words)).save(store.path / "tokenizer")
    with pytest.raises(StoreError, match="another vocabulary"):
        store.tokenizer()


def test_unigram_entropy(split: Split) -> None:
    """Uniform words have the entropy log V, one word has none, and words that never occur none."""
    assert unigram_entropy(np.full(97, 3)) == pytest.approx(np.log(97))
    assert unigram_entropy(np.array([0, 9, 0])) == 0.0
    assert unigram_entropy(np.zeros(5, np.int64)) == 0.0
    # -(3/4 ln 3/4 + 1/4 ln 1/4)
    assert unigram_entropy(np.array([3, 1])) == pytest.approx(0.5623351)
    counts = word_counts(split, 97)
    assert counts.sum() == len(split.ids)
    assert counts[7] == (split.ids == 7).sum()
