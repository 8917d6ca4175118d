"""The process group of a run: what its processes share, and how they fail together.

Each process computes the losses of some micro-batches of every step. DistributedDataParallel sums
the gradients while the last backward pass of a step is still running, so all processes make the
same update. Process 0 is the main process: it alone reads and writes the run directory and prints.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bertsmith.errors import PeerError, RunError, SettingsError
from bertsmith.runtime.process_rank import ProcessRank, read_process_rank

#: A process that waits longer for another one fails. It must exceed the time that the main process
#: needs alone, for example to verify a store or to write a checkpoint.
TIMEOUT: Final = timedelta(minutes=30)
#: Key in the store of the process group under which the first process that fails writes its rank.
_FAILED_RANK_KEY: Final = "failed_rank"
#: Signals whose handlers a training loop replaces.
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
T = TypeVar("T")
Number = TypeVar("Number", int, float)
LossFunction = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run; by default a single one, for which all methods are trivial.

    Attributes:
        rank: Number of this process, from 0.
        world_size: Number of processes.
        local_world_size: Number of processes on this machine.
    """

    rank: int = 0
    world_size: int = 1
    local_world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    def assign_indices(self, count: int) -> Sequence[int]:
        """Return which of ``count`` micro-batches this process computes, at least one.

        Process r computes ``micro_batches[r::world_size]``. A process for which none is left
        computes the first one; ``synchronize_gradients`` sets its losses to 0.
        """
        return range(self.rank, count, self.world_size) or range(1)

    def broadcast(self, value: T) -> T:
        """Return the main process's ``value`` in all processes."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def broadcast_numbers(self, values: Sequence[float]) -> list[float]:
        """Return the main process's values in all processes, faster than ``broadcast``."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(tensor, src=0)
        return tensor.tolist()

    def all_gather(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks."""
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value)
        return values

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all processes in the main process, and None in the others."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.is_main else None
        dist.gather_object(value, values)
        return values

    def run_on_main(self, function: Callable[[], T]) -> T:
        """Call a function in the main process, and return its result in all processes."""
        return self.broadcast(function() if self.is_main else None)  # type: ignore[return-value]

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors with those of the main process."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def sum(self, values: Sequence[Number], device: torch.device) -> list[Number]:
        """Return the sum of each value over all processes, computed in float64 on ``device``."""
        return self._reduce(values, dist.ReduceOp.SUM, device)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all processes, on its device; may change ``tensor``."""
        if self.world_size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.SUM)
        return tensor

    def max(self, values: Sequence[Number], device: torch.device) -> list[Number]:
        """Return the maximum of each value over all processes."""
        return self._reduce(values, dist.ReduceOp.MAX, device)

    def _reduce(
        self, values: Sequence[Number], operation: dist.ReduceOp.RedOpType, device: torch.device
    ) -> list[Number]:
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(tensor, operation)
        return [type(value)(total) for value, total in zip(values, tensor.tolist(), strict=True)]

    def synchronize_gradients(self, loss_fn: LossFunction, model: nn.Module) -> LossFunction:
        """Return ``loss_fn`` as a function whose backward pass sums gradients over all processes.

        The weights must be the same in all processes.

        Args:
            loss_fn: Returns the losses of a micro-batch, given it and all micro-batches.
            model: The model that ``loss_fn`` uses.
        """
        if self.world_size == 1:
            return loss_fn
        # With find_unused_parameters, the buckets do not change after the first step. The order in
        # which gradients are added, and so the rounding, is then the same in a resumed run.
        parallel = DistributedDataParallel(
            _LossModule(loss_fn, model, self.rank),
            init_sync=False,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
        )
        parallel.register_comm_hook(None, _sum_bucket)
        return parallel

    def time_gradient_sum(self, num_parameters: int, device: torch.device) -> float:
        """Measure the seconds of summing gradients over all processes, without overlap."""
        if self.world_size == 1:
            return 0.0
        gradient = torch.zeros(num_parameters, device=device)
        seconds = []
        for _ in range(3):
            start_time = time.perf_counter()
            dist.all_reduce(gradient)
            float(gradient[0])  # Waits for the device.
            seconds.append(time.perf_counter() - start_time)
        return min(seconds)


#: A run without torchrun.
SINGLE_PROCESS: Final = ProcessGroup()


class _LossModule(nn.Module):
    """The losses of a model as the output of a module, which DistributedDataParallel needs."""

    def __init__(self, loss_fn: LossFunction, model: nn.Module, rank: int) -> None:
        super().__init__()
        self.model = model
        self._loss_fn = loss_fn
        self._rank = rank

    def forward(
        self, micro_batch: Any, micro_batches: list[Any], *arguments: Any
    ) -> dict[str, Tensor]:
        losses = self._loss_fn(micro_batch, micro_batches, *arguments)
        if self._rank < len(micro_batches):
            return losses
        # Another process computes this micro-batch. This one only takes part in the sum.
        return {name: 0.0 * loss for name, loss in losses.items()}


def _sum_bucket(_: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """Sum gradients over all processes; the default of DistributedDataParallel is their mean."""
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]


