"""Finding the text files that the arguments of a command name."""

import pickle
from pathlib import Path

import pytest

from bertsmith.errors import CorpusError
from bertsmith.text.sources import find_sources


def write_file(path: Path, content: bytes = b"x") -> None:
    """Write a file and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def test_text_files_in_a_folder_are_found(tmp_path: Path) -> None:
    """Text files are found in sorted order, hidden files are skipped, others are reported."""
    for name in ("b.jsonl", "AA/wiki_01", "AA/wiki_00", ".hidden.jsonl", "picture.png", "a.md.gz"):
        write_file(tmp_path / name)
    ignored: list[str] = []
    names = [source.name for source in find_sources([str(tmp_path)], ignored)]
    assert [str(Path(name).relative_to(tmp_path)) for name in names] == [
        "a.md.gz",
        "b.jsonl",
        "AA/wiki_00",
        "AA/wiki_01",
    ]
    assert ignored == [str(tmp_path / "picture.png")]
    matches = find_sources([str(tmp_path / "**" / "wiki_*")])
    assert [source.name for source in matches] == names[2:]


def test_globs_match_folders_and_files(tmp_path: Path) -> None:
    """Files in matched folders are read, once, except below folders that ``**`` matches."""
    for name in ("wiki/AA/wiki_00", "wiki/BB/b.txt", "wiki/c.txt", "wiki/images/d.png"):
        write_file(tmp_path / name)
    ignored: list[str] = []
    sources = find_sources([str(tmp_path / "wiki" / "*")], ignored)
    names = ["wiki/AA/wiki_00", "wiki/BB/b.txt", "wiki/c.txt"]
    assert [str(Path(source.name).relative_to(tmp_path)) for source in sources] == names
    assert ignored == [str(tmp_path / "wiki/images/d.png")]
    sources = find_sources([str(tmp_path / "**" / "*.txt")])
    assert [str(Path(source.name).relative_to(tmp_path)) for source in sources] == names[1:]
    with pytest.raises(CorpusError, match="no text file in the folders"):
        find_sources([str(tmp_path / "wiki" / "im*")])


@pytest.mark.parametrize(
    "files",
    [
        ["tokenizer.json", "vocab.txt"],
        ["bertsmith.json", "README.md"],
        ["manifest.json", "train.ids", "tokenizer/vocab.txt"],
        ["parts/plan.json", "tokenizer/vocab.txt"],
        ["settings.toml", "metrics.jsonl", "model/README.md"],
        ["index.json", "lines.txt"],
        ["state.json", "data/lines.txt"],
    ],
)
def test_outputs_in_a_folder_are_ignored(tmp_path: Path, files: list[str]) -> None:
    """Outputs in subfolders are no text, but an output that is given by its name is read."""
    write_file(tmp_path / "text/a.txt")
    for name in files:
        write_file(tmp_path / "text/output" / name)
    for argument in (tmp_path / "text", tmp_path / "text" / "*"):
        ignored: list[str] = []
        sources = find_sources([str(argument)], ignored)
        assert [Path(source.name).name for source in sources] == ["a.txt"]
        assert ignored == [str(tmp_path / "text/output")]
    output_sources = find_sources([str(tmp_path / "text/output")])
    assert output_sources[0].name.startswith(str(tmp_path / "text/output"))


def test_corpus_folder_with_a_manifest_is_read(tmp_path: Path) -> None:
    """Single files with the names of a store's or a run's files do not make a folder an output."""
    for name in ("data/manifest.json", "data/settings.toml", "data/index.json", "data/a.txt"):
        write_file(tmp_path / name)
    assert [Path(source.name).name for source in find_sources([str(tmp_path)])] == ["a.txt"]


def test_links_to_folders_are_followed_once(tmp_path: Path) -> None:
    """A link is followed, but not in a cycle, and not to a folder or file read before."""
    write_file(tmp_path / "corpus/a.txt")
    (tmp_path / "corpus/a2.txt").symlink_to(tmp_path / "corpus/a.txt")
    write_file(tmp_path / "elsewhere/b.txt")
    (tmp_path / "corpus/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/cycle").symlink_to(tmp_path / "corpus")
    sources = find_sources([str(tmp_path / "corpus")])
    assert [Path(source.name).name for source in sources] == ["a.txt", "b.txt"]


@pytest.mark.parametrize("missing", ["nowhere.txt", "*.nothing", "empty"])
def test_argument_without_text_is_rejected(tmp_path: Path, missing: str) -> None:
    """A missing path, a pattern without matches and a folder without text are errors."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(CorpusError, match=missing.replace("*", r"\*")):
        find_sources([str(tmp_path / missing)])


def test_address_is_rejected() -> None:
    """The message says that files on the web must be downloaded first."""
    address = "https://example.org/text.txt"
    with pytest.raises(CorpusError, match=f"{address}: addresses are not read; download"):
        find_sources([address])


def test_source_can_be_pickled_and_has_a_fingerprint(tmp_path: Path) -> None:
    """A source can be pickled, and its fingerprint changes with a single byte."""
    write_file(path := tmp_path / "a.txt", b"abc")
    (source,) = find_sources([str(path)])
    assert pickle.loads(pickle.dumps(source)) == source
    fingerprint = source.fingerprint()
    write_file(tmp_path / "a.txt", b"abd")
    assert find_sources([str(path)])[0].fingerprint() != fingerprint
