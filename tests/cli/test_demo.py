"""``bertsmith demo``: the commands that it gives."""

from pathlib import Path

import pytest

from bertsmith.cli import demo


def test_the_budget_of_minutes_decides_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pre-training command has the minutes, but no least number of steps nor interval."""
    commands: list[list[str]] = []

    def record(arguments: list[str], *, standalone_mode: bool) -> int:
        commands.append(arguments)
        return 0

    monkeypatch.setattr(demo, "app", record)
    demo.demo(out=tmp_path, minutes=0.5, seed=0)
    assert [command[0] for command in commands] == [
        "corpus", "vocab", "prepare", "pretrain", "fill"
    ]  # fmt: skip
    pretrain = commands[3]
    assert pretrain[pretrain.index("--minutes") + 1] == "0.5"
    assert not any("steps" in word or "eval_every" in word for word in pretrain)
