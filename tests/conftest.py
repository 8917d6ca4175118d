"""What every test finds in place: one thread a test process, and the repository's places.

It never knows what is tested.
"""

import os
import signal
import tarfile
from pathlib import Path

import pytest
from hypothesis import settings

# A machine that is slow for a moment is no fault of what is tested.
settings.register_profile("bertsmith", deadline=None)
settings.load_profile("bertsmith")

# Set before any test loads torch. Under xdist each worker would otherwise take every core, and
# kill-and-resume tests compare bytes, which needs the same number of threads in every process.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_name, "1")
# `tokenizers` warns when a process that used threads forks; nothing here forks on purpose.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A look-up of a model by name would leave the machine: every test is offline.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell that starts a command in the background has it ignore Ctrl-C, and its children inherit
# that; the tests that interrupt would then wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_text(root: Path) -> Path:
    """Return the folder of the shared corpora (``*.jsonl.xz``); skip where they are absent."""
    folder = root.parent / "shared" / "data" / "text"
    if not folder.is_dir():
        pytest.skip(f"the shared corpora are not beside the repository: no {folder}")
    return folder


@pytest.fixture(scope="session")
def labelled(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack the shared labelled data, and return their folder; skip where they are absent."""
    packed = root.parent / "shared" / "data" / "labelled.tar.xz"
    if not packed.is_file():
        pytest.skip(f"the shared labelled data are not beside the repository: no {packed}")
    folder = tmp_path_factory.mktemp("labelled")
    with tarfile.open(packed) as pack:
        pack.extractall(folder, filter="data")
    return folder / "labelled"
