"""``bertsmith serve``: what it says before it listens, and what it refuses.

These tests never ask an endpoint.
"""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertsmith.cli.serve import _named, _usual
from bertsmith.errors import SettingsError

Run = Callable[..., Any]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "nowhere: no such file or directory"),
        (["nowhere", "--set", "serve.texs=5"], "texs"),
        (["nowhere", "--set", "run.seed=5"], "expected serve.…"),
        (["nowhere", "--set", "serve.texts=0"], "texts: Input should be greater"),
        (["a=nowhere", "a=elsewhere"], "the name 'a' is taken"),
        (["nowhere", "--device", "tpu"], "--device tpu: expected auto, cpu"),
        (["nowhere", "--api-key", ""], "--api-key is empty; give a key, or unset it"),
        (["nowhere", "--host", "300.1.1.1"], "cannot listen at 300.1.1.1"),
        (["nowhere", "--allow-host", "https://a.example"], "--allow-host is not a host name"),
    ],
)
def test_mistakes_are_told_before_anything_listens(
    run: Run, words: list[str], message: str
) -> None:
    """Status 2, what was found and what to do, no traceback."""
    found = run("serve", *words, "--port", "0")
    assert found.status == 2, found.err
    assert message in found.err
    assert "Traceback" not in found.err


def test_a_variable_that_was_not_filled(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is set and empty is a mistake, never a server that stands open."""
    monkeypatch.setenv("BERTSMITH_API_KEY", " ")
    found = run("serve", "nowhere", "--port", "0")
    assert found.status == 2
    assert "$BERTSMITH_API_KEY is empty; give a key" in found.err


def test_a_port_that_is_taken(run: Run) -> None:
    """It says so at once, not after minutes of loading."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        found = run("serve", "nowhere", "--port", str(other.getsockname()[1]))
    assert found.status == 2
    assert "Address already in use; give another --port" in found.err


def test_names(tmp_path: Path) -> None:
    """A model is called by its folder, a RUN's model by the RUN; NAME=MODEL names it."""
    (tmp_path / "my-run" / "model").mkdir(parents=True)
    run = str(tmp_path / "my-run")
    assert _usual(run) == _usual(f"{run}/model") == "my-run"
    assert _usual("google-bert/bert-base-uncased") == "bert-base-uncased"
    assert _named(["a=x/y", "google-bert/b"]) == [("a", "x/y"), ("b", "google-bert/b")]
    # A path with an equals sign in it is no name.
    assert _named(["lr/a=3/model"]) == [("a=3", "lr/a=3/model")]
    with pytest.raises(SettingsError, match="the name 'my-run' is taken"):
        _named([run, f"{run}/model"])
