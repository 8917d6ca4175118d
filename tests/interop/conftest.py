"""Fixtures with TensorFlow checkpoints, from the repository and newly written by TensorFlow.

TensorFlow runs in a separate process. Tests that need it are skipped if it is not installed.
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

#: Folder of the stored checkpoints and of the script that writes them.
DATA = Path(__file__).parent / "data"
#: Content of bert_config.json for the model in the checkpoints.
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
#: Function that runs ``checkpoints.py`` with TensorFlow in a separate process.
RunScript = Callable[..., None]


@pytest.fixture(scope="session")
def run_tensorflow() -> RunScript:
    """Return a function that runs ``checkpoints.py``; skip the test if TensorFlow is missing."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("TensorFlow is not installed; stored checkpoints are still tested")

    def run(*arguments: object) -> None:
        command = [sys.executable, str(DATA / "checkpoints.py"), *map(str, arguments)]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert process.returncode == 0, process.stderr

    return run


@pytest.fixture(scope="session")
def new_checkpoints(tmp_path_factory: pytest.TempPathFactory, run_tensorflow: RunScript) -> Path:
    """Return a folder with a newly written checkpoint in each format."""
    folder = tmp_path_factory.mktemp("tensorflow")
    run_tensorflow("make", folder)
    return folder


@pytest.fixture(scope="session", params=["stored", "new"])
def checkpoint_dir(request: pytest.FixtureRequest) -> Path:
    """Return a folder with a checkpoint in each format: stored ones or newly written ones."""
    is_stored = request.param == "stored"
    folder: Path = DATA if is_stored else request.getfixturevalue("new_checkpoints")
    return folder


def write_config_and_vocab(folder: Path, **changes: object) -> Path:
    """Write bert_config.json and vocab.txt to a folder; return the folder.

    Args:
        folder: The folder to write to.
        changes: Values of bert_config.json to change.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bert_config.json").write_text(json.dumps(CONFIG | changes))
    num_words = checkpoints.VOCAB_SIZE - len(SPECIAL_TOKENS)
    words = [*SPECIAL_TOKENS, *(f"word{index}" for index in range(num_words))]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return folder


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    """Return a folder with the config and the vocabulary of the checkpoints."""
    return write_config_and_vocab(tmp_path / "uncased_files")
