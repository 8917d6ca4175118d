"""Settings of the test processes, and fixtures for the repository and shared data."""

import os
import signal
import sys
import tarfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

# No deadline: a slow machine must not fail a test.
settings.register_profile("bertsmith", deadline=None)
settings.load_profile("bertsmith")

# Set before any test imports torch. Otherwise each xdist worker would use all cores, and tests
# that compare bytes after a resume need the same number of threads in every process.
if "PYTEST_XDIST_WORKER" in os.environ:
    for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(_variable, "1")
# Avoids the warning of `tokenizers` when a process with threads forks.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tests run offline.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A shell starts background commands with SIGINT ignored, which child processes inherit. Tests that
# interrupt a process would then wait forever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# absl, which libraries in tests import, logs to the stderr of its import, and closes that stream
# when uvicorn configures logging. It must not be the stream in which pytest captures output.
if find_spec("absl") is not None:
    from absl import logging as absl_logging

    absl_logging.get_absl_handler().python_handler.stream = sys.__stderr__


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run slow tests first, so that no process waits for the last one at the end."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session", autouse=True)
def skip_fsync() -> Iterator[None]:
    """Do not wait for the disk. Tests that kill a process do not need it: no test loses power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_text(root: Path) -> Path:
    """Return the folder of the shared corpora (``*.jsonl.xz``), or skip the test."""
    folder = root.parent / "shared" / "data" / "text"
    if not folder.is_dir():
        pytest.skip(f"the shared corpora are not available: no {folder}")
    return folder


@pytest.fixture(scope="session")
def labeled_data(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the shared labeled data, or skip the test."""
    archive = root.parent / "shared" / "data" / "labelled.tar.xz"
    if not archive.is_file():
        pytest.skip(f"the shared labeled data is not available: no {archive}")
    folder = tmp_path_factory.mktemp("labelled")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / "labelled"
