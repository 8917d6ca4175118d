"""A server of little random models of every kind, for all tests of the server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle import Head, save_task
from bertsmith.model.bert import PreTrainingModel
from bertsmith.serve.models import Served, served
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train
from tests.serve.little import HEADS, TEXT, Running, listening, shape


@pytest.fixture(scope="session")
def words() -> Tokenizer:
    """A vocabulary learnt from five sentences, lowered."""
    return train(iter(TEXT * 3), 227)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, words: Tokenizer) -> dict[str, Path]:
    """A pre-trained model, and one fine-tuned model of each kind, all random."""
    root, found = tmp_path_factory.mktemp("served"), {}
    torch.manual_seed(11)
    found["plain"] = root / "plain"
    bundle.save(found["plain"], PreTrainingModel(shape(words)), words, {})
    for name, (kind, labels) in HEADS.items():
        head = Head(kind, labels)
        found[name] = root / name
        save_task(found[name], head.model(shape(words)), words, head, {})
    return found


@pytest.fixture(scope="session")
def models(folders: dict[str, Path]) -> list[Served]:
    """All of them, loaded."""
    return [served(name, path) for name, path in folders.items()]


@pytest.fixture(scope="module")
def running(models: list[Served]) -> Iterator[Running]:
    """A server of all models with the usual limits."""
    with listening(models) as found:
        yield found
