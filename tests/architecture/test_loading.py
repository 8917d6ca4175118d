"""What loading costs: torch takes seconds and 225 MB, so what does without never loads it.

These tests never look at the source, they start Python anew.
"""

import json
import subprocess
import sys

import pytest

#: Loads as the program would, then says which heavy packages came along.
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
heavy = {
    "torch", "transformers", "matplotlib", "pyarrow", "kiwipiepy", "tensorboard", "huggingface_hub",
    "onnx", "usearch",
}
print("\\nLOADED " + json.dumps(sorted(heavy & set(sys.modules))))
"""


def loaded(arguments: list[str]) -> list[str]:
    """Return the heavy packages that a fresh process has after running ``arguments``."""
    command = [sys.executable, "-c", PROBE, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    result: list[str] = json.loads(done.stdout.rpartition("LOADED ")[2])
    return result


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
    """``import bertsmith``, its help and the verbs on text load neither torch nor an extra."""
    assert loaded(arguments) == []


def test_the_probe_sees_torch() -> None:
    """The probe does tell when torch is loaded, so the test above can fail."""
    code = PROBE.replace("dir(bertsmith)", "import torch")
    command = [sys.executable, "-c", code, "[]"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout.rpartition("LOADED ")[2]) == ["torch"]
