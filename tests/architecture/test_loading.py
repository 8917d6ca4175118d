"""Tests that commands without a model do not load torch (seconds and 225 MB)."""

import json
import subprocess
import sys

import pytest

#: Runs the program, or imports the package, and prints which heavy packages were loaded.
PROBE = """
import json, sys
arguments = json.loads(sys.argv[1])
sys.argv = ["bertsmith", *arguments]
try:
    if arguments:
        from bertsmith.cli.main import main
        main()
    else:
        import bertsmith
        dir(bertsmith)
except SystemExit as error:
    assert not error.code, error.code
heavy_packages = {
    "torch", "transformers", "matplotlib", "pyarrow", "kiwipiepy", "tensorboard", "huggingface_hub",
    "onnx", "usearch",
}
print("\\nLOADED " + json.dumps(sorted(heavy_packages & set(sys.modules))))
"""


def find_heavy_imports(arguments: list[str]) -> list[str]:
    """Return the heavy packages that a new process loads when run with ``arguments``."""
    command = [sys.executable, "-c", PROBE, json.dumps(arguments)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert completed.returncode == 0, completed.stderr
    packages: list[str] = json.loads(completed.stdout.rpartition("LOADED ")[2])
    return packages


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--help"],
        ["vocab", "--help"],
        ["vocab", "extend", "--help"],
        ["prepare", "--help"],
        ["corpus", "--help"],
        ["compare", "--help"],
        ["embed", "--help"],
        ["search", "--help"],
    ],
)
def test_torch_is_not_loaded(arguments: list[str]) -> None:
    """``import bertsmith`` and help texts load neither torch nor an optional package."""
    assert find_heavy_imports(arguments) == []


def test_probe_detects_torch() -> None:
    """The probe reports torch if it is loaded, so the test above can fail."""
    code = PROBE.replace("dir(bertsmith)", "import torch")
    command = [sys.executable, "-c", code, "[]"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(completed.stdout.rpartition("LOADED ")[2]) == ["torch"]
