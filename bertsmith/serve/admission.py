"""Reject requests of an overloaded server before their bodies are received and tokenized.

Otherwise tokenizing requests that are rejected afterwards would take most of the CPU time. The
tokens of a request are estimated from the size of its body and earlier requests of the same client,
so that one client's requests have no effect on the estimates of others.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from bertsmith.serve.batching import Batcher
from bertsmith.serve.fair_queue import TokenDemand

#: Earlier requests of a client and endpoint from which tokens are estimated.
_NUM_REQUESTS: Final = 8
#: Time after which an earlier request is ignored. Without recent requests a request is not rejected
#: early, so that a client whose requests have changed is not rejected because of a wrong estimate.
_RECENT_SECONDS: Final = 10.0
#: Clients and endpoints whose requests are remembered.
_MAX_CLIENTS: Final = 4096


@dataclass(frozen=True)
class _RecentRequest:
    """A request whose tokens are known.

    Attributes:
        recorded_at: time in seconds.
        num_bytes: size of the body.
        num_tokens: tokens that the model computes.
    """

    recorded_at: float
    num_bytes: int
    num_tokens: int

    def estimate(self, num_bytes: int) -> float:
        """Return the fewest tokens that a similar request may have.

        Tokens grow at most with the square of the size (attributions compute a sequence for each
        token), and do not grow at all if texts are truncated or the endpoint has a fixed cost. A
        larger request may also be invalid: it must then be answered with its error.
        """
        return self.num_tokens * min(num_bytes / self.num_bytes, 1.0) ** 2


class RecentRequests:
    """Sizes and tokens of recent requests by client and endpoint; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: Recent requests by client and path, oldest use first.
        self._requests: OrderedDict[tuple[str, str], deque[_RecentRequest]] = OrderedDict()

    def record(self, client: str, path: str, num_bytes: int, num_tokens: int) -> None:
        """Remember a request, whose body has at least one byte."""
        with self._lock:
            requests = self._requests.setdefault((client, path), deque(maxlen=_NUM_REQUESTS))
            requests.append(_RecentRequest(self._clock(), num_bytes, num_tokens))
            self._requests.move_to_end((client, path))
            if len(self._requests) > _MAX_CLIENTS:
                self._requests.popitem(last=False)

    def estimate(self, client: str, path: str, num_bytes: int) -> int:
        """Return the fewest tokens that a request may have; 0 without recent requests."""
        with self._lock:
            requests = self._requests.get((client, path), ())
            oldest = self._clock() - _RECENT_SECONDS
            estimates = [
                request.estimate(num_bytes) for request in requests if request.recorded_at >= oldest
            ]
        return int(min(estimates, default=0.0))


class EarlyAdmission:
    """Admits requests by the size of their bodies."""

    def __init__(self, batcher: Batcher, timeout_seconds: float) -> None:
        """Admit requests to the queue of a batcher.

        Args:
            batcher: the batcher.
            timeout_seconds: time to answer a request.
        """
        self._batcher = batcher
        self._timeout_seconds = timeout_seconds
        self._recent_requests = RecentRequests()

    @contextmanager
    def admit(self, client: str, path: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
        """Reserve room in the queue for a request, within the block.

        Yields a function that takes the number of tokens of the request when it is known. The
        function ends the reservation and remembers the tokens.

        Args:
            client: client that sent the request.
            path: path of the request.
            num_bytes: size of its body.

        Raises:
            BusyError: the server cannot answer the request in time.
        """
        num_tokens = self._recent_requests.estimate(client, path, num_bytes)
        demand = TokenDemand(client, num_tokens, time.monotonic() + self._timeout_seconds)

        def release() -> None:
            if num_tokens:
                self._batcher.release(demand)

        def record_tokens(num_request_tokens: int) -> None:
            release()
            if num_bytes:
                self._recent_requests.record(client, path, num_bytes, num_request_tokens)

        if num_tokens:
            self._batcher.reserve(demand)
        try:
            yield record_tokens
        finally:
            release()
