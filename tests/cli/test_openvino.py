"""``export --to openvino`` and commands that embed texts with the result."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.cli.conftest import SENTENCES, RunCli

pytest.importorskip("openvino", reason="pip install 'bertsmith[openvino]'")
pytest.importorskip("nncf", reason="pip install 'bertsmith[openvino]'")


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of sentences."""
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(SENTENCES) + "\n")
    return path


def test_export_and_embed(run_cli: RunCli, model: Path, tmp_path: Path, lines: Path) -> None:
    """The suggested command embeds with the 8-bit graph, and vectors are close to float32."""
    out = tmp_path / "out"
    completed = run_cli(
        "export", model, "--to", "openvino", "--calibration", lines, "--pooling", "cls", "--out",
        out, "--json",
    )  # fmt: skip
    assert completed.status == 0, completed.err
    result = json.loads(completed.out)
    assert result["format"] == "openvino"
    assert "texts for calibration" in result["notes"][0]
    assert f"next: bertsmith embed {out} LINES --out vectors.npy" in completed.err
    for directory, options in ((out, []), (model, ["--pooling", "first", "--normalize"])):
        completed = run_cli(
            "embed", directory, lines, *options, "--out", tmp_path / f"{directory.name}.npy"
        )
        assert completed.status == 0, completed.err
    vectors, expected = np.load(tmp_path / "out.npy"), np.load(tmp_path / "model.npy")
    assert (vectors * expected).sum(1).min() >= 0.99
    completed = run_cli("similar", out, lines, "--word", "the", "--skip-invalid")
    assert completed.status == 0, completed.err


def test_other_commands_name_the_original_model(
    run_cli: RunCli, model: Path, tmp_path: Path, lines: Path
) -> None:
    """Commands that need weights, other layers or --fast fail without a traceback."""
    out = tmp_path / "out"
    completed = run_cli("export", model, "--to", "openvino", "--out", out)
    assert completed.status == 0, completed.err
    commands = (
        ("fill", out, "a [MASK]"),
        ("export", out, "--to", "hf", "--out", tmp_path / "hf"),
        ("embed", out, lines, "--layer", "-2"),
    )
    for command in commands:
        completed = run_cli(*command)
        assert completed.status == 2
        assert f"use the original model, {model.parent.name}" in completed.err
        assert "Traceback" not in completed.err
    completed = run_cli("embed", out, lines, "--fast")
    assert completed.status == 2
    assert "remove --fast" in completed.err


def test_invalid_options_are_errors(
    run_cli: RunCli, model: Path, tmp_path: Path, lines: Path
) -> None:
    """The error says what is wrong with the options or the file, and nothing is written."""
    files = {"empty": b"", "blank": b"\n \n", "latin1": "caf\xe9\n".encode("latin-1")}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    cases: list[tuple[list[object], str]] = [
        (["--int8"], "--int8: openvino quantizes to 8 bits with --calibration FILE"),
        (["--dims", "9"], "--dims: not an option of the format openvino"),
        (["--calibration", tmp_path / "none"], "none: no such file"),
        (["--calibration", tmp_path], "this is a folder; give a file"),
        (["--calibration", tmp_path / "empty"], "empty: no line with text"),
        (["--calibration", tmp_path / "blank"], "blank: no line with text"),
        (["--calibration", tmp_path / "latin1"], "latin1, line 1: not UTF-8"),
    ]
    for options, message in cases:
        completed = run_cli("export", model, "--to", "openvino", "--out", tmp_path / "x", *options)
        assert completed.status == 2
        assert message in completed.err
        assert not (tmp_path / "x").exists()
    completed = run_cli(
        "export", model, "--to", "onnx", "--calibration", lines, "--out", tmp_path / "x"
    )
    assert completed.status == 2
    assert "--calibration: not an option of the format onnx" in completed.err
