"""The queue of a batcher: fair to clients, and long calls do not block short ones.

Calls of similar size form a size class. Classes share the model equally, and a class without calls
costs the others nothing. A class computes one call after another, because sharing the model between
long calls would delay all of them until their deadlines. Its order is that of start-time fair
queueing (Goyal et al. 1996): a client that sends many calls cannot delay another client's call by
more than one call.
"""

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

#: Takes the payloads of a batch and returns the result of each payload, in order.
BatchFunction = Callable[[list[Any]], Sequence[Any]]
#: Calls of the largest class have more than 4 ** (number of classes - 2) batches.
NUM_SIZE_CLASSES: Final = 6
#: Number of clients in a class from which records of idle clients are removed.
_MAX_IDLE_CLIENTS: Final = 1024


@dataclass(frozen=True, eq=False)
class TokenDemand:
    """Estimated tokens of a request that is not tokenized yet.

    Attributes:
        client: client that sent the request.
        num_tokens: estimated tokens.
        expires_at: deadline, in seconds of the monotonic clock.
    """

    client: str
    num_tokens: int
    expires_at: float


@dataclass(eq=False)
class Call:
    """Sequences that are answered together.

    Attributes:
        key: sequences of different calls share a batch only if the keys of the calls are equal.
        client: client that sent the call.
        compute_batch: computes the results of a batch.
        expires_at: deadline, in seconds of the monotonic clock.
        lengths: tokens of each sequence.
        payloads: item for ``compute_batch`` of each sequence.
        queued_at: time of arrival, in seconds of the monotonic clock.
        trace_context: context of the request's spans; None without tracing.
        future: resolves to the results of all sequences.
        num_tokens: tokens of all sequences.
        num_tokens_queued: tokens of the sequences in the queue.
        num_sequences_left: number of sequences that are not computed yet.
        results: result of each sequence, None until it is computed.
        order: indices of the sequences in the order of their computation.
        num_started: number of sequences that have left the queue.
        size_class: index of the size class.
        was_idle: whether the queue was empty and no batch was running when the call arrived.
    """

    key: Hashable
    client: str
    compute_batch: BatchFunction
    expires_at: float
    lengths: list[int]
    payloads: list[Any]
    queued_at: float
    trace_context: Any = None
    future: Future[list[Any]] = field(default_factory=Future)
    num_tokens: int = field(init=False)
    num_tokens_queued: int = field(init=False)
    num_sequences_left: int = field(init=False)
    results: list[Any] = field(init=False)
    order: list[int] = field(init=False)
    num_started: int = 0
    size_class: int = 0
    was_idle: bool = False

    def __post_init__(self) -> None:
        self.num_tokens = self.num_tokens_queued = sum(self.lengths)
        self.num_sequences_left = len(self.lengths)
        self.results = [None] * len(self.lengths)
        # Longest first: sequences of similar length share batches, which limits padding.
        self.order = sorted(range(len(self.lengths)), key=lambda index: -self.lengths[index])

    def fail(self, error: Exception) -> None:
        """Set an error as the result, unless the call has already ended."""
        if not self.future.done() and self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(frozen=True)
class QueuedSequence:
    """A sequence of a call.

    Attributes:
        call: the call.
        index: index of the sequence in the call.
    """

    call: Call
    index: int

    @property
    def num_tokens(self) -> int:
        """Length of the sequence."""
        return self.call.lengths[self.index]

    @property
    def payload(self) -> Any:
        """Item for ``call.compute_batch``."""
        return self.call.payloads[self.index]


@dataclass
class _Client:
    """The calls of one client in a size class.

    Attributes:
        num_tokens: tokens in the queue.
        tag: tokens that the client has received in this class; a client without queued calls starts
            at the number of the client in service.
        unstarted_calls: calls without computed sequences, oldest first; the values are unused.
    """

    num_tokens: int = 0
    tag: int = 0
    unstarted_calls: dict[Call, None] = field(default_factory=dict)


@dataclass(order=True)
class _HeapItem:
    """The queued calls of one client with one key.

    Attributes:
        tag: the client's tag when the item was added to the heap.
        arrival_number: arrival number of the first call.
        client: name of the client.
        calls: arrival number and call. Ended calls remain until they are at the front.
    """

    tag: int
    arrival_number: int
    client: str = field(compare=False)
    calls: deque[tuple[int, Call]] = field(compare=False)


