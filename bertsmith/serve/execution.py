"""Run requests in threads until their deadline, and cancel requests of disconnected clients."""

import asyncio
import contextlib
import io
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Final, TypeVar

import numpy as np
import orjson
from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from numpy.typing import NDArray
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bertsmith.serve.deadline import Deadline, DisconnectedError, create_deadline_error
from bertsmith.serve.parsing import UNKNOWN_SHARE_HEADER, BodyParser
from bertsmith.serve.sending import CONNECTION_KEY, MIN_PROGRESS_BYTES, Connection
from bertsmith.serve.service import Service
from bertsmith.text.unknown import MAX_UNKNOWN_SHARE

Result = TypeVar("Result")
#: Largest response, in numbers, that is serialized on the event loop. Serializing a larger response
#: there would delay other requests.
MAX_INLINE_NUMBERS: Final = 10_000
#: Size of the parts of a streamed response. A client must read as much within the time limit.
_CHUNK_BYTES: Final = MIN_PROGRESS_BYTES


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
        """Return a router whose POST endpoints take ``(request, parsed body)``.

        As in FastAPI, an ``async def`` endpoint runs on the event loop, and a ``def`` endpoint in a
        thread, where it may tokenize and wait for results. Both find the request's deadline in
        ``request.state.deadline``. The header ``UNKNOWN_SHARE_HEADER`` is added to their responses
        if necessary.
        """
        parse, run_in_thread = self._parser.parse, self.run_in_thread

        class ParsedRoute(APIRoute):
            def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
                if self.body_field is None:
                    return super().get_route_handler()
                endpoint = self.endpoint
                model = self.body_field.field_info.annotation
                assert isinstance(model, type)
                assert issubclass(model, BaseModel)
                is_async = iscoroutinefunction(endpoint)

                async def handle(request: Request) -> Response:
                    call = partial(endpoint, request, await parse(request, model))
                    response: Response = await (
                        call() if is_async else run_in_thread(request, call)
                    )
                    share = request.state.deadline.token_counts.unknown_share
                    if share > MAX_UNKNOWN_SHARE:
                        response.headers[UNKNOWN_SHARE_HEADER] = f"{share:.4g}"
                    return response

                return handle

        return APIRouter(route_class=ParsedRoute)

    async def run_in_thread(self, request: Request, function: Callable[[], Result]) -> Result:
        """Call ``function`` in a thread and return its result.

        A large response is returned when there is memory for it, unless ``function`` has reserved
        memory.

        Raises:
            BusyError: too many requests wait for memory.
            DeadlineExceededError: the function did not return in time.
            DisconnectedError: the client disconnected.
        """
        deadline: Deadline = request.state.deadline

        def run() -> Result:
            result = function()
            deadline.reserve_response(len(getattr(result, "body", b"")))
            return result

        with _cancel_on_disconnect(request, deadline):
            return await _await_future(deadline, self._threads.submit(run))

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
                future = await _await_future(deadline, self._threads.submit(submit, deadline))
            else:
                future = submit(deadline)
            return await _await_future(deadline, future)

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

    def stream_response(self, pieces: Iterator[bytes]) -> Response:
        """Return a response with pieces of JSON, which are created while the client reads."""
        return _StreamedResponse(pieces, self._encoder)

    def close(self) -> None:
        """Shut down the threads without waiting for running requests."""
        for executor in (self._threads, self._encoder):
            executor.shutdown(wait=False, cancel_futures=True)
        self._parser.close()


class _StreamedResponse(Response):
    """A response that is serialized in chunks in a thread, each after the previous one was read."""

    def __init__(self, pieces: Iterator[bytes], encoder: ThreadPoolExecutor) -> None:
        # Without ``super``, which would set the header Content-Length.
        self.status_code = 200
        self.media_type = "application/json"
        self.background = None
        self.init_headers()
        self._pieces = pieces
        self._encoder = encoder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response until its end, or until the client disconnects."""
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        connection: Connection | None = scope.get("extensions", {}).get(CONNECTION_KEY)
        loop = asyncio.get_running_loop()
        is_disconnected = False
        while not is_disconnected:
            chunk = await loop.run_in_executor(self._encoder, self._create_chunk)
            await send({"type": "http.response.body", "body": chunk, "more_body": bool(chunk)})
            if not chunk:
                break
            del chunk
            is_disconnected = connection is not None and connection.is_disconnected

    def _create_chunk(self) -> bytes:
        """Return the next bytes of the response; empty at its end."""
        buffer = io.BytesIO()
        for piece in self._pieces:
            buffer.write(piece)
            if buffer.tell() >= _CHUNK_BYTES:
                break
        return buffer.getvalue()


async def _await_future(deadline: Deadline, future: Future[Result]) -> Result:
    """Return the result of a future; cancel the request if the future is not done in time.

    ``asyncio.wait_for`` and ``asyncio.wrap_future`` would need several times as much CPU time.

    Raises:
        DeadlineExceededError: the future was not done at the deadline.
        DisconnectedError: the future was cancelled, because the client disconnected.
    """
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def end_wait() -> None:
        if not ended.done():
            ended.set_result(None)

    def end_wait_from_thread(_: Future[Result]) -> None:
        # The loop is closed if the server stops before the future is done.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(end_wait)

    future.add_done_callback(end_wait_from_thread)
    timer = loop.call_later(max(deadline.get_remaining_seconds(), 0.0), end_wait)
    try:
        await ended
    except asyncio.CancelledError:
        # A running thread cannot be cancelled, but the calls that it waits for can.
        deadline.cancel()
        future.cancel()
        raise
    finally:
        timer.cancel()
    if not future.done():
        deadline.cancel()
        raise create_deadline_error()
    try:
        return future.result()
    except CancelledError:
        raise DisconnectedError("the client disconnected") from None


@contextlib.contextmanager
def _cancel_on_disconnect(request: Request, deadline: Deadline) -> Iterator[None]:
    """Cancel the request if its client disconnects within the block."""
    connection: Connection | None = request.scope.get("extensions", {}).get(CONNECTION_KEY)
    if connection is not None:
        with connection.call_on_disconnect(deadline.cancel):
            yield
        return
    # Other ASGI servers, such as test clients, do not provide the connection.
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


def iter_json_pieces(arrays: list[NDArray[Any]]) -> Iterator[bytes]:
    """Yield a list of arrays as pieces of JSON; each array is freed when it was serialized."""
    arrays.reverse()
    separator = b"["
    while arrays:
        yield separator
        yield from _iter_array_pieces(arrays.pop())
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def _iter_array_pieces(array: NDArray[Any]) -> Iterator[bytes]:
    """Yield an array row by row."""
    if array.ndim == 1:
        yield serialize_array(array)
        return
    separator = b"["
    for row in array:
        yield separator
        yield from _iter_array_pieces(row)
        separator = b","
    yield b"[]" if separator == b"[" else b"]"


def serialize_array(array: NDArray[Any]) -> bytes:
    """Return an array of numbers as JSON, serialized row by row."""
    if array.ndim > 1:
        return join_json_items(map(serialize_array, array))
    return orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
