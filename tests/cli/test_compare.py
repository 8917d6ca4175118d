"""The verb ``compare``: its exit status, and what it puts where."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from bertsmith import bundle
from tests.cli.conftest import Run


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The model with every number of one bias a little higher."""
    found = bundle.load(model)
    with torch.no_grad():
        found.model.state_dict()["mlm.decoder.bias"] += 0.001
    folder = tmp_path_factory.mktemp("compare") / "other"
    bundle.save_model(folder, found)
    return folder


def test_equal_models_exit_with_0(run: Run, model: Path, tmp_path: Path) -> None:
    """A copy is equal in everything, and stdout says so, a line each."""
    shutil.copytree(model, tmp_path / "copy")
    done = run("compare", model, tmp_path / "copy", "--tolerance", 0)
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    assert "config: equal" in lines
    assert "tensors: 46 of 46 equal bit for bit" in lines
    assert "  masked LM\t0\t0" in lines
    assert lines[-1] == "equal (tolerance 0)"


def test_a_difference_exits_with_1(run: Run, model: Path, other: Path) -> None:
    """The tensor and the output are named; a tolerance above the difference makes them equal."""
    done = run("compare", model, other)
    assert done.status == 1
    assert "tensors: 45 of 46 equal bit for bit" in done.out
    assert "  cls.predictions.bias\t0.001\t" in done.out
    assert "  layer 2\t0\t0" in done.out
    assert done.out.rstrip().endswith("different (tolerance 1e-05)")
    assert run("compare", model, other, "--tolerance", 0.01).status == 0


def test_everything_as_json(run: Run, model: Path, other: Path) -> None:
    """--json puts one object on stdout, with every tensor, and keeps the exit status."""
    done = run("compare", model, other, "--json", "--text", "-", stdin="나룻배\nthe\n".encode())
    assert done.status == 1
    facts = json.loads(done.out)
    assert facts["equal"] is False
    assert len(facts["tensors"]) == 46
    assert facts["texts"] == 2
    assert facts["tensors"]["cls.predictions.bias"]["largest"] == pytest.approx(0.001, rel=1e-3)
    assert facts["outputs"]["embeddings"]["largest"] == 0


def test_other_heads_and_words_are_shown(
    run: Run, model: Path, model_without_pairs: Path, tmp_path: Path
) -> None:
    """Fields of the config, what one side lacks, and texts that are cut otherwise stand there."""
    done = run("compare", model, model_without_pairs)
    assert done.status == 1
    assert "config: 1 fields differ" in done.out
    assert "  nsp\tTrue\tFalse" in done.out
    assert "  next sentence\t-\t-\tonly in A" in done.out
    (tmp_path / "words.txt").write_text("ferrymen\n")
    run("vocab", "extend", model, "--words", tmp_path / "words.txt", "--out", tmp_path / "more")
    (tmp_path / "text.txt").write_text("ferrymen\n")
    done = run("compare", model, tmp_path / "more", "--text", tmp_path / "text.txt")
    assert "vocabulary: 1 ids differ" in done.out
    assert "\t-\tferrymen" in done.out
    assert "1 texts left out, which the tokenizers cut otherwise:" in done.out
    assert "    B  ferrymen" in done.out


def test_a_terminal_gets_tables(
    run: Run, model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns with heads instead of tabs, and no name is cut off where it is narrow."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "44")
    done = run("compare", model, other)
    assert "\t" not in done.out
    assert "difference" in done.out
    assert "…" not in done.out
    monkeypatch.setenv("COLUMNS", "100")
    assert "cls.predictions.bias" in run("compare", model, other).out


def test_errors_exit_with_2(run: Run, model: Path, tmp_path: Path) -> None:
    """A path without a model, or a text that is not there, is no difference but an error."""
    assert run("compare", model, tmp_path / "nothing").status == 2
    done = run("compare", model, model, "--text", tmp_path / "nothing")
    assert done.status == 2
    assert "nothing" in done.err
