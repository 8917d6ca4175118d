"""Damaged, lying and foreign checkpoints: refused with file and tensor named, and nothing else."""

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
from bertsmith.interop.tensorflow import read_tensorflow
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
from bertsmith.interop.tensorflow.sstable import _append_block, encode_table, read_entries
from bertsmith.interop.tensorflow.writing import write_checkpoint
from tests.interop.conftest import DATA, write_config_and_vocab
from tests.interop.data import checkpoints

#: A footer's length, and a block's trailer of kind and checksum.
FOOTER, TRAILER = 48, 5


def bitwise(data: bytes) -> int:
    """Return the CRC-32C by its definition, a bit at a time."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_crc32c() -> None:
    """The check value of RFC 3720's sum, and the definition at lengths around every border."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    data = random.Random(0).randbytes(3 * 65536 + 7)
    for length in (*range(9), 65535, 65536, 65537, 65539, 65540, 2 * 65536 + 3, len(data)):
        assert crc32c(memoryview(data)[:length]) == bitwise(data[:length]), length


@given(st.dictionaries(st.binary(min_size=1, max_size=40), st.binary(max_size=90), max_size=300))
def test_a_table_gives_back_what_went_in(pairs: dict[bytes, bytes]) -> None:
    """Any keys and values, in any number of blocks."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "table"
        path.write_bytes(encode_table(sorted(pairs.items())))
        assert {key: bytes(value) for key, value in read_entries(path)} == pairs


@given(st.integers(-(2**40), 2**40), st.integers(-(2**40), 2**40))
def test_encode_ordered_numbers_are_in_order(a: int, b: int) -> None:
    """The bytes of two numbers compare as the numbers do."""
    assert (_encode_ordered(a) < _encode_ordered(b)) == (a < b)
    assert (_encode_ordered(0), _encode_ordered(-1), _encode_ordered(64)) == (b"\x80", b"\x7f", b"\xc0\x40")


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A sound release, to be damaged."""
    folder = write_config_and_vocab(tmp_path / "uncased")
    write_checkpoint(folder / "bert_model.ckpt", checkpoints.make_variables().items())
    return folder


INDEX, SHARD = "bert_model.ckpt.index", "bert_model.ckpt.data-00000-of-00001"


def cut(name: str, length: int) -> Callable[[Path], None]:
    """Return what keeps only the first bytes of a file."""

    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:length])

    return change


def lengthen(folder: Path) -> None:
    """Add a word to the vocabulary."""
    with (folder / "vocab.txt").open("a") as file:
        file.write("more\n")


def turn(name: str, place: int) -> Callable[[Path], None]:
    """Return what turns one bit of a file over."""

    def change(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[place] ^= 4
        (folder / name).write_bytes(data)

    return change


def without(*names: str) -> Callable[[Path], None]:
    """Return what takes tensors out."""

    def change(folder: Path) -> None:
        values = checkpoints.make_variables()
        write_checkpoint(
            folder / "bert_model.ckpt", [pair for pair in values.items() if pair[0] not in names]
        )

    return change


def instead(**arrays: Any) -> Callable[[Path], None]:
    """Return what puts other tensors into the checkpoint; ``__`` in a name stands for a slash."""
    more = {name.replace("__", "/"): array for name, array in arrays.items()}
    return lambda folder: write_checkpoint(
        folder / "bert_model.ckpt", (checkpoints.make_variables() | more).items()
    )


def only(*names: str) -> Callable[[Path], None]:
    """Return what makes a checkpoint of other names altogether."""
    one = np.ones(3, dtype=np.float32)
    return lambda folder: write_checkpoint(
        folder / "bert_model.ckpt", [(name, one) for name in names]
    )


def edit(**changes: Any) -> Callable[[Path], None]:
    """Return what changes keys of bert_config.json; None takes one away."""

    def change(folder: Path) -> None:
        path = folder / "bert_config.json"
        raw = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: raw[key] for key in raw if raw[key] is not None}))

    return change


def compress(folder: Path) -> None:
    """Say that the first block of the index is compressed, with a right checksum."""
    data = bytearray((folder / INDEX).read_bytes())
    footer = memoryview(bytes(data[-FOOTER:]))
    _, place = read_varint(footer, read_varint(footer, 0)[1])
    index = read_varint(footer, place)[0]
    # The first block ends where the second, or the empty one of the table's notes, begins.
    end = next(end for end in range(1, index) if checked(data, end))
    data[end] = 1
    data[end + 1 : end + TRAILER] = mask_crc(crc32c(bytes(data[: end + 1]))).to_bytes(4, "little")
    (folder / INDEX).write_bytes(data)


