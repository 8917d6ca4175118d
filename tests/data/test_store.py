"""The token store: what is written is read back, and what is broken is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.plan import StorePlan
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import (
    SPLITS,
    Manifest,
    Split,
    SplitCounts,
    SplitName,
    SplitWriter,
    Store,
    choose_id_bits,
    write_manifest,
)
from bertsmith.data.stream import ExampleStream
from bertsmith.data.unigram import count_token_ids, unigram_entropy
from bertsmith.errors import StoreError
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

TOKENIZER = Tokenizer(
    TokenizerSpec(vocab=(*SPECIAL_TOKENS, *(f"w{number}" for number in range(92))))
)


def write_store(path: Path, splits: dict[str, Split], vocab_size: int = 97) -> Store:
    """Write a store of splits in memory, each in two pieces, and open it."""
    path.mkdir()
    bits = choose_id_bits(vocab_size)
    counts: dict[SplitName, SplitCounts] = {}
    checksums: dict[str, str] = {}
    for name in SPLITS:
        split, writer = splits[name], SplitWriter(path, name, bits)
        sentence_sizes, document_sizes = (
            np.diff(split.sentence_offsets),
            np.diff(split.document_offsets),
        )
        half = len(document_sizes) // 2
        sentences = int(split.document_offsets[half])
        tokens = int(split.sentence_offsets[sentences])
        writer.append(split.ids[:tokens], sentence_sizes[:sentences], document_sizes[:half])
        writer.append(split.ids[tokens:], sentence_sizes[sentences:], document_sizes[half:])
        counts[name] = writer.close()
        checksums |= writer.checksums
    TOKENIZER.save(path / "tokenizer")
    plan = StorePlan(vocabulary_hash=TOKENIZER.hash)
    manifest = Manifest(
        bits=bits, vocab_size=vocab_size, lowercase=True, plan=plan, splits=counts,
        checksums=checksums,
    )  # fmt: skip
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
        found = store.load_split(name)
        assert found.ids.dtype == np.dtype(kind)
        for part in ("ids", "sentence_offsets", "document_offsets"):
            assert (getattr(found, part) == getattr(splits[name], part)).all()
        assert found.counts == store.manifest.splits[name]


def test_the_arrays_are_mapped(store: Store) -> None:
    """A split is mapped into memory and cannot be written to."""
    assert not store.load_split("train").ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        store.load_split("train").ids[0] = 1


def test_an_empty_split_can_be_read(tmp_path: Path, make_split: Callable[..., Split]) -> None:
    """A store without held-out documents opens, and the split holds nothing."""
    store = write_store(
        tmp_path / "store", {"train": make_split(4), "heldout": Split.from_documents([])}
    )
    assert store.load_split("heldout").counts.documents == 0


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
    with pytest.raises(
        StoreError, match=rf"train\.{part}: .* {size - 2:,} bytes, expected {size:,}"
    ):
        Store.open(store.path)
    file.unlink()
    with pytest.raises(StoreError, match=rf"train\.{part}: the file is missing"):
        Store.open(store.path)


def flip(file: Path, position: int) -> None:
    """Change one byte of a file."""
    content = bytearray(file.read_bytes())
    content[position] ^= 0x81
    file.write_bytes(content)


def without_checksums(store: Store) -> None:
    """Make the manifest one of version 0.1."""
    file = store.path / "manifest.json"
    values = json.loads(file.read_text())
    assert len(values.pop("checksums")) == 6
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("part", ["sentences", "documents"])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_damaged_offsets_are_refused(store: Store, part: str, has_checksums: bool) -> None:
    """Offsets that do not ascend from 0 to the end are refused, with and without checksums."""
    if not has_checksums:
        without_checksums(store)
    file = store.path / f"train.{part}"
    content = file.read_bytes()
    offsets = np.frombuffer(content, "<i8")
    for number, value in ((0, 1), (3, offsets[2]), (5, -1), (5, 1 << 40), (-1, offsets[-1] + 1)):
        changed = offsets.copy()
        changed[number] = value
        file.write_bytes(changed.tobytes())
        message = rf"train\.{part}: the file is damaged: its offset.*make it again with `bertsmith"
        with pytest.raises(StoreError, match=message):
            Store.open(store.path).load_split("train")
    file.write_bytes(content)
    Store.open(store.path).load_split("train")


@pytest.mark.parametrize("part", ["ids", "sentences", "documents"])
@pytest.mark.parametrize("name", SPLITS)
def test_any_changed_byte_is_found(store: Store, name: str, part: str) -> None:
    """A changed byte of any file is found by its checksum; the error names the file."""
    assert store.verify()
    file = store.path / f"{name}.{part}"
    size = file.stat().st_size
    for position in (0, size // 2, size - 1):
        flip(file, position)
        with pytest.raises(StoreError, match=rf"{name}\.{part}: the file is damaged: it"):
            Store.open(store.path).verify()
        flip(file, position)
    assert Store.open(store.path).verify()


def test_changed_offset_that_still_ascends(store: Store) -> None:
    """Offsets are compared with their checksum whenever a split is opened."""
    file = store.path / "train.sentences"
    offsets = np.frombuffer(file.read_bytes(), "<i8").copy()
    gap = int(np.flatnonzero(np.diff(offsets) > 1)[0])
    offsets[gap + 1] -= 1
    file.write_bytes(offsets.tobytes())
    with pytest.raises(StoreError, match=r"train\.sentences.*SHA-256"):
        Store.open(store.path).load_split("train")


def test_ids_beyond_the_vocabulary(store: Store, facts: VocabularyInfo) -> None:
    """Without checksums an id beyond the vocabulary is found: by verify, counts and examples."""
    without_checksums(store)
    opened = Store.open(store.path)
    assert not opened.verify()
    file = store.path / "train.ids"
    ids = np.frombuffer(file.read_bytes(), "<u2").copy()
    ids[:] = 5
    ids[-40:] = 97
    file.write_bytes(ids.tobytes())
    opened = Store.open(store.path)
    with pytest.raises(StoreError, match=r"train\.ids: .*token id 97, but .* 97 words"):
        opened.verify()
    with pytest.raises(StoreError, match=r"\(train\): .*token id 97"):
        count_token_ids(opened.load_split("train"), 97)
    settings = DataSettings(length=16)
    stream = ExampleStream(opened.load_split("train"), facts, settings, settings.length, 0, 0)
    with pytest.raises(StoreError, match=r"\(train\): .*token id 97"):
        stream.batch(0, len(stream))


def test_vocabulary_size_of_the_manifest_is_compared(store: Store) -> None:
    """A manifest that was changed in its vocabulary size does not fit the tokenizer."""
    file = store.path / "manifest.json"
    file.write_text(file.read_text().replace('"vocab_size": 97', '"vocab_size": 91'))
    with pytest.raises(StoreError, match=r"manifest.json.* 91 words, but the tokenizer has 97"):
        Store.open(store.path).load_tokenizer()


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
    assert store.load_tokenizer().hash == TOKENIZER.hash
    words = (*TOKENIZER.vocab[:-1], "other")
    for recipe in (
        TokenizerSpec(vocab=words),
        TokenizerSpec(vocab=TOKENIZER.vocab, lowercase=False),
    ):
        with pytest.raises(StoreError, match="another vocabulary"):
            store.check_tokenizer(Tokenizer(recipe))
    Tokenizer(TokenizerSpec(vocab=words)).save(store.path / "tokenizer")
    with pytest.raises(StoreError, match="another vocabulary"):
        store.load_tokenizer()


def test_unigram_entropy(split: Split) -> None:
    """Uniform words have the entropy log V, one word has none, and words that never occur none."""
    assert unigram_entropy(np.full(97, 3)) == pytest.approx(np.log(97))
    assert unigram_entropy(np.array([0, 9, 0])) == 0.0
    assert unigram_entropy(np.zeros(5, np.int64)) == 0.0
    # -(3/4 ln 3/4 + 1/4 ln 1/4)
    assert unigram_entropy(np.array([3, 1])) == pytest.approx(0.5623351)
    counts = count_token_ids(split, 97)
    assert counts.sum() == len(split.ids)
    assert counts[7] == (split.ids == 7).sum()
