"""Downloads from and uploads to the Hugging Face Hub, with its client and a local server."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, constants
from safetensors.torch import load_file

from bertsmith import bundle
from bertsmith.bundle.directory import (
    download_from_hub,
    get_hub_id,
    get_model_name,
    is_hub_id,
    locate_model,
    pin_model_path,
)
from bertsmith.bundle.encoder import NO_POOLER_NOTE
from bertsmith.errors import InputError, ModelError, TokenizerError
from bertsmith.interop.huggingface import push_to_hub, write_huggingface
from bertsmith.interop.sentence_transformers import read_pooling
from bertsmith.model.bert import BertForPreTraining
from bertsmith.settings import read_toml
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.use.inspection.artifacts import identify_artifact
from tests.interop.fake_hub import FakeHub, RepoFiles, commit_hash, run_fake_hub
from tests.interop.transformers_models import make_transformers_model, write_model_directory
from tests.model.examples import make_prime_size_config, make_tokenizer, randomize_weights

REPO_ID = "acme/tiny-bert"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Start a fake hub, and allow the client in this process to go online."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with run_fake_hub() as hub:
        yield hub


def read_files(directory: Path) -> RepoFiles:
    """Return the contents of all files in a directory by their paths in it."""
    return {
        file.relative_to(directory).as_posix(): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }


def write_model(directory: Path, seed: int = 0) -> RepoFiles:
    """Write a random model directory and return its files."""
    model = randomize_weights(BertForPreTraining(make_prime_size_config()), seed)
    bundle.save(directory, model, make_tokenizer(), {})
    return read_files(directory)


def test_model_is_downloaded_by_id(hub: FakeHub, tmp_path: Path) -> None:
    """A model id may name a branch or a commit, and only the needed files are downloaded."""
    main_files = write_model(tmp_path / "m")
    branch_files = write_model(tmp_path / "n", seed=1)
    extra_files = {"tf_model.h5": b"0" * 100, "pytorch_model.bin": b"1" * 100, "picture.png": b"2"}
    hub.repos[REPO_ID] = {"main": main_files | extra_files, "next/one": branch_files}
    directory = download_from_hub(REPO_ID, endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert read_files(directory) == main_files
    assert directory.name == commit_hash(main_files | extra_files)
    assert get_hub_id(directory) == REPO_ID
    assert not bundle.load(directory).new_weights
    by_branch = download_from_hub(
        f"{REPO_ID}@next/one", endpoint=hub.url, cache_dir=tmp_path / "cache"
    )
    assert read_files(by_branch) == branch_files
    by_commit = download_from_hub(
        f"{REPO_ID}@{directory.name}", endpoint=hub.url, cache_dir=tmp_path / "cache"
    )
    assert by_commit == directory


def write_old_embedding_model(directory: Path, weight_format: str) -> RepoFiles:
    """Write a sentence-transformers directory with its BERT in 0_Transformer; return its files."""
    model = make_transformers_model("BertModel")
    write_model_directory(model, directory / "0_Transformer", weight_format)
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    modules = [
        {"path": folder, "type": f"sentence_transformers.models.{folder[2:]}"}
        for folder in ("0_Transformer", "1_Pooling")
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    return read_files(directory)


@pytest.mark.parametrize("weight_format", ["old bin", "sharded bin"])
def test_pytorch_weights_are_downloaded_without_safetensors(
    hub: FakeHub, tmp_path: Path, weight_format: str
) -> None:
    """Pickled weights, also sharded ones, are downloaded if there are no others, and load."""
    files = read_files(
        write_model_directory(
            make_transformers_model("BertForMaskedLM"), tmp_path / "m", weight_format
        )
    )
    hub.repos[REPO_ID] = {"main": files}
    directory = download_from_hub(REPO_ID, endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert read_files(directory) == files
    assert not bundle.load(directory).new_weights


@pytest.mark.parametrize("weight_format", ["sharded", "sharded bin"])
def test_model_in_its_own_folder_is_downloaded(
    hub: FakeHub, tmp_path: Path, weight_format: str
) -> None:
    """The BERT in the folder 0_Transformer of an older sentence-transformers model is found."""
    files = write_old_embedding_model(tmp_path / "m", weight_format)
    hub.repos[REPO_ID] = {"main": files | {"0_Transformer/tf_model.h5": b"0"}}
    directory = download_from_hub(REPO_ID, endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert directory.name == "0_Transformer"
    assert read_files(directory.parent) == files
    assert get_hub_id(directory) == get_model_name(directory) == REPO_ID
    assert get_model_name(tmp_path / "m" / "0_Transformer") == "m"
    pooling = read_pooling(directory)
    assert pooling is not None
    assert pooling.modes == ("cls",)
    bundle.load_encoder(directory)


def test_sentencepiece_model_on_the_hub_is_rejected(hub: FakeHub, tmp_path: Path) -> None:
    """The SentencePiece file, which shows that vocab.txt is not WordPiece, is downloaded."""
    model = make_transformers_model("BertModel")
    files = read_files(write_model_directory(model, tmp_path / "m"))
    hub.repos[REPO_ID] = {"main": files | {"tokenizer_78b3253a26.model": b"0"}}
    directory = download_from_hub(REPO_ID, endpoint=hub.url, cache_dir=tmp_path / "cache")
    with pytest.raises(TokenizerError, match="SentencePiece"):
        bundle.load(directory)


def test_interrupted_download_resumes(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a lost connection, only the missing bytes are requested."""
    # The client resumes after complete chunks. The default chunk is larger than the model.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    files = write_model(tmp_path / "m")
    hub.repos[REPO_ID] = {"main": files}
    hub.truncated_files = {"model.safetensors": 10_000}
    directory = download_from_hub(REPO_ID, endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert read_files(directory) == files
    # The first 10,000 bytes contain two complete chunks.
    assert hub.range_headers("GET", "model.safetensors") == [None, f"bytes={2 * 4096}-"]


def test_cached_model_loads_offline(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With HF_HUB_OFFLINE or without a connection, downloaded models are found."""
    hub.repos[REPO_ID] = {"main": write_model(tmp_path / "m")}
    directory = download_from_hub(REPO_ID, endpoint=hub.url, cache_dir=tmp_path / "cache")
    num_requests = len(hub.requests)
    # No server uses port 9.
    assert (
        download_from_hub(REPO_ID, endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
        == directory
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download_from_hub(REPO_ID, endpoint=hub.url, cache_dir=tmp_path / "cache") == directory
    assert len(hub.requests) == num_requests
    with pytest.raises(ModelError, match=r"acme/other: no such file.*loc"):
        download_from_hub("acme/other", endpoint=hub.url, cache_dir=tmp_path / "cache")


def test_missing_models_are_reported(hub: FakeHub, tmp_path: Path) -> None:
    """An unknown model, an unknown revision and a repository without weights are errors."""
    hub.repos[REPO_ID] = {"main": {"config.json": b"{}"}}
    for name, message in (
        ("acme/nothing", "the hub has no such model, or it is private"),
        (f"{REPO_ID}@nowhere", "the hub's model has no such revision"),
        (REPO_ID, r"the hub is not a model: it needs config\.json and model\.safetensors"),
    ):
        with pytest.raises(ModelError, match=message):
            download_from_hub(name, endpoint=hub.url, cache_dir=tmp_path / "cache")


def test_mistyped_paths_are_not_sent_to_the_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names without an owner, or whose parent folder exists, are not looked up on the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    (tmp_path / "runs").mkdir()
    local_names = ("my-rum/model", "my-rum/config.json", "acme/model.safetensors")
    for name in (
        "runs/one",
        "bert-base-uncased",
        "a/b/c",
        "/acme/tiny",
        "acme/tiny@",
        *local_names,
    ):
        assert not is_hub_id(Path(name)), name
        with pytest.raises(ModelError, match=r"no such file or directory; expected a model dir"):
            locate_model(name)
    assert hub.requests == []
    assert is_hub_id(Path("google-bert/bert-base-uncased"))
    assert is_hub_id(Path("google-bert/bert-base-uncased@refs/pr/5"))
    assert identify_artifact(Path(REPO_ID)) == ("model", Path(REPO_ID))
    with pytest.raises(InputError, match="no such file or directory"):
        identify_artifact(Path("runs/one"))


def test_push_uploads_the_model_files(hub: FakeHub, tmp_path: Path) -> None:
    """Pushing uploads all files of the model in one commit, also to a branch.

    Checkpoints of a trainer in the same directory are not uploaded.
    """
    files = write_model(tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text("mine")
    write_model(tmp_path / "m" / "checkpoint-500")
    uploaded = push_to_hub(tmp_path / "m", REPO_ID, private=True, endpoint=hub.url, token="secret")
    assert hub.repos[REPO_ID]["main"] == files
    assert uploaded.commit == commit_hash(files)
    assert set(uploaded.files) == set(files)
    assert hub.private == {REPO_ID}
    assert {token for *_, token in hub.requests} == {"Bearer secret"}
    second_files = write_model(tmp_path / "n", seed=1)
    push_to_hub(tmp_path / "n", REPO_ID, revision="next", endpoint=hub.url, token="secret")
    assert hub.repos[REPO_ID]["main"] == files
    assert hub.repos[REPO_ID]["next"] == second_files
    # The download has no token, so the repository must be public.
    hub.private.clear()
    directory = download_from_hub(f"{REPO_ID}@next", endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert read_files(directory) == second_files


def test_push_uploads_all_modules_and_added_tokens(hub: FakeHub, tmp_path: Path) -> None:
    """Pushing uploads the modules next to 0_Transformer, and added_tokens.json."""
    files = write_old_embedding_model(tmp_path / "m", "safetensors")
    (tmp_path / "m" / "0_Transformer" / "added_tokens.json").write_text("{}")
    for number, name in enumerate(("m", "m/0_Transformer")):
        repo_id = f"{REPO_ID}-{number}"
        push_to_hub(tmp_path / name, repo_id, endpoint=hub.url, token="secret")
        expected = files | {"0_Transformer/added_tokens.json": b"{}"}
        assert hub.repos[repo_id]["main"] == expected


def test_push_of_an_invalid_model_uploads_nothing(hub: FakeHub, tmp_path: Path) -> None:
    """Inconsistent config and weights, and directories without safetensors, are errors."""
    files = write_model(tmp_path / "m")
    config = files["config.json"].replace(b'"vocab_size": 101', b'"vocab_size": 103')
    (tmp_path / "m" / "config.json").write_bytes(config)
    with pytest.raises(ModelError, match=r"vocab_size .*101"):
        push_to_hub(tmp_path / "m", REPO_ID, endpoint=hub.url, token="secret")
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path / "old", "bin")
    with pytest.raises(ModelError, match="no safetensors weights"):
        push_to_hub(tmp_path / "old", REPO_ID, endpoint=hub.url, token="secret")
    write_old_embedding_model(tmp_path / "embedder", "bin")
    with pytest.raises(ModelError, match="--to sentence-transformers"):
        push_to_hub(tmp_path / "embedder", REPO_ID, endpoint=hub.url, token="secret")
    (tmp_path / "m" / "config.json").write_bytes(files["config.json"])
    (tmp_path / "m" / "2_Dense").mkdir()
    (tmp_path / "m" / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"2_Dense: this module has no model\.safetensors"):
        push_to_hub(tmp_path / "m", REPO_ID, endpoint=hub.url, token="secret")
    assert hub.requests == []


@pytest.mark.parametrize("has_pooler", [True, False])
def test_pickled_encoder_can_be_pushed_after_the_recommended_export(
    hub: FakeHub, tmp_path: Path, has_pooler: bool
) -> None:
    """The export that ``push`` recommends for a pickled BertModel gives a model that it uploads."""
    model = make_transformers_model("BertModel")
    if not has_pooler:
        model.pooler = None
    write_model_directory(model, tmp_path / "old", "bin")
    with pytest.raises(ModelError, match="bertsmith export --to hf"):
        push_to_hub(tmp_path / "old", REPO_ID, endpoint=hub.url, token="secret")
    notes = write_huggingface(tmp_path / "old", tmp_path / "new", dtype="fp16")
    assert notes == ["the model has no trained head: only the encoder is written"] + (
        [] if has_pooler else [NO_POOLER_NOTE]
    )
    stored = load_file(tmp_path / "new" / "model.safetensors")
    state = model.state_dict()
    assert stored.keys() == state.keys()
    assert all(torch.equal(stored[name], state[name].half()) for name in stored)
    push_to_hub(tmp_path / "new", REPO_ID, endpoint=hub.url, token="secret")
    assert "model.safetensors" in hub.repos[REPO_ID]["main"]
    card = hub.repos[REPO_ID]["main"]["README.md"].decode()
    assert 'pipeline_tag: "feature-extraction"' in card
    assert "from transformers import AutoModel, AutoTokenizer" in card


def test_pickled_weights_of_dense_modules_are_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    """Older sentence-transformers models have them next to the encoder's safetensors."""
    files = write_model(tmp_path / "m") | {"2_Dense/pytorch_model.bin": b"weights"}
    hub.repos[REPO_ID] = {"main": files}
    directory = download_from_hub(REPO_ID, endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert (directory / "2_Dense" / "pytorch_model.bin").read_bytes() == b"weights"


#: Program that runs several commands, given as JSON, and prints END after each.
COMMANDS_PROGRAM = """
import json, sys
from bertsmith.cli.main import main

for arguments in json.loads(sys.argv[1]):
    sys.argv = ["bertsmith", *arguments]
    try:
        main()
    except SystemExit as error:
        assert not error.code, arguments
    print("END", flush=True)
"""


def test_commands_accept_hub_ids(hub: FakeHub, tmp_path: Path) -> None:
    """fill, prepare and push use HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE."""
    hub.repos[REPO_ID] = {"main": write_model(tmp_path / "m")}
    hub.private.add(REPO_ID)
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": "secret",
    }

    def run_commands(*commands: list[str], offline: str) -> tuple[list[str], str]:
        """Run commands in one process; return the output of each, and standard error of all."""
        process = subprocess.run(
            [sys.executable, "-c", COMMANDS_PROGRAM, json.dumps(commands)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=tmp_path,
            env=environment | {"HF_HUB_OFFLINE": offline},
        )
        assert process.returncode == 0, process.stderr
        return process.stdout.split("END\n")[:-1], process.stderr

    fill = ["fill", REPO_ID, "word3 [MASK]"]
    push = ["push", str(tmp_path / "m"), "acme/again", "--private", "--json"]
    (filled, pushed), errors = run_commands(fill, push, offline="0")
    assert json.loads(pushed)["commit"] == commit_hash(hub.repos["acme/again"]["main"])
    assert "next: bertsmith fill acme/again" in errors
    assert hub.private == {REPO_ID, "acme/again"}
    num_requests = len(hub.requests)
    assert num_requests > 0
    (tmp_path / "text.jsonl").write_text('{"text": "word3"}\n{"text": "word4 word5"}\n')
    prepare = ["prepare", "text.jsonl", "--tokenizer", REPO_ID, "--out", "s", "--workers", "1"]
    (filled_offline, _), _ = run_commands(fill, prepare, offline="1")
    assert filled_offline == filled
    assert len(hub.requests) == num_requests


def test_hub_client_is_imported_only_for_hub_ids(tmp_path: Path) -> None:
    """Loading a local model does not import huggingface_hub."""
    write_model(tmp_path / "m")
    code = (
        "import sys; from bertsmith import bundle; bundle.load(sys.argv[1])\n"
        "assert 'huggingface_hub' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert process.returncode == 0, process.stderr


def test_hub_id_is_pinned_to_its_commit(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run stores the directory of the commit, so that resuming uses the same model."""
    hub.repos[REPO_ID] = {"main": write_model(tmp_path / "m")}
    download = partial(download_from_hub, endpoint=hub.url, cache_dir=tmp_path / "cache")
    monkeypatch.setattr("bertsmith.bundle.directory.download_from_hub", download)
    rows = [f"word{number} word{number + 1},{'ab'[number % 2]}" for number in range(12)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    finetuned = finetune(
        "classify",
        REPO_ID,
        tmp_path / "run",
        data=tmp_path / "rows.csv",
        values={
            "task": {"text": "text", "label": "label", "batch": 4, "length": 16},
            "schedule": {"steps": 1},
            "run": {"threads": 1},
        },
    )
    assert finetuned.model is not None
    # The model card names the hub id instead of a local folder.
    assert ModelCard.load(finetuned.model / "README.md").data.base_model == REPO_ID
    directory = pin_model_path(REPO_ID)
    assert str(directory) == read_toml(tmp_path / "run" / "settings.toml")["run"]["start_from"]
    assert directory.is_absolute()
    assert directory.name == commit_hash(hub.repos[REPO_ID]["main"])
    assert pin_model_path(tmp_path / "m") == (tmp_path / "m").resolve()


def test_model_with_only_a_next_sentence_head_is_not_exported(tmp_path: Path) -> None:
    """The error says what to do instead."""
    model = make_transformers_model("BertForNextSentencePrediction")
    write_model_directory(model, tmp_path / "old", "safetensors")
    with pytest.raises(ModelError, match="cannot be exported; fine-tune it"):
        write_huggingface(tmp_path / "old", tmp_path / "new")
    assert not (tmp_path / "new").exists()
