"""Mistakes in arguments are reported at once, and without loading torch."""

import json
import subprocess
import sys

import pytest

from bertsmith.text.wordpiece import Tokenizer

#: Runs each list of arguments, and prints status, the last line of stderr, and whether torch came.
PROBE = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from bertsmith.cli.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["bertsmith", *arguments]
    told, status = io.StringIO(), 0
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(told):
            main()
    except SystemExit as stop:
        status = stop.code
    line = (told.getvalue().strip().splitlines() or [""])[-1]
    print(json.dumps([status, line, "torch" in sys.modules]))
"""

#: A command line, and a part of what it says. M is a model directory, S a store, T a text file.
MISTAKES = [
    ("fill nowhere x", "nowhere: no such file or directory"),
    ("fill M x --device gpu", "--device gpu: expected auto"),
    ("fill M x --device cuda:x", "--device cuda:x: expected auto"),
    ("pair M one", "one text was given"),
    ("score M no.txt", "no.txt: cannot be read"),
    ("score M T --text a", "a file and --text were both given"),
    ("embed nowhere T", "nowhere: no such file or directory"),
    ("embed M no.txt", "no.txt: cannot be read: No such file"),
    ("embed M T --layer a", "--layer a: expected numbers"),
    ("embed M T --pooling median", "pooling"),
    ("embed M T --out v.csv", "expected a name that ends in"),
    ("embed M T --pooling none --out v.npy", "a vector a token fits"),
    ("similar nowhere T --word a", "nowhere: no such file or directory"),
    ("search nowhere x", "nowhere: there is nothing; make an index"),
    ("predict M", "give texts, or --input FILE"),
    ("predict M --input no.txt", "no.txt: cannot be read"),
    ("predict nowhere x", "nowhere: no such file or directory"),
    ("evaluate M --data no.tsv", "no.tsv: no such file"),
    ("evaluate nowhere --data T", "nowhere: no such file or directory"),
    ("finetune sorting --model M --data T --out r", "unknown task 'sorting'"),
    ("finetune classify --model nowhere --data T --out r", "nowhere: no such file or directory"),
    ("finetune classify --model M --data no.tsv --out r", "no.tsv: no such file"),
    ("finetune classify --model M --data T --dev no.tsv --out r", "no.tsv: no such file"),
    ("finetune classify --model M --data T --out r --set optim.learning_rate=1", "optim.learning"),
    ("finetune classify --model M --data T --out r --set model.width=8", "model.width"),
    ("finetune classify --model M --data T --out T", "this is a file; give --out"),
    (
        "finetune squad --model M --data M --out r",
        "squad expects a folder with train-v1.1.json and",
    ),
    ("pretrain --data nowhere --out r", "nowhere: no such store"),
    ("pretrain --data S", "--out RUN"),
    ("pretrain --data S --out r --size huge", "--size 'huge': the sizes are"),
    ("pretrain --data S --out r --steps 1 --epochs 1", "only one of --steps, --epochs"),
    ("pretrain --data S --out r --set data.masking=1", "unknown setting 'data.masking'"),
    ("pretrain --data S --out r --set data.length=9999", "sequences of 9999 tokens"),
    ("pretrain --data S --out r --config no.toml", "no.toml: no such settings file"),
    ("pretrain --data S --out r --from nowhere", "nowhere: no such file or directory"),
    ("pretrain --data S --out T", "this is a file; give --out"),
    ("export M --to pickle --out x", "--to pickle: expected one of hf"),
    ("export M --to hf --int8 --out x", "--int8: the form hf has no such option"),
    ("export M --to hf --out M", "something is there already"),
    ("export nowhere --to hf --out x", "nowhere: no such file or directory"),
    ("compare nowhere M", "nowhere: no such file or directory"),
    ("compare M M --text no.txt", "no.txt: cannot be read"),
    ("import nowhere --out x", "nowhere: no such file or directory"),
    ("push nowhere acme/bert", "nowhere: no such file or directory"),
    ("serve nowhere --port 0", "nowhere: no such file or directory"),
    ("serve M --device gpu", "--device gpu: expected auto"),
    ("vocab extend nowhere --words T --out x", "nowhere: no such file or directory"),
    ("vocab extend M --words no.txt --out x", "no.txt: cannot be read"),
    ("prepare T --tokenizer nowhere --out x", "nowhere"),
    ("inspect nowhere", "nowhere: no such file or directory"),
    ("lab nothing", "nothing"),
    ("corpus stats ''", "an empty name"),
]


@pytest.fixture(scope="module")
def answers(
    words: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[int, str, bool]]:
    """What one process says to every mistake, one after another."""
    folder = tmp_path_factory.mktemp("mistakes")
    words.save(folder / "words", 43)
    (folder / "T").write_text("One line.\n")
    corpus = folder / "a.txt"
    corpus.write_text("\n\n".join(f"Line {n} is here.\nSo is {n}." for n in range(60)))
    # What is looked at before torch is loaded: that the files are there, and config and tokenizer.
    words.save(folder / "M", 43)
    (folder / "M" / "config.json").write_text('{"vocab_size": 131, "hidden_size": 8}')
    (folder / "M" / "model.safetensors").touch()
    commands = [["prepare", "a.txt", "--tokenizer", "words", "--workers", "1", "--out", "S"]]
    commands += [["" if word == "''" else word for word in line.split()] for line, _ in MISTAKES]
    done = subprocess.run(
        [sys.executable, "-c", PROBE, json.dumps(commands)],
        cwd=folder, capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert lines[0][0] == 0, lines[0]
    return {line: tuple(found) for (line, _), found in zip(MISTAKES, lines[1:], strict=True)}


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_mistake_is_reported_before_torch_is_loaded(
    answers: dict[str, tuple[int, str, bool]], line: str, message: str
) -> None:
    """Exit status 2 and one message; the seconds that torch takes to load are not spent."""
    status, told, has_torch = answers[line]
    assert status == 2
    assert message in told
    assert not has_torch
