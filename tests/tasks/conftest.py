"""The labelled data beside the repository.

It never knows what is tested.
"""

import tarfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory, shared_text: Path) -> Path:
    """Unpack the labelled data and return their folder; skip where they are absent."""
    folder = tmp_path_factory.mktemp("shared")
    with tarfile.open(shared_text.parent / "labelled.tar.xz") as pack:
        pack.extractall(folder, filter="data")
    return folder / "labelled"
