"""The worker processes of ``prepare``: their pool, their errors, and their shard files."""

from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.data import worker
from bertsmith.data.word_cache import CachedTokenizer
from bertsmith.data.worker import DamagedShardError, Shard, ShardTask, build_shard
from bertsmith.data.worker_pool import WorkerPool, raise_failure
from bertsmith.errors import StoreError, TokenizerError
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

TOKENIZER = Tokenizer(TokenizerSpec(vocab=(*SPECIAL_TOKENS, ".", "the", "an", "end")))


def make_pool(max_workers: int, tokenizer: Path) -> WorkerPool:
    """Create a pool of workers with the tokenizer of a directory."""
    return WorkerPool(max_workers, [str(tokenizer), "en", "16"])


def test_killed_worker_is_an_error(tmp_path: Path) -> None:
    """If a worker ends without an answer, the error names the signal and suggests what to do."""
    TOKENIZER.save(tmp_path)
    with make_pool(1, tmp_path) as pool:
        # The task is so large that the worker cannot finish it before it is killed.
        pool.submit(ShardTask(tmp_path / "shard.npz", ["the end"] * 100_000, [False] * 100_000))
        (process,) = pool._workers.values()
        process.kill()
        with pytest.raises(StoreError, match=r"SIGKILL.*fewer --workers.*same command again"):
            pool.drain()


def test_workers_are_started_on_demand(tmp_path: Path) -> None:
    """A worker is started only for a task that finds no idle worker."""
    TOKENIZER.save(tmp_path)
    with make_pool(1000, tmp_path) as pool:
        assert not pool._workers
        for number in range(3):
            pool.submit(ShardTask(tmp_path / f"{number}.npz", ["the end"], [False]))
            assert len(pool._workers) <= number + 1
        pool.drain()
        num_started = len(pool._workers)
        pool.submit(ShardTask(tmp_path / "last.npz", ["the end"], [False]))
        assert len(pool._workers) == num_started
        pool.drain()
    assert len(list(tmp_path.glob("*.npz"))) == 4


def test_number_of_workers_is_limited(tmp_path: Path) -> None:
    """Two workers build any number of shards."""
    TOKENIZER.save(tmp_path)
    with make_pool(2, tmp_path) as pool:
        for number in range(6):
            pool.submit(ShardTask(tmp_path / f"{number}.npz", ["the end"], [False]))
        pool.drain()
        assert len(pool._workers) <= 2
    assert len(list(tmp_path.glob("*.npz"))) == 6


def test_error_in_a_worker_is_raised(tmp_path: Path) -> None:
    """An error in a worker is raised in the parent process with its type and message."""
    with make_pool(1, tmp_path / "none") as pool:
        pool.submit(ShardTask(tmp_path / "shard.npz", ["the end"], [False]))
        with pytest.raises(TokenizerError, match="no such tokenizer"):
            pool.drain()


def test_error_in_a_worker_keeps_or_names_its_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MemoryError keeps its type; other errors name theirs in the message."""
    TOKENIZER.save(tmp_path)
    pool_end, worker_end = Pipe()
    for error, expected, message in (
        (MemoryError("no room"), MemoryError, "no room"),
        (ValueError("first\nsecond"), RuntimeError, "process failed: ValueError: first\nTraceback"),
    ):

        def fail(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(worker, "build_shard", fail)
        pool_end.send(ShardTask(tmp_path / "shard.npz", ["the end"], [False]))
        worker.serve_tasks(worker_end, tmp_path, "en", 16)
        with pytest.raises(expected, match=message):
            raise_failure(pool_end.recv())


def test_shard_damage_is_detected(tmp_path: Path) -> None:
    """A truncated or changed shard file is rejected, unless the change affects no array."""
    task = ShardTask(tmp_path, ["the end. an end."] * 3, [False] * 3)
    shard = build_shard(task, CachedTokenizer(TOKENIZER), "en", 16)
    file = tmp_path / "shard.npz"
    shard.save(file)
    content = file.read_bytes()
    messages = []
    # Each tested position gives a truncated file, and a file with a changed byte.
    for position in range(0, len(content), 11):
        changed = bytearray(content)
        changed[position] ^= 0x11
        for damaged in (content[:position], bytes(changed)):
            file.write_bytes(damaged)
            try:
                loaded = Shard.load(file)
            except DamagedShardError as error:
                messages.append(str(error))
                continue
            for name, values in vars(shard).items():
                assert np.array_equal(getattr(loaded, name), values), position
    # All truncated files and many changed files are rejected.
    assert len(messages) > len(content) / 11
    start = f"{file}: this shard of an unfinished store is damaged: "
    assert all(message.startswith(start) for message in messages)


def test_shard_file_has_only_the_fields_of_a_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy before 2.2 stores every keyword of ``savez``; other arrays are ignored."""
    task = ShardTask(tmp_path, ["the end. an end."], [False])
    shard = build_shard(task, CachedTokenizer(TOKENIZER), "en", 16)
    savez = np.savez
    keywords: list[str] = []

    def record_keywords(file: Any, **arrays: Any) -> None:
        keywords.extend(arrays)
        savez(file, **arrays, other=np.array(True))

    monkeypatch.setattr(np, "savez", record_keywords)
    shard.save(tmp_path / "shard.npz")
    assert set(keywords) == set(vars(shard))
    assert Shard.load(tmp_path / "shard.npz").ids.tolist() == shard.ids.tolist()
