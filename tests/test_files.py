"""Locks of files and directories."""

import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith.errors import StoreError
from bertsmith.files import hold_lock

HOLD_UNTIL_EOF = """
import sys
from pathlib import Path
from bertsmith.files import hold_lock

with hold_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("is_directory", [False, True])
def test_lock_is_held_by_one_process(tmp_path: Path, is_directory: bool) -> None:
    """While a process holds a lock, others fail with the given error, or wait until it exits."""
    path = tmp_path if is_directory else tmp_path / ".lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_UNTIL_EOF, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(StoreError, match="in use"), hold_lock(path, error=StoreError("in use")):
        pytest.fail("the lock was acquired twice")
    with hold_lock(path, on_wait=process.stdin.close):
        assert process.wait(60) == 0
    process.stdout.close()
