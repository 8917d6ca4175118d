"""How long a request waits, and each way in which it ends without an answer.

It never knows what is asked.
"""

import time
from concurrent.futures import CancelledError, Future
from typing import Any

from bertsmith.errors import BertsmithError
from bertsmith.text.unknown import TokenCounts


class BusyError(BertsmithError):
    """The queue is full. ``seconds``: after which it is worth to ask again."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.retry_after = seconds


class DeadlineExceededError(BertsmithError):
    """There was no answer within the time of a request."""


class DisconnectedError(BertsmithError):
    """The client went away before there was an answer."""


class ShuttingDownError(BertsmithError):
    """The server is being stopped and takes nothing new."""


class RequestTooLargeError(BertsmithError):
    """One request asks for more than it may."""


class NotFiniteError(BertsmithError):
    """A model computed NaN or infinity."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the model {model!r} computed numbers that are not finite (NaN or infinity): its "
            "weights are broken; serve another checkpoint of it"
        )


class Deadline:
    """How long one request waits, and its end before that if the client goes away."""

    def __init__(self, seconds: float) -> None:
        """``seconds`` from now on."""
        self.expires_at = time.monotonic() + seconds
        self.is_cancelled = False
        #: The tokens of the request's texts, whichever of them the model reads.
        self.token_counts = TokenCounts()
        self._waiting: Future[Any] | None = None

    def remaining(self) -> float:
        """Return the seconds until the deadline; negative after it."""
        return self.expires_at - time.monotonic()

    def check(self) -> None:
        """Raise GoneError or LateError where nobody waits for the answer any more."""
        if self.is_cancelled:
            raise DisconnectedError("the client went away")
        if self.remaining() < 0:
            raise deadline_exceeded()

    def cancel_on_disconnect(self, future: Future[Any]) -> None:
        """Remember what is cancelled if the client goes away."""
        self._waiting = future
        if self.is_cancelled:
            future.cancel()

    def cancel(self) -> None:
        """Give up, from any thread."""
        self.is_cancelled = True
        if self._waiting is not None:
            self._waiting.cancel()


def wait_for_result(future: Future[list[Any]], patience: Deadline) -> list[Any]:
    """Return the answers, within the time there is; raises LateError or GoneError."""
    try:
        return future.result(max(patience.expires_at - time.monotonic(), 0.0))
    except TimeoutError:
        future.cancel()
        raise deadline_exceeded() from None
    except CancelledError:
        raise DisconnectedError("the client went away") from None


def deadline_exceeded() -> DeadlineExceededError:
    """Return the error of a request whose time is over."""
    return DeadlineExceededError("there was no answer in time; ask for less at once, or later")
