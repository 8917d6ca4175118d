"""The token store on disk: reading what was written, and detecting damage."""

import json
import re
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
from bertsmith.data.unigram import compute_unigram_entropy, count_token_ids
from bertsmith.errors import StoreError
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

#: A tokenizer of 97 words, the size of the synthetic vocabulary of the fixtures.
TOKENIZER = Tokenizer(
    TokenizerSpec(vocab=(*SPECIAL_TOKENS, *(f"w{number}" for number in range(92))))
)


def write_store(path: Path, splits: dict[str, Split], vocab_size: int = 97) -> Store:
    """Write a store from splits in memory, each in two parts, and open it."""
    path.mkdir()
    bits = choose_id_bits(vocab_size)
    counts: dict[SplitName, SplitCounts] = {}
    checksums: dict[str, str] = {}
    for name in SPLITS:
        split, writer = splits[name], SplitWriter(path, name, bits)
        sentence_sizes = np.diff(split.sentence_offsets)
        document_sizes = np.diff(split.document_offsets)
        # First document, sentence and token of the second part.
        document = len(document_sizes) // 2
        sentence = int(split.document_offsets[document])
        token = int(split.sentence_offsets[sentence])
        writer.append(split.ids[:token], sentence_sizes[:sentence], document_sizes[:document])
        writer.append(split.ids[token:], sentence_sizes[sentence:], document_sizes[document:])
        counts[name] = writer.close()
        checksums |= writer.checksums
    TOKENIZER.save(path / "tokenizer")
    manifest = Manifest(
        bits=bits,
        vocab_size=vocab_size,
        lowercase=True,
        plan=StorePlan(vocabulary_hash=TOKENIZER.hash),
        splits=counts,
        checksums=checksums,
    )
    write_manifest(path, manifest)
    return Store.open(path)


@pytest.fixture
def store(tmp_path: Path, make_split: Callable[..., Split]) -> Store:
    """A small store."""
    splits = {"train": make_split(20), "heldout": make_split(3, seed=1)}
    return write_store(tmp_path / "store", splits)


@pytest.mark.parametrize(("vocab_size", "dtype"), [(97, "<u2"), (65536, "<u2"), (65537, "<u4")])
def test_splits_are_read_as_written(
    tmp_path: Path, make_split: Callable[..., Split], vocab_size: int, dtype: str
) -> None:
    """Ids and offsets are read as written; ids have 16 bits up to 65,536 words, then 32."""
    splits = {"train": make_split(20), "heldout": make_split(3, seed=1)}
    splits["train"].ids[0] = vocab_size - 1
    store = write_store(tmp_path / "store", splits, vocab_size)
    for name in SPLITS:
        split = store.load_split(name)
        assert split.ids.dtype == np.dtype(dtype)
        for field in ("ids", "sentence_offsets", "document_offsets"):
            assert (getattr(split, field) == getattr(splits[name], field)).all()
        assert split.counts == store.manifest.splits[name]


