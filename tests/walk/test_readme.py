"""Tests that run the commands of the README and the guides, with shorter training."""

import ast
import json
import re
import shlex
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import RunCli

#: Number of pre-training steps instead of the documented budgets.
NUM_STEPS = 10
#: Number of rows of each table of reviews.
NUM_REVIEWS = 60
#: Documents whose commands run, in this order.
DOCUMENTS = (
    "README.md",
    "docs/guides/train-your-own.md",
    "docs/guides/fine-tuning.md",
    "docs/guides/embeddings.md",
    "docs/guides/evaluation.md",
)
#: Regular expressions for options that take too long in a test, and their replacements.
REDUCED_BUDGETS = {
    r"--minutes \d+(\.\d+)?": f"--steps {NUM_STEPS} --set run.eval_every={NUM_STEPS}",
    r"minutes=\d+": f"steps={NUM_STEPS}, assignments=['run.eval_every={NUM_STEPS}']",
    r"--size (mini|small|medium|base)": "--size tiny",
    r"--size \d+": "--size 2000",  # the vocabulary's size
}
REFERENCE_COMMANDS = ["fill", "fill"]
PRETRAINING_COMMANDS = ["corpus", "vocab", "prepare", "pretrain", "fill"]
CLASSIFIER_COMMANDS = ["finetune", "evaluate", "predict", "finetune", "evaluate", "predict"]
TASK_COMMANDS = ["finetune", "predict", "finetune", "finetune", "predict", "finetune"]
VECTOR_COMMANDS = ["embed", "similar", "embed", "search", "embed"]
EVALUATION_COMMANDS = ["evaluate", "evaluate", "evaluate", "score", "score"]
#: Size of a corpus that is large enough for sentence pairs and a validation split.
MIN_CORPUS_CHARACTERS = 400_000


def read_code_blocks(root: Path, language: str) -> list[str]:
    """Return the code blocks in ``language`` of all documents."""
    pattern = rf"^```{language}\n(.*?)^```"
    texts = [(root / document).read_text(encoding="utf-8") for document in DOCUMENTS]
    return [
        block for text in texts for block in re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    ]


def read_commands(root: Path) -> list[str]:
    """Return the commands in the console blocks, without the prompt ``$``."""
    console = "\n".join(read_code_blocks(root, "console")).replace("\\\n", " ")
    return [line[2:].strip() for line in console.splitlines() if line.startswith("$ ")]


def reduce_budget(command: str) -> str:
    """Return ``command`` with options that make it faster."""
    for pattern, replacement in REDUCED_BUDGETS.items():
        command = re.sub(pattern, replacement, command)
    return command


