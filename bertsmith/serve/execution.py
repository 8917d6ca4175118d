"""Run requests in threads until their deadline, and cancel requests of disconnected clients."""

import asyncio
import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from bertsmith.serve.deadline import Deadline, DisconnectedError, create_deadline_error
from bertsmith.serve.parsing import BodyParser
from bertsmith.serve.service import Service

Result = TypeVar("Result")
#: Largest response, in numbers, that is serialized on the event loop. Serializing a larger response
#: there would delay other requests.
MAX_INLINE_NUMBERS: Final = 10_000


class RequestExecutor:
    """Runs the requests of all endpoints of an app on a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._parser = BodyParser(service.settings)
        # Except for short embedding requests, each request tokenizes and waits in a thread.
        self._threads = ThreadPoolExecutor(service.settings.max_concurrent_requests, "request")
        # One thread, because serialization holds the GIL: more threads would delay each other.
        self._encoder = ThreadPoolExecutor(1, "encoder")

    def create_router(self) -> APIRouter:
        """Return a router whose POST endpoints take ``(request, parsed body)``."""
        return APIRouter(route_class=self._parser.create_route_class())

    async def run_in_thread(
        self, request: Request, function: Callable[[Deadline], Result]
    ) -> Result:
        """Call ``function`` in a thread and return its result.

        Raises:
            DeadlineExceededError: the function did not return in time.
            DisconnectedError: the client disconnected.
        """
        deadline: Deadline = request.state.deadline
        with _cancel_on_disconnect(request, deadline):
            loop = asyncio.get_running_loop()
            return await _await_future(
                deadline, loop.run_in_executor(self._threads, function, deadline)
            )

    async def await_future(
        self,
        request: Request,
        submit: Callable[[Deadline], Future[Result]],
        *,
        in_thread: bool = False,
    ) -> Result:
        """Submit work to the batcher and return its result.

        Args:
            request: the request.
            submit: submits the work and returns the batcher's future.
            in_thread: whether to call ``submit`` in a thread, because it takes a long time.

        Raises:
            DeadlineExceededError: there was no result in time.
            DisconnectedError: the client disconnected.
        """
        deadline: Deadline = request.state.deadline
        with _cancel_on_disconnect(request, deadline):
            if in_thread:
                loop = asyncio.get_running_loop()
                future = await _await_future(
                    deadline, loop.run_in_executor(self._threads, submit, deadline)
                )
            else:
                future = submit(deadline)
            try:
                return await _await_future(deadline, asyncio.wrap_future(future))
            except (asyncio.CancelledError, CancelledError):
                if deadline.is_cancelled:
                    raise DisconnectedError("the client disconnected") from None
                raise

    async def encode_response(self, encode: Callable[[], bytes], num_numbers: int) -> Response:
        """Return a response with the JSON that ``encode`` returns.

        Args:
            encode: serializes the response. It is called in a thread if the response is large.
            num_numbers: number of numbers in the response.
        """
        if num_numbers <= MAX_INLINE_NUMBERS:
            return create_json_response(encode())
        loop = asyncio.get_running_loop()
        return create_json_response(await loop.run_in_executor(self._encoder, encode))

    def close(self) -> None:
        """Shut down the threads without waiting for running requests."""
        for executor in (self._threads, self._encoder):
            executor.shutdown(wait=False, cancel_futures=True)
        self._parser.close()


async def _await_future(deadline: Deadline, future: asyncio.Future[Result]) -> Result:
    """Return the result of a future; cancel the request if the future is not done in time.

    Raises:
        DeadlineExceededError: the future was not done at the deadline.
    """
    try:
        return await asyncio.wait_for(future, max(deadline.get_remaining_seconds(), 0.0))
    except TimeoutError:
        deadline.cancel()
        raise create_deadline_error() from None


@contextlib.contextmanager
def _cancel_on_disconnect(request: Request, deadline: Deadline) -> Iterator[None]:
    """Cancel the request if its client disconnects within the block."""
    watcher = asyncio.create_task(_watch_for_disconnect(request, deadline))
    try:
        yield
    finally:
        watcher.cancel()


async def _watch_for_disconnect(request: Request, deadline: Deadline) -> None:
    """Wait until the client disconnects, and cancel the request."""
    # The body has already been received, so all messages except the disconnect are irrelevant.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    deadline.cancel()


def to_json_response(value: Any) -> Response:
    """Return a value as a JSON response; NumPy arrays become lists of numbers."""
    return create_json_response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def create_json_response(body: bytes) -> Response:
    """Return a response with serialized JSON as its body."""
    return Response(body, media_type="application/json")


def join_json_items(items: Iterable[bytes]) -> bytes:
    """Join serialized items to a JSON list.

    The items are serialized one by one, which releases the GIL between them. For one large value,
    orjson would block all other threads for up to a second. Each item is freed before the next one
    is serialized, so that the memory is that of the list.
    """
    buffer = io.BytesIO()
    buffer.write(b"[")
    separator = b""
    for item in items:
        buffer.write(separator)
        buffer.write(item)
        separator = b","
    buffer.write(b"]")
    return buffer.getvalue()


def serialize_array(array: NDArray[Any]) -> bytes:
    """Return an array of numbers as JSON, serialized row by row."""
    if array.ndim > 1:
        return join_json_items(map(serialize_array, array))
    return orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