class _Queue:
    """The queued calls with one key, ordered by the tags of their clients."""

    def __init__(self) -> None:
        self._heap: list[_HeapItem] = []
        self._items: dict[str, _HeapItem] = {}

    def push(self, client_tag: int, arrival_number: int, call: Call) -> None:
        """Add a call."""
        item = self._items.get(call.client)
        if item is None:
            item = _HeapItem(client_tag, arrival_number, call.client, deque())
            self._items[call.client] = item
            heapq.heappush(self._heap, item)
        item.calls.append((arrival_number, call))

    def get_first(self, clients: dict[str, _Client]) -> _HeapItem | None:
        """Return the item of the client with the smallest tag; None if all calls have ended."""
        while self._heap:
            item = self._heap[0]
            while item.calls and not item.calls[0][1].num_tokens_queued:
                item.calls.popleft()
            if not item.calls:
                heapq.heappop(self._heap)
                del self._items[item.client]
                continue
            order = (clients[item.client].tag, item.calls[0][0])
            if (item.tag, item.arrival_number) == order:
                return item
            item.tag, item.arrival_number = order
            heapq.heapreplace(self._heap, item)
        return None


class _SizeClass:
    """Queued calls of similar size.

    Attributes:
        num_tokens: tokens in the queue.
        num_calls: calls in the queue.
        served_tokens: tokens that the class has received; a class that was empty starts at the
            number of the class in service.
        clients: clients with queued calls, or with a tag above that of the client in service.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.num_calls = 0
        self.served_tokens = 0
        self.clients: dict[str, _Client] = {}
        self._queues: dict[Hashable, _Queue] = {}
        #: Tag of the client in service.
        self._tag = 0
        #: Call of which only a part has left the queue.
        self._started_call: Call | None = None

    def push(self, call: Call, arrival_number: int) -> None:
        """Add a call, after the calls that its client has already queued."""
        client = self.clients.setdefault(call.client, _Client())
        if not client.num_tokens:
            client.tag = max(client.tag, self._tag)
        client.num_tokens += call.num_tokens
        client.unstarted_calls[call] = None
        self.num_tokens += call.num_tokens
        self.num_calls += 1
        self._queues.setdefault(call.key, _Queue()).push(client.tag, arrival_number, call)

    def take_tokens(self, call: Call, num_tokens: int) -> None:
        """Stop counting tokens of a call that were computed or removed."""
        client = self.clients[call.client]
        client.unstarted_calls.pop(call, None)
        client.num_tokens -= num_tokens
        self.num_tokens -= num_tokens
        call.num_tokens_queued -= num_tokens
        if call.num_tokens_queued:
            self._started_call = call
            return
        if call is self._started_call:
            self._started_call = None
        self.num_calls -= 1
        if not self.num_calls:
            self._queues.clear()
            self.clients.clear()

    def find_first_key(self) -> Hashable | None:
        """Return the key of the next call; None if there is no call."""
        if self._started_call is not None:
            return self._started_call.key
        first_key: Hashable | None = None
        first_item: _HeapItem | None = None
        for key, queue in list(self._queues.items()):
            item = queue.get_first(self.clients)
            if item is None:
                del self._queues[key]
            elif first_item is None or item < first_item:
                first_key, first_item = key, item
        return first_key

    def find_first_call(self, key: Hashable) -> Call | None:
        """Return the next call with a key; None if there is none."""
        if self._started_call is not None:
            return self._started_call
        queue = self._queues.get(key)
        item = None if queue is None else queue.get_first(self.clients)
        return None if item is None else item.calls[0][1]

    def charge(self, call: Call) -> None:
        """Add the tokens of a call that starts to its client's tag."""
        client = self.clients[call.client]
        self._tag = max(self._tag, client.tag)
        client.tag += call.num_tokens
        if len(self.clients) > _MAX_IDLE_CLIENTS:
            self.clients = {
                name: client
                for name, client in self.clients.items()
                if client.num_tokens or client.tag > self._tag
            }


