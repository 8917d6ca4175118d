"""Copies on a CUDA stream of their own, with streams and events that record what happens."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bertsmith.data.store import Store
from bertsmith.runtime.copy_stream import CopyStream
from bertsmith.train.engine.duration import StepDuration
from bertsmith.train.pretraining.micro_batches import PretrainingMicroBatch
from bertsmith.train.pretraining.resolve import Overrides, resolve_settings
from bertsmith.train.pretraining.session import Session
from tests.train.conftest import make_assignments, make_store

MAIN, PREFETCH = "MainThread", "bertsmith-batches"


class FakeStream:
    """A stream that records what is done with it, in which thread.

    Attributes:
        log: Thread, name of the stream, and what is done.
        device: Device of the stream.
    """

    def __init__(self, name: str, log: list[tuple[str, str, Any]], device: Any = None) -> None:
        self.name = name
        self.log = log
        self.device = device

    def add(self, action: Any) -> None:
        """Add a line to the log."""
        self.log.append((threading.current_thread().name, self.name, action))

    def record_event(self) -> int:
        """Record an event, the number of lines in the log."""
        self.add("record")
        return len(self.log)

    def wait_event(self, event: int) -> None:
        """Wait for an event."""
        self.add(("wait", event))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Any]]:
    """Replace the streams of CUDA by ones that write to this log."""
    log: list[tuple[str, str, Any]] = []
    compute_stream = FakeStream("compute", log)

    @contextmanager
    def enter(stream: FakeStream) -> Iterator[None]:
        stream.add("enter")
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("copy", log, device))
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: FakeStream("none", log).add(("select", device))
    )
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: compute_stream)
    monkeypatch.setattr(
        Tensor, "record_stream", lambda tensor, stream: stream.add(("reserve", id(tensor)))
    )
    return log


def test_copies_are_recorded_on_the_copy_stream_and_awaited_on_the_current_one(
    log: list[tuple[str, str, Any]],
) -> None:
    """The current stream waits for the event of the copies before it reserves their memory."""
    stream = CopyStream(torch.device("cuda:1"))
    tensor = torch.zeros(3)
    copied, event = stream.start(lambda: [tensor])
    stream.finish(event, copied)
    assert log == [
        (MAIN, "copy", "enter"), (MAIN, "copy", "record"), (MAIN, "compute", ("wait", 2)),
        (MAIN, "compute", ("reserve", id(tensor))),
    ]  # fmt: skip


def test_prefetch_thread_copies_and_the_step_waits(
    log: list[tuple[str, str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prefetch thread starts the copies, and the main thread waits before it yields a batch.

    The prefetch thread first selects the device of the copies. The batches are those without a copy
    stream.
    """
    store = Store.open(make_store(tmp_path))
    options = make_assignments(run__device="cpu", run__micro_batch_tokens=64)
    settings = resolve_settings(Overrides(data=store.path, assignments=options), store)
    session = Session(settings, store)
    plain, copied = (session.build_objective(StepDuration(9)) for _ in range(2))
    monkeypatch.setattr(copied, "_copy_stream", CopyStream(torch.device("cpu")))
    batches = copied.iter_batches(0)
    for number, expected in enumerate(islice(plain.iter_batches(0), 4)):
        batch: list[PretrainingMicroBatch] = next(batches)
        if number == 0:
            selection = (PREFETCH, "none", ("select", torch.device("cpu")))
            assert log[0] == selection
            log[0] = (PREFETCH, "copy", "read")
        tensors = [tensor for part in batch for tensor in part.list_tensors()]
        assert len(batch) > 1
        lines = [line for line in log if line[0] == MAIN]
        reserved = [action[1] for *_, action in lines if action[0] == "reserve"]
        assert reserved == [id(tensor) for tensor in tensors]
        waits = [action[1] for *_, action in lines if action[0] == "wait"]
        assert len(set(waits)) == 1
        assert lines[0][2] == ("wait", waits[0])
        # The event of this batch was recorded by the other thread, on the other stream.
        assert log[waits[0] - 1] == (PREFETCH, "copy", "record")
        for thread, name, _ in log:
            assert (thread, name) in {(PREFETCH, "copy"), (MAIN, "compute")}
        expected_tensors = [tensor for part in expected for tensor in part.list_tensors()]
        torch.testing.assert_close(tensors, expected_tensors, rtol=0, atol=0)
        for line in lines:
            log[log.index(line)] = (PREFETCH, "copy", "read")
    batches.close()  # type: ignore[attr-defined]
