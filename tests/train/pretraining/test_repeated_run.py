"""A new run that repeats another run (``--config RUN/settings.toml``) with some new settings."""

import re
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import SettingsError
from bertsmith.train.engine.run_directory import SETTINGS_FILE
from bertsmith.train.pretraining.resolve import check_pretrain_arguments


def write_config(folder: Path, settings: Any) -> Path:
    """Write settings.toml of a run to ``folder``; return its path."""
    path = folder / SETTINGS_FILE
    path.write_text(settings.to_toml())
    return path


def test_another_width_has_its_own_defaults(resolve: Any, tmp_path: Path) -> None:
    """Defaults for the width of the other run are replaced, and its own values are kept."""
    config = write_config(tmp_path, resolve())
    repeated = resolve(config=config, assignments=["model.width=768", "model.heads=12"])
    fresh = resolve(assignments=["model.width=768", "model.heads=12"])
    assert repeated == fresh
    assert (repeated.model.feed_forward, repeated.model.init_range) == (3072, 0.02)
    custom = ["model.feed_forward=512", "model.init_range=0.1", "optim.lr=3e-3"]
    config = write_config(tmp_path, resolve(assignments=custom))
    repeated = resolve(config=config, assignments=["model.width=768", "model.heads=12"])
    assert (repeated.model.feed_forward, repeated.model.init_range) == (512, 0.1)
    assert repeated.optim.lr == 0.003


def test_another_objective_has_its_own_learning_rate(resolve: Any, tmp_path: Path) -> None:
    """The default rate depends on next-sentence prediction; another rate of the user is kept."""
    config = write_config(tmp_path, resolve())
    for change in ("data.nsp=true", "data.pair_objective=sop", "model.layers=1"):
        assert resolve(config=config, assignments=[change]) == resolve(assignments=[change])
    assert resolve(config=config, assignments=["data.nsp=true"]).optim.lr == 1e-3
    config = write_config(tmp_path, resolve(assignments=["data.nsp=true"]))
    assert resolve(config=config).optim.lr == 1e-3
    assert resolve(config=config, assignments=["data.nsp=false"]).optim.lr == 2e-3
    config = write_config(tmp_path, resolve(assignments=["optim.lr=3e-3"]))
    assert resolve(config=config, assignments=["data.nsp=true"]).optim.lr == 3e-3


@pytest.mark.parametrize(
    ("width", "problem"),
    [('"256"', "valid integer"), ("0", "greater than 0"), ("-256", "greater than 0")],
)
def test_invalid_width_in_the_file_is_reported(
    resolve: Any, tmp_path: Path, width: str, problem: str
) -> None:
    """The file of the other run may have been edited."""
    config = write_config(tmp_path, resolve())
    text = re.sub(r"width = \d+", f"width = {width}", config.read_text())
    config.write_text(text)
    with pytest.raises(SettingsError, match=f"model.width.*{problem}"):
        resolve(config=config)


def test_values_that_contradict_new_settings_are_dropped(resolve: Any, tmp_path: Path) -> None:
    """A new objective, batch size or start left to right replaces what depends on the old one."""
    config = write_config(tmp_path, resolve(assignments=["data.initial_batch_size=16"]))
    assert resolve(config=config).data.initial_batch_size == 16
    causal = ["data.objective=left-to-right", "model.attention=causal"]
    repeated = resolve(config=config, assignments=causal)
    assert (repeated.data.final_masking_rate, repeated.schedule.neighbor_bias_steps) == (None, 0)
    assert resolve(config=config, assignments=["data.batch_size=8"]).data.initial_batch_size is None
    repeated = resolve(config=config, assignments=["schedule.causal_fraction=0.25"])
    assert repeated.schedule.neighbor_bias_steps == 0
    with pytest.raises(SettingsError, match="initial_batch_size is 16"):
        resolve(config=config, assignments=["data.batch_size=8", "data.initial_batch_size=16"])


def test_run_on_a_gpu_is_repeated_without_one(resolve: Any, tmp_path: Path) -> None:
    """The device of the other run and what depends on it are selected again if there is no GPU."""
    machine = [
        "run.device=cuda:0", "run.precision=bf16", "run.attention_kernel=varlen",
        "run.compile=true", "run.threads=1", "run.micro_batch_tokens=131072",
    ]  # fmt: skip
    settings = resolve(assignments=machine)
    config = write_config(tmp_path, settings)
    assert resolve(config=config, cuda=True).run == settings.run
    run = resolve(config=config, cuda=False).run
    assert (run.device, run.precision, run.attention_kernel) == ("auto", "auto", "auto")
    assert (run.compile, run.threads, run.micro_batch_tokens) == (None, None, None)
    assert resolve(config=config, cuda=False).data.batch_size == 256


def test_run_keeps_its_batch_size_on_another_device(
    resolve: Any, store: Path, tmp_path: Path
) -> None:
    """A run that was started on a GPU is resumed with its batch size, which was the default."""
    assignments = ["data.initial_batch_size=64"]
    settings = resolve(cuda=True, assignments=assignments)
    assert (settings.data.batch_size, resolve(cuda=False).data.batch_size) == (256, 32)
    # The check without PyTorch does not know whether there is a GPU.
    check_pretrain_arguments(store, tmp_path / "new", {"steps": 1}, {"assignments": assignments})
    with pytest.raises(SettingsError, match="initial_batch_size is 64, which is above"):
        resolve(cuda=False, assignments=assignments)
    write_config(tmp_path, settings)
    assert resolve(out=tmp_path, assignments=assignments).data.batch_size == 256
