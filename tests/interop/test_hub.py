"""A model by its hub id: downloaded, resumed, offline; and sent. The real client, a local hub."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import ModelCard, constants

from bertsmith import bundle
from bertsmith.bundle.directory import (
    download_from_hub,
    hub_id_of,
    is_hub_id,
    locate_model,
    pin_model_path,
)
from bertsmith.errors import InputError, ModelError
from bertsmith.interop.huggingface import push_to_hub
from bertsmith.model.bert import BertForPreTraining
from bertsmith.settings import read_toml
from bertsmith.train.finetuning.finetune import finetune
from bertsmith.use.inspection.artifacts import identify_artifact
from tests.interop.fake_hub import FakeHub, RepoFiles, commit_hash, run_fake_hub
from tests.interop.transformers_models import make_transformers_model, write_model_directory
from tests.model.examples import make_tokenizer, prime_config, randomize_weights

NAME = "acme/tiny-bert"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Start a hub; the client of this process may go online, which tests otherwise forbid."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with run_fake_hub() as hub:
        yield hub


def files_of(directory: Path) -> RepoFiles:
    """Return the files of a directory."""
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def model_files(directory: Path, seed: int = 0) -> RepoFiles:
    """Return the files of a random model directory of ours."""
    model = randomize_weights(BertForPreTraining(prime_config()), seed)
    bundle.save(directory, model, make_tokenizer(101), {})
    return files_of(directory)


def test_a_model_is_downloaded_by_its_id(hub: FakeHub, tmp_path: Path) -> None:
    """Branch, commit and default; what a model needs comes, other frameworks' weights stay."""
    first = model_files(tmp_path / "m")
    other = model_files(tmp_path / "n", seed=1)
    extra = {"tf_model.h5": b"0" * 100, "pytorch_model.bin": b"1" * 100, "picture.png": b"2"}
    hub.repos[NAME] = {"main": first | extra, "next/one": other}
    found = download_from_hub(NAME, endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert files_of(found) == first
    assert found.name == commit_hash(first | extra)
    assert hub_id_of(found) == NAME
    assert not bundle.load(found).new_weights
    by_branch = download_from_hub(
        f"{NAME}@next/one", endpoint=hub.url, cache_dir=tmp_path / "cache"
    )
    assert files_of(by_branch) == other
    by_commit = download_from_hub(
        f"{NAME}@{found.name}", endpoint=hub.url, cache_dir=tmp_path / "cache"
    )
    assert by_commit == found


def test_old_weights_are_fetched_where_there_are_no_others(hub: FakeHub, tmp_path: Path) -> None:
    """A model with pytorch_model.bin alone is fetched with it, and loads."""
    hub.repos[NAME] = {
        "main": files_of(
            write_model_directory(
                make_transformers_model("BertForMaskedLM"), tmp_path / "m", "old bin"
            )
        )
    }
    found = download_from_hub(NAME, endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert (found / "pytorch_model.bin").is_file()
    assert not bundle.load(found).new_weights


def test_a_broken_download_goes_on_where_it_ended(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a connection that ended in the middle, the rest alone is asked for."""
    # The client keeps whole pieces; its own are of 10 MB, and the model is smaller.
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    files = model_files(tmp_path / "m")
    hub.repos[NAME] = {"main": files}
    hub.truncated_files = {"model.safetensors": 10_000}
    found = download_from_hub(NAME, endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert files_of(found) == files
    assert hub.range_headers("GET", "model.safetensors") == [None, "bytes=8192-"]


def test_offline_works_from_the_cache(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With HF_HUB_OFFLINE, or with no hub to be reached, what was fetched before is found."""
    hub.repos[NAME] = {"main": model_files(tmp_path / "m")}
    found = download_from_hub(NAME, endpoint=hub.url, cache_dir=tmp_path / "cache")
    count = len(hub.requests)
    assert (
        download_from_hub(NAME, endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "cache")
        == found
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download_from_hub(NAME, endpoint=hub.url, cache_dir=tmp_path / "cache") == found
    assert len(hub.requests) == count
    with pytest.raises(
        ModelError, match=r"acme/other: no such file.*the local cache is incomplete"
    ):
        download_from_hub("acme/other", endpoint=hub.url, cache_dir=tmp_path / "cache")


def test_what_a_hub_has_not_is_said(hub: FakeHub, tmp_path: Path) -> None:
    """An unknown model, an unknown revision, and a repository without weights."""
    hub.repos[NAME] = {"main": {"config.json": b"{}"}}
    for name, message in (
        ("acme/nothing", "the hub has no such model, or it is private"),
        (f"{NAME}@nowhere", "the hub's model has no such revision"),
        (NAME, r"the hub repository has no config\.json with model\.safetensors"),
    ):
        with pytest.raises(ModelError, match=message):
            download_from_hub(name, endpoint=hub.url, cache_dir=tmp_path / "cache")


def test_a_slip_in_a_path_asks_no_hub(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name whose folder is here, or that has no owner, can only be meant for this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    (tmp_path / "runs").mkdir()
    own = ("my-rum/model", "my-rum/config.json", "acme/model.safetensors")
    for name in ("runs/one", "bert-base-uncased", "a/b/c", "/acme/tiny", "acme/tiny@", *own):
        assert not is_hub_id(Path(name)), name
        with pytest.raises(ModelError, match=r"no such file or directory; expected a model dir"):
            locate_model(name)
    assert hub.requests == []
    assert is_hub_id(Path("google-bert/bert-base-uncased"))
    assert is_hub_id(Path("google-bert/bert-base-uncased@refs/pr/5"))
    assert identify_artifact(Path(NAME)) == ("model", Path(NAME))
    with pytest.raises(InputError, match="no such file or directory"):
        identify_artifact(Path("runs/one"))


def test_a_push_sends_what_a_model_needs(hub: FakeHub, tmp_path: Path) -> None:
    """One commit with the model's files; it comes back the same; a branch and privacy are said."""
    files = model_files(tmp_path / "m")
    (tmp_path / "m" / "notes.txt").write_text("mine")
    done = push_to_hub(tmp_path / "m", NAME, private=True, endpoint=hub.url, token="secret")
    assert hub.repos[NAME]["main"] == files
    assert done.commit == commit_hash(files)
    assert set(done.files) == set(files)
    assert hub.private == {NAME}
    assert {token for *_, token in hub.requests} == {"Bearer secret"}
    again = model_files(tmp_path / "n", seed=1)
    push_to_hub(tmp_path / "n", NAME, revision="next", endpoint=hub.url, token="secret")
    assert hub.repos[NAME]["main"] == files
    assert hub.repos[NAME]["next"] == again
    hub.private.clear()
    found = download_from_hub(f"{NAME}@next", endpoint=hub.url, cache_dir=tmp_path / "cache")
    assert files_of(found) == again


def test_a_push_of_what_is_no_model_sends_nothing(hub: FakeHub, tmp_path: Path) -> None:
    """A directory whose weights do not fit its config, and one of old weights, stay here."""
    files = model_files(tmp_path / "m")
    config = files["config.json"].replace(b'"vocab_size": 101', b'"vocab_size": 103')
    (tmp_path / "m" / "config.json").write_bytes(config)
    with pytest.raises(ModelError, match="set vocab_size to 101"):
        push_to_hub(tmp_path / "m", NAME, endpoint=hub.url, token="secret")
    write_model_directory(make_transformers_model("BertForMaskedLM"), tmp_path / "old", "bin")
    with pytest.raises(ModelError, match="no safetensors weights"):
        push_to_hub(tmp_path / "old", NAME, endpoint=hub.url, token="secret")
    assert hub.requests == []


def test_the_command_line_takes_an_id(hub: FakeHub, tmp_path: Path) -> None:
    """``bertsmith fill OWNER/NAME`` with HF_ENDPOINT, HF_HOME and HF_TOKEN; then offline."""
    hub.repos[NAME] = {"main": model_files(tmp_path / "m")}
    hub.private.add(NAME)
    environment = os.environ | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "secret",
    }
    command = [sys.executable, "-m", "bertsmith", "fill", NAME, "word3 [MASK]"]

    def run(**changes: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=300, cwd=tmp_path,
            env=environment | changes,
        )  # fmt: skip

    first = run()
    assert first.returncode == 0, first.stderr
    count = len(hub.requests)
    assert count > 0
    offline = run(HF_HUB_OFFLINE="1")
    assert offline.returncode == 0, offline.stderr
    assert offline.stdout == first.stdout
    assert len(hub.requests) == count
    (tmp_path / "text.jsonl").write_text('{"text": "word3"}\n{"text": "word4 word5"}\n')
    command[3:] = ["prepare", "text.jsonl", "--tokenizer", NAME, "--out", "s", "--workers", "1"]
    prepared = run(HF_HUB_OFFLINE="1")
    assert prepared.returncode == 0, prepared.stderr
    command[3:] = ["push", str(tmp_path / "m"), "acme/again", "--private", "--json"]
    sent = run()
    assert sent.returncode == 0, sent.stderr
    assert json.loads(sent.stdout)["commit"] == commit_hash(hub.repos["acme/again"]["main"])
    assert "next: bertsmith fill acme/again" in sent.stderr
    assert hub.private == {NAME, "acme/again"}


def test_the_client_is_loaded_for_a_hub_id_only(tmp_path: Path) -> None:
    """A model of this machine is loaded without huggingface_hub."""
    model_files(tmp_path / "m")
    code = (
        "import sys; from bertsmith import bundle; bundle.load(sys.argv[1])\n"
        "assert 'huggingface_hub' not in sys.modules"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "m")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_an_id_is_pinned_to_its_commit(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run goes on from is the directory of the commit, so a resume meets the same model."""
    hub.repos[NAME] = {"main": model_files(tmp_path / "m")}
    here = partial(download_from_hub, endpoint=hub.url, cache_dir=tmp_path / "cache")
    monkeypatch.setattr("bertsmith.bundle.directory.download_from_hub", here)
    rows = [f"word{number} word{number + 1},{'ab'[number % 2]}" for number in range(12)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    done = finetune(
        "classify", NAME, tmp_path / "run", data=tmp_path / "rows.csv",
        values={"task": {"text": "text", "label": "label", "batch": 4, "length": 16},
                "schedule": {"steps": 1}, "run": {"threads": 1}},
    )  # fmt: skip
    assert done.model is not None
    # The card names the model of the hub, and no folder.
    assert ModelCard.load(done.model / "README.md").data.base_model == NAME
    found = pin_model_path(NAME)
    assert str(found) == read_toml(tmp_path / "run" / "settings.toml")["run"]["start_from"]
    assert found.is_absolute()
    assert found.name == commit_hash(hub.repos[NAME]["main"])
    assert pin_model_path(tmp_path / "m") == (tmp_path / "m").resolve()
