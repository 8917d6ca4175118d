"""Limit the memory of large answers, from their computation until clients have read them."""

import threading
from collections import deque
from typing import Final

from bertsmith.runtime.device import trim_memory
from bertsmith.serve.deadline import BusyError, Deadline

#: Answers with fewer bytes are not counted.
MIN_COUNTED_BYTES: Final = 2**20
#: Maximum number of waiting requests, because their texts need memory too.
_MAX_WAITING: Final = 8
_RETRY_SECONDS: Final = 2.0
#: Time after which a waiting request checks whether its client has disconnected.
_CHECK_SECONDS: Final = 0.2


class AnswerMemory:
    """Counts the bytes of large answers; requests wait, in order, until there is room for theirs.

    Thread-safe.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start without answers.

        Args:
            max_bytes: maximum bytes of all answers. A larger answer is computed alone.
        """
        self._max_bytes = max_bytes
        self._condition = threading.Condition()
        self._num_bytes = 0
        self._waiting: deque[AnswerReservation] = deque()

    @property
    def is_full(self) -> bool:
        """Whether requests are waiting."""
        return bool(self._waiting)

    def reserve(self, reservation: "AnswerReservation", num_bytes: int, deadline: Deadline) -> None:
        """Wait until there is room for an answer, and count its bytes.

        Args:
            reservation: the reservation, without bytes.
            num_bytes: bytes of the answer.
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
                    f"{_MAX_WAITING} requests with large answers are waiting for memory; retry in "
                    f"{_RETRY_SECONDS:.0f} seconds",
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
        # The memory of earlier answers may not be reused for this one.
        trim_memory()

    def shrink(self, reservation: "AnswerReservation", num_bytes: int) -> None:
        """Reduce a reservation to ``num_bytes``; nothing happens if it is not larger."""
        with self._condition:
            if num_bytes < reservation.num_bytes:
                self._num_bytes -= reservation.num_bytes - num_bytes
                reservation.num_bytes = num_bytes
                self._condition.notify_all()


class AnswerReservation:
    """The counted bytes of one request's answer.

    Attributes:
        num_bytes: counted bytes.
    """

    def __init__(self, memory: AnswerMemory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_bytes = 0

    def reserve(self, num_bytes: int, deadline: Deadline) -> None:
        """Wait until there is room for the answer; see ``AnswerMemory.reserve``.

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
        """Reduce the bytes, now that the size of the answer is known."""
        self._memory.shrink(self, num_bytes)

    def close(self) -> None:
        """Stop counting, because the answer was sent or there is none."""
        with self._lock:
            self._is_closed = True
            self._memory.shrink(self, 0)