def checked(data: bytearray, end: int) -> bool:
    """Tell whether a block that began at 0 ends at ``end``."""
    return bytes(data[end + 1 : end + TRAILER]) == mask_crc(
        crc32c(bytes(data[: end + 1]))
    ).to_bytes(4, "little")


KERNEL = "bert/encoder/layer_1/attention/self/key/kernel"
FAULTS: list[tuple[str, Callable[[Path], None], str]] = [
    (
        "no shard",
        lambda f: (f / SHARD).unlink(),
        rf"{SHARD}: no such file, but tensor 'bert/em",
    ),
    ("cut shard", cut(SHARD, 500), rf"{SHARD}: truncated: it has 500 bytes, but tensor 'bert/"),
    ("cut a little", cut(SHARD, -1), rf"{SHARD}: truncated: .* tensor '[a-z/_A-Z0-9]+' ends at"),
    ("cut index", cut(INDEX, 300), rf"{INDEX}: damaged, or not a TensorFlow checkpoint: no magic"),
    ("empty index", cut(INDEX, 0), rf"{INDEX}: damaged, or not .* no magic number of a sorted table"),
    ("magic", turn(INDEX, -1), rf"{INDEX}: damaged, or not .* no magic number of a sorted table"),
    ("block", turn(INDEX, 9), rf"{INDEX}: damaged, .* wrong checksum of the block at byte 0"),
    ("data", turn(SHARD, 5), rf"{SHARD}: damaged, .* wrong checksum of tensor 'bert/embeddings/word"),
    ("snappy", compress, rf"{INDEX}: .* compressed \(type 1, 1 is snappy\)"),
    ("kernel", without(KERNEL), rf"{INDEX}: tensor '{KERNEL}' is missing"),
    ("half a head", without("cls/predictions/output_bias"), r"'cls/predictions/output_bias' is mi"),
    (
        "shape",
        instead(bert__pooler__dense__kernel=np.ones((6, 5), dtype=np.float32)),
        r"bert/pooler/dense/kernel has shape \(6, 5\), but bert_config\.json requires \(6, 6\)",
    ),
    ("ALBERT", only("bert/encoder/embedding_hidden_mapping_in/kernel"), r"this is ALBERT"),
    ("ELECTRA", only("electra/embeddings/word_embeddings"), r"this is ELECTRA"),
    ("ResNet", only("resnet/conv1", "global_step"), r"not a BERT: its tensors are resnet/conv1, …;"),
    ("layers", edit(num_hidden_layers=3), r"has 2 layers, but bert_config\.json has 3"),
    ("words", edit(vocab_size=10**12), r"word_embeddings has shape \(11, 6\); .* \(10{12}, 6\)"),
    ("width", edit(hidden_size=10**12), r"word_embeddings has shape \(11, 6\)"),
    (
        "inner",
        edit(intermediate_size=10**12),
        r"layer_0/intermediate/dense/kernel has shape \(6, 7",
    ),
    (
        "layers too",
        edit(num_hidden_layers=10**12),
        r"has 2 layers, but bert_config\.json has 10",
    ),
    ("heads", edit(num_attention_heads=4), r"bert_config\.json: .*width 6 is not a multiple of"),
    ("no size", edit(hidden_size=None), r"bert_config\.json: hidden_size is missing"),
    ("activation", edit(hidden_act="linear"), r"hidden_act is 'linear'; supported: gelu, relu"),
    ("no config", lambda f: (f / "bert_config.json").unlink(), r"no such file; releases have it"),
    ("no checkpoint", lambda f: (f / INDEX).unlink(), r"found no TensorFlow checkpoint; expected"),
    ("vocabulary", lengthen, r"vocab\.txt has 12 words, but the model only has 11"),
]


@pytest.mark.parametrize(("fault", "said"), [fault[1:] for fault in FAULTS],
                         ids=[fault[0] for fault in FAULTS])  # fmt: skip
def test_each_fault_is_told(fault: Callable[[Path], None], said: str, release: Path) -> None:
    """Whatever is wrong with a release is a ModelError that names file, tensor and sizes."""
    read_tensorflow(release)
    fault(release)
    with pytest.raises(ModelError, match=said):
        read_tensorflow(release)


