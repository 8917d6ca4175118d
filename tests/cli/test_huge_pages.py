"""Commands let PyTorch use transparent huge pages, unless the user decides."""

import os
import subprocess
import sys

import pytest

_CODE = """
import contextlib, io, os, sys
sys.argv = ["bertsmith", "--version"]
from bertsmith.cli.main import main
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
    main()
print(os.environ["THP_MEM_ALLOC_ENABLE"])
"""


@pytest.mark.parametrize(("user_value", "expected"), [(None, "1"), ("0", "0")])
def test_huge_pages_are_on_unless_the_user_sets_them(user_value: str | None, expected: str) -> None:
    """The variable that PyTorch reads at its first allocation is 1, or that of the user."""
    environment = {key: value for key, value in os.environ.items() if key != "THP_MEM_ALLOC_ENABLE"}
    if user_value is not None:
        environment["THP_MEM_ALLOC_ENABLE"] = user_value
    command = [sys.executable, "-c", _CODE]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert completed.stdout.strip() == expected
