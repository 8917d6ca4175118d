"""Files from hostile hands: refused within a second, nothing run, no memory by promise alone."""

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
from tests.interop.transformers_models import make_transformers_model, write_model_directory
from tests.model.examples import make_tokenizer, prime_config, randomize_weights

#: Bytes of address space that a refusal may take beyond what the process has. A promise of 10^12
#: would need a thousand times as many.
ROOM = 2 * 2**30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model directory of ours."""
    saved = randomize_weights(BertForPreTraining(prime_config()))
    bundle.save(tmp_path / "m", saved, make_tokenizer(101), {})
    return tmp_path / "m"


@pytest.fixture
def narrow() -> Iterator[None]:
    """Leave the process little more memory than it has, so that a large promise fails at once."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * os.sysconf("SC_PAGE_SIZE") + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refused(directory: Path, match: str, kind: type[BertsmithError] = ModelError) -> None:
    """Check that a directory is refused, quickly, as a pre-trained model and as a start."""
    for read in (
        bundle.load,
        lambda path: bundle.load_for_fine_tuning(path, HeadConfig("single", ("a", "b"))),
    ):
        began = time.process_time()
        with pytest.raises(kind, match=match):
            read(directory)
        assert time.process_time() - began < 1


def weights(directory: Path) -> Path:
    """Return the path of the weights."""
    return directory / "model.safetensors"


def header(directory: Path, how: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of the weights; their bytes stay."""
    raw = weights(directory).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    table = json.loads(raw[8 : 8 + size])
    how(table)
    new = json.dumps(table).encode()
    weights(directory).write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + size :])


WORDS = "bert.embeddings.word_embeddings.weight"


def lie_about_length(directory: Path) -> None:
    """Promise a header of 2^60 bytes."""
    weights(directory).write_bytes(struct.pack("<Q", 2**60) + weights(directory).read_bytes()[8:])


def lie_about_shape(table: dict[str, Any]) -> None:
    """Promise a tensor of 10^12 rows where there are bytes for 101."""
    table[WORDS]["shape"] = [10**12, 21]


def reach_beyond(table: dict[str, Any]) -> None:
    """Let a tensor end far beyond the file."""
    table[WORDS] |= {"shape": [10**12], "data_offsets": [0, 4 * 10**12]}


def overlap(table: dict[str, Any]) -> None:
    """Let two tensors have the same bytes."""
    first, second = "bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.bias"
    table[first]["data_offsets"] = table[second]["data_offsets"]


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    "lie",
    [
        lie_about_length,
        lambda d: header(d, lambda table: table.update(x="y" * 9 * 2**20)),
        lambda d: header(d, lie_about_shape),
        lambda d: header(d, reach_beyond),
        lambda d: header(d, overlap),
        lambda d: weights(d).write_bytes(weights(d).read_bytes()[:-1]),
        lambda d: weights(d).write_bytes(weights(d).read_bytes()[:100]),
        lambda d: weights(d).write_bytes(b""),
        lambda d: weights(d).write_bytes(b"\xff" * 1000),
    ],
    ids=["length", "long", "shape", "beyond", "overlap", "short", "header cut", "empty", "noise"],
)
def test_a_lying_header_is_refused(lie: Callable[[Path], object], model: Path) -> None:
    """The header of safetensors is compared with the file before anything is allocated."""
    lie(model)
    refused(model, r"model\.safetensors: not a readable safetensors file")


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("key", "match"),
    [
        ("hidden_size", r"has shape \(101, 21\); config\.json requires \(101, 3000000000000\)"),
        ("intermediate_size", r"has shape \(37, 21\)"),
        ("vocab_size", r"set vocab_size to 101"),
        ("max_position_embeddings", r"position_embeddings\.weight has shape"),
        ("type_vocab_size", r"token_type_embeddings\.weight has shape"),
        ("num_hidden_layers", r"'bert\.encoder\.layer\.2\.attention"),
    ],
)
def test_sizes_of_a_config_are_compared_first(key: str, match: str, model: Path) -> None:
    """A size of 3 * 10^12 builds no model: the file's own tensors say otherwise."""
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: 3 * 10**12}))
    refused(model, match)