def write_corpus(folder: Path) -> None:
    """Write docstrings of the standard library as text files, one for each module."""
    folder.mkdir()
    num_characters = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(file.read_bytes())
        documented_types = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, documented_types)]
        docstrings = [ast.get_docstring(node) or "" for node in nodes]
        # Skip docstrings of only a few words.
        texts = [docstring for docstring in docstrings if len(docstring) > 80]
        if texts:
            (folder / f"{file.stem}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
            num_characters += sum(map(len, texts))
        if num_characters > MIN_CORPUS_CHARACTERS:
            return
    raise AssertionError(f"the standard library has only {num_characters} characters of docstrings")


def write_reviews(folder: Path) -> None:
    """Write two tables with the columns ``review`` and ``mood``."""
    rows = []
    for number in range(NUM_REVIEWS):
        adjective, mood = ("fine", "good") if number % 2 else ("poor", "bad")
        rows.append(f"a {adjective} thing {number},{mood}")
    for name in ("reviews.csv", "more-reviews.csv"):
        (folder / name).write_text("\n".join(["review,mood", *rows]) + "\n", encoding="utf-8")


def write_comments(folder: Path) -> None:
    """Write two tables of comments with a column of 0 and 1 for each label."""
    labels = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")
    rows = []
    for number in range(NUM_REVIEWS):
        flags = [int(number % (index + 2) == 0) for index in range(len(labels))]
        rows.append(f"a thing of number {number},{','.join(map(str, flags))}")
    for name in ("train.csv", "validation.csv"):
        lines = [f"comment_text,{','.join(labels)}", *rows]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_minimal_pairs(folder: Path) -> None:
    """Write three files with two minimal pairs each."""
    pairs = [("the files are open", "the files is open"), ("a name", "a names")]
    lines = [json.dumps({"sentence_good": good, "sentence_bad": bad}) for good, bad in pairs]
    (folder / "blimp").mkdir()
    for name in ("blimp/transitive.jsonl", "blimp/causative.jsonl", "korean.jsonl"):
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_task_data(folder: Path) -> None:
    """Write small files for question answering, tagging and multiple choice."""
    context = "The smith lifted the white iron, and a boy carried water to him."
    answers = [("Who lifted the iron?", "The smith"), ("What did the boy carry?", "water")]
    questions = [
        {
            "id": f"{answer}{number}",
            "question": question,
            "answers": [{"text": answer, "answer_start": context.index(answer)}],
        }
        for number in range(4)
        for question, answer in answers
    ]
    (folder / "SQUAD").mkdir()
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        articles = [{"title": "a smith", "paragraphs": [{"context": context, "qas": questions}]}]
        (folder / "SQUAD" / name).write_text(json.dumps({"version": "1.1", "data": articles}))
    lines = [f"{question}\t{context}\n" for question, _ in answers]
    (folder / "questions.txt").write_text("".join(lines))
    rows = [f"take a file {number},read it,eat it,{number % 2}\n" for number in range(20)]
    (folder / "plans.csv").write_text("plan,a,b,right\n" + "".join(rows))
    (folder / "CONLL").mkdir()
    sentence = "Peter NNP B-NP B-PER\nflew VBD B-VP O\nto TO B-PP O\nOslo NNP B-NP B-LOC\n\n"
    for name in ("train.txt", "valid.txt", "test.txt"):
        (folder / "CONLL" / name).write_text("-DOCSTART- -X- -X- O\n\n" + sentence * 20)


def run_installed(command: str) -> str:
    """Run a command with the installed program, and return its output."""
    program = str(Path(sys.executable).with_name("bertsmith"))
    completed = subprocess.run(
        [program, *shlex.split(command)[1:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert completed.returncode == 0, f"{command}\n{completed.stdout}\n{completed.stderr}"
    return completed.stdout


def run_python(code: str, folder: Path) -> None:
    """Run Python code in ``folder`` and check that it succeeds."""
    completed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert completed.returncode == 0, f"{code}\n{completed.stdout}\n{completed.stderr}"


def read_shown_output(root: Path, command: str) -> str:
    """Return the output that the README shows below a command."""
    text = (root / "README.md").read_text(encoding="utf-8")
    following = text.partition(f"$ {command}\n")[2]
    return re.split(r"^(?:\$ |```)", following, maxsplit=1, flags=re.MULTILINE)[0]


def assert_same_output(output: str, expected: str) -> None:
    """Check that lines are equal except for small differences of percentages.

    Processors round differently, so the last digit may differ.
    """
    number = re.compile(r"\d+\.\d+(?=%)")
    assert number.sub("N", output) == number.sub("N", expected), "run docs/readme_outputs.py"
    values = [[float(value) for value in number.findall(text)] for text in (output, expected)]
    assert values[0] == pytest.approx(values[1], abs=0.05)


@contextmanager
def run_documented_server(text: str, folder: Path) -> Iterator[int]:
    """Run ``bertsmith serve`` of a document in ``folder`` on a free port, and yield the port."""
    command = re.findall(r"^bertsmith serve.*", text, re.MULTILINE)[0]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [*shlex.split(command)[1:], "--port", str(port)]
    program = str(Path(sys.executable).with_name("bertsmith"))
    server = subprocess.Popen(
        [program, *arguments, "--no-page"], cwd=folder, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stderr is not None
        assert any("serving at" in line for line in server.stderr), "the server did not start"
        yield port
    finally:
        server.terminate()
        server.wait(60)


def check_curl_commands(root: Path, folder: Path) -> None:
    """Run the curl commands of the README and the serving guide against their servers."""
    for document, count in (("README.md", 1), ("docs/guides/serving.md", 3)):
        text = (root / document).read_text(encoding="utf-8")
        commands = re.findall(r"^curl (?:.*\\\n)*.*", text, re.MULTILINE)
        assert len(commands) == count
        check_requests(commands, text, folder)


def check_requests(commands: Sequence[str], text: str, folder: Path) -> None:
    """Run curl commands of a document against the server that the document starts."""
    with run_documented_server(text, folder) as port:
        for command in commands:
            completed = subprocess.run(
                ["bash", "-c", command.replace("8080", str(port)) + " --fail"],
                capture_output=True,
                check=False,
            )
            assert completed.returncode == 0, command
            assert json.loads(completed.stdout), command


@pytest.mark.slow
def test_commands_work_in_order(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: RunCli
) -> None:
    """The commands and Python blocks of the documents run one after another.

    Most commands run in this process, because each new process would import torch again.
    """
    monkeypatch.chdir(tmp_path)
    for name, value in (("NO_COLOR", "1"), ("COLUMNS", "100")):
        monkeypatch.setenv(name, value)

    def run(command: str) -> str:
        completed = run_cli(*shlex.split(command)[1:])
        assert completed.status == 0, f"{command}\n{completed.out}\n{completed.err}"
        return completed.out

    commands = read_commands(root)
    groups = (REFERENCE_COMMANDS, PRETRAINING_COMMANDS, CLASSIFIER_COMMANDS, TASK_COMMANDS,
              VECTOR_COMMANDS, EVALUATION_COMMANDS)  # fmt: skip
    names = [name for group in groups for name in group]
    assert [command.split()[:2] for command in commands] == [["bertsmith", name] for name in names]
    # Split the commands into groups again.
    remaining = iter(commands)
    reference, pretraining, classifier, tasks, vectors, evaluation = (
        [next(remaining) for _ in group] for group in groups
    )

    outputs = [run_installed(command) for command in reference]
    assert_same_output(outputs[0], read_shown_output(root, reference[0]))

    write_corpus(tmp_path / "my-text")
    outputs = [run(reduce_budget(command)) for command in pretraining]
    assert outputs[-1].strip(), "fill printed no words"
    filled = run(f"{pretraining[-1]} --json")
    assert all(json.loads(line) for line in filled.splitlines())

    write_reviews(tmp_path)
    write_comments(tmp_path)
    outputs = [run(command) for command in classifier]
    table = (tmp_path / "labelled.csv").read_text(encoding="utf-8").splitlines()
    assert table[0] == "review,mood,label,probability"
    assert len(table) == 1 + NUM_REVIEWS
    label, probability, text = outputs[2].rstrip("\n").split("\t")
    assert label in {"good", "bad"}
    assert text == "a fine piece of work"
    assert 0.5 <= float(probability) <= 1
    assert "identity_hate" in outputs[4]

    write_task_data(tmp_path)
    outputs = [run(command) for command in tasks]
    assert len(outputs[1].splitlines()) == 2
    assert json.loads(outputs[4])["text"].startswith("Peter Blackburn")

    (tmp_path / "lines.txt").write_text("open the file\nthe name of a file\na long list\n")
    (tmp_path / "sentences.txt").write_text("open the file\na file of names\n")
    (tmp_path / "more-lines.txt").write_text("a short list\n")
    outputs = [run(command) for command in vectors]
    assert len(np.load(tmp_path / "vectors.npy")) == 3
    assert "the name of a file" in outputs[3].splitlines()[0]
    assert len(np.load(tmp_path / "lines.index" / "vectors.npy")) == 4

    write_minimal_pairs(tmp_path)
    outputs = [run(command) for command in evaluation]
    assert outputs[1].splitlines()[-1].startswith("mean of files")
    # The header, and two pairs in each of two files.
    assert len((tmp_path / "scores.csv").read_text(encoding="utf-8").splitlines()) == 1 + 2 * 2
    assert json.loads(outputs[2])["num_pairs"] == 2

    check_curl_commands(root, tmp_path)

    blocks = read_code_blocks(root, "python")
    assert len(blocks) == 6
    for block in blocks:
        run_python(reduce_budget(block), tmp_path)


def test_only_training_time_is_reduced(root: Path) -> None:
    """``reduce_budget`` changes only the size of ``vocab`` and the budget of ``pretrain``."""
    commands = read_commands(root)
    changed = [command for command in commands if reduce_budget(command) != command]
    assert [command.split()[1] for command in changed] == ["vocab", "pretrain"]
    assert reduce_budget("bertsmith pretrain --data x --size mini --minutes 30 --out y") == (
        f"bertsmith pretrain --data x --size tiny --steps {NUM_STEPS} "
        f"--set run.eval_every={NUM_STEPS} --out y"
    )
