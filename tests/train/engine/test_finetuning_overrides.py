"""Settings that all kinds of fine-tuning resolve in the same way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import tomli_w

from bertsmith.errors import SettingsError
from bertsmith.settings import SettingsTable
from bertsmith.tasks.embedding_settings import EmbeddingSettings
from bertsmith.tasks.reranking_settings import RerankingSettings
from bertsmith.train.distillation.settings import DistillSettings
from bertsmith.train.embedding import settings as embedding_settings
from bertsmith.train.engine.finetuning_overrides import (
    check_data_files,
    compute_default_lr,
    get_model_overrides,
    resolve_length,
)
from bertsmith.train.finetuning import settings as finetuning_settings
from bertsmith.train.reranking import settings as reranking_settings

#: Settings table -> function that reads the settings.toml of such a run.
_READERS: Final[dict[str, Callable[[Path], dict[str, Any]]]] = {
    "task": lambda config: finetuning_settings.read_overrides("classify", None, config, None, ()),
    "embedding": lambda config: embedding_settings.read_overrides((), config, None, ()),
    "reranking": lambda config: reranking_settings.read_overrides((), config, None, ()),
}


@pytest.mark.parametrize("table", ["task", "embedding"])
def test_validation_files_replace_those_of_the_settings_file(tmp_path: Path, table: str) -> None:
    """The first validation file selects the best checkpoint, so old files are not kept.

    Assignments add files to those of --dev, or to those of the settings file.
    """
    config = tmp_path / "settings.toml"
    stored = {"fingerprint": "1a2b", "validation_files": {"dev": "old.csv"}, "batch_size": 8}
    config.write_text(tomli_w.dumps({table: stored}))
    assignments = [f"{table}.validation_files.{name}={name}.csv" for name in ("b", "c")]

    def read(files: dict[str, str]) -> object:
        values = {table: {"validation_files": files}} if files else None
        if table == "task":
            overrides = finetuning_settings.read_overrides(
                "classify", None, config, values, assignments
            )
        else:
            overrides = embedding_settings.read_overrides((), config, values, assignments)
        assert overrides[table]["batch_size"] == 8
        return overrides[table]["validation_files"]

    added_files = {"b": "b.csv", "c": "c.csv"}
    assert read({"a": "a.csv"}) == {"a": "a.csv", **added_files}
    assert read({}) == {"dev": "old.csv", **added_files}


@pytest.mark.parametrize("table", ["task", "embedding"])
@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ({"device": "cpu", "precision": "fp32", "threads": 3, "world_size": 2},
         {"device": "cpu", "precision": "fp32"}),
        ({"device": "cpu", "threads": 3}, {"device": "cpu", "threads": 3}),
        ({"device": "cuda", "precision": "bf16", "attention_kernel": "varlen", "threads": 8}, {}),
        ({"device": "cuda:1", "precision": "bf16"}, {"device": "cuda:1", "precision": "bf16"}),
    ],
)  # fmt: skip
def test_settings_of_a_run_on_another_machine(
    tmp_path: Path, table: str, machine: dict[str, object], expected: dict[str, object]
) -> None:
    """A new run with the settings.toml of a run selects what the machine determined."""
    stored = {
        table: {"fingerprint": "1a2b"},
        "model": {"width": 8, "dropout": 0.2},
        "run": {"start_from": "model", "start_id": "3c4d", "seed": 5, **machine},
    }
    config = tmp_path / "settings.toml"
    config.write_text(tomli_w.dumps(stored))
    overrides = _READERS[table](config)
    assert overrides["run"] == {"seed": 5, **expected}
    assert overrides["model"] == {"dropout": 0.2}


@pytest.mark.parametrize(
    ("table", "changes", "expected"),
    [
        ("task", {}, {}),
        ("task", {"lr": 1e-3}, {"lr": 1e-3}),
        ("task", {"lr": 1e-3, "features": {"layers": "last"}}, {}),
        ("task", {"lr": 3e-4, "features": {"layers": "last"}}, {"lr": 3e-4}),
        ("task", {"lr": 3e-4, "features": {"layers": "last", "frozen": False}}, {}),
        ("task", {"max_seqlen": 32}, {"max_seqlen": 32}),
        ("task", {"kind": "span", "max_seqlen": 384, "max_positions": 512}, {}),
        ("task", {"kind": "span", "max_seqlen": 128, "max_positions": 512}, {"max_seqlen": 128}),
        ("embedding", {"lr": 3e-5}, {"lr": 3e-5}),
        ("embedding", {"lr": 3e-5, "max_seqlen": 32}, {"lr": 3e-5, "max_seqlen": 32}),
        ("reranking", {}, {}),
        ("reranking", {"lr": 3e-5, "max_seqlen": 63}, {"lr": 3e-5, "max_seqlen": 63}),
    ],
)
def test_defaults_of_another_model_are_replaced(
    tmp_path: Path, table: str, changes: dict[str, Any], expected: dict[str, object]
) -> None:
    """A settings.toml has no learning rate and maximum length that its model determined.

    The defaults are 3e-4 for a width of 192, or 1e-3 with a frozen encoder below a BiLSTM, and 128
    tokens or 384 for questions, limited by the positions of the model.
    """
    values = {"lr": 3e-4, "max_seqlen": 64, "max_positions": 64, **changes}
    stored = {
        "model": {"width": 192, "max_positions": values.pop("max_positions")},
        "optim": {"lr": values.pop("lr")},
    }
    if "features" in values:
        stored["features"] = values.pop("features")
    stored[table] = {"fingerprint": "1a2b", **values}
    config = tmp_path / "settings.toml"
    config.write_text(tomli_w.dumps(stored))
    overrides = _READERS[table](config)
    remaining = {**overrides["optim"], **overrides[table]}
    assert {name: remaining[name] for name in ("lr", "max_seqlen") if name in remaining} == expected


@pytest.mark.parametrize(
    ("table", "stored", "name", "expected"),
    [
        ("reranking", {"random_negatives": 4}, "same", {"random_negatives": 4}),
        ("reranking", {"random_negatives": 4}, "other", {}),
        ("reranking", {"random_negatives": 0}, "other", {}),
        ("reranking", {"random_negatives": 2}, "other", {"random_negatives": 2}),
        ("reranking", {"loss": "bce", "batch_size": 32}, "same", {"loss": "bce"}),
        ("reranking", {"loss": "mnrl", "batch_size": 32}, "same",
         {"loss": "mnrl", "batch_size": 32}),
        ("embedding", {"loss": "mnrl"}, "other", {}),
        ("embedding", {"loss": "cosent"}, "other", {}),
        ("embedding", {"loss": "triplet"}, "other", {"loss": "triplet"}),
    ],
)  # fmt: skip
def test_defaults_of_other_data_are_replaced(
    tmp_path: Path, table: str, stored: dict[str, Any], name: str, expected: dict[str, Any]
) -> None:
    """A settings.toml has no defaults that its loss, or data that are replaced, determined."""
    train_files = {"train_files": [str(tmp_path / "same")]}
    config = tmp_path / "settings.toml"
    config.write_text(tomli_w.dumps({table: {"fingerprint": "1a2b", **train_files, **stored}}))
    settings_module: Any = embedding_settings if table == "embedding" else reranking_settings
    overrides = settings_module.read_overrides([tmp_path / name], config, None, ())
    assert overrides[table] == train_files | expected


@pytest.mark.parametrize("schedule", [{}, {"decay": "linear"}])
def test_default_length_has_a_minimum_number_of_steps(schedule: dict[str, object]) -> None:
    """Without a length of the user, few epochs of a small file are at least 100 steps."""
    assert resolve_length({"schedule": schedule}, 3.0) == {"epochs": 3.0, "min_steps": 100}


@pytest.mark.parametrize("schedule", [{"epochs": 1.5}, {"steps": 7}])
def test_length_of_the_user_replaces_the_defaults(schedule: dict[str, object]) -> None:
    """A number of epochs or steps unsets the default epochs and their minimum number of steps."""
    assert resolve_length({"schedule": schedule}, 3.0) == {}


@pytest.mark.parametrize(
    ("width", "lr"),
    [(1024, 3e-5), (768, 3e-5), (512, 6.8e-5), (384, 1.2e-4), (256, 2.7e-4), (64, 3e-4)],
)
def test_narrow_models_have_a_higher_default_learning_rate(
    tmp_path: Path, width: int, lr: float
) -> None:
    """The rate grows with the inverse square of the width, up to 3e-4."""
    config = {"model_type": "bert", "hidden_size": width, "num_attention_heads": 4}
    sizes = {"vocab_size": 100, "num_hidden_layers": 1, "intermediate_size": 4 * width}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    (tmp_path / "model.safetensors").touch()
    assert compute_default_lr(tmp_path) == lr


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"steps": 7, "epochs": 2}, "schedule.steps is 7 and schedule.epochs is 2; set only one"),
        ({"minutes": 5}, "fine-tuning has no time budget; set schedule.epochs or schedule.steps"),
    ],
)
def test_contradictory_and_unsupported_lengths_are_rejected(
    schedule: dict[str, object], message: str
) -> None:
    """Two lengths, or a time budget, which only pre-training has, are errors."""
    with pytest.raises(SettingsError, match=message):
        resolve_length({"schedule": schedule}, 3.0)


def test_only_the_dropout_rates_of_the_model_can_be_set() -> None:
    """The sizes of the model are those of the start model."""
    rates = {"dropout": 0.2, "attention_dropout": 0.1, "classifier_dropout": 0.3}
    assert get_model_overrides({"model": rates}) == rates
    with pytest.raises(SettingsError, match=r"model\.width cannot be set"):
        get_model_overrides({"model": {"dropout": 0.2, "width": 64}})


@pytest.mark.parametrize(
    ("settings", "suffix"),
    [
        (EmbeddingSettings(delimiter=";"), ".jsonl"),
        (RerankingSettings(header=False), ".json.gz"),
        (DistillSettings(teacher="t", encoding="cp949"), ".parquet"),
    ],
)
def test_settings_of_text_tables_are_rejected_without_one(
    tmp_path: Path, settings: SettingsTable, suffix: str
) -> None:
    """A delimiter of JSON lines is an error, but not if another file is CSV."""
    file, other_file = tmp_path / f"data{suffix}", tmp_path / "more.csv"
    file.touch()
    other_file.touch()
    settings = settings.model_copy(update={"train_files": [str(file)]})
    with pytest.raises(
        SettingsError, match=rf"{settings.table}\.\w+: has no effect on {file}; remove it"
    ):
        check_data_files(settings, [file])
    check_data_files(settings, [file, other_file])
