"""Labeled datasets that are stored next to the repository."""

import tarfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def labeled_data(tmp_path_factory: pytest.TempPathFactory, shared_text: Path) -> Path:
    """Unpack the labeled datasets and return their folder."""
    directory = tmp_path_factory.mktemp("shared")
    with tarfile.open(shared_text.parent / "labelled.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "labelled"