@pytest.mark.usefixtures("narrow")
def test_a_promised_lstm_is_not_built(tmp_path: Path) -> None:
    """The width of a BiLSTM, which bertsmith.json says, is compared with the weights too."""
    head = HeadConfig("single", ("a", "b"))
    made = head.build_model(prime_config())
    bundle.save_fine_tuned(tmp_path, made, make_tokenizer(101), head, {})
    for width in (10**6, 10**12):
        said = {"features": {"layers": "last", "width": width}}
        (tmp_path / "bertsmith.json").write_text(json.dumps(said))
        with pytest.raises(ModelError, match=r"lstm|impossible model size"):
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
def test_other_kinds_of_numbers_are_refused(
    dtype: torch.dtype, name: str, model: Path, tmp_path: Path
) -> None:
    """What is no float of 16 or 32 bits is named; in an old checkpoint as well."""
    gone = "bert.encoder.layer.1.output.dense.bias"
    state = load_file(weights(model))
    state[gone] = state[gone].to(dtype)
    save_file(state, weights(model))
    refused(model, rf"{gone} is in {name}; expected bfloat16, float16, float32")
    weights(model).unlink()
    torch.save(state, model / "pytorch_model.bin")
    refused(model, rf"{gone} is in {str(dtype).removeprefix('torch.')}|imports")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_16_bits_are_widened(dtype: torch.dtype, form: str, model: Path) -> None:
    """float16 and bfloat16 become float32, bit for bit, from either form."""
    state = {name: value.to(dtype) for name, value in load_file(weights(model)).items()}
    if form == "bin":
        weights(model).unlink()
        torch.save(state, model / "pytorch_model.bin")
    else:
        save_file(state, weights(model))
    words = bundle.load(model).model.bert.embeddings.words.weight
    assert words.dtype == torch.float32
    assert torch.equal(words, state[WORDS].float())


class Evil:
    """What runs a program when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


class Bytes:
    """What takes memory when it is unpickled, by a function that PyTorch's own reader allows."""

    def __reduce__(self) -> tuple[Any, tuple[int]]:
        return bytearray, (3 * 10**12,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_with_code_is_refused_unread(zipped: bool, model: Path, tmp_path: Path) -> None:
    """Nothing of it runs; the message names what it asked for."""
    weights(model).unlink()
    mark, path = tmp_path / "mark", model / "pytorch_model.bin"
    torch.save({"a": Evil(mark)}, path, _use_new_zipfile_serialization=zipped)
    refused(model, r"imports posix\.system, which no weights need; rejected without executing it")
    assert not mark.exists()
    torch.save({"a": Evil(mark)}, path, pickle_protocol=4, _use_new_zipfile_serialization=zipped)
    refused(model, r"its pickle has protocol 4|expected a zip file or the legacy")
    assert not mark.exists()
    path.write_bytes(pickle.dumps(Evil(mark)))
    refused(model, "not a PyTorch checkpoint")
    assert not mark.exists()


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("zipped", [True, False])
def test_promises_of_a_pickle_take_no_memory(zipped: bool, model: Path) -> None:
    """A storage of 10^12 numbers, a tensor stretched out of one number, and a long bytearray."""
    weights(model).unlink()
    path = model / "pytorch_model.bin"

    def save(value: Any) -> None:
        torch.save(value, path, _use_new_zipfile_serialization=zipped)

    save({"a": Bytes()})
    refused(model, r"imports .*bytearray")
    state = make_transformers_model("BertForMaskedLM").state_dict()
    state[WORDS] = torch.zeros(1).expand(10**12, 21)
    save(state)
    refused(model, "would need more than the file's")
    state[WORDS] = torch.zeros(1).expand(101, 21)
    save(state)
    refused(model, f"{WORDS} is larger than its data in the file")
    shared = torch.zeros(101, 21)
    save({f"bert.{number}": shared.view(101 * 21)[number:] for number in range(50)})
    refused(model, r"the tensors are larger than the file|would need more")


def storage_of(number: int) -> bytes:
    """Return the pickle of a tensor whose storage promises so many floats."""
    stream, storage = io.BytesIO(), object()

    class Writer(pickle.Pickler):
        """Puts a promise in the place of a storage."""

        def persistent_id(self, value: Any) -> Any:
            """Name the storage as PyTorch does."""
            if value is storage:
                return ("storage", torch.FloatStorage, "0", "cpu", number)
            return None

    class Tensor:
        """What unpickles as a tensor."""

        def __reduce__(self) -> Any:
            rebuild = torch._utils._rebuild_tensor_v2
            return rebuild, (storage, 0, (2,), (1,), False, OrderedDict())

    Writer(stream, protocol=2).dump({"a": Tensor()})
    return stream.getvalue()


@pytest.mark.usefixtures("narrow")
def test_a_storage_beyond_its_file_is_refused(model: Path) -> None:
    """A record of a few bytes that promises 3 * 10^12 floats, and one that promises too few."""
    weights(model).unlink()
    for number in (3 * 10**12, 300):
        with zipfile.ZipFile(model / "pytorch_model.bin", "w") as archive:
            archive.writestr("archive/data.pkl", storage_of(number))
            archive.writestr("archive/version", "3\n")
            archive.writestr("archive/data/0", b"\0" * 8)
        refused(model, r"need more than the file's|not a readable checkpoint|larger than|missing")


@pytest.mark.usefixtures("narrow")
def test_a_zip_bomb_is_refused(model: Path) -> None:
    """A packed member is refused before it is unpacked: here 128 MB in a few hundred KB."""
    weights(model).unlink()
    path = model / "pytorch_model.bin"
    torch.save(make_transformers_model("BertForMaskedLM").state_dict(), path)
    with zipfile.ZipFile(path) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        with archive.open("archive/data/999", "w", force_zip64=True) as member:
            for _ in range(8):
                member.write(bytes(2**24))
    assert path.stat().st_size < 2**20
    refused(model, "a compressed checkpoint, which may unpack to any size")


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..", "x.bin", 7, None]
)
def test_an_index_names_files_beside_it_only(name: Any, tmp_path: Path) -> None:
    """A path that climbs out, an absolute one, a folder, another kind of file: none is opened."""
    write_model_directory(
        make_transformers_model("BertForMaskedLM"), tmp_path / "a" / "b", "sharded"
    )
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "x.safetensors")
    index = tmp_path / "a" / "b" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"][WORDS] = name
    index.write_text(json.dumps(table))
    refused(tmp_path / "a" / "b", r"is not the name of a \.safetensors file in the same folder")


