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


class TokenRates:
    """Tokens per byte of recent requests; thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        #: Time and tokens per byte of recent requests by client and path, oldest use first.
        self._rates: OrderedDict[tuple[str, str], deque[tuple[float, float]]] = OrderedDict()

    def record(self, client: str, path: str, tokens_per_byte: float) -> None:
        """Remember a request."""
        with self._lock:
            rates = self._rates.setdefault((client, path), deque(maxlen=_NUM_REQUESTS))
            rates.append((self._clock(), tokens_per_byte))
            self._rates.move_to_end((client, path))
            if len(self._rates) > _MAX_CLIENTS:
                self._rates.popitem(last=False)

    def estimate(self, client: str, path: str, num_bytes: int) -> int:
        """Return the fewest tokens that a body may have; 0 without recent requests."""
        with self._lock:
            rates = self._rates.get((client, path), ())
            oldest = self._clock() - _RECENT_SECONDS
            recent = [rate for recorded_at, rate in rates if recorded_at >= oldest]
        return int(min(recent, default=0.0) * num_bytes)


class AdmissionTicket:
    """An admitted request, whose estimated tokens are reserved until the exact number is known."""

    def __init__(
        self, batcher: Batcher, rates: TokenRates, demand: TokenDemand, path: str, num_bytes: int
    ) -> None:
        self._batcher = batcher
        self._rates = rates
        self._demand = demand
        self._path = path
        self._num_bytes = num_bytes

    def record_tokens(self, num_tokens: int) -> None:
        """End the reservation, and remember the tokens of the request."""
        self.close()
        if self._num_bytes:
            self._rates.record(self._demand.client, self._path, num_tokens / self._num_bytes)

    def close(self) -> None:
        """End the reservation."""
        self._batcher.release(self._demand)


class EarlyAdmission:
    """Admits requests by the size of their bodies."""

    def __init__(
        self,
        batcher: Batcher,
        timeout_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Admit requests to the queue of a batcher.

        Args:
            batcher: the batcher.
            timeout_seconds: time to answer a request.
            clock: returns the time in seconds; the batcher uses the same clock.
        """
        self._batcher = batcher
        self._timeout_seconds = timeout_seconds
        self._clock = clock
        self._rates = TokenRates(clock)

    @contextmanager
    def admit(self, client: str, path: str, num_bytes: int) -> Iterator[AdmissionTicket]:
        """Reserve room in the queue for a request, within the block.

        Args:
            client: client that sent the request.
            path: path of the request.
            num_bytes: size of its body; 0 if it is unknown.

        Raises:
            BusyError: the server cannot answer the request in time.
        """
        num_tokens = self._rates.estimate(client, path, num_bytes)
        demand = TokenDemand(client, num_tokens, self._clock() + self._timeout_seconds)
        if num_tokens:
            self._batcher.reserve(demand)
        ticket = AdmissionTicket(self._batcher, self._rates, demand, path, num_bytes)
        try:
            yield ticket
        finally:
            ticket.close()
