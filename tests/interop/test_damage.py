"""Damaged checkpoints and checkpoints of other models raise a ModelError."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.errors import ModelError
from bertsmith.interop.tensorflow.checkpoint_v1 import CheckpointV1
from bertsmith.interop.tensorflow.checkpoint_v2 import CheckpointV2
from bertsmith.interop.tensorflow.crc32c import crc32c, mask_crc
from bertsmith.interop.tensorflow.object_graph import _encode_ordered
from bertsmith.interop.tensorflow.protobuf import (
    encode_bytes_field,
    encode_varint,
    encode_varint_field,
    read_varint,
)
from bertsmith.interop.tensorflow.reading import read_tensorflow
from bertsmith.interop.tensorflow.sstable import _append_block, encode_table, read_entries
from bertsmith.interop.tensorflow.writing import write_checkpoint
from tests.interop.conftest import DATA, write_config_and_vocab
from tests.interop.data import checkpoints

#: Length of a table's footer, and of a block's trailer with compression type and checksum.
FOOTER_BYTES, TRAILER_BYTES = 48, 5


def crc32c_bitwise(data: bytes) -> int:
    """Return the CRC-32C by its definition, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c_matches_its_definition() -> None:
    """CRC-32C equals the values in RFC 3720, and a bitwise CRC for many lengths."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    data = random.Random(0).randbytes(3 * 65536 + 7)
    for length in (*range(9), 65535, 65536, 65537, 65539, 65540, 2 * 65536 + 3, len(data)):
        assert crc32c(memoryview(data)[:length]) == crc32c_bitwise(data[:length]), length


@given(st.dictionaries(st.binary(min_size=1, max_size=40), st.binary(max_size=90), max_size=300))
def test_written_table_is_read_back(pairs: dict[bytes, bytes]) -> None:
    """A written table contains the same keys and values when it is read."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        path.write_bytes(encode_table(sorted(pairs.items())))
        assert {key: bytes(value) for key, value in read_entries(path)} == pairs


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_ordered_encoding_preserves_order(a: int, b: int) -> None:
    """Encoded integers sort in the order of the integers."""
    assert (_encode_ordered(a) < _encode_ordered(b)) == (a < b)
    assert (_encode_ordered(0), _encode_ordered(-1), _encode_ordered(64)) == (
        b"\x80",
        b"\x7f",
        b"\xc0\x40",
    )


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """Return the folder of a valid release, which tests can damage."""
    folder = write_config_and_vocab(tmp_path / "uncased")
    write_checkpoint(folder / "bert_model.ckpt", checkpoints.make_variables().items())
    return folder


INDEX_FILE, SHARD_FILE = "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"


def truncate(name: str, length: int) -> Callable[[Path], None]:
    """Return a function that keeps only the first ``length`` bytes of a file."""

    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:length])

    return damage


def add_word(folder: Path) -> None:
    """Add a word to the vocabulary."""
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")


def flip_bit(name: str, offset: int) -> Callable[[Path], None]:
    """Return a function that flips a bit of the byte at ``offset`` of a file."""

    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[offset] ^= 4
        (folder / name).write_bytes(data)

    return damage


def remove_tensors(*names: str) -> Callable[[Path], None]:
    """Return a function that removes tensors from the checkpoint."""

    def damage(folder: Path) -> None:
        values = checkpoints.make_variables()
        write_checkpoint(
            folder / "bert_model.ckpt",
            [(name, array) for name, array in values.items() if name not in names],
        )

    return damage


def replace_tensors(**arrays: Any) -> Callable[[Path], None]:
    """Return a function that replaces tensors; ``__`` in a name stands for a slash."""
    replaced = {name.replace("__", "/"): array for name, array in arrays.items()}
    return lambda folder: write_checkpoint(
        folder / "bert_model.ckpt", (checkpoints.make_variables() | replaced).items()
    )