def test_a_path_without_a_checkpoint(tmp_path: Path) -> None:
    """A path that is not there, and a file of another kind, are told."""
    with pytest.raises(ModelError, match="no such folder or checkpoint"):
        read_tensorflow(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("just some notes")
    with pytest.raises(ModelError, match="not a TensorFlow checkpoint, neither in the V2 format"):
        read_tensorflow(tmp_path / "notes.txt")


def test_a_damaged_v1_file(tmp_path: Path) -> None:
    """A turned bit anywhere in the values, and a cut, are found."""
    data = bytearray((DATA / "v1" / "bert_model.ckpt").read_bytes())
    data[9000] ^= 1
    (tmp_path / "model.ckpt").write_bytes(data)
    with pytest.raises(ModelError, match=r"model\.ckpt: damaged, .* wrong checksum of the block at"):
        CheckpointV1(tmp_path / "model.ckpt")
    (tmp_path / "cut").write_bytes(bytes(data[:9000]))
    with pytest.raises(ModelError, match="neither in the V2 format"):
        read_tensorflow(tmp_path / "cut")


def test_a_size_that_only_the_index_promises(release: Path) -> None:
    """A tensor of 10^12 words, said by config and index alike, is refused before any is taken."""
    edit(vocab_size=10**12)(release)
    pairs = {key: bytes(value) for key, value in read_entries(release / INDEX)}
    shape = b"".join(encode_bytes_field(2, encode_varint_field(1, size)) for size in (10**12, 6))
    size = 4 * 6 * 10**12
    words = encode_varint_field(1, 1) + encode_bytes_field(2, shape) + encode_varint_field(5, size)
    pairs[b"bert/embeddings/word_embeddings"] = words
    (release / INDEX).write_bytes(encode_table(sorted(pairs.items())))
    with pytest.raises(ModelError, match=r"truncated: .*word_embeddings' ends at byte 24,000,"):
        read_tensorflow(release)


def test_a_table_that_reads_one_block_again_and_again(tmp_path: Path) -> None:
    """An index of ten thousand entries that all name the same block is refused at the second."""
    file = bytearray()
    handle = _append_block(file, [(b"a", b"1")])
    index = _append_block(file, [(b"%05d" % number, handle) for number in range(10_000)])
    file += (handle + index).ljust(FOOTER - 8, b"\0") + encode_table([])[-8:]
    (tmp_path / "table").write_bytes(file)
    with pytest.raises(ModelError, match="overlaps the one before"):
        list(read_entries(tmp_path / "table"))


def test_a_shard_is_found_beside_its_index_only(tmp_path: Path) -> None:
    """A lying number of shards cannot lead out of the folder, nor a negative size into memory."""
    header = encode_varint_field(1, 2**63 + 5)
    entry = (
        encode_varint_field(1, 1)
        + encode_varint_field(3, 2**64 - 1)
        + encode_varint_field(5, 2**64 - 4)
    )
    (tmp_path / "x.index").write_bytes(encode_table([(b"", header), (b"bert/x", entry)]))
    with pytest.raises(ModelError, match="no such file, but tensor 'bert/x' is stored in it"):
        CheckpointV2(tmp_path / "x.index").read("bert/x")


def faults_of(path: Path) -> list[str]:
    """Return what is said against a checkpoint, as a whole or against its tensors."""
    faults = []
    try:
        opened = CheckpointV2(path) if path.suffix == ".index" else CheckpointV1(path)
    except ModelError as error:
        return [str(error)]
    for name in opened.shapes:
        try:
            opened.check_data([name])
            opened.read(name)
        except ModelError as error:
            faults.append(str(error))
    return faults


@given(st.data())
def test_no_index_makes_anything_but_a_model_error(data: st.DataObject) -> None:
    """Entries with any bytes changed, under right checksums, are read or are a ModelError."""
    form = data.draw(st.sampled_from(["parts", "object", "types", "v1"]))
    with TemporaryDirectory() as folder:
        for file in (DATA / form).iterdir():
            shutil.copy(file, folder)
        names = {"object": "bert_model.ckpt-1.index", "v1": "bert_model.ckpt"}
        path = Path(folder) / names.get(form, INDEX)
        pairs = [(key, bytearray(value)) for key, value in read_entries(path)]
        for _ in range(data.draw(st.integers(1, 4))):
            value = pairs[data.draw(st.integers(0, len(pairs) - 1))][1]
            if value:
                value[data.draw(st.integers(0, len(value) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(encode_table([(key, bytes(value)) for key, value in pairs]))
        assert all(folder in fault for fault in faults_of(path))


def test_a_varint_ends() -> None:
    """Numbers of any size come back; one without an end is refused."""
    for number in (0, 1, 127, 128, 2**32, 2**64 - 1):
        assert read_varint(memoryview(encode_varint(number)), 0) == (
            number,
            len(encode_varint(number)),
        )
    with pytest.raises(ValueError, match="unterminated varint"):
        read_varint(memoryview(b"\xff" * 11), 0)
