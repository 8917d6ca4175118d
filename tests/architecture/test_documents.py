"""The documents agree with the code that they speak of.

These tests never judge the prose.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bertsmith

#: A path of the repository, in back quotes: it has a slash and no space.
PATH = re.compile(r"`((?:bertsmith|tests|docs|benchmarks)/[^`\s]*)`")
LINK = re.compile(r"\]\(([^)#:]+)\)")
#: Words that stand in a cell of docs/paper.md where no file stands.
OPEN = {"not yet", "none"}


def test_generated_parts_are_up_to_date(root: Path) -> None:
    """Help pages, the README's tree and its public names are what ``make docs`` would write."""
    command = [sys.executable, str(root / "docs" / "generate.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"run `make docs`\n{done.stdout}{done.stderr}"


def test_generate_notices_a_difference(root: Path, tmp_path: Path) -> None:
    """A help page that says something else makes the check fail, and is left as it was."""
    page = root / "docs" / "cli" / "bertsmith.md"
    code = (
        "import runpy, sys, pathlib\n"
        "read = pathlib.Path.read_text\n"
        "def changed(path, *a, **k):\n"
        "    text = read(path, *a, **k)\n"
        "    return text.replace('Usage', 'Use') if path.name == 'bertsmith.md' else text\n"
        "pathlib.Path.read_text = changed\n"
        "sys.argv = ['generate.py', '--check']\n"
        f"runpy.run_path({str(root / 'docs' / 'generate.py')!r}, run_name='__main__')\n"
    )
    before = page.read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1, done.stderr
    assert "differs: docs/cli/bertsmith.md" in done.stdout
    assert page.read_bytes() == before


def test_a_help_page_is_what_the_program_prints(root: Path) -> None:
    """The page of the program equals ``bertsmith --help`` in a process of its own."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name("bertsmith")), "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={"COLUMNS": "80", "NO_COLOR": "1", "PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"},
    )
    page = (root / "docs" / "cli" / "bertsmith.md").read_text(encoding="utf-8")
    printed = "\n".join(line.rstrip() for line in done.stdout.strip("\n").splitlines())
    assert printed in page


def test_public_names_can_be_had() -> None:
    """Each public name is there, is listed once, and no other name is given out."""
    assert len(set(bertsmith.__all__)) == len(bertsmith.__all__)
    for name in bertsmith.__all__:
        assert getattr(bertsmith, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bertsmith.nothing


def test_public_names_have_a_home() -> None:
    """The lazy table and ``__all__`` name the same things."""
    assert set(bertsmith.__all__) == {"__version__", *bertsmith._PUBLIC}


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", "docs/paper.md", "docs/deviations.md"]
)
def test_named_files_exist(root: Path, document: str) -> None:
    """Every path and every link of a document leads to something that is there."""
    path = root / document
    text = path.read_text(encoding="utf-8")
    named = {root / found for found in PATH.findall(text)}
    named |= {path.parent / found for found in LINK.findall(text)}
    missing = sorted(str(file) for file in named if not file.exists())
    assert not missing, f"{document} names what is not there: {missing}"


def test_paper_rows_are_whole(root: Path) -> None:
    """Each row of docs/paper.md names a file and a test, or says that they are still to come."""
    lines = (root / "docs" / "paper.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if re.match(r"\| (\d|A|B|C)", line)]
    assert len(rows) >= 21
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        for cell in cells[2:]:
            assert cell in OPEN or PATH.search(cell), row
        assert (cells[2] in OPEN) == (cells[3] in OPEN), f"a file without a test: {row}"
