"""The command ``serve``: invalid arguments, and names of models."""

import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest

from bertsmith.bundle import save
from bertsmith.cli import serve
from bertsmith.cli.serve import _get_default_name, _name_models, _normalize_origin
from bertsmith.errors import SettingsError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.serve.launch import ServerProcess
from bertsmith.serve.models import ServedModel
from bertsmith.serve.options import ServerOptions
from tests.cli.conftest import RunCli
from tests.model.examples import make_prime_size_config, make_tokenizer


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


def test_sighup_does_not_end_a_server_that_loads_its_models(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGHUP, which reloads a running server, has no effect before the server runs."""

    def receive_hangup(_: Path) -> None:
        signal.raise_signal(signal.SIGHUP)
        raise SettingsError("after SIGHUP")

    monkeypatch.setattr(serve, "check_embedding_model", receive_hangup)
    previous_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        completed = run_cli("serve", "nowhere", "--port", "0")
        assert (completed.status, completed.err) == (2, "error: after SIGHUP\n")
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, previous_handler)


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
    named = [("a", Path("x/y")), ("b", Path("google-bert/b"))]
    assert _name_models(["a=x/y", "google-bert/b"]) == named
    # An equals sign after a slash is part of the path.
    assert _name_models(["lr/a=3/model"]) == [("a=3", Path("lr/a=3/model"))]
    with pytest.raises(SettingsError, match="the name 'my-run' is already used"):
        _name_models([run_directory, f"{run_directory}/model"])


def test_reload_reads_the_finished_model_of_a_run(
    run_cli: RunCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is served from its latest checkpoint, and after a reload from its finished model."""
    snapshots: list[Path] = []

    def write_snapshot(_: Path, directory: Path) -> tuple[int, int]:
        snapshots.append(directory)
        save(directory, BertForPreTraining(make_prime_size_config()), make_tokenizer(), {})
        return 1, 2

    monkeypatch.setattr("bertsmith.train.latest_snapshot.write_latest_snapshot", write_snapshot)
    all_options: list[ServerOptions] = []

    def record(options: ServerOptions, sock: socket.socket, *_: object) -> None:
        all_options.append(options)
        sock.close()

    monkeypatch.setattr(serve, "_run_process", record)
    run = tmp_path / "run"
    (run / "checkpoints" / "step-1").mkdir(parents=True)
    (run / "settings.toml").touch()
    completed = run_cli("serve", run, "--port", 0, "--device", "cpu")
    assert completed.status == 0, completed.err
    (options,) = all_options
    assert options.models == (("run", run),)

    process = ServerProcess(options, serve.open_model, log=lambda _: None)
    assert [path.exists() for path in snapshots] == [False]
    save(run / "model", BertForPreTraining(make_prime_size_config()), make_tokenizer(), {})
    reloaded: list[Sequence[ServedModel]] = []
    monkeypatch.setattr(process._app.control, "replace_models", reloaded.append)
    process.reload()
    ((model,),) = reloaded
    assert model.bundle.path == run / "model"
    assert len(snapshots) == 1
