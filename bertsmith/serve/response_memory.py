"""Limit the memory of large responses, from their computation until clients have read them."""

import threading
from collections import deque
from typing import Final

from bertsmith.runtime.device import trim_memory
from bertsmith.serve.deadline import BusyError, Deadline

#: Responses with fewer bytes are not counted.
MIN_COUNTED_BYTES: Final = 2**20
#: Maximum number of waiting requests, because their texts need memory too.
_MAX_WAITING: Final = 8
_RETRY_SECONDS: Final = 2.0
#: Time after which a waiting request checks whether its client has disconnected.
_CHECK_SECONDS: Final = 0.2


class ResponseMemory:
    """Counts the bytes of large responses; requests wait, in order, until there is room for theirs.

    Thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start without responses.

        Args:
            max_bytes: maximum bytes of all responses. A larger response is computed alone.
        """
        self._max_bytes = max_bytes
        self._condition = threading.Condition()
        self._num_bytes = 0
        self._waiting: deque[ResponseReservation] = deque()

    @property
    def is_full(self) -> bool:
        """Whether requests are waiting."""
        return bool(self._waiting)

    def reserve(
        self, reservation: "ResponseReservation", num_bytes: int, deadline: Deadline
    ) -> None:
        """Wait until there is room for a response, and count its bytes.

        Args:
            reservation: the reservation, without bytes.
            num_bytes: bytes of the response.
            deadline: the request's deadline.

        Raises:
            BusyError: too many requests are waiting.
            DeadlineExceededError: the deadline passed.
            DisconnectedError: the client disconnected.
        """
        if num_bytes < MIN_COUNTED_BYTES:
            return
        num_bytes = min(num_bytes, self._max_bytes)
        with self._condition:
            if len(self._waiting) >= _MAX_WAITING:
                raise BusyError(
                    f"{_MAX_WAITING} requests with large responses are waiting for memory; retry "
                    f"in {_RETRY_SECONDS:.0f} seconds",
                    _RETRY_SECONDS,
                )
            self._waiting.append(reservation)
            try:
                while (
                    self._waiting[0] is not reservation
                    or self._num_bytes + num_bytes > self._max_bytes
                ):
                    deadline.check()
                    self._condition.wait(_CHECK_SECONDS)
                reservation.num_bytes = num_bytes
                self._num_bytes += num_bytes
            finally:
                self._waiting.remove(reservation)
                self._condition.notify_all()
        # The memory of earlier responses may not be reused for this one.
        trim_memory()

    def shrink(self, reservation: "ResponseReservation", num_bytes: int) -> None:
        """Reduce a reservation to ``num_bytes``; nothing happens if it is not larger."""
        with self._condition:
            if num_bytes < reservation.num_bytes:
                self._num_bytes -= reservation.num_bytes - num_bytes
                reservation.num_bytes = num_bytes
                self._condition.notify_all()


class ResponseReservation:
    """The counted bytes of one request's response.

    Attributes:
        num_bytes: counted bytes.
    """

    def __init__(self, memory: ResponseMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_bytes = 0

    def reserve(self, num_bytes: int, deadline: Deadline) -> None:
        """Wait until there is room for the response; see ``ResponseMemory.reserve``.

        Nothing happens if bytes are reserved already, because requests that wait for more could
        block each other.
        """
        if self.num_bytes:
            return
        self._memory.reserve(self, num_bytes, deadline)
        # The request may have ended at its deadline in the meantime.
        with self._lock:
            if self._is_closed:
                self._memory.shrink(self, 0)

    def shrink(self, num_bytes: int) -> None:
        """Reduce the bytes, now that the size of the response is known."""
        self._memory.shrink(self, num_bytes)

    def close(self) -> None:
        """Stop counting, because the response was sent or there is none."""
        with self._lock:
            self._is_closed = True
            self._memory.shrink(self, 0)
