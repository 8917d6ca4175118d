"""The provenance of a model has no directories of the machine that trained it."""

from pathlib import Path

from bertsmith.train.engine.provenance import dump_settings, remove_directories
from bertsmith.train.reranking.settings import RerankingRunSettings


def test_paths_become_names(tmp_path: Path) -> None:
    """Names of files, and of the run of a model, remain in all settings tables."""
    values = {
        "model": {"vocab_size": 11},
        "reranking": {
            "train_files": [str(tmp_path / "train.csv")],
            "validation_files": {"dev": str(tmp_path / "dev.csv")},
        },
        "run": {"start_from": str(tmp_path / "my-run" / "model")},
    }
    tables = dump_settings(RerankingRunSettings.parse(values, "the test"))
    assert tables["reranking"]["train_files"] == ["train.csv"]
    assert tables["reranking"]["validation_files"] == {"dev": "dev.csv"}
    assert tables["run"]["start_from"] == "my-run"
    assert str(tmp_path) not in str(tables)
    task = {"train_file": "/data/train.tsv", "teacher": "/models/a", "store_path": "", "seed": 3}
    names = {"train_file": "train.tsv", "teacher": "a", "store_path": "", "seed": 3}
    assert remove_directories(task) == names