def use_other_names(*names: str) -> Callable[[Path], None]:
    """Return a function that replaces the checkpoint by one with tensors of these names."""
    ones = np.ones(3, dtype=np.float32)
    return lambda folder: write_checkpoint(
        folder / "bert_model.ckpt", [(name, ones) for name in names]
    )


def edit_config(**changes: Any) -> Callable[[Path], None]:
    """Return a function that changes keys of bert_config.json; None removes a key."""

    def damage(folder: Path) -> None:
        path = folder / "bert_config.json"
        raw = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: raw[key] for key in raw if raw[key] is not None}))

    return damage


def mark_compressed(folder: Path) -> None:
    """Mark the first block of the index as compressed, with a correct checksum."""
    data = bytearray((folder / INDEX_FILE).read_bytes())
    footer = memoryview(bytes(data[-FOOTER_BYTES:]))
    # The footer has the offset and size of an empty block, and then those of the index block.
    _, offset = read_varint(footer, 0)
    _, offset = read_varint(footer, offset)
    index_offset, _ = read_varint(footer, offset)
    # The first block ends at the first byte that is followed by a correct checksum.
    end = next(end for end in range(1, index_offset) if has_checksum_at(data, end))
    data[end] = 1
    data[end + 1 : end + TRAILER_BYTES] = encode_checksum(data[: end + 1])
    (folder / INDEX_FILE).write_bytes(data)


def has_checksum_at(data: bytearray, end: int) -> bool:
    """Return whether a block from byte 0 to ``end`` is followed by its checksum."""
    return data[end + 1 : end + TRAILER_BYTES] == encode_checksum(data[: end + 1])


def encode_checksum(data: bytearray) -> bytes:
    """Return the masked CRC-32C of a block and its compression type, as four bytes."""
    return mask_crc(crc32c(bytes(data))).to_bytes(4, "little")


#: Name of a tensor that tests remove.
KERNEL = "bert/encoder/layer_1/attention/self/key/kernel"
#: Name of the damage, function that causes it, and pattern of the expected error message.
FAULTS: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "no shard",
        lambda f: (f / SHARD_FILE).unlink(),
        rf"{SHARD_FILE}: no such file, but it should contain tensor 'bert/em",
    ),
    (
        "truncated shard",
        truncate(SHARD_FILE, 500),
        rf"{SHARD_FILE}: the file is truncated: it has 500 bytes, but tensor 'bert/",
    ),
    (
        "missing last byte",
        truncate(SHARD_FILE, -1),
        rf"{SHARD_FILE}: the file is truncated: .* tensor '[a-z/_A-Z0-9]+' ends at",
    ),
    (
        "truncated index",
        truncate(INDEX_FILE, 300),
        rf"{INDEX_FILE}: the file is damaged or not a TensorFlow checkpoint: the magic",
    ),
    (
        "empty index",
        truncate(INDEX_FILE, 0),
        rf"{INDEX_FILE}: the file is damaged .* the magic number of a sorted table",
    ),
    (
        "magic",
        flip_bit(INDEX_FILE, -1),
        rf"{INDEX_FILE}: the file is damaged .* the magic number of a sorted table",
    ),
    (
        "block",
        flip_bit(INDEX_FILE, 9),
        rf"{INDEX_FILE}: the file is damaged .* wrong checksum of the block at byte 0",
    ),
    (
        "data",
        flip_bit(SHARD_FILE, 5),
        rf"{SHARD_FILE}: the file is damaged .* wrong checksum of tensor 'bert/embeddings/word",
    ),
    ("snappy", mark_compressed, rf"{INDEX_FILE}: .* compressed \(type 1, 1 is snappy\)"),
    ("kernel", remove_tensors(KERNEL), rf"{INDEX_FILE}: the tensor '{KERNEL}' is missing"),
    (
        "half a head",
        remove_tensors("cls/predictions/output_bias"),
        r"'cls/predictions/output_bias' is mi",
    ),
    (
        "shape",
        replace_tensors(bert__pooler__dense__kernel=np.ones((6, 5), dtype=np.float32)),
        r"bert/pooler/dense/kernel has shape \(6, 5\), but bert_config\.json requires \(6, 6\)",
    ),
    (
        "ALBERT",
        use_other_names("bert/encoder/embedding_hidden_mapping_in/kernel"),
        r"this is ALBERT",
    ),
    ("ELECTRA", use_other_names("electra/embeddings/word_embeddings"), r"this is ELECTRA"),
    (
        "ResNet",
        use_other_names("resnet/conv1", "global_step"),
        r"not a BERT: its tensors are resnet/conv1, …;",
    ),
    ("layers", edit_config(num_hidden_layers=3), r"has 2 layers, but bert_config\.json says 3"),
    (
        "vocab size",
        edit_config(vocab_size=10**12),
        r"word_embeddings has shape \(11, 6\), .* \(10{12}, 6\)",
    ),
    ("width", edit_config(hidden_size=10**12), r"word_embeddings has shape \(11, 6\)"),
    (
        "feed-forward",
        edit_config(intermediate_size=10**12),
        r"layer_0/intermediate/dense/kernel has shape \(6, 7",
    ),
    (
        "too many layers",
        edit_config(num_hidden_layers=10**12),
        r"has 2 layers, but bert_config\.json says 10",
    ),
    (
        "heads",
        edit_config(num_attention_heads=4),
        r"bert_config\.json: .*width 6 is not a multiple of",
    ),
    (
        "no size",
        edit_config(hidden_size=None),
        r"bert_config\.json: these keys are missing: hidden_size",
    ),
    (
        "activation",
        edit_config(hidden_act="linear"),
        r"hidden_act is 'linear'; supported: gelu, relu",
    ),
    (
        "no config",
        lambda f: (f / "bert_config.json").unlink(),
        r"no such file; copy it to the folder",
    ),
    (
        "no checkpoint",
        lambda f: (f / INDEX_FILE).unlink(),
        r"found no TensorFlow checkpoint; expected",
    ),
    ("vocabulary", add_word, r"vocab\.txt has 12 tokens, but the model has only 11"),
]


