"""Checkpoints that real TensorFlow made: those of the repository, and fresh ones where it is there.

It never loads TensorFlow into this process.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS
from tests.interop.data import checkpoints

DATA = Path(__file__).parent / "data"
CONFIG = {
    "vocab_size": checkpoints.VOCAB_SIZE,
    "num_hidden_layers": checkpoints.NUM_LAYERS,
    "hidden_size": checkpoints.WIDTH,
    "num_attention_heads": checkpoints.NUM_HEADS,
    "intermediate_size": checkpoints.FEED_FORWARD,
    "max_position_embeddings": checkpoints.MAX_POSITIONS,
    "type_vocab_size": checkpoints.NUM_SEGMENTS,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.17,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.03,
}
#: Runs the script beside the checkpoints with TensorFlow, in a process of its own.
Script = Callable[..., None]


@pytest.fixture(scope="session")
def script() -> Script:
    """Run the script; skip where TensorFlow is not installed."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed; its checkpoints in the repository are still read")

    def run(*arguments: object) -> None:
        command = [sys.executable, str(DATA / "checkpoints.py"), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture(scope="session")
def fresh(tmp_path_factory: pytest.TempPathFactory, script: Script) -> Path:
    """Checkpoints of every form, made now."""
    folder = tmp_path_factory.mktemp("tensorflow")
    script("make", folder)
    return folder


@pytest.fixture(scope="session", params=["kept", "fresh"])
def made(request: pytest.FixtureRequest) -> Path:
    """The folder of checkpoints, a folder a form: the repository's, then fresh ones."""
    folder: Path = DATA if request.param == "kept" else request.getfixturevalue("fresh")
    return folder


def write_config_and_vocab(folder: Path, **changes: object) -> Path:
    """Write bert_config.json, with keys changed, and vocab.txt into a folder, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bert_config.json").write_text(json.dumps(CONFIG | changes))
    words = [
        *SPECIAL_TOKENS,
        *(f"word{index}" for index in range(checkpoints.VOCAB_SIZE - len(SPECIAL_TOKENS))),
    ]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return folder


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder with the config and the vocabulary of the checkpoints."""
    return write_config_and_vocab(tmp_path / "uncased_files")
