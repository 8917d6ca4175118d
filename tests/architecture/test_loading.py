"""Tests that commands load torch only if they need it, because loading takes seconds and 225 MB."""

import json
import subprocess
import sys

import pytest

#: Program that prints which heavy packages a command loads, or `import bertsmith` if there is no
#: command.
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
    "nncf", "onnx", "openvino", "usearch",
}
print("\\nLOADED " + json.dumps(sorted(heavy_packages & set(sys.modules))))
"""


def find_loaded_packages(arguments: list[str]) -> list[str]:
    """Return the heavy packages that a command with ``arguments`` loads in a new process."""
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
    """``import bertsmith`` and ``--help`` load neither torch nor an optional package."""
    assert find_loaded_packages(arguments) == []


def test_probe_detects_torch() -> None:
    """PROBE reports torch if it is loaded, so ``test_torch_is_not_loaded`` can fail."""
    code = PROBE.replace("dir(bertsmith)", "import torch")
    command = [sys.executable, "-c", code, "[]"]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(completed.stdout.rpartition("LOADED ")[2]) == ["torch"]