@pytest.mark.parametrize(("damage", "message"), [fault[1:] for fault in FAULTS],
                         ids=[fault[0] for fault in FAULTS])  # fmt: skip
def test_faults_raise_model_errors(
    damage: Callable[[Path], None], message: str, release: Path
) -> None:
    """Each kind of damage raises a ModelError with a message that describes it."""
    read_tensorflow(release)
    damage(release)
    with pytest.raises(ModelError, match=message):
        read_tensorflow(release)


def test_path_without_checkpoint_is_an_error(tmp_path: Path) -> None:
    """Importing from a missing path or from a text file is an error."""
    with pytest.raises(ModelError, match="no such folder or checkpoint"):
        read_tensorflow(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("just some notes")
    with pytest.raises(ModelError, match="not a TensorFlow checkpoint in V1 or V2 format"):
        read_tensorflow(tmp_path / "notes.txt")


def test_damaged_v1_checkpoint_is_an_error(tmp_path: Path) -> None:
    """A V1 checkpoint with a flipped bit, or a truncated one, is an error."""
    data = bytearray((DATA / "v1" / "bert_model.ckpt").read_bytes())
    data[9000] ^= 1
    (tmp_path / "model.ckpt").write_bytes(data)
    with pytest.raises(
        ModelError, match=r"model\.ckpt: the file is damaged .* wrong checksum of the block at"
    ):
        CheckpointV1(tmp_path / "model.ckpt")
    (tmp_path / "truncated").write_bytes(bytes(data[:9000]))
    with pytest.raises(ModelError, match="in V1 or V2 format"):
        read_tensorflow(tmp_path / "truncated")


def test_tensor_larger_than_its_file_is_an_error(release: Path) -> None:
    """A tensor of 10^12 rows in config and index fails before memory is allocated."""
    edit_config(vocab_size=10**12)(release)
    entries = {key: bytes(value) for key, value in read_entries(release / INDEX_FILE)}
    shape = b"".join(encode_bytes_field(2, encode_varint_field(1, size)) for size in (10**12, 6))
    size = 4 * 6 * 10**12
    # A BundleEntryProto message: data type 1 (float32), shape and size.
    words = encode_varint_field(1, 1) + encode_bytes_field(2, shape) + encode_varint_field(5, size)
    entries[b"bert/embeddings/word_embeddings"] = words
    (release / INDEX_FILE).write_bytes(encode_table(sorted(entries.items())))
    with pytest.raises(ModelError, match=r"truncated: .*word_embeddings' ends at byte 24,000,"):
        read_tensorflow(release)


def test_repeated_block_is_an_error(tmp_path: Path) -> None:
    """An index whose 10,000 entries refer to the same block fails at the second one."""
    file = bytearray()
    handle = _append_block(file, [(b"a", b"1")])
    index = _append_block(file, [(b"%05d" % number, handle) for number in range(10_000)])
    file += (handle + index).ljust(FOOTER_BYTES - 8, b"\0") + encode_table([])[-8:]
    (tmp_path / "table").write_bytes(file)
    with pytest.raises(ModelError, match="overlaps the previous block"):
        list(read_entries(tmp_path / "table"))


def test_invalid_shard_numbers_are_an_error(tmp_path: Path) -> None:
    """Huge shard numbers and sizes are errors; no other folder is read, no memory allocated."""
    # The number of shards in the header; the data type, shard number and size in the entry.
    header = encode_varint_field(1, 2**63 + 5)
    entry = (
        encode_varint_field(1, 1)
        + encode_varint_field(3, 2**64 - 1)
        + encode_varint_field(5, 2**64 - 4)
    )
    (tmp_path / "x.index").write_bytes(encode_table([(b"", header), (b"bert/x", entry)]))
    with pytest.raises(ModelError, match="no such file, but it should contain tensor 'bert/x'"):
        CheckpointV2(tmp_path / "x.index").read("bert/x")


def collect_errors(path: Path) -> list[str]:
    """Return the error of opening a checkpoint, or the errors of reading its tensors."""
    errors = []
    try:
        checkpoint = CheckpointV2(path) if path.suffix == ".index" else CheckpointV1(path)
    except ModelError as error:
        return [str(error)]
    for name in checkpoint.shapes:
        try:
            checkpoint.check_data([name])
            checkpoint.read(name)
        except ModelError as error:
            errors.append(str(error))
    return errors


@given(st.data())
def test_random_index_changes_raise_only_model_errors(data: st.DataObject) -> None:
    """Entries with random bytes and correct checksums are read or raise a ModelError."""
    checkpoint_format = data.draw(st.sampled_from(["parts", "object", "types", "v1"]))
    with TemporaryDirectory() as folder:
        for file in (DATA / checkpoint_format).iterdir():
            shutil.copy(file, folder)
        names = {"object": "bert_model.ckpt-1.index", "v1": "bert_model.ckpt"}
        path = Path(folder) / names.get(checkpoint_format, INDEX_FILE)
        pairs = [(key, bytearray(value)) for key, value in read_entries(path)]
        for _ in range(data.draw(st.integers(1, 4))):
            value = pairs[data.draw(st.integers(0, len(pairs) - 1))][1]
            if value:
                value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(encode_table([(key, bytes(value)) for key, value in pairs]))
        assert all(folder in error for error in collect_errors(path))


def test_varints_are_read_back() -> None:
    """Integers of any size are read back, and an unterminated varint is an error."""
    for number in (0, 1, 127, 128, 2**32, 2**64 - 1):
        assert read_varint(memoryview(encode_varint(number)), 0) == (
            number,
            len(encode_varint(number)),
        )
    with pytest.raises(ValueError, match="unterminated varint"):
        read_varint(memoryview(b"\xff" * 11), 0)