def test_an_index_must_keep_its_word(tmp_path: Path) -> None:
    """A shard that is missing, a tensor that is not where the index says, and no index at all."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path, "sharded")
    index = tmp_path / "model.safetensors.index.json"
    before = json.loads(index.read_text())
    shards = sorted(set(before["weight_map"].values()))
    other = next(name for name in shards if name != before["weight_map"][WORDS])
    index.write_text(json.dumps({"weight_map": before["weight_map"] | {WORDS: other}}))
    refused(tmp_path, rf"the tensor '{WORDS}' is missing from {other}")
    gone = {"weight_map": before["weight_map"] | {WORDS: "gone.safetensors"}}
    index.write_text(json.dumps(gone))
    refused(tmp_path, "the shard gone.safetensors is missing; download it again")
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{", "[" * 100_000):
        index.write_text(text)
        refused(tmp_path, r"weight_map is missing|not readable as JSON|expected a JSON object")


def tokenizer_json(directory: Path, **changes: Any) -> None:
    """Change the model of a tokenizer.json."""
    path = directory / "tokenizer.json"
    table = json.loads(path.read_text())
    table["model"] |= changes
    path.write_text(json.dumps(table))


@pytest.mark.usefixtures("narrow")
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
def test_a_tokenizer_of_another_kind_is_refused(
    changes: dict[str, Any], match: str, model: Path
) -> None:
    """BPE and Unigram are named; ids that are no ids are refused before any list is made."""
    tokenizer_json(model, **changes)
    refused(model, match, TokenizerError)


def test_a_repeated_word_renumbers_nothing(tmp_path: Path) -> None:
    """A line that stands twice in vocab.txt leaves every other word its own line's id."""
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path)
    words = list(make_tokenizer(101).vocab)
    words[40] = words[7]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    tokenizer = bundle.load(tmp_path).tokenizer
    assert tokenizer.vocab_size == 101
    for index in (5, 39, 41, 100):
        assert tokenizer.encode(words[index]) == [index]


def test_a_tokenizer_of_another_model_is_refused(model: Path) -> None:
    """More words than word embeddings cannot be this model's."""
    make_tokenizer(103).save(model)
    refused(model, "the tokenizer has 103 tokens, but the model only 101")
