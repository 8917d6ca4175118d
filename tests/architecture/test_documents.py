"""Tests that the documentation matches the code."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import bertsmith

#: A path of the repository in backticks.
PATH = re.compile(r"`((?:bertsmith|tests|docs|benchmarks)/[^`\s]*)`")
#: A relative link in Markdown.
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
ROOT = Path(__file__).resolve().parents[2]
#: An option of the command line.
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
#: Options of scripts in benchmarks/ that no Bertsmith command has.
BENCHMARK_OPTIONS = {
    "--precision",
    "--store",
    "--sample",
    "--texts",
    "--kills",
    "--mode",
    "--stage",
    "--dry",
}
#: Options of torchrun and of sbatch.
LAUNCHER_OPTIONS = {
    "--standalone", "--max-restarts", "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-id",
    "--rdzv-endpoint", "--signal",
}  # fmt: skip
#: Lines with options of other programs only.
OTHER_PROGRAMS = ("pip install", "#SBATCH")
#: Contents of cells in docs/paper.md that name no file.
NO_FILE = {"not yet", "none"}


#: Runs docs/generate.py --check twice: as it is, and as if a page had other content. Pages are
#: rendered in a new process, because tests can change the commands of this one.
CHECK_PROGRAM = """
import importlib.util, sys
from pathlib import Path

script, page = map(Path, sys.argv[1:])
spec = importlib.util.spec_from_file_location("generate", script)
generate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generate)
files = {}
render_files = generate.render_files
generate.render_files = lambda: files or files.update(render_files()) or files
sys.argv = ["generate.py", "--check"]
print("status", generate.main())
files[page] += "x"
print("status", generate.main())
"""


def test_generated_files_are_up_to_date(root: Path) -> None:
    """The help pages and the generated tables are the output of docs/generate.py.

    ``generate.py --check`` reports an outdated page and does not change it.
    """
    page = root / "docs" / "cli" / "bertsmith.md"
    content = page.read_bytes()
    command = [sys.executable, "-c", CHECK_PROGRAM, str(root / "docs" / "generate.py"), str(page)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == "status 0\ndiffers: docs/cli/bertsmith.md\nstatus 1\n", (
        f"run `make docs`\n{completed.stdout}"
    )
    assert page.read_bytes() == content


def test_help_page_equals_the_output_of_help(root: Path) -> None:
    """docs/cli/bertsmith.md contains the output of ``bertsmith --help`` in a new process."""
    completed = subprocess.run(
        [str(Path(sys.executable).with_name("bertsmith")), "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={
            "COLUMNS": "80",
            "NO_COLOR": "1",
            "PATH": "/usr/bin:/bin",
            "LC_ALL": "C.UTF-8",
            # The package of this checkout, even if another one is installed.
            "PYTHONPATH": str(root),
        },
    )
    page = (root / "docs" / "cli" / "bertsmith.md").read_text(encoding="utf-8")
    help_text = "\n".join(line.rstrip() for line in completed.stdout.strip("\n").splitlines())
    assert help_text in page


def test_site_navigation_contains_every_page(root: Path) -> None:
    """The navigation of the site lists exactly the existing help, guide and reference pages."""
    text = (root / "mkdocs.yml").read_text(encoding="utf-8")
    listed = {
        path
        for path in re.findall(r"^ *- (?:.*: )?(\S+\.md)$", text, re.MULTILINE)
        if path.startswith(("cli/", "guides/", "reference/"))
    }
    folders = ("cli", "guides", "reference")
    pages = {
        path.relative_to(root / "docs").as_posix()
        for folder in folders
        for path in (root / "docs" / folder).glob("*.md")
    }
    assert listed == pages


def test_every_option_in_the_guides_exists(root: Path) -> None:
    """The help pages contain each ``--option`` that the guides mention."""
    documents = [root / "README.md", root / "docs" / "index.md"]
    documents += sorted((root / "docs" / "guides").glob("*.md"))
    help_text = "\n".join(
        page.read_text(encoding="utf-8") for page in (root / "docs" / "cli").glob("*.md")
    )
    existing = set(OPTION.findall(help_text))
    for document in documents:
        lines = document.read_text(encoding="utf-8").splitlines()
        text = "\n".join(
            line for line in lines if not any(program in line for program in OTHER_PROGRAMS)
        )
        missing = set(OPTION.findall(text)) - existing - BENCHMARK_OPTIONS - LAUNCHER_OPTIONS
        assert not missing, f"{document} names options that do not exist: {sorted(missing)}"


def test_every_setting_in_the_guides_exists(root: Path) -> None:
    """The settings page lists each key that the guides mention."""
    reference = (root / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    existing = set(re.findall(r"^\| `([a-z_.]+)` \|", reference, re.MULTILINE))
    tables = {key.partition(".")[0] for key in existing}
    for document in [root / "README.md", *sorted((root / "docs" / "guides").glob("*.md"))]:
        text = document.read_text(encoding="utf-8")
        names = re.findall(r"--set ([a-z_.]+)=", text) + re.findall(r"`([a-z]+\.[a-z_]+)`", text)
        keys = {name for name in names if name.partition(".")[0] in tables}
        # These are files.
        keys -= {"model.onnx", "model.safetensors"}
        assert keys <= existing, f"{document} names unknown settings: {sorted(keys - existing)}"


def test_public_names_can_be_imported() -> None:
    """Each name in ``__all__`` can be imported; unknown names raise AttributeError."""
    assert len(set(bertsmith.__all__)) == len(bertsmith.__all__)
    for name in bertsmith.__all__:
        assert getattr(bertsmith, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bertsmith.nothing


def test_changelog_describes_the_version(root: Path) -> None:
    """The newest release in the change log is the version of the package."""
    text = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[(\d[^\]]*)\]", text, re.MULTILINE)
    assert releases[0] == bertsmith.__version__


def test_lazy_names_match_all() -> None:
    """``__all__`` lists ``__version__`` and the lazily imported names."""
    assert set(bertsmith.__all__) == {"__version__", *bertsmith._MODULE_OF_NAME}


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "docs/paper.md",
        "docs/deviations.md",
        "docs/index.md",
        "docs/architecture.md",
        "docs/formats.md",
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("guides/*.md")),
        *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("reference/*.md")),
    ],
)
def test_paths_and_links_in_documents_exist(root: Path, document: str) -> None:
    """The paths and relative links in a document point to existing files."""
    path = root / document
    text = path.read_text(encoding="utf-8")
    files = {root / name for name in PATH.findall(text)}
    files |= {path.parent / link for link in LINK.findall(text)}
    missing = sorted(str(file) for file in files if not file.exists())
    assert not missing, f"{document} names files that do not exist: {missing}"


def test_paper_rows_name_code_and_tests(root: Path) -> None:
    """Each section in docs/paper.md has code and a test, or neither."""
    lines = (root / "docs" / "paper.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if re.match(r"\| (\d|A|B|C)", line)]
    assert len(rows) >= 21, "sections of the paper are missing"
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 4, row
        for cell in cells[2:]:
            assert cell in NO_FILE or PATH.search(cell), row
        assert (cells[2] in NO_FILE) == (cells[3] in NO_FILE), f"code without a test: {row}"
