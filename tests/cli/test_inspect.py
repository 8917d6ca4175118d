"""The command ``inspect``, for every kind of artifact."""

import json
import shutil
from pathlib import Path

import pytest

from bertsmith.cli.inspect import _FILL_COMMAND, _FINETUNE_COMMAND, _NEXT_COMMANDS
from bertsmith.text.wordpiece import Tokenizer
from tests.cli.conftest import MODEL_WIDTH, RunCli

DOCUMENT = (
    "The ferry crossed the river twice a day. Nobody remembered a winter with ice. "
    "The old pilot knew every stone. Every stone knew him in the evening. "
)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """The folder of a saved tokenizer."""
    folder = tmp_path_factory.mktemp("inspect") / "tokenizer"
    tokenizer.save(folder)
    return folder


def test_inspect_shows_a_vocabulary(
    run_cli: RunCli, tokenizer_folder: Path, tokenizer: Tokenizer
) -> None:
    """The vocabulary of a tokenizer folder, its files, or a renamed vocab.txt is shown."""
    renamed = tokenizer_folder.parent / "mine.txt"
    renamed.write_bytes((tokenizer_folder / "vocab.txt").read_bytes())
    vocab_file, json_file = tokenizer_folder / "vocab.txt", tokenizer_folder / "tokenizer.json"
    for path in (tokenizer_folder, vocab_file, json_file, renamed):
        completed = run_cli("inspect", path)
        assert completed.status == 0, completed.err
        assert f"{tokenizer.vocab_size} words" in completed.out
        assert "[MASK] 4" in completed.out
        assert "next: bertsmith prepare" in completed.err
        report = json.loads(run_cli("inspect", path, "--json").out)
        assert report["kind"] == "tokenizer"
        assert report["size"] == tokenizer.vocab_size


def test_inspect_shows_and_verifies_a_store(
    run_cli: RunCli, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A store shows its counts and examples with masks; --verify detects damage."""
    corpus = tmp_path / "corpus.jsonl"
    texts = [f"{DOCUMENT * (2 + number % 3)} {number}." for number in range(40)]
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    store = tmp_path / "store"
    completed = run_cli(
        "prepare", corpus, "--tokenizer", tokenizer_folder, "--out", store, "--workers", 1
    )
    assert completed.status == 0, completed.err
    completed = run_cli("inspect", store, "--examples", 4, "--length", 32)
    assert completed.status == 0, completed.err
    # Like the default recipe of pretrain, without sentence pairs.
    assert sum(line.startswith("  [CLS] ") for line in completed.out.splitlines()) == 4
    assert "examples per epoch at length 32: " in completed.out
    assert "(one segment each)" in completed.out
    assert "{[MASK]→" in completed.out
    pairs = run_cli("inspect", store, "--examples", 4, "--length", 32, "--pairs").out
    assert sum(line.startswith("  A: [CLS]") for line in pairs.splitlines()) == 4
    assert "(pairs of segments)" in pairs
    assert "next: bertsmith pretrain --data" in completed.err
    report = json.loads(run_cli("inspect", store / "manifest.json", "--json").out)
    assert report["kind"] == "store"
    assert report["report"]["documents"] == 40
    assert "verified" not in report
    assert "verified: checksums" in run_cli("inspect", store, "--verify").out
    assert (
        json.loads(run_cli("inspect", store, "--verify", "--json").out)["verified"] == "checksums"
    )
    # Damage the last token id.
    ids = store / "train.ids"
    ids.write_bytes(ids.read_bytes()[:-2] + b"\0\0")
    completed = run_cli("inspect", store, "--verify")
    assert completed.status == 2
    assert "train.ids: the file is damaged" in completed.err
    completed = run_cli("inspect", tokenizer_folder, "--verify")
    assert completed.status == 2
    assert "--verify is for token stores" in completed.err
    for arguments in ((tokenizer_folder, "--seed", 1), (store, "--pairs", "--json")):
        completed = run_cli("inspect", *arguments)
        assert completed.status == 2
        assert f"{arguments[1]}: only selects the examples of a token store" in completed.err


def test_inspect_shows_config_heads_and_tensors_of_a_model(run_cli: RunCli, model: Path) -> None:
    """A model directory, or its config.json, shows config, heads and tensors."""
    for path in (model, model / "config.json"):
        completed = run_cli("inspect", path)
        assert completed.status == 0, completed.err
        assert f"2 layers, width {MODEL_WIDTH}, 2 heads" in completed.out
        assert "masked LM, next sentence" in completed.out
        assert "bert.encoder.layer.1.attention.self.query.weight" in completed.out
        assert f"next: bertsmith fill {model}" in completed.err
    assert json.loads(run_cli("inspect", model, "--json").out)["config"]["feed_forward"] == 31


def test_inspect_shows_tensor_and_settings_files(
    run_cli: RunCli, model: Path, tmp_path: Path
) -> None:
    """A .safetensors file shows its tensors, a settings file its settings."""
    output = run_cli("inspect", model / "model.safetensors").out
    assert "cls.predictions.bias" in output
    assert "config" not in output
    settings = tmp_path / "mine.toml"
    settings.write_text("[optim]\nlr = 2e-4\n")
    assert run_cli("inspect", settings).out.split()[-2:] == ["optim.lr", "0.0002"]
    assert json.loads(run_cli("inspect", settings, "--json").out)["settings"] == {
        "optim": {"lr": 2e-4}
    }


def test_many_source_files_are_shortened(
    run_cli: RunCli, tokenizer_folder: Path, model: Path, tmp_path: Path
) -> None:
    """A store and a model of 30 files show the first 10 of them; the JSON output has all."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(30):
        (corpus / f"{number:02}.txt").write_text(f"{DOCUMENT * 3} {number}.")
    prepare = ("prepare", corpus, "--tokenizer", tokenizer_folder, "--out", tmp_path / "store")
    assert run_cli(*prepare, "--workers", 1).status == 0
    lines = run_cli("inspect", tmp_path / "store").out.splitlines()
    assert sum(line.startswith("source: ") for line in lines) == 11
    assert "source: … and 20 more" in lines
    report = json.loads(run_cli("inspect", tmp_path / "store", "--json").out)
    assert len(report["plan"]["sources"]) == 30

    names = [source["name"] for source in report["plan"]["sources"]]
    info_file = shutil.copytree(model, tmp_path / "model") / "bertsmith.json"
    info = json.loads(info_file.read_text()) | {"provenance": {"sources": names}}
    info_file.write_text(json.dumps(info))
    output = run_cli("inspect", tmp_path / "model").out
    assert "09.txt, … and 20 more" in output
    report = json.loads(run_cli("inspect", tmp_path / "model", "--json").out)
    assert report["metadata"]["provenance"]["sources"] == names


@pytest.mark.parametrize("name", ["nothing", "empty", "notes.txt"])
def test_unknown_artifact_is_an_error(run_cli: RunCli, tmp_path: Path, name: str) -> None:
    """A path without a known artifact is an error that lists the known kinds."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("just some notes\n")
    completed = run_cli("inspect", tmp_path / name)
    assert completed.status == 2
    assert "expected one of: a tokenizer" in completed.err


def test_suggested_commands_exist(run_cli: RunCli) -> None:
    """Every suggested command is a command of the program."""
    for command in (*_NEXT_COMMANDS.values(), _FILL_COMMAND, _FINETUNE_COMMAND):
        assert run_cli(command.split()[1], "--help").status == 0
