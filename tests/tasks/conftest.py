"""Settings of tagging tasks, and labeled datasets that are stored next to the repository."""

import tarfile
from pathlib import Path

import pytest

from bertsmith.tasks.settings import TaskSettings

#: Entities in the columns of CoNLL-2003.
ENTITIES = TaskSettings(
    kind="entities", text_column="0", label_column="3", max_seqlen=32, metrics=["f1", "accuracy"]
)
#: Entities of characters in files with two columns, as in KLUE-NER.
CHARACTERS = ENTITIES.model_copy(update={"label_column": "1", "tag_level": "character"})


@pytest.fixture(scope="session")
def labeled_data(tmp_path_factory: pytest.TempPathFactory, shared_text: Path) -> Path:
    """Unpack the labeled datasets and return their folder."""
    directory = tmp_path_factory.mktemp("shared")
    with tarfile.open(shared_text.parent / "labelled.tar.xz") as archive:
        archive.extractall(directory, filter="data")
    return directory / "labelled"
