"""``embed_lines`` in several processes, and the command with torchrun."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from bertsmith.runtime.process_group import ProcessGroup
from bertsmith.use import embed_chunks
from bertsmith.use.embed import Embedder
from bertsmith.use.embed_lines import EmbeddingSummary, embed_lines, embed_share
from bertsmith.use.vector_settings import VectorSettings, build_vector_settings

WORLD_SIZE = 3
LINES = [f"{'the smith ' * (number % 5)}{number} hammers" for number in range(25)]


@dataclass(frozen=True)
class ThreadGroup(ProcessGroup):
    """Threads that communicate like processes."""

    shared: dict[int, Any] = field(default_factory=dict)
    barrier: Barrier = field(default_factory=lambda: Barrier(WORLD_SIZE))

    def _exchange(self, value: Any) -> dict[int, Any]:
        self.shared[self.rank] = value
        self.barrier.wait(30)
        values = dict(self.shared)
        self.barrier.wait(30)
        return values

    def broadcast(self, value: Any) -> Any:
        """Return the value of thread 0."""
        return self._exchange(value)[0]

    def gather(self, value: Any) -> list[Any] | None:
        """Return all values in thread 0."""
        values = self._exchange(value)
        return [values[rank] for rank in range(WORLD_SIZE)] if self.is_main else None


def embed_in_threads(
    embedder: Embedder, lines: Any, out: Path, settings: VectorSettings, **options: Any
) -> EmbeddingSummary:
    """Embed lines in WORLD_SIZE threads; return the summary of thread 0."""
    main = ThreadGroup(0, WORLD_SIZE)
    others = [ThreadGroup(r, WORLD_SIZE, 1, main.shared, main.barrier) for r in (1, 2)]
    with ThreadPoolExecutor(WORLD_SIZE) as executor:
        shares = [
            executor.submit(embed_share, embedder, iter(list(LINES)), settings, processes)
            for processes in others
        ]
        try:
            summary = embed_lines(embedder, lines, out, settings, processes=main, **options)
        except BaseException:
            main.barrier.abort()
            raise
        for share in shares:
            share.result()
    return summary


@pytest.fixture
def embedder(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Embedder:
    """The random model; a chunk has at most 4 lines per process."""
    monkeypatch.setattr(embed_chunks, "_MAX_LINES", 4)
    return Embedder.load(model_dir)


def test_processes_divide_the_lines(embedder: Embedder, tmp_path: Path) -> None:
    """The vectors and the summary are those of a single process, in the order of the lines."""
    settings = build_vector_settings()
    expected = embed_lines(embedder, LINES, tmp_path / "one.npy", settings)
    lengths: Queue[int] = Queue()
    tokenize = embedder.tokenize

    def count_texts(texts: list[str], *arguments: Any) -> Any:
        lengths.put(len(texts))
        return tokenize(texts, *arguments)

    embedder.tokenize = count_texts  # type: ignore[method-assign, assignment]
    summary = embed_in_threads(embedder, LINES, tmp_path / "three.npy", settings)
    assert (summary.num_lines, summary.width) == (expected.num_lines, expected.width)
    np.testing.assert_allclose(np.load(summary.path), np.load(expected.path), atol=1e-5)
    # Chunks of 12, 12 and 1 lines are divided into 4, 4, 4; 4, 4, 4; and 1, 0, 0.
    assert sorted(lengths.get() for _ in range(9)) == [0, 0, 1, *[4] * 6]


def test_processes_divide_token_vectors(embedder: Embedder, tmp_path: Path) -> None:
    """Vectors per token are those of a single process."""
    settings = build_vector_settings(pooling="none")
    paths = [tmp_path / "one.jsonl", tmp_path / "three.jsonl"]
    embed_lines(embedder, LINES, paths[0], settings)
    embed_in_threads(embedder, LINES, paths[1], settings)
    one, three = ([json.loads(x) for x in path.read_text().splitlines()] for path in paths)
    assert [line["tokens"] for line in one] == [line["tokens"] for line in three]
    for expected, line in zip(one, three, strict=True):
        np.testing.assert_allclose(line["vectors"], expected["vectors"], atol=1e-5)


def test_interrupted_processes_are_resumed(embedder: Embedder, tmp_path: Path) -> None:
    """Processes continue after the lines that an interrupted process has written."""
    settings = build_vector_settings()
    expected = embed_lines(embedder, LINES, tmp_path / "one.npy", settings)

    def interrupted_lines() -> Iterator[str]:
        yield from LINES[:9]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_lines(embedder, interrupted_lines(), tmp_path / "three.npy", settings)
    summary = embed_in_threads(embedder, LINES, tmp_path / "three.npy", settings)
    assert summary.num_lines == len(LINES)
    np.testing.assert_allclose(np.load(summary.path), np.load(expected.path), atol=1e-5)


@pytest.mark.slow
def test_command_embeds_in_two_processes(model_dir: Path, tmp_path: Path) -> None:
    """With torchrun, two processes write one file and print one message."""
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(LINES) + "\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "bertsmith", "embed", str(model_dir), str(texts)]
    out = tmp_path / "two.npy"
    completed = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, check=False, timeout=200
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stderr.count("wrote ") == 1
    expected = Embedder.load(model_dir).encode(LINES)
    np.testing.assert_allclose(np.load(out), expected, atol=1e-5)
