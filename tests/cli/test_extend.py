"""The command ``vocab extend``, and the default command of ``vocab``."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertsmith import bundle
from tests.cli.conftest import RunCli

WORDS = "Ferrymen\nriverboat\n\nthe\nwinter-time\n나룻배\nzz zz\n"


def test_words_of_a_file_are_added(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """Known, normalized, rejected and added words are logged; existing embeddings are kept."""
    (tmp_path / "words.txt").write_text(WORDS)
    out = tmp_path / "out"
    completed = run_cli("vocab", "extend", model, "--words", tmp_path / "words.txt", "--out", out)
    assert completed.status == 0, completed.err
    assert completed.out == ""
    for message in (
        "1 already in the vocabulary: the",
        "Ferrymen as ferrymen",
        "2 rejected:",
        "winter | - | time",
        "1 of the words were tokenized as [UNK]",
        "added 3 words, ids ",
        f"wrote {out}",
        f"next: bertsmith prepare CORPUS... --tokenizer {out}",
        f"bertsmith pretrain --from {out}",
    ):
        assert message in completed.err
    original, extended = bundle.load(model), bundle.load(out)
    # The folder of the file is not published with the model.
    assert str(tmp_path) not in (out / "bertsmith.json").read_text()
    new_words = ("ferrymen", "riverboat", "나룻배")
    assert extended.tokenizer.vocab == (*original.tokenizer.vocab, *new_words)
    vocab_size = original.tokenizer.vocab_size
    embeddings = extended.model.bert.embeddings.words.weight
    assert torch.equal(embeddings[:vocab_size], original.model.bert.embeddings.words.weight)


def test_dropped_weights_and_modules_are_reported(
    run_cli: RunCli, model: Path, tmp_path: Path
) -> None:
    """Weights and files of sentence-transformers that the new model does not have are notes."""
    shutil.copytree(model, tmp_path / "model")
    weights_file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(weights_file) | {"projection.weight": torch.zeros(2)}, weights_file)
    (tmp_path / "model" / "modules.json").write_text("[]")
    arguments = ["--words", "-", "--out", tmp_path / "out", "--json"]
    words = "riverboat\n나룻배\n".encode()
    completed = run_cli("vocab", "extend", tmp_path / "model", *arguments, stdin=words)
    assert completed.status == 0, completed.err
    assert "model: unused weights: projection.weight" in completed.err
    assert "note: the new directory has no modules of sentence-transformers" in completed.err
    notes = json.loads(completed.out)["notes"]
    assert "1 of the words were tokenized as [UNK]" in notes[-1]
    assert [f"note: {note}" for note in notes] == [
        line for line in completed.err.splitlines() if line.startswith("note: ")
    ]


def test_frequent_words_of_a_corpus_are_added(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """The most frequent words that are split now are added, and reduce the pieces per word."""
    text = "Riverboats and ferrymen. " * 9 + "Riverboats, pilots and lanterns, pilots! " * 2
    (tmp_path / "a.txt").write_text(text)
    second_file = tmp_path / "b.jsonl"
    second_file.write_text(json.dumps({"text": "ferrymen ferrymen ferrymen winters"}) + "\n")
    options = ["--from-corpus", tmp_path / "a.txt", "--from-corpus", second_file, "--count", 2]
    options += ["--on-error", "skip"]
    completed = run_cli("vocab", "extend", model, *options, "--out", tmp_path / "out", "--json")
    assert completed.status == 0, completed.err
    report = json.loads(completed.out)
    assert report["words"] == ["ferrymen", "riverboats"]
    assert report["before"]["pieces_per_word"] > report["after"]["pieces_per_word"] >= 1
    assert len(report["piece_ids"]) == 2
    sources = f"{tmp_path / 'a.txt'} {second_file}"
    assert f"next: bertsmith prepare {sources} --on-error skip --tokenizer " in completed.err
    assert "before: " in completed.err
    assert "after: " in completed.err
    extended = bundle.load(tmp_path / "out")
    assert extended.tokenizer.vocab[-2:] == ("ferrymen", "riverboats")
    assert extended.info["vocab_extensions"][0]["source"] == "a.txt, b.jsonl"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--from-corpus PATH, found neither"),
        (["--words", "w.txt", "--from-corpus", "a.txt"], "--from-corpus PATH, found both"),
        (["--words", "nowhere.txt"], "nowhere.txt"),
        (["--words", "known.txt"], "no word to add"),
        (["--words", "known.txt", "--count", 5], "--count: this option only has an effect with"),
        (["--words", "known.txt", "--field", "x"], "--field: this option only has an effect with"),
        (["--from-corpus", "nowhere"], "nowhere"),
    ],
)
def test_invalid_options_are_errors(
    run_cli: RunCli,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[object],
    message: str,
) -> None:
    """Invalid options, or no word to add, exit with 2 and create no folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "known.txt").write_text("the\nriver bank\n")
    completed = run_cli("vocab", "extend", model, *options, "--out", tmp_path / "out")
    assert completed.status == 2
    assert message in completed.err
    assert not (tmp_path / "out").exists()


def test_existing_folder_is_not_overwritten(run_cli: RunCli, model: Path) -> None:
    """A folder that is not empty is rejected as output."""
    completed = run_cli("vocab", "extend", model, "--words", "-", "--out", model, stdin=b"pilots\n")
    assert completed.status == 2
    assert "already exists" in completed.err


def test_learn_is_the_default_command(run_cli: RunCli, tmp_path: Path) -> None:
    """``vocab FILE`` equals ``vocab learn FILE``, also with options first."""
    text = "The ferry crossed the river twice a day. " * 20
    (tmp_path / "a.txt").write_text(text)
    commands = (
        ["vocab", tmp_path / "a.txt", "--size", 120],
        ["vocab", "learn", tmp_path / "a.txt", "--size", 120],
        ["vocab", "--size", 120, tmp_path / "a.txt"],
    )
    vocabularies = []
    for number, command in enumerate(commands):
        completed = run_cli(*command, "--out", tmp_path / str(number))
        assert completed.status == 0, completed.err
        vocabularies.append((tmp_path / str(number) / "vocab.txt").read_bytes())
    assert vocabularies[0] == vocabularies[1] == vocabularies[2]
    # A file with the name of a command, given with its folder.
    (tmp_path / "extend").write_text(text)
    completed = run_cli("vocab", f"{tmp_path}/extend", "--size", 120, "--out", tmp_path / "named")
    assert completed.status == 0, completed.err
