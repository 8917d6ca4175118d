"""The command ``prepare``: valid and invalid values of --tokenizer."""

import shutil
from pathlib import Path

import pytest

from bertsmith.data.store import Store
from tests.cli.conftest import RunCli


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A corpus of two documents."""
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"text": "The ferry crossed the river."}\n{"text": "It had no pilot."}\n')
    return path


def test_tokenizer_can_be_a_model_a_run_or_a_file(
    run_cli: RunCli, model: Path, corpus: Path, tmp_path: Path
) -> None:
    """A model directory, a run directory and a tokenizer.json give the same tokenizer."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(model)
    fingerprints = set()
    for number, path in enumerate((model, tmp_path / "run", model / "tokenizer.json")):
        out = tmp_path / f"store-{number}"
        completed = run_cli("prepare", corpus, "--tokenizer", path, "--out", out, "--workers", 1)
        assert completed.status == 0, completed.err
        fingerprints.add(Store.open(out).load_tokenizer().spec.fingerprint())
    assert len(fingerprints) == 1


def test_path_without_a_tokenizer_is_an_error(
    run_cli: RunCli, corpus: Path, tmp_path: Path
) -> None:
    """An unfinished run, an empty folder and a missing path are errors; no store is written."""
    for folder in ("unfinished/checkpoints", "empty"):
        (tmp_path / folder).mkdir(parents=True)
    for name, message in (
        ("unfinished", "this run has not written its model yet"),
        ("empty", "tokenizer.json or vocab.txt"),
        ("nothing", "no such tokenizer"),
    ):
        tokenizer = tmp_path / name
        completed = run_cli(
            "prepare", corpus, "--tokenizer", tokenizer, "--out", tmp_path / "store"
        )
        assert (completed.status, completed.out) == (2, "")
        assert f"{tokenizer}: " in completed.err
        assert message in completed.err
    assert not (tmp_path / "store").exists()


def test_language_of_a_korean_vocabulary_is_korean(
    run_cli: RunCli, corpus: Path, tmp_path: Path
) -> None:
    """Most words decide, and words without letters do not count; --language has precedence."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    korean = [
        *special,
        "1850",
        "!",
        *["학교", "도시", "역사", "아침", "책을", "읽었다", "길이", "##에서"],
    ]
    english = [
        *special,
        *[
            "1850",
            "1851",
            "1852",
            "학교",
            "the",
            "ferry",
            "crossed",
            "river",
            "it",
            "had",
            "no",
            "pilot",
        ],
    ]
    for words, options, expected in (
        (korean, (), "ko"),
        (english, (), "en"),
        (korean, ("--language", "en"), "en"),
    ):
        vocabulary, out = tmp_path / "vocab.txt", tmp_path / "store"
        vocabulary.write_text("".join(f"{word}\n" for word in words))
        shutil.rmtree(out, ignore_errors=True)
        completed = run_cli(
            "prepare", corpus, "--tokenizer", vocabulary, "--out", out, "--workers", 1, *options
        )
        assert completed.status == 0, completed.err
        assert Store.open(out).manifest.plan.options.language == expected