def test_examples_of_the_formats_page_decode_a_sentence(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The Python blocks of docs/formats.md print the first sentence, as text and as tokens."""
    page = Path(__file__).parents[2] / "docs" / "formats.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    split = store.load_split("train")
    tokens = TOKENIZER.ids_to_tokens(split.ids[: split.sentence_offsets[1]].tolist())
    store.path.rename(store.path.with_name("my-store"))
    monkeypatch.chdir(store.path.parent)
    for block in blocks:
        exec(block, {})
    assert capsys.readouterr().out == f"{' '.join(tokens)}\n{tokens}\n"


def test_arrays_are_memory_mapped(store: Store) -> None:
    """The arrays of a split are memory-mapped and read-only."""
    assert not store.load_split("train").ids.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        store.load_split("train").ids[0] = 1


def test_store_without_held_out_documents_opens(
    tmp_path: Path, make_split: Callable[..., Split]
) -> None:
    """A store without held-out documents opens, with an empty held-out split."""
    splits = {"train": make_split(4), "heldout": Split.from_documents([])}
    store = write_store(tmp_path / "store", splits)
    assert store.load_split("heldout").counts.documents == 0


def test_documents_of_a_split_may_be_a_generator() -> None:
    """The documents are read once."""
    documents = [[[5, 6], [7]], [[8, 9, 10]]]
    split = Split.from_documents(document for document in documents)
    assert split.counts == Split.from_documents(documents).counts
    assert split.counts.documents == 2


def test_writer_rejects_inconsistent_sizes(tmp_path: Path) -> None:
    """Sizes that do not add up, empty sentences and empty documents are errors."""
    writer = SplitWriter(tmp_path, "train", 16)
    for sentence_sizes, document_sizes in (([3], [1]), ([2], [2]), ([2, 0], [2]), ([2], [1, 0])):
        with pytest.raises(ValueError, match=r"add up|empty"):
            writer.append(np.array([5, 6]), np.array(sentence_sizes), np.array(document_sizes))


@pytest.mark.parametrize("part", ["ids", "sentences", "documents"])
def test_truncated_or_missing_file_is_rejected(store: Store, part: str) -> None:
    """The error names the file and, for a truncated file, its actual and expected size."""
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


def flip_byte(file: Path, position: int) -> None:
    """Change one byte of a file; a second call restores it."""
    content = bytearray(file.read_bytes())
    content[position] ^= 0x81
    file.write_bytes(content)


def remove_checksums(store: Store) -> None:
    """Remove the checksums from the manifest, which a store of version 0.1 does not have."""
    file = store.path / "manifest.json"
    values = json.loads(file.read_text())
    # Each of the two splits has three files.
    assert len(values.pop("checksums")) == 2 * 3
    file.write_text(json.dumps(values))


@pytest.mark.parametrize("part", ["sentences", "documents"])
@pytest.mark.parametrize("has_checksums", [True, False])
def test_damaged_offsets_are_rejected(store: Store, part: str, has_checksums: bool) -> None:
    """Offsets must ascend from 0 to the end, also in a store without checksums."""
    if not has_checksums:
        remove_checksums(store)
    file = store.path / f"train.{part}"
    content = file.read_bytes()
    offsets = np.frombuffer(content, "<i8")
    for index, value in ((0, 1), (3, offsets[2]), (5, -1), (5, 1 << 40), (-1, offsets[-1] + 1)):
        changed = offsets.copy()
        changed[index] = value
        file.write_bytes(changed.tobytes())
        message = rf"train\.{part}: the file is damaged: its offset.*make it again with `bertsmith"
        with pytest.raises(StoreError, match=message):
            Store.open(store.path).load_split("train")
    file.write_bytes(content)
    Store.open(store.path).load_split("train")


@pytest.mark.parametrize("part", ["ids", "sentences", "documents"])
@pytest.mark.parametrize("name", SPLITS)
def test_checksums_detect_any_changed_byte(store: Store, name: str, part: str) -> None:
    """``verify`` detects a changed byte of any file, and the error names the file."""
    assert store.verify()
    file = store.path / f"{name}.{part}"
    size = file.stat().st_size
    for position in (0, size // 2, size - 1):
        flip_byte(file, position)
        with pytest.raises(StoreError, match=rf"{name}\.{part}: the file is damaged: it"):
            Store.open(store.path).verify()
        flip_byte(file, position)
    assert Store.open(store.path).verify()


def test_checksums_of_offsets_are_verified_on_loading(store: Store) -> None:
    """A changed offset that still ascends is detected when the split is loaded."""
    file = store.path / "train.sentences"
    offsets = np.frombuffer(file.read_bytes(), "<i8").copy()
    index = int(np.flatnonzero(np.diff(offsets) > 1)[0])
    offsets[index + 1] -= 1
    file.write_bytes(offsets.tobytes())
    with pytest.raises(StoreError, match=r"train\.sentences.*SHA-256"):
        Store.open(store.path).load_split("train")


def test_ids_outside_the_vocabulary_are_rejected(store: Store, vocabulary: VocabularyInfo) -> None:
    """Without checksums, invalid ids are detected by ``verify``, by counting and by sampling."""
    remove_checksums(store)
    reopened = Store.open(store.path)
    assert not reopened.verify()
    file = store.path / "train.ids"
    ids = np.frombuffer(file.read_bytes(), "<u2").copy()
    ids[:] = 5
    ids[-40:] = 97
    file.write_bytes(ids.tobytes())
    reopened = Store.open(store.path)
    with pytest.raises(StoreError, match=r"train\.ids: .*token id 97, but .* 97 words"):
        reopened.verify()
    with pytest.raises(StoreError, match=r"\(train\): .*token id 97"):
        count_token_ids(reopened.load_split("train"), 97)
    settings = DataSettings(max_seqlen=16)
    stream = ExampleStream(
        reopened.load_split("train"), vocabulary, settings, settings.max_seqlen, 0, 0
    )
    with pytest.raises(StoreError, match=r"\(train\): .*token id 97"):
        stream.batch(0, len(stream))


def test_vocabulary_size_of_the_manifest_is_checked(store: Store) -> None:
    """A manifest with another vocabulary size than the tokenizer is rejected."""
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
def test_invalid_manifest_is_rejected(store: Store, changes: dict[str, Any], message: str) -> None:
    """Another format version, an invalid value and missing counts are errors."""
    file = store.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(StoreError, match=message):
        Store.open(store.path)


def test_folders_without_a_valid_store_are_rejected(tmp_path: Path, store: Store) -> None:
    """Missing folders, folders without a store, unfinished stores and invalid JSON are errors."""
    with pytest.raises(StoreError, match="no such store"):
        Store.open(tmp_path / "nothing")
    with pytest.raises(StoreError, match="not a store"):
        Store.open(tmp_path)
    (tmp_path / "parts").mkdir()
    with pytest.raises(StoreError, match="not a store"):
        Store.open(tmp_path)
    (tmp_path / "parts" / "plan.json").touch()
    with pytest.raises(StoreError, match="unfinished"):
        Store.open(tmp_path)
    (store.path / "manifest.json").write_text("{")
    with pytest.raises(StoreError, match="not valid JSON"):
        Store.open(store.path)


def test_other_tokenizer_is_rejected(store: Store) -> None:
    """A tokenizer with another word or option than the tokenizer of the store is rejected."""
    assert store.load_tokenizer().hash == TOKENIZER.hash
    words = (*TOKENIZER.vocab[:-1], "other")
    other_words = TokenizerSpec(vocab=words)
    other_case = TokenizerSpec(vocab=TOKENIZER.vocab, lowercase=False)
    for spec in (other_words, other_case):
        with pytest.raises(StoreError, match="another vocabulary"):
            store.check_tokenizer(Tokenizer(spec))
    Tokenizer(other_words).save(store.path / "tokenizer")
    with pytest.raises(StoreError, match="another vocabulary"):
        store.load_tokenizer()


def test_unigram_entropy_of_known_distributions(split: Split) -> None:
    """The entropy is log V for a uniform distribution, and 0 for a single word or none."""
    assert compute_unigram_entropy(np.full(97, 3)) == pytest.approx(np.log(97))
    assert compute_unigram_entropy(np.array([0, 9, 0])) == 0.0
    assert compute_unigram_entropy(np.zeros(5, np.int64)) == 0.0
    # -(3/4 ln 3/4 + 1/4 ln 1/4)
    assert compute_unigram_entropy(np.array([3, 1])) == pytest.approx(0.5623351)
    counts = count_token_ids(split, 97)
    assert counts.sum() == len(split.ids)
    assert counts[7] == (split.ids == 7).sum()
