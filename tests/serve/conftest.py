"""A server of little random models of every kind, for all tests of the server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle import HeadConfig, save_fine_tuned
from bertsmith.model.bert import BertForPreTraining
from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece
from tests.serve.model_server import HEADS, TEXT, RunningServer, model_config, run_server


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    """A vocabulary learnt from five sentences, lowered."""
    return train_wordpiece(iter(TEXT * 3), 227)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, words: Tokenizer) -> dict[str, Path]:
    """A pre-trained model, and one fine-tuned model of each kind, all random."""
    root, found = tmp_path_factory.mktemp("served"), {}
    torch.manual_seed(11)
    found["plain"] = root / "plain"
    bundle.save(found["plain"], BertForPreTraining(model_config(words)), words, {})
    for name, (kind, labels) in HEADS.items():
        head = HeadConfig(kind, labels)
        found[name] = root / name
        save_fine_tuned(found[name], head.build_model(model_config(words)), words, head, {})
    return found


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> list[ServedModel]:
    """All of them, loaded."""
    return [load_served_model(name, path) for name, path in folders.items()]


@pytest.fixture(scope="module")
def running(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server of all models with the usual limits."""
    with run_server(models) as found:
        yield found
