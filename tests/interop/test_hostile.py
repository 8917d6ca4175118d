"""Malicious model files are rejected quickly, without running code or allocating much memory."""

import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith import bundle
from bertsmith.bundle import HeadConfig
from bertsmith.errors import BertsmithError, ModelError, TokenizerError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS
from tests.interop.transformers_models import make_transformers_model, write_model_directory
from tests.model.examples import (
    VOCAB_SIZE,
    WIDTH,
    make_prime_size_config,
    make_tokenizer,
    randomize_weights,
)

#: Additional address space that a test may use, in bytes. Tensors with 10^12 values, as in the
#: tests, need a thousand times as much.
EXTRA_MEMORY_BYTES = 2 * 2**30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a valid model directory, which tests can damage."""
    saved = randomize_weights(BertForPreTraining(make_prime_size_config()))
    bundle.save(tmp_path / "m", saved, make_tokenizer(), {})
    return tmp_path / "m"


@pytest.fixture
def limit_memory() -> Iterator[None]:
    """Limit the address space, so that large allocations fail immediately."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    original = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * os.sysconf("SC_PAGE_SIZE") + EXTRA_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, original[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, original)


def assert_rejected(
    directory: Path, match: str, error_type: type[BertsmithError] = ModelError
) -> None:
    """Assert that ``load`` and ``load_for_fine_tuning`` fail within a second of CPU time.

    Args:
        directory: The model directory.
        match: Pattern of the error message.
        error_type: Type of the error.
    """
    for load in (
        bundle.load,
        lambda path: bundle.load_for_fine_tuning(path, HeadConfig("single", ("a", "b"))),
    ):
        start = time.process_time()
        with pytest.raises(error_type, match=match):
            load(directory)
        assert time.process_time() - start < 1


def get_weights_path(directory: Path) -> Path:
    """Return the path of the weights in a model directory."""
    return directory / "model.safetensors"