class FairQueue:
    """Queue of calls; not thread-safe.

    Attributes:
        num_tokens: tokens in the queue.
    """

    def __init__(self, max_batch_tokens: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._classes = [_SizeClass() for _ in range(NUM_SIZE_CLASSES)]
        self._arrival_numbers = itertools.count()
        #: Served tokens of the class in service before its last batch.
        self._served_tokens = 0
        self.num_tokens = 0

    def __bool__(self) -> bool:
        """Return whether there are queued calls."""
        return any(size_class.num_calls for size_class in self._classes)

    def get_size_class(self, num_tokens: int) -> int:
        """Return the size class of a call: 0 for one batch, 1 for up to 4, 2 for up to 16, ..."""
        num_batches = max(-(-num_tokens // self._max_batch_tokens), 1)
        return min(((num_batches - 1).bit_length() + 1) // 2, NUM_SIZE_CLASSES - 1)

    def push(self, call: Call) -> None:
        """Add a call."""
        call.size_class = self.get_size_class(call.num_tokens)
        size_class = self._classes[call.size_class]
        if not size_class.num_calls:
            size_class.served_tokens = max(size_class.served_tokens, self._served_tokens)
        size_class.push(call, next(self._arrival_numbers))
        self.num_tokens += call.num_tokens

    def remove(self, call: Call) -> None:
        """Remove the remaining sequences of a call; nothing happens without such sequences."""
        if call.num_tokens_queued:
            self.num_tokens -= call.num_tokens_queued
            self._classes[call.size_class].take_tokens(call, call.num_tokens_queued)

    def count_class_tokens(self) -> list[int]:
        """Return the number of queued tokens of each size class."""
        return [size_class.num_tokens for size_class in self._classes]

    def count_client_tokens(self, size_class: int) -> Counter[str]:
        """Return the number of queued tokens of each client in a size class."""
        clients = self._classes[size_class].clients
        return Counter({name: client.num_tokens for name, client in clients.items()})

    def iter_evictable(self, call: Call | TokenDemand) -> Iterator[Call]:
        """Yield calls that a new call may replace, newest calls of the heaviest client first.

        These are calls of the same class that have not started, as long as their client has more
        queued tokens than the client of the new call would have.
        """
        clients = self._classes[self.get_size_class(call.num_tokens)].clients
        same_client = clients.get(call.client, _Client())
        limit = same_client.num_tokens + call.num_tokens
        num_tokens = {name: client.num_tokens for name, client in clients.items()}
        candidates = {name: reversed(client.unstarted_calls) for name, client in clients.items()}
        while num_tokens:
            heaviest = max(num_tokens, key=num_tokens.__getitem__)
            if heaviest == call.client or num_tokens[heaviest] <= limit:
                return
            candidate = next(candidates[heaviest], None)
            if candidate is None:
                del num_tokens[heaviest]
                continue
            num_tokens[heaviest] -= candidate.num_tokens
            yield candidate

    def pop_batch(self, can_run: Callable[[Call], bool]) -> list[QueuedSequence]:
        """Remove sequences of the next size class and key, up to a full batch.

        Args:
            can_run: returns whether a call may run. It removes a call that may not. If it removes
                all calls of the key, the batch is empty.
        """
        backlogged = [size_class for size_class in self._classes if size_class.num_calls]
        size_class = min(backlogged, key=lambda size_class: size_class.served_tokens)
        self._served_tokens = max(self._served_tokens, size_class.served_tokens)
        key = size_class.find_first_key()
        batch: list[QueuedSequence] = []
        num_tokens = 0
        is_full = False
        while not is_full and (call := size_class.find_first_call(key)) is not None:
            if can_run(call):
                num_tokens, is_full = self._take_sequences(size_class, call, batch, num_tokens)
        return batch

    def _take_sequences(
        self, size_class: _SizeClass, call: Call, batch: list[QueuedSequence], batch_tokens: int
    ) -> tuple[int, bool]:
        """Move sequences of a call to a batch of ``batch_tokens`` tokens.

        Padding does not count: models compute real tokens only, and attention groups sequences of
        similar length.

        Returns:
            The tokens of the batch, and whether the batch is full.
        """
        is_full = False
        is_new = not call.num_started
        num_tokens = 0
        while call.num_started < len(call.order):
            sequence = QueuedSequence(call, call.order[call.num_started])
            if batch and batch_tokens + num_tokens + sequence.num_tokens > self._max_batch_tokens:
                is_full = True
                break
            batch.append(sequence)
            call.num_started += 1
            num_tokens += sequence.num_tokens
        size_class.served_tokens += num_tokens
        self.num_tokens -= num_tokens
        if num_tokens:
            if is_new:
                size_class.charge(call)
            size_class.take_tokens(call, num_tokens)
        return batch_tokens + num_tokens, is_full
