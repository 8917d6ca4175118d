"""Models that are distributed with Bertsmith, which commands find by name."""

import socket
from pathlib import Path

import pytest

from bertsmith.bundle import directory, load, save
from bertsmith.bundle.directory import locate_model, locate_tokenizer, pin_model_path
from bertsmith.cli import serve
from bertsmith.data.store import Store
from bertsmith.errors import ModelError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.serve.options import ServerOptions
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from tests.cli.conftest import RunCli
from tests.model.examples import make_prime_size_config, make_tokenizer


@pytest.fixture
def reference_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a reference model named mini-xx, and return its directory."""
    path = tmp_path / "reference_models" / "mini-xx"
    save(path, BertForPreTraining(make_prime_size_config()), make_tokenizer(), {})
    monkeypatch.setattr(directory, "REFERENCE_MODELS", path.parent)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return path


def test_a_name_stands_for_a_reference_model(reference_model: Path) -> None:
    """The name is found from any folder, for weights and tokenizer."""
    name = Path("mini-xx")
    assert locate_model("mini-xx") == reference_model
    assert locate_tokenizer(name) == reference_model
    assert pin_model_path(name) == reference_model
    assert load("mini-xx").path == reference_model


def test_a_local_path_takes_precedence(reference_model: Path) -> None:
    """A model in the current folder with the name of a reference model is the one that is used."""
    local = Path("mini-xx")
    save(local, BertForPreTraining(make_prime_size_config()), make_tokenizer(), {})
    assert locate_model("mini-xx") == local
    assert pin_model_path(local) == local.resolve()


def test_error_lists_the_reference_models(reference_model: Path) -> None:
    """The error about a missing model names the reference models."""
    with pytest.raises(ModelError, match=r"name of a reference model \(mini-xx\), or"):
        locate_model("mini-yy")


def test_a_folder_of_another_kind_takes_precedence(reference_model: Path) -> None:
    """A folder with the name of a reference model that is no model is an error, not ignored."""
    Path("mini-xx").mkdir()
    with pytest.raises(ModelError, match="mini-xx: not a model directory"):
        locate_model("mini-xx")


def test_a_reference_model_needs_no_network(
    reference_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is not asked for a name without an owner, nor for OWNER/NAME in this form."""

    def fail(name: str) -> Path:
        raise AssertionError(name)

    monkeypatch.setattr(directory, "download_from_hub", fail)
    assert locate_model("mini-xx") == reference_model
    with pytest.raises(AssertionError, match="owner/mini-xx"):
        locate_model("owner/mini-xx")


def test_commands_accept_the_name(reference_model: Path, run_cli: RunCli) -> None:
    """Commands that inspect, convert and read a tokenizer accept the name of a reference model."""
    completed = run_cli("inspect", "mini-xx")
    assert completed.status == 0, completed.err
    assert f"model directory {reference_model}" in completed.out
    completed = run_cli("import", "mini-xx", "--out", "copy")
    assert completed.status == 0, completed.err
    completed = run_cli("compare", "copy", "mini-xx", "--text", "-", stdin=b"word1 word2\n")
    assert completed.status == 0, completed.err
    Path("text.txt").write_text("word1 word2. word3 word4.\n\nword5 word6.\n")
    completed = run_cli("prepare", "text.txt", "--tokenizer", "mini-xx", "--held-out", 0,
                        "--out", "store")  # fmt: skip
    assert completed.status == 0, completed.err
    # Settings contain the path, so that a later folder of this name does not change a resumed run.
    overrides = Overrides(
        data=Path("store"), start_from="mini-xx", assignments=["data.max_seqlen=32"]
    )
    settings = resolve_settings(overrides, Store.open(Path("store")))
    assert settings.run.start_from == str(reference_model)


def test_serve_uses_the_default_model(
    reference_model: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without MODEL, serve loads the reference model and says so; with one, it does not."""
    served: list[ServerOptions] = []

    def record(options: ServerOptions, sock: socket.socket, *_: object) -> None:
        served.append(options)
        sock.close()

    monkeypatch.setattr(serve, "REFERENCE_MODEL", "mini-xx")
    monkeypatch.setattr(serve, "_run_process", record)
    completed = run_cli("serve", "--port", 0)
    assert completed.status == 0, completed.err
    assert [name for name, _ in served[0].models] == ["mini-xx"]
    assert "no MODEL given; serving the reference model mini-xx" in completed.err
    completed = run_cli("serve", "a=mini-xx", "--port", 0)
    assert [name for name, _ in served[1].models] == ["a"]
    assert "no MODEL given" not in completed.err
