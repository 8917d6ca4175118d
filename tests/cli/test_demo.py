"""The command ``demo``: the commands that it runs."""

from pathlib import Path

import pytest

from bertsmith.cli import demo
from bertsmith.errors import InputError


def test_pretraining_is_limited_by_minutes_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pretrain command gets --minutes, but neither steps nor an evaluation interval."""
    commands: list[list[str]] = []

    def record_command(arguments: list[str], *, standalone_mode: bool) -> int:
        commands.append(arguments)
        return 0

    monkeypatch.setattr(demo, "app", record_command)
    demo.demo(out=tmp_path, minutes=0.5, seed=0)
    names = [command[0] for command in commands]
    assert names == ["corpus", "vocab", "prepare", "pretrain", "fill"]
    pretrain = commands[3]
    assert pretrain[pretrain.index("--minutes") + 1] == "0.5"
    assert not any("steps" in word or "eval_every" in word for word in pretrain)


def test_other_minutes_need_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo with other minutes than the one in the folder is an error that names --out."""
    monkeypatch.setattr(demo, "app", None)
    (tmp_path / "corpus.jsonl").touch()
    (tmp_path / "run-0").mkdir()
    (tmp_path / "run-0" / "settings.toml").write_text("[schedule]\nminutes = 3.0\nsteps = 90\n")
    expected = r"run-0: .* --minutes 3, got 0\.2; .* --out my-demo"
    with pytest.raises(InputError, match=expected):
        demo.demo(out=tmp_path, minutes=0.2, seed=0)
