"""Models that are distributed with Bertsmith, which commands find by name."""

from pathlib import Path

import pytest

from bertsmith.bundle import directory, load, save
from bertsmith.bundle.directory import locate_model, locate_tokenizer, pin_model_path
from bertsmith.errors import ModelError
from bertsmith.model.bert import BertForPreTraining
from tests.model.examples import make_prime_size_config, make_tokenizer


@pytest.fixture
def reference_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a reference model named mini-xx, and return its directory."""
    path = tmp_path / "reference_models" / "mini-xx"
    save(path, BertForPreTraining(make_prime_size_config()), make_tokenizer(), {})
    monkeypatch.setattr(directory, "REFERENCE_MODELS", path.parent)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return path


def test_a_name_stands_for_a_reference_model(reference_model: Path) -> None:
    """The name is found from any folder, for weights and tokenizer."""
    name = Path("mini-xx")
    assert locate_model("mini-xx") == reference_model
    assert locate_tokenizer(name) == reference_model
    assert pin_model_path(name) == reference_model
    assert load("mini-xx").path == reference_model


def test_a_local_path_takes_precedence(reference_model: Path) -> None:
    """A model in the current folder with the name of a reference model is the one that is used."""
    local = Path("mini-xx")
    save(local, BertForPreTraining(make_prime_size_config()), make_tokenizer(), {})
    assert locate_model("mini-xx") == local
    assert pin_model_path(local) == local.resolve()


def test_error_lists_the_reference_models(reference_model: Path) -> None:
    """The error about a missing model names the reference models."""
    with pytest.raises(ModelError, match=r"a reference model \(mini-xx\), or a model on the hub"):
        locate_model("mini-yy")
