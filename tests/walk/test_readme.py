"""The README's own-text commands, run as they stand there, one after another, on a small corpus.

These tests know no verb: what they run is what the README says. Only budgets are made smaller.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

STEPS = 10
#: Budgets that a test cannot spend: the README's words, and what stands in their place here.
SMALLER = {
    r"--minutes \d+(\.\d+)?": f"--steps {STEPS} --set run.eval_every={STEPS}",
    r"minutes=\d+": f"steps={STEPS}, assignments=['run.eval_every={STEPS}']",
    r"--size (mini|small|medium|base)": "--size tiny",
    r"--size \d+": "--size 2000",  # the vocabulary's size
}
VERBS = ["corpus", "vocab", "prepare", "pretrain", "fill"]
TUNING = ["finetune", "evaluate", "predict", "predict"]
VECTORS = ["embed", "similar", "embed", "search"]
FAMILIES = ["finetune", "predict", "finetune", "finetune", "predict", "finetune"]
#: Characters of text to learn from: enough for pairs and a held-out split.
CHARACTERS = 400_000


def readme_commands(root: Path) -> list[str]:
    """Return the lines that begin with ``$`` in the README's blocks marked console."""
    text = (root / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line[2:].strip() for line in joined.splitlines() if line.startswith("$ ")]


def python_blocks(root: Path) -> list[str]:
    """Return the README's blocks of Python."""
    text = (root / "README.md").read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def smaller(command: str) -> str:
    """Return ``command`` with its budgets made small."""
    for pattern, words in SMALLER.items():
        command = re.sub(pattern, words, command)
    return command


def write_corpus(folder: Path) -> None:
    """Write documentation of the standard library as plain text, a file a module."""
    folder.mkdir()
    written = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(file.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(tree) if isinstance(node, kinds)]
        texts = [text for node in nodes if (text := ast.get_docstring(node)) and len(text) > 80]
        if texts:
            (folder / f"{file.stem}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
            written += sum(map(len, texts))
        if written > CHARACTERS:
            return
    raise AssertionError(f"only {written} characters of documentation in the standard library")


def write_reviews(folder: Path) -> None:
    """Write two tables of reviews and moods."""
    rows = [f"a {'fine' if n % 2 else 'poor'} thing {n},{'good' if n % 2 else 'bad'}"
            for n in range(60)]  # fmt: skip
    for name in ("reviews.csv", "more-reviews.csv"):
        (folder / name).write_text("\n".join(["review,mood", *rows]) + "\n", encoding="utf-8")


def write_families(folder: Path) -> None:
    """Write SQuAD's, CoNLL's and a multiple choice's files, and questions, all of them small."""
    context = "The smith lifted the white iron, and a boy carried water to him."
    answers = [("Who lifted the iron?", "The smith"), ("What did the boy carry?", "water")]
    asked = [
        {"id": f"{text}{number}", "question": question,
         "answers": [{"text": text, "answer_start": context.index(text)}]}
        for number in range(4) for question, text in answers
    ]  # fmt: skip
    (folder / "SQUAD").mkdir()
    for name in ("train-v1.1.json", "dev-v1.1.json"):
        articles = [{"title": "a smith", "paragraphs": [{"context": context, "qas": asked}]}]
        (folder / "SQUAD" / name).write_text(json.dumps({"version": "1.1", "data": articles}))
    lines = [f"{question}\t{context}\n" for question, _ in answers]
    (folder / "questions.txt").write_text("".join(lines))
    rows = [f"take a file {number},read it,eat it,{number % 2}\n" for number in range(20)]
    (folder / "plans.csv").write_text("plan,a,b,right\n" + "".join(rows))
    (folder / "CONLL").mkdir()
    sentence = "Peter NNP B-NP B-PER\nflew VBD B-VP O\nto TO B-PP O\nOslo NNP B-NP B-LOC\n\n"
    for name in ("train.txt", "valid.txt", "test.txt"):
        (folder / "CONLL" / name).write_text("-DOCSTART- -X- -X- O\n\n" + sentence * 20)


def run(arguments: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the program in ``folder`` and fail with its own words where it fails."""
    command = [str(Path(sys.executable).with_name("bertsmith")), *arguments]
    environment = {**os.environ, "NO_COLOR": "1", "COLUMNS": "100"}
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    words = shlex.join(arguments)
    assert done.returncode == 0, f"bertsmith {words}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr
    return done


def run_python(code: str, folder: Path) -> None:
    """Run lines of Python in ``folder`` and fail with their own words where they fail."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_own_text_in_five_commands(root: Path, tmp_path: Path) -> None:
    """Each command works on what the one before wrote, and so do the lines of Python."""
    every = readme_commands(root)
    verbs = [["bertsmith", verb] for verb in (*VERBS, *TUNING, *FAMILIES, *VECTORS)]
    assert [command.split()[:2] for command in every] == verbs
    commands, tuning = every[: len(VERBS)], every[len(VERBS) : len(VERBS) + len(TUNING)]
    write_corpus(tmp_path / "my-text")
    done = None
    for command in commands:
        done = run(shlex.split(smaller(command))[1:], tmp_path)
    assert done is not None
    assert done.stdout.strip(), "the last command gave no words for the mask"
    filled = run([*shlex.split(commands[-1])[1:], "--json"], tmp_path)
    assert all(json.loads(line) for line in filled.stdout.splitlines())
    write_reviews(tmp_path)
    for command in tuning[:-1]:
        done = run(shlex.split(command)[1:], tmp_path)
    run(shlex.split(tuning[-1])[1:], tmp_path)
    table = (tmp_path / "labelled.csv").read_text(encoding="utf-8").splitlines()
    assert (table[0], len(table)) == ("review,mood,label,probability", 61)
    label, share, text = done.stdout.rstrip("\n").split("\t")
    assert (label in {"good", "bad"}, text) == (True, "a fine piece of work")
    assert 0.5 <= float(share) <= 1
    write_families(tmp_path)
    families, vectors = every[-len(FAMILIES + VECTORS) :], every[-len(VECTORS) :]
    told = [run(shlex.split(one)[1:], tmp_path) for one in families[: len(FAMILIES)]]
    assert len(told[1].stdout.splitlines()) == 2
    assert json.loads(told[4].stdout)["text"].startswith("Peter Blackburn")
    (tmp_path / "lines.txt").write_text("open the file\nthe name of a file\na long list\n")
    (tmp_path / "sentences.txt").write_text("open the file\na file of names\n")
    told = [run(shlex.split(command)[1:], tmp_path) for command in vectors]
    assert len(np.load(tmp_path / "vectors.npy")) == 3
    assert "the name of a file" in told[3].stdout.splitlines()[0]
    blocks = python_blocks(root)
    assert len(blocks) == 4
    for block in blocks:
        run_python(smaller(block), tmp_path)


def test_budgets_are_all_that_changes(root: Path) -> None:
    """Of the README's commands the walk changes three options and nothing else."""
    before = readme_commands(root)
    changed = [old for old in before if smaller(old) != old]
    assert [command.split()[1] for command in changed] == ["vocab", "pretrain"]
    assert smaller("bertsmith pretrain --data x --size mini --minutes 30 --out y") == (
        f"bertsmith pretrain --data x --size tiny --steps {STEPS} "
        f"--set run.eval_every={STEPS} --out y"
    )
