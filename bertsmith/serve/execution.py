"""Run the work of a request off the event loop, until its deadline or a client disconnect."""

import asyncio
import contextlib
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
#: Largest response, in numbers, that is serialized on the event loop; larger ones would delay
#: other requests.
MAX_INLINE_NUMBERS: Final = 10_000


class RequestExecutor:
    """Runs requests of an app on a service; the endpoints share one."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._parser = BodyParser(service.settings)
        # Requests other than short embedding requests tokenize and wait in a thread of their own.
        self._threads = ThreadPoolExecutor(service.settings.max_concurrent_requests, "request")
        # One thread: serialization holds the GIL, as parsing does.
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
        """Return the result of the batcher's future that ``submit`` returns.

        Args:
            request: the request.
            submit: submits work to the batcher.
            in_thread: call ``submit`` in a thread, because it takes long itself.

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
        """Return the JSON of ``encode``; it runs in a thread if the response has many numbers."""
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
    """Return the result of a future; cancel the request and raise if it is not done in time."""
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
    # The body is read already, so the next message of interest is the disconnect.
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
    """Return a JSON list of serialized items.

    Serializing item by item releases the GIL in between. For one large value, orjson would block
    all other threads for up to a second.
    """
    return b"[" + b",".join(items) + b"]"


def serialize_array(array: NDArray[Any]) -> bytes:
    """Return an array of numbers as JSON, serialized row by row."""
    if array.ndim > 1:
        return join_json_items(map(serialize_array, array))
    return orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