def defer_gradient_sum(loss_fn: LossFunction, *, is_last: bool) -> AbstractContextManager[None]:
    """Return a context in which backward passes add to the gradients of this process only.

    Args:
        loss_fn: A result of ``ProcessGroup.synchronize_gradients``.
        is_last: Whether this is the last backward pass of the step, which sums over processes.
    """
    if isinstance(loss_fn, DistributedDataParallel) and not is_last:
        return loss_fn.no_sync()
    return nullcontext()


@contextmanager
def join_process_group() -> Iterator[ProcessGroup]:
    """Connect the processes that torchrun has started; without torchrun there is a single one.

    If a process fails, the others fail, too. Only the first failed process raises its error. If the
    connection to another process of torchrun is lost, this process ignores SIGTERM from then on.
    torchrun sends SIGTERM because the other process has ended, and it would replace the error.

    Raises:
        PeerError: If another process has failed, which raises its own error.
        RunError: If the connection to another process is lost.
    """
    process_rank = read_process_rank()
    if process_rank.world_size == 1:
        yield SINGLE_PROCESS
        return
    store = _connect(process_rank)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield ProcessGroup(
            process_rank.rank, process_rank.world_size, process_rank.local_world_size
        )
    except Exception as error:
        # Without cleaning up: the end of this process interrupts the others, if they wait for it.
        is_first = _is_first_failure(store, process_rank.rank)
        is_lost_connection = is_first and _is_connection_error(error)
        if is_lost_connection and dist.is_torchelastic_launched():
            handlers[signal.SIGTERM] = signal.SIG_IGN
        # A training loop that fails leaves its handlers, so that no signal replaces the error.
        _set_signal_handlers(handlers)
        if is_lost_connection:
            raise RunError(_explain_connection_error(error)) from error
        if not is_first:
            raise PeerError("another process failed, which reports the error") from error
        raise
    dist.destroy_process_group()


def _connect(process_rank: ProcessRank) -> Any:
    """Initialize torch.distributed, and return its key-value store."""
    has_cuda = torch.cuda.is_available()
    if has_cuda and process_rank.local_rank < torch.cuda.device_count():
        torch.cuda.set_device(process_rank.local_rank)
    with _default_signal_handlers():
        store, rank, world_size = next(rendezvous("env://", timeout=TIMEOUT))
        name = _agree_on_name(store, rank, world_size)
        store = dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if has_cuda else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=TIMEOUT,
        )
    return store


@contextmanager
def _default_signal_handlers() -> Iterator[None]:
    """Let signals end this process at once, even if it waits for another process in C++ code."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    _set_signal_handlers(dict.fromkeys(numbers, signal.SIG_DFL))
    try:
        yield
    finally:
        _set_signal_handlers(handlers)


def _set_signal_handlers(handlers: Mapping[signal.Signals, Any]) -> None:
    """Set signal handlers, which Python allows only in the main thread."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _agree_on_name(store: Any, rank: int, world_size: int) -> str:
    """Return a new name on which all processes agree, as the prefix of their keys in ``store``.

    torchrun keeps the store when it restarts the processes. Without a new prefix, a process could
    read the address of an ended process and wait for it.
    """
    name = uuid4().hex
    store.set(f"bertsmith/{rank}", name)
    if rank > 0:
        main_name = store.get(f"bertsmith/main of {name}").decode()
        store.set(f"bertsmith/{main_name}/{rank}", "")
        return str(main_name)
    waiting = set(range(1, world_size))
    while waiting:
        for other in waiting:
            # This may be the name of an ended process. Then it is read again.
            other_name = store.get(f"bertsmith/{other}").decode()
            store.set(f"bertsmith/main of {other_name}", name)
        time.sleep(0.02)
        waiting = {other for other in waiting if not store.check([f"bertsmith/{name}/{other}"])}
    return name


def check_process_device(device: torch.device, processes: ProcessGroup) -> None:
    """Check that each process on this machine can have a GPU of its own.

    Raises:
        SettingsError: If it cannot, or if ``device`` names a single GPU.
    """
    if processes.world_size == 1 or device.type != "cuda":
        return
    has_index = device.index is not None
    if has_index:
        raise SettingsError(
            f"run.device is {device}, which is one GPU, but there are {processes.world_size} "
            "processes; set run.device=cuda, which gives each process its own GPU"
        )
    if processes.local_world_size > torch.cuda.device_count():
        raise SettingsError(
            f"{processes.local_world_size} processes on this machine need as many GPUs, but "
            f"PyTorch finds {torch.cuda.device_count()}; lower --nproc-per-node of torchrun"
        )


def _is_first_failure(store: Any, rank: int) -> bool:
    """Record that this process has failed; return whether it is the first one."""
    try:
        # An expected value of "" means that the key does not exist yet.
        return bool(store.compare_set(_FAILED_RANK_KEY, "", str(rank)) == str(rank).encode())
    except RuntimeError:
        # The process with the store has ended. Its launcher knows why.
        return False


def _is_connection_error(error: Exception) -> bool:
    """Return whether an error means that another process has ended or does not respond."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error).lower()
    )


def _explain_connection_error(error: Exception) -> str:
    reason = "does not respond" if "imed out" in str(error) else "has ended unexpectedly"
    return (
        f"another process of this run {reason}; run the same command again to continue from the "
        "last checkpoint (torchrun --max-restarts N does so up to N times)"
    )
