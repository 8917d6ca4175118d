"""Request deadlines, and the errors of requests that end without a response."""

import math
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any

from bertsmith.errors import BertsmithError
from bertsmith.serve.rate_limits import TokenBucket
from bertsmith.text.unknown import TokenCounts

#: Message of the responses with status 503.
SHUTDOWN_MESSAGE = "the server is shutting down; use another server"


class BusyError(BertsmithError):
    """The server is overloaded.

    Attributes:
        retry_after: seconds until a retry is likely to succeed.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceededError(BertsmithError):
    """The request was not answered within its time limit."""


class DisconnectedError(BertsmithError):
    """The client disconnected before its request was answered."""


class ShuttingDownError(BertsmithError):
    """The server is shutting down and accepts no new requests."""


class RequestTooLargeError(BertsmithError):
    """The request exceeds a limit of the server."""


class NotFiniteError(BertsmithError):
    """A model computed NaN or infinity."""

    def __init__(self, model: str) -> None:
        super().__init__(
            f"the outputs of model {model!r} are not finite (NaN or infinity): its weights are "
            "broken; serve another checkpoint"
        )


class Deadline:
    """Time limit of one request, which is cancelled earlier if its client disconnects.

    Attributes:
        expires_at: time of the deadline, in seconds of the monotonic clock.
        client: client that sent the request, for fairness between clients.
        token_bucket: limits the tokens of the client per minute; None for no limit.
        trace_context: context of the request's spans; None without tracing.
        is_cancelled: whether ``cancel`` was called.
        token_counts: tokens of all texts of the request, including truncated tokens.
    """

    def __init__(
        self,
        seconds: float,
        client: str = "",
        token_bucket: TokenBucket | None = None,
        record_tokens: Callable[[int], None] | None = None,
        trace_context: Any = None,
        reserve_response: Callable[[int, "Deadline"], None] | None = None,
        shrink_response: Callable[[int], None] | None = None,
    ) -> None:
        """Start the time limit.

        Args:
            seconds: duration of the time limit.
            client: client that sent the request.
            token_bucket: limits the tokens of the client per minute; None for no limit.
            record_tokens: called with the number of tokens when the texts are tokenized.
            trace_context: context of the request's spans; None without tracing.
            reserve_response: waits until there is memory for a response; None for no limit.
            shrink_response: called with the bytes of the response when they are known.
        """
        self.expires_at = time.monotonic() + seconds
        self.client = client
        self.token_bucket = token_bucket
        self.trace_context = trace_context
        self._record_tokens = record_tokens
        self._reserve_response = reserve_response
        self._shrink_response = shrink_response
        self.is_cancelled = False
        self.token_counts = TokenCounts()
        #: A connection keeps the deadline of its last request, but must not keep the results.
        self._future_reference: weakref.ref[Future[Any]] | None = None

    def charge_tokens(self, num_tokens: int) -> None:
        """Count tokens against the client's limit; raise BusyError beyond it."""
        if self._record_tokens is not None:
            self._record_tokens(num_tokens)
        if self.token_bucket is not None:
            seconds = self.token_bucket.take(num_tokens)
            if seconds:
                raise BusyError(
                    f"the limit of this API key is {self.token_bucket.per_minute:,.0f} tokens per "
                    f"minute; retry in {math.ceil(max(seconds, 1.0))} seconds",
                    seconds,
                )

    def refund_tokens(self, num_tokens: int) -> None:
        """Return charged tokens that are not computed to the client."""
        if self.token_bucket is not None:
            self.token_bucket.refund(num_tokens)

    def reserve_response(self, max_bytes: int) -> None:
        """Wait until there is memory for a response of at most ``max_bytes``.

        Raises:
            DeadlineExceededError: the deadline passed.
            DisconnectedError: the client disconnected.
        """
        if self._reserve_response is not None:
            self._reserve_response(max_bytes, self)

    def shrink_response(self, num_bytes: int) -> None:
        """Release the reserved memory beyond the bytes of the response."""
        if self._shrink_response is not None:
            self._shrink_response(num_bytes)

    def get_remaining_seconds(self) -> float:
        """Return the seconds until the deadline; negative after it."""
        return self.expires_at - time.monotonic()

    def check(self) -> None:
        """Raise DisconnectedError for a cancelled request, DeadlineExceededError for a late one."""
        self.check_connection()
        if self.get_remaining_seconds() < 0:
            raise create_deadline_error()

    def check_connection(self) -> None:
        """Raise DisconnectedError for a cancelled request."""
        if self.is_cancelled:
            raise DisconnectedError("the client disconnected")

    def cancel_on_disconnect(self, future: Future[Any]) -> None:
        """Cancel a future as soon as the client disconnects, which may already have happened."""
        self._future_reference = weakref.ref(future)
        if self.is_cancelled:
            future.cancel()

    def cancel(self) -> None:
        """Cancel the request and its future; can be called from any thread."""
        self.is_cancelled = True
        future = None if self._future_reference is None else self._future_reference()
        if future is not None:
            future.cancel()


def wait_for_result(future: Future[list[Any]], deadline: Deadline) -> list[Any]:
    """Return the result of a future.

    Raises:
        DeadlineExceededError: the future is not done at the deadline.
        DisconnectedError: the future was cancelled, because the client disconnected.
    """
    try:
        return future.result(max(deadline.get_remaining_seconds(), 0.0))
    except TimeoutError:
        future.cancel()
        raise create_deadline_error() from None
    except CancelledError:
        raise DisconnectedError("the client disconnected") from None


def create_deadline_error() -> DeadlineExceededError:
    """Return the error of a request that was not answered in time."""
    return DeadlineExceededError(
        "the request was not answered in time; send fewer texts per request, or retry later"
    )
