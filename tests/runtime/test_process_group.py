"""The process group: ranks, division of work, and the election of the process that reports."""

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bertsmith.errors import PeerError, RunError, SettingsError
from bertsmith.runtime import process_group
from bertsmith.runtime.process_group import (
    SINGLE_PROCESS,
    ProcessGroup,
    _agree_on_name,
    _default_signal_handlers,
    check_process_device,
    join_process_group,
)
from bertsmith.runtime.process_rank import ProcessRank, read_process_rank

CPU = torch.device("cpu")
TORCHRUN_ENVIRONMENT = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4",
}  # fmt: skip


def test_rank_is_read_from_the_environment() -> None:
    """The variables of torchrun give the rank; without them, or with one process, it is 0 of 1."""
    assert read_process_rank(TORCHRUN_ENVIRONMENT) == ProcessRank(5, 8, 1, 4)
    assert read_process_rank({"RANK": "1", "WORLD_SIZE": "2"}) == ProcessRank(1, 2, 0, 1)
    assert read_process_rank({}) == ProcessRank(0, 1, 0, 1)
    assert read_process_rank({"RANK": "0", "WORLD_SIZE": "1"}) == ProcessRank(0, 1, 0, 1)
    assert read_process_rank({"WORLD_SIZE": "4"}) == ProcessRank(0, 1, 0, 1)


def test_rank_is_read_without_torch() -> None:
    """The command line reads the rank of a process without importing torch."""
    code = "import sys, bertsmith.runtime.process_rank; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 12])
def test_every_micro_batch_is_assigned_to_one_process(count: int) -> None:
    """Process r gets r::world_size; a process without one gets the first, whose loss becomes 0."""
    groups = [ProcessGroup(rank, 3) for rank in range(3)]
    assigned = [list(group.assign_indices(count)) for group in groups]
    assert sorted(index for indices in assigned[:count] for index in indices) == list(range(count))
    assert all(indices == [0] for indices in assigned[count:])
    assert list(SINGLE_PROCESS.assign_indices(count)) == list(range(count))


def test_losses_of_a_process_without_work_are_zero() -> None:
    """With one micro-batch, process 1 of 2 has losses and gradients of 0, process 0 has its own."""
    model = torch.nn.Linear(3, 1)

    def compute_losses(micro_batch: torch.Tensor, _: Any) -> dict[str, torch.Tensor]:
        return {"loss": model(micro_batch).sum()}

    micro_batch = torch.ones(2, 3)
    for rank, factor in ((0, 1.0), (1, 0.0)):
        model.zero_grad()
        module = process_group._LossModule(compute_losses, model, rank)
        loss = module(micro_batch, [micro_batch])["loss"]
        loss.backward()
        assert loss.item() == factor * model(micro_batch).sum().item()
        assert model.weight.grad is not None
        assert model.weight.grad.tolist() == [[2.0 * factor] * 3]


def test_single_process_does_not_communicate() -> None:
    """Without torchrun, torch.distributed is not initialized and values are returned unchanged."""
    with join_process_group() as processes:
        assert processes == SINGLE_PROCESS
        assert not dist.is_initialized()
        assert processes.sum([1, 2.5], CPU) == [1, 2.5]
        assert processes.max([3], CPU) == [3]
        assert processes.run_on_main(lambda: "value") == "value"
        assert processes.synchronize_gradients(dict, torch.nn.Identity()) is dict


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The key-value store that two processes share; the environment is that of process 1."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    monkeypatch.setattr(process_group, "_connect", lambda _: store)
    monkeypatch.setattr(process_group, "read_process_rank", lambda: ProcessRank(1, 2, 1, 2))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    return store


def _fail(error: Exception) -> None:
    with join_process_group():
        raise error


@pytest.mark.usefixtures("store")
def test_first_failed_process_raises_its_error() -> None:
    """The error of the process that fails first is raised unchanged."""
    with pytest.raises(ValueError, match="first"):
        _fail(ValueError("first"))


def test_later_failed_process_raises_a_peer_error(store: Any) -> None:
    """If process 0 has failed, process 1 does not raise an error of its own."""
    store.set(process_group._FAILED_RANK_KEY, "0")
    with pytest.raises(PeerError):
        _fail(ValueError("second"))


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer", "has ended unexpectedly"),
        ("[gloo/transport/unbound_buffer.cc:81] Timed out waiting 600 ms", "does not respond"),
    ],
)
def test_lost_connection_is_explained(message: str, reason: str) -> None:
    """A lost connection, as after a SIGKILL, and a timeout become errors that say how to go on."""
    with pytest.raises(RunError, match=f"another process of this run {reason}.*--max-restarts"):
        _fail(RuntimeError(message))


def test_restarted_processes_do_not_read_the_keys_of_ended_ones() -> None:
    """Processes agree on a new prefix, even if names of ended processes are still in the store."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    names: list[set[str]] = []
    for _ in range(3):
        # Process 0 starts first, and so reads the name that process 2 had in the last attempt.
        with ThreadPoolExecutor(3) as executor:
            futures = [executor.submit(_agree_on_name, store, rank, 3) for rank in (0, 1)]
            time.sleep(0.05)
            futures.append(executor.submit(_agree_on_name, store, 2, 3))
            names.append({future.result(timeout=60) for future in futures})
    assert [len(attempt) for attempt in names] == [1, 1, 1]
    assert len(set.union(*names)) == 3


def test_signals_end_a_process_that_connects() -> None:
    """While a process waits for others in C++ code, SIGTERM has its default effect."""
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with _default_signal_handlers():
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, handler)
    finally:
        signal.signal(signal.SIGTERM, handler)


def test_devices_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process on a machine needs its own GPU, and none may be chosen by its number."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_process_device(torch.device("cuda:1"), SINGLE_PROCESS)
    check_process_device(CPU, ProcessGroup(0, 4, 4))
    check_process_device(torch.device("cuda"), ProcessGroup(0, 4, 2))
    with pytest.raises(SettingsError, match="cuda:1, which is one GPU"):
        check_process_device(torch.device("cuda:1"), ProcessGroup(0, 2, 2))
    with pytest.raises(SettingsError, match="3 processes on this machine need as many GPUs"):
        check_process_device(torch.device("cuda"), ProcessGroup(0, 3, 3))
