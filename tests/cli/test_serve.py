"""The command ``serve``: invalid arguments, and names of models."""

import socket
from pathlib import Path

import pytest

from bertsmith.cli.serve import _get_default_name, _name_models, _normalize_origin
from bertsmith.errors import SettingsError
from tests.cli.conftest import RunCli


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such file or directory"),
        (["nowhere", "--set", "serve.texs=5"], "texs"),
        (["nowhere", "--set", "run.seed=5"], "expected a setting of the table serve"),
        (["nowhere", "--set", "serve.max_texts=0"], "texts: Input should be greater"),
        ([""], "'': no model; give MODEL or NAME=MODEL"),
        (["a="], "'a=': no model; give MODEL or NAME=MODEL"),
        (["a=nowhere", "a=elsewhere"], "the name 'a' is already used"),
        (["=nowhere"], "=nowhere: the model has no name"),
        (["nowhere", "--device", "tpu"], "--device tpu: expected auto, cpu"),
        (["nowhere", "--api-key", ""], "--api-key is empty; set a key, or unset it"),
        (["nowhere", "--host", "300.1.1.1"], "300.1.1.1"),
        (["nowhere", "--host", ""], "--host is empty; give an address"),
        (["nowhere", "--host", " "], "--host is empty; give an address"),
        (["nowhere", "--allow-host", "https://a.example"], "--allow-host"),
        (
            ["nowhere", "--forwarded-allow-ips", "nginx"],
            "--forwarded-allow-ips nginx: 'nginx' does",
        ),
        (["nowhere", "--uds", "s", "--forwarded-allow-ips", "127.0.0.1"], "use '*', which accepts"),
        (
            ["nowhere", "--forwarded-allow-ips", "*", "--forwarded-allow-ips", "::1"],
            "leave out the",
        ),
        (["nowhere", "--cors", "app.example.com"], "--cors app.example.com: not an origin"),
        (["nowhere", "--cors", "https://a.example/page"], "not an origin; give a scheme"),
        (["nowhere", "--api-key", "a", "--key-file", "b"], "--api-key and --key-file exclude"),
        (["nowhere", "--ssl-certfile", "a.pem"], "add --ssl-keyfile FILE"),
        (["nowhere", "--ssl-keyfile", "a.pem"], "add --ssl-certfile FILE"),
        (["nowhere", "--uds", "missing/server.sock"], "--uds missing/server.sock: cannot create"),
    ],
)
def test_invalid_arguments_are_errors(run_cli: RunCli, arguments: list[str], message: str) -> None:
    """Invalid arguments exit with 2 and a message before the server starts."""
    completed = run_cli("serve", *arguments, "--port", "0")
    assert completed.status == 2, completed.err
    assert message in completed.err
    assert "Traceback" not in completed.err


@pytest.mark.parametrize(
    ("origin", "expected"),
    [("https://App.example.com/", "https://app.example.com"), ("*", "*"), ("null", "null"),
     ("http://[::1]:8000", "http://[::1]:8000")],
)  # fmt: skip
def test_origins_are_those_that_browsers_send(origin: str, expected: str) -> None:
    """A slash at the end and upper case are removed."""
    assert _normalize_origin(origin) == expected


def test_empty_key_in_the_environment_is_an_error(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty BERTSMITH_API_KEY is an error instead of a server without a key."""
    monkeypatch.setenv("BERTSMITH_API_KEY", " ")
    completed = run_cli("serve", "nowhere", "--port", "0")
    assert completed.status == 2
    assert "$BERTSMITH_API_KEY is empty; set a key" in completed.err


def test_key_in_the_environment_and_key_file_exclude_each_other(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key in BERTSMITH_API_KEY is not ignored silently when there is a file of keys."""
    monkeypatch.setenv("BERTSMITH_API_KEY", "secret")
    completed = run_cli("serve", "nowhere", "--port", "0", "--key-file", "keys.toml")
    assert completed.status == 2
    assert "$BERTSMITH_API_KEY and --key-file exclude each other" in completed.err


def test_used_port_is_an_error(run_cli: RunCli) -> None:
    """A used port is reported before the models are loaded."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        completed = run_cli("serve", "nowhere", "--port", str(other.getsockname()[1]))
    assert completed.status == 2
    assert "Address already in use" in completed.err


def test_model_is_named_by_its_folder_or_argument(tmp_path: Path) -> None:
    """A model is named by its folder, or by the run directory; NAME=MODEL sets the name."""
    (tmp_path / "my-run" / "model").mkdir(parents=True)
    run_directory = str(tmp_path / "my-run")
    assert (
        _get_default_name(run_directory) == _get_default_name(f"{run_directory}/model") == "my-run"
    )
    assert _get_default_name("google-bert/bert-base-uncased") == "bert-base-uncased"
    assert _name_models(["a=x/y", "google-bert/b"]) == [("a", "x/y"), ("b", "google-bert/b")]
    # An equals sign after a slash is part of the path.
    assert _name_models(["lr/a=3/model"]) == [("a=3", "lr/a=3/model")]
    with pytest.raises(SettingsError, match="the name 'my-run' is already used"):
        _name_models([run_directory, f"{run_directory}/model"])
