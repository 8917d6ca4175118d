"""Fixtures: small random models of every kind, and a server of all of them."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest
import torch

from bertsmith import bundle
from bertsmith.bundle import HeadConfig, save_fine_tuned
from bertsmith.model.bert import BertForPreTraining
from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.text.wordpiece_trainer import train_wordpiece
from tests.serve.model_pause import TIMEOUT
from tests.serve.model_server import HEADS, SENTENCES, RunningServer, model_config, run_server


@pytest.fixture(scope="session", autouse=True)
def long_timeouts() -> Iterator[None]:
    """httpx.get and httpx.post wait for a busy server; their default timeout is 5 seconds."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("get", "post"):
            monkeypatch.setattr(httpx, name, partial(getattr(httpx, name), timeout=TIMEOUT))
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """A lower-casing tokenizer with a vocabulary of the test sentences."""
    return train_wordpiece(iter(SENTENCES * 3), 227)


@pytest.fixture(scope="session")
def model_dirs(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> dict[str, Path]:
    """Directories of randomly initialized models: one for pre-training, one per kind of head."""
    root = tmp_path_factory.mktemp("served")
    paths: dict[str, Path] = {}
    torch.manual_seed(11)
    paths["plain"] = root / "plain"
    bundle.save(paths["plain"], BertForPreTraining(model_config(tokenizer)), tokenizer, {})
    for name, (kind, labels) in HEADS.items():
        head = HeadConfig(kind, labels)
        paths[name] = root / name
        model = head.build_model(model_config(tokenizer))
        save_fine_tuned(paths[name], model, tokenizer, head, {})
    return paths


@pytest.fixture(scope="session")
def models(model_dirs: dict[str, Path]) -> list[ServedModel]:
    """All models, loaded."""
    return [load_served_model(name, path) for name, path in model_dirs.items()]


@pytest.fixture(scope="module")
def server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server of all models with default limits."""
    with run_server(models) as running:
        yield running
