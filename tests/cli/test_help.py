"""Help texts of all commands: sections, summaries and examples."""

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from bertsmith.cli import commands as registered_commands  # noqa: F401
from bertsmith.cli.app import HELP_SECTIONS, app
from tests.cli.conftest import RunCli


def iterate_command_paths(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of the program, each group and each command."""
    yield path
    for name, command in getattr(group, "commands", {}).items():
        yield from iterate_command_paths(command, (*path, name))


COMMAND_PATHS = list(iterate_command_paths(get_command(app)))
GROUP_PATHS: list[tuple[str, ...]] = [(), ("corpus",), ("finetune",), ("vocab",)]


def test_every_command_is_in_one_section(run_cli: RunCli) -> None:
    """The help lists each command once, under the title of its section."""
    names = [name for section in HELP_SECTIONS.values() for name in section]
    assert sorted(names) == sorted(path[0] for path in COMMAND_PATHS if len(path) == 1)
    lines = run_cli("--help").out.splitlines()
    for title, section in HELP_SECTIONS.items():
        start = lines.index(f"{title}:") + 1
        rows = lines[start : start + len(section)]
        assert [row.split()[0] for row in rows] == list(section)


@pytest.mark.parametrize("path", COMMAND_PATHS, ids=" ".join)
def test_help_fits_80_columns_and_ends_with_examples(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]
) -> None:
    """Each help ends with commands that exist, in lines of at most 80 characters."""
    monkeypatch.setenv("COLUMNS", "80")
    help_text = run_cli(*path, "--help").out.rstrip()
    _, examples = help_text.split("\n  Examples:\n")
    assert all(len(line) <= 80 for line in examples.splitlines())
    commands = examples.replace("\\\n", " ").splitlines()
    assert commands
    for command in commands:
        words = shlex.split(command)
        name = words[words.index("bertsmith") + 1]
        assert (name,) in COMMAND_PATHS


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("path", GROUP_PATHS, ids=" ".join)
def test_group_help_wraps_whole_summaries(
    run_cli: RunCli, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...], columns: int
) -> None:
    """The help of a group shows the whole summary of each command at any terminal width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    # Lines also break after hyphens, so compare without spaces.
    help_text = "".join(run_cli(*path, "--help").out.split())
    group: Any = get_command(app)
    for name in path:
        group = group.commands[name]
    for name, command in group.commands.items():
        summary = command.help.partition(".\n")[0]
        assert name + "".join(summary.split()) in help_text
