"""Randomly changed model files either load or raise a BertsmithError, never another exception."""

import contextlib
import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bertsmith import bundle
from bertsmith.bundle import HeadConfig
from bertsmith.errors import BertsmithError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.text.wordpiece import Tokenizer
from tests.interop.transformers_models import make_transformers_model, write_model_directory
from tests.model.examples import make_prime_size_config, make_tokenizer, randomize_weights

#: Values that replace other values in JSON files.
JSON_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 200),
    st.sampled_from([10**12, -(10**12), 2**63, 2**64, 10**40]),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["\ud800", "gelu", "BertForMaskedLM", "../../x", "WordPiece", "BPE"]),
    st.just([]),
    st.just({}),
    st.lists(st.one_of(st.integers(), st.text(max_size=3), st.none()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.text(max_size=3)), max_size=3),
)
FUZZ_SETTINGS = settings(
    max_examples=25,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def list_paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of the values in nested JSON: the keys that lead to each value.

    In long objects and arrays, only the first 12 and the last 3 values are listed.
    """
    paths = [path]
    keys: list[Any] = []
    if isinstance(value, dict):
        keys = list(value)
    elif isinstance(value, list):
        keys = list(range(len(value)))
    for key in keys[:12] + keys[-3:]:
        paths += list_paths(value[key], (*path, key))
    return paths


def mutate_json(data: st.DataObject, value: Any) -> Any:
    """Return a copy of a JSON value with one to three values changed, removed or renamed."""
    value = json.loads(json.dumps(value))
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list_paths(value)))
        if not path:
            continue
        parent = value
        for key in path[:-1]:
            parent = parent[key]
        change = data.draw(st.sampled_from(["change", "change", "remove", "rename"]))
        if change == "change":
            parent[path[-1]] = data.draw(JSON_VALUES)
        elif change == "remove":
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[data.draw(st.text(max_size=6))] = parent.pop(path[-1])
    return value


def mutate_bytes(data: st.DataObject, content: bytes) -> bytes:
    """Return a copy of ``content``, possibly truncated, with one to four changed bytes."""
    result = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        result[data.draw(st.integers(0, len(result) - 1))] = data.draw(st.integers(0, 255))
    return bytes(result[: data.draw(st.sampled_from([len(result), len(result) // 2, 3]))])


#: Functions that load a model directory, by name.
LOADERS: dict[str, Callable[[Path], Any]] = {
    "load": bundle.load,
    "load_task": bundle.load_fine_tuned,
    "start_task": lambda path: bundle.load_for_fine_tuning(path, HeadConfig("regression")),
}


def load_with_random_loader(data: st.DataObject, directory: Path) -> None:
    """Load a directory with a random loader; an error must be a BertsmithError with a message."""
    load = LOADERS[data.draw(st.sampled_from(sorted(LOADERS)))]
    try:
        load(directory)
    except BertsmithError as error:
        assert str(error).strip()  # noqa: PT017 - both outcomes are valid


@pytest.fixture(scope="module")
def valid_directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with valid model directories.

    The models are pre-trained, fine-tuned, sharded, and in the current and old pickle formats.
    """
    root = tmp_path_factory.mktemp("valid")
    bundle.save(
        root / "plain",
        randomize_weights(BertForPreTraining(make_prime_size_config())),
        make_tokenizer(),
        {},
    )
    head = HeadConfig("single", ("a", "b"))
    bundle.save_fine_tuned(
        root / "task", head.build_model(make_prime_size_config()), make_tokenizer(), head, {}
    )
    write_model_directory(make_transformers_model("BertForMaskedLM"), root / "sharded", "sharded")
    write_model_directory(make_transformers_model("BertForMaskedLM"), root / "bin", "bin")
    write_model_directory(make_transformers_model("BertForMaskedLM"), root / "old", "old bin")
    return root


def copy_with_change(
    source: Path, target: Path, name: str, change: Callable[[bytes], bytes]
) -> Path:
    """Copy a directory and change the file ``name``; return the copy.

    The other files in the copy are symbolic links.
    """
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in source.iterdir():
        if file.name != name:
            (target / file.name).symlink_to(file)
    (target / name).write_bytes(change((source / name).read_bytes()))
    return target


def make_json_mutator(data: st.DataObject) -> Callable[[bytes], bytes]:
    """Return a function that mutates a JSON file."""
    return lambda content: json.dumps(mutate_json(data, json.loads(content))).encode()


def make_header_mutator(data: st.DataObject) -> Callable[[bytes], bytes]:
    """Return a function that mutates the header of a safetensors file."""

    def change(content: bytes) -> bytes:
        # The first eight bytes are the size of the header.
        (header_size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + header_size])
        new_header = json.dumps(mutate_json(data, header)).encode()
        return struct.pack("<Q", len(new_header)) + new_header + content[8 + header_size :]

    return change


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("plain", "config.json"),
        ("plain", "bertsmith.json"),
        ("task", "config.json"),
        ("task", "bertsmith.json"),
        ("sharded", "model.safetensors.index.json"),
        ("plain", "tokenizer.json"),
    ],
)
@FUZZ_SETTINGS
@given(data=st.data())
def test_mutated_json_raises_only_bertsmith_errors(
    directory: str, name: str, valid_directories: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Model directories with a mutated JSON file load or raise a BertsmithError."""
    mutated = copy_with_change(
        valid_directories / directory, tmp_path / "m", name, make_json_mutator(data)
    )
    load_with_random_loader(data, mutated)


@pytest.mark.parametrize("name", ["id2label", "architectures", "hidden_act", "hidden_size"])
@FUZZ_SETTINGS
@given(value=JSON_VALUES)
def test_unexpected_config_values_raise_only_bertsmith_errors(
    name: str, valid_directories: Path, tmp_path: Path, value: Any
) -> None:
    """Models with any JSON value in a config key either load or raise a BertsmithError."""

    def change(content: bytes) -> bytes:
        return json.dumps(json.loads(content) | {name: value}).encode()

    with contextlib.suppress(BertsmithError):
        bundle.load_fine_tuned(
            copy_with_change(valid_directories / "task", tmp_path / "m", "config.json", change)
        )


@FUZZ_SETTINGS
@given(data=st.data())
def test_mutated_safetensors_header_raises_only_bertsmith_errors(
    valid_directories: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Model directories with a mutated safetensors header load or raise a BertsmithError."""
    mutated = copy_with_change(
        valid_directories / "plain", tmp_path / "m", "model.safetensors", make_header_mutator(data)
    )
    load_with_random_loader(data, mutated)


@pytest.mark.parametrize(
    ("directory", "name"),
    [
        ("plain", "config.json"),
        ("plain", "model.safetensors"),
        ("plain", "tokenizer.json"),
        ("sharded", "vocab.txt"),
        ("bin", "pytorch_model.bin"),
        ("old", "pytorch_model.bin"),
    ],
)
@FUZZ_SETTINGS
@given(data=st.data())
def test_mutated_bytes_raise_only_bertsmith_errors(
    directory: str, name: str, valid_directories: Path, tmp_path: Path, data: st.DataObject
) -> None:
    """Model directories with a changed or truncated file load or raise a BertsmithError."""

    def change(content: bytes) -> bytes:
        return mutate_bytes(data, content)

    mutated = copy_with_change(valid_directories / directory, tmp_path / "m", name, change)
    load_with_random_loader(data, mutated)


@FUZZ_SETTINGS
@given(data=st.data())
def test_mutated_vocabulary_raises_only_bertsmith_errors(
    tmp_path: Path, data: st.DataObject
) -> None:
    """Tokenizers with arbitrary vocab.txt lines and config values load or raise an error."""
    lines = list(make_tokenizer(40).vocab)
    for _ in range(data.draw(st.integers(1, 4))):
        line = data.draw(st.one_of(st.sampled_from(lines), st.text(max_size=4)))
        lines[data.draw(st.integers(0, len(lines) - 1))] = line
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    (tmp_path / "vocab.txt").write_bytes(text)
    config = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(mutate_json(data, config)))
    try:
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.encode("word3 [MASK]", allow_special=True)
    except BertsmithError as error:
        assert str(error).strip()  # noqa: PT017 - both outcomes are valid
