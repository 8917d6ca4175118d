"""Shell completion of commands, options and values."""

import json
import os
import subprocess
import sys

import pytest

#: Runs the program and prints whether torch was loaded.
PROBE = """
import json, sys
from bertsmith.cli.main import main
sys.argv = ["bertsmith"]
try:
    main()
finally:
    print("TORCH", json.dumps("torch" in sys.modules))
"""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bertsmith pre", ["predict", "prepare", "pretrain"]),
        ("bertsmith corpus s", ["show", "stats"]),
        ("bertsmith vocab corpus.txt --si", ["--size"]),
        ("bertsmith pretrain --rec", ["--recipe"]),
        ("bertsmith pretrain --recipe p", ["paper"]),
    ],
)
def test_bash_completion_does_not_load_torch(line: str, expected: list[str]) -> None:
    """Completion returns the matching words without loading torch."""
    environment = {
        **os.environ,
        "_BERTSMITH_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(line.split()) - 1),
    }
    completed = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    words, _, has_torch = completed.stdout.rpartition("TORCH ")
    assert words.split() == expected, completed.stderr
    assert json.loads(has_torch) is False