def change_header(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of the safetensors file in a model directory, but not the tensor data."""
    path = get_weights_path(directory)
    content = path.read_bytes()
    # The first eight bytes are the size of the header.
    (header_size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + header_size])
    change(header)
    new_header = json.dumps(header).encode()
    data = content[8 + header_size :]
    path.write_bytes(struct.pack("<Q", len(new_header)) + new_header + data)


WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"


def inflate_header_length(directory: Path) -> None:
    """Make the safetensors file declare a header of 2^60 bytes."""
    get_weights_path(directory).write_bytes(
        struct.pack("<Q", 2**60) + get_weights_path(directory).read_bytes()[8:]
    )


def inflate_shape(header: dict[str, Any]) -> None:
    """Declare 10^12 rows for the word embeddings."""
    header[WORD_EMBEDDINGS]["shape"] = [10**12, WIDTH]


def extend_beyond_file(header: dict[str, Any]) -> None:
    """Declare a tensor that ends far beyond the end of the file."""
    header[WORD_EMBEDDINGS] |= {"shape": [10**12], "data_offsets": [0, 4 * 10**12]}


def overlap_tensors(header: dict[str, Any]) -> None:
    """Declare the same bytes of the file for two tensors."""
    first, second = "bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.bias"
    header[first]["data_offsets"] = header[second]["data_offsets"]


@pytest.mark.usefixtures("limit_memory")
@pytest.mark.parametrize(
    "damage",
    [
        inflate_header_length,
        # Headers have at most 8 MiB.
        lambda d: change_header(d, lambda header: header.update(x="y" * 9 * 2**20)),
        lambda d: change_header(d, inflate_shape),
        lambda d: change_header(d, extend_beyond_file),
        lambda d: change_header(d, overlap_tensors),
        lambda d: get_weights_path(d).write_bytes(get_weights_path(d).read_bytes()[:-1]),
        lambda d: get_weights_path(d).write_bytes(get_weights_path(d).read_bytes()[:100]),
        lambda d: get_weights_path(d).write_bytes(b""),
        lambda d: get_weights_path(d).write_bytes(b"\xff" * 1000),
    ],
    ids=["length", "long", "shape", "beyond", "overlap", "short", "header cut", "empty", "noise"],
)
def test_invalid_header_is_rejected(damage: Callable[[Path], object], model: Path) -> None:
    """A header that does not match the file is an error, and no memory is allocated for it."""
    damage(model)
    assert_rejected(model, r"model\.safetensors: not a readable safetensors file")


@pytest.mark.usefixtures("limit_memory")
@pytest.mark.parametrize(
    ("key", "match"),
    [
        ("hidden_size", r"has shape \(101, 21\); config\.json .* \(101, 3000000000000\)"),
        ("intermediate_size", r"has shape \(37, 21\)"),
        ("vocab_size", r"vocab_size .*101"),
        ("max_position_embeddings", r"position_embeddings\.weight has shape"),
        ("type_vocab_size", r"token_type_embeddings\.weight has shape"),
        ("num_hidden_layers", r"'bert\.encoder\.layer\.2\.attention"),
    ],
)
def test_config_sizes_are_checked_before_allocation(key: str, match: str, model: Path) -> None:
    """A size of 3 * 10^12 in config.json is an error, and no memory is allocated for it."""
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 3 * 10**12}))
    assert_rejected(model, match)


@pytest.mark.usefixtures("limit_memory")
def test_number_of_labels_is_checked_before_allocation(tmp_path: Path) -> None:
    """3 * 10^12 labels in config.json are an error, and no memory is allocated for them."""
    head = HeadConfig("single", ("a", "b"))
    classifier = head.build_model(make_prime_size_config())
    bundle.save_fine_tuned(tmp_path, classifier, make_tokenizer(), head, {})
    path = tmp_path / "config.json"
    changes = {"id2label": None, "num_labels": 3 * 10**12}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match="num_labels is 3,000,000,000,000, but the maximum is"):
        bundle.load_fine_tuned(tmp_path)


@pytest.mark.usefixtures("limit_memory")
def test_lstm_width_is_checked_before_allocation(tmp_path: Path) -> None:
    """A BiLSTM width of 10^12 in bertsmith.json is an error, and no memory is allocated for it."""
    head = HeadConfig("single", ("a", "b"))
    classifier = head.build_model(make_prime_size_config())
    bundle.save_fine_tuned(tmp_path, classifier, make_tokenizer(), head, {})
    for width in (10**6, 10**12):
        info = {"features": {"layers": "last", "width": width}}
        (tmp_path / "bertsmith.json").write_text(json.dumps(info))
        with pytest.raises(ModelError, match=r"lstm|a size that PyTorch cannot allocate"):
            bundle.load_fine_tuned(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.int64, "I64"),
        (torch.int8, "I8"),
        (torch.float64, "F64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
        (torch.bool, "BOOL"),
    ],
)
def test_other_dtypes_are_rejected(
    dtype: torch.dtype, name: str, model: Path, tmp_path: Path
) -> None:
    """Dtypes other than 16-bit and 32-bit floats are errors, in safetensors and pickled files."""
    tensor_name = "bert.encoder.layer.1.output.dense.bias"
    state = load_file(get_weights_path(model))
    state[tensor_name] = state[tensor_name].to(dtype)
    save_file(state, get_weights_path(model))
    assert_rejected(model, rf"{tensor_name} has the dtype {name}; convert it to one of bfloat16")
    get_weights_path(model).unlink()
    torch.save(state, model / "pytorch_model.bin")
    assert_rejected(
        model, rf"{tensor_name} has the dtype {str(dtype).removeprefix('torch.')}|imports"
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_16_bit_weights_become_float32(dtype: torch.dtype, form: str, model: Path) -> None:
    """float16 and bfloat16 are converted exactly, in safetensors and pickled files."""
    state = {name: value.to(dtype) for name, value in load_file(get_weights_path(model)).items()}
    if form == "bin":
        get_weights_path(model).unlink()
        torch.save(state, model / "pytorch_model.bin")
    else:
        save_file(state, get_weights_path(model))
    words = bundle.load(model).model.bert.embeddings.words.weight
    assert words.dtype == torch.float32
    assert torch.equal(words, state[WORD_EMBEDDINGS].float())


class RunsCommand:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


class AllocatesMemory:
    """An object that allocates memory when it is unpickled, with a function that torch allows."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return bytearray, (3 * 10**12,)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_with_code_is_rejected(zipped: bool, model: Path, tmp_path: Path) -> None:
    """Code in a pickle is not executed, and the error contains the name of its function."""
    get_weights_path(model).unlink()
    marker = tmp_path / "mark"
    path = model / "pytorch_model.bin"
    torch.save({"a": RunsCommand(marker)}, path, _use_new_zipfile_serialization=zipped)
    assert_rejected(model, r"posix\.system, which no weights need")
    assert not marker.exists()
    torch.save(
        {"a": RunsCommand(marker)}, path, pickle_protocol=4, _use_new_zipfile_serialization=zipped
    )
    assert_rejected(model, r"the pickle in this file has protocol 4|expected a zip file")
    assert not marker.exists()
    path.write_bytes(pickle.dumps(RunsCommand(marker)))
    assert_rejected(model, "not a .*checkpoint")
    assert not marker.exists()


@pytest.mark.usefixtures("limit_memory")
@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_with_huge_tensors_is_rejected(zipped: bool, model: Path) -> None:
    """A huge bytearray, expanded tensors and overlapping tensors are errors."""
    get_weights_path(model).unlink()
    path = model / "pytorch_model.bin"

    def save(value: Any) -> None:
        torch.save(value, path, _use_new_zipfile_serialization=zipped)

    save({"a": AllocatesMemory()})
    assert_rejected(model, r"bytearray")
    state = make_transformers_model("BertForMaskedLM").state_dict()
    state[WORD_EMBEDDINGS] = torch.zeros(1).expand(10**12, WIDTH)
    save(state)
    assert_rejected(model, "the tensors in this file need more than")
    state[WORD_EMBEDDINGS] = torch.zeros(1).expand(VOCAB_SIZE, WIDTH)
    save(state)
    assert_rejected(model, f"{WORD_EMBEDDINGS} is larger than")
    shared = torch.zeros(VOCAB_SIZE * WIDTH)
    save({f"bert.{offset}": shared[offset:] for offset in range(50)})
    assert_rejected(
        model, r"the tensors are larger than the file|the tensors in this file need more than"
    )


def pickle_tensor(num_elements: int) -> bytes:
    """Return the pickle of a tensor whose storage declares ``num_elements`` floats."""
    stream = io.BytesIO()
    storage = object()

    class StoragePickler(pickle.Pickler):
        """Pickles a storage with a declared size."""

        def persistent_id(self, value: Any) -> Any:
            """Return the persistent id that torch.save writes for a storage."""
            if value is storage:
                return ("storage", torch.FloatStorage, "0", "cpu", num_elements)
            return None

    class PickledTensor:
        """An object whose pickle is that of a tensor."""

        def __reduce__(self) -> Any:
            rebuild = torch._utils._rebuild_tensor_v2
            return rebuild, (storage, 0, (2,), (1,), False, OrderedDict())

    StoragePickler(stream, protocol=2).dump({"a": PickledTensor()})
    return stream.getvalue()


@pytest.mark.usefixtures("limit_memory")
def test_storage_of_wrong_size_is_rejected(model: Path) -> None:
    """A pickled tensor that declares more values than the file contains is an error."""
    get_weights_path(model).unlink()
    for num_elements in (3 * 10**12, 300):
        with zipfile.ZipFile(model / "pytorch_model.bin", "w") as archive:
            archive.writestr("archive/data.pkl", pickle_tensor(num_elements))
            archive.writestr("archive/version", "3\n")
            archive.writestr("archive/data/0", b"\0" * 8)
        assert_rejected(model, r"need more than its|not a readable checkpoint|larger than|missing")


@pytest.mark.usefixtures("limit_memory")
def test_zip_bomb_is_rejected(model: Path) -> None:
    """A compressed checkpoint of less than 1 MB that unpacks to 128 MB is an error."""
    get_weights_path(model).unlink()
    path = model / "pytorch_model.bin"
    torch.save(make_transformers_model("BertForMaskedLM").state_dict(), path)
    with zipfile.ZipFile(path) as archive:
        members = {member_name: archive.read(member_name) for member_name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        with archive.open("archive/data/999", "w", force_zip64=True) as member:
            for _ in range(8):
                member.write(bytes(2**24))
    assert path.stat().st_size < 2**20
    assert_rejected(model, "is compressed and may unpack to any size")


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..", "x.bin", 7, None]
)
def test_index_cannot_name_files_elsewhere(name: Any, tmp_path: Path) -> None:
    """Paths outside the folder and other file types are not opened."""
    write_model_directory(
        make_transformers_model("BertForMaskedLM"), tmp_path / "a" / "b", "sharded"
    )
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = tmp_path / "a" / "b" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"][WORD_EMBEDDINGS] = name
    index.write_text(json.dumps(table))
    assert_rejected(tmp_path / "a" / "b", r"is not the name of a \.safetensors file")


def test_inconsistent_index_is_rejected(tmp_path: Path) -> None:
    """Missing shards, tensors in another shard and unreadable indexes are errors."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path, "sharded")
    index = tmp_path / "model.safetensors.index.json"
    original = json.loads(index.read_text())
    shards = sorted(set(original["weight_map"].values()))
    other = next(name for name in shards if name != original["weight_map"][WORD_EMBEDDINGS])
    index.write_text(json.dumps({"weight_map": original["weight_map"] | {WORD_EMBEDDINGS: other}}))
    assert_rejected(tmp_path, rf"the tensor '{WORD_EMBEDDINGS}' is missing from {other}")
    missing_shard = {"weight_map": original["weight_map"] | {WORD_EMBEDDINGS: "gone.safetensors"}}
    index.write_text(json.dumps(missing_shard))
    assert_rejected(tmp_path, r"gone\.safetensors.* is missing")
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{", "[" * 100_000):
        index.write_text(text)
        assert_rejected(tmp_path, r"weight_map|not readable as JSON|expected a JSON object")


def change_tokenizer_json(directory: Path, **changes: Any) -> None:
    """Change the model section of tokenizer.json."""
    path = directory / "tokenizer.json"
    table = json.loads(path.read_text())
    table["model"] |= changes
    path.write_text(json.dumps(table))


@pytest.mark.usefixtures("limit_memory")
@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"type": "BPE", "merges": []}, "found a BPE tokenizer; expected WordPiece"),
        ({"type": "Unigram", "vocab": [["a", 0.0]]}, "found a Unigram tokenizer"),
        ({"type": "WordLevel"}, "found a WordLevel tokenizer"),
        ({"vocab": {"[PAD]": 3 * 10**12}}, "an id is 3,000,000,000,000, but there are only 1 wor"),
        ({"vocab": {"[PAD]": -1}}, "has the id -1"),
        ({"vocab": {"[PAD]": "0"}}, "has the id '0'"),
        ({"vocab": {"[PAD]": 0, "[UNK]": 0}}, "two words have the same id"),
        ({"vocab": ["[PAD]"]}, "expected an object"),
        ({"max_input_chars_per_word": "x"}, "max_input_chars_per_word is 'x'"),
        ({"vocab": {"\ud800": 0}}, "cannot be encoded as UTF-8"),
    ],
)
def test_invalid_tokenizers_are_rejected(changes: dict[str, Any], match: str, model: Path) -> None:
    """Errors name unsupported tokenizer types; invalid ids fail before memory is allocated."""
    change_tokenizer_json(model, **changes)
    assert_rejected(model, match, TokenizerError)


def test_repeated_word_keeps_other_ids(tmp_path: Path) -> None:
    """A repeated line in vocab.txt does not change the ids of other tokens."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    words = list(make_tokenizer().vocab)
    words[40] = words[7]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    tokenizer = bundle.load(tmp_path).tokenizer
    assert tokenizer.vocab_size == VOCAB_SIZE
    # The tokens before and after the repeated line, and the first and last words.
    for index in (39, 41, len(SPECIAL_TOKENS), VOCAB_SIZE - 1):
        assert tokenizer.encode(words[index]) == [index]


def test_tokenizer_with_too_many_words_is_rejected(model: Path) -> None:
    """A vocabulary with more tokens than word embeddings is an error."""
    make_tokenizer(VOCAB_SIZE + 2).save(model)
    assert_rejected(
        model, rf"the tokenizer has {VOCAB_SIZE + 2} tokens, but the model only {VOCAB_SIZE}"
    )
