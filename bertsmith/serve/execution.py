"""Runs the work of a request off the event loop; ends it at the deadline or a disconnect."""

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

from bertsmith.serve.deadline import Deadline, DisconnectedError, deadline_exceeded
from bertsmith.serve.parsing import BodyParser
from bertsmith.serve.service import Service

Result = TypeVar("Result")
#: Numbers in an answer that are serialized on the event loop; more would delay other requests.
MAX_INLINE_NUMBERS: Final = 10_000


class RequestExecutor:
    """Asks a service for the endpoints of an app."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._parser = BodyParser(service.settings)
        # A thread waits for each request that is no plain embedding; it tokenizes beside the model.
        self._threads = ThreadPoolExecutor(service.settings.requests, "request")
        # One thread: serialization holds Python's lock, as parsing does.
        self._encoder = ThreadPoolExecutor(1, "encoder")

    def create_router(self) -> APIRouter:
        """Return a router whose POST endpoints take ``(request, parsed body)``."""
        return APIRouter(route_class=self._parser.route_class())

    async def run_in_thread(self, request: Request, ask: Callable[[Deadline], Result]) -> Result:
        """Return what ``ask`` does in a thread. Raises what it raises, LateError or GoneError."""
        patience: Deadline = request.state.patience
        with _watched(request, patience):
            loop = asyncio.get_running_loop()
            return await _before(patience, loop.run_in_executor(self._threads, ask, patience))

    async def await_future(
        self,
        request: Request,
        submit: Callable[[Deadline], Future[Result]],
        *,
        in_thread: bool = False,
    ) -> Result:
        """Return what a future of the batcher brings. Raises LateError or GoneError.

        in_thread: whether ``submit`` itself takes long, and is called in a thread.
        """
        patience: Deadline = request.state.patience
        with _watched(request, patience):
            if in_thread:
                loop = asyncio.get_running_loop()
                submitted = await _before(
                    patience, loop.run_in_executor(self._threads, submit, patience)
                )
            else:
                submitted = submit(patience)
            try:
                return await _before(patience, asyncio.wrap_future(submitted))
            except (asyncio.CancelledError, CancelledError):
                if patience.is_cancelled:
                    raise DisconnectedError("the client went away") from None
                raise

    async def encode_response(self, encode: Callable[[], bytes], numbers: int) -> Response:
        """Return JSON that ``encode`` makes; in a thread if it has many numbers."""
        if numbers <= MAX_INLINE_NUMBERS:
            return json_response(encode())
        loop = asyncio.get_running_loop()
        return json_response(await loop.run_in_executor(self._encoder, encode))

    def close(self) -> None:
        """Wait for nobody any more."""
        for executor in (self._threads, self._encoder):
            executor.shutdown(wait=False, cancel_futures=True)
        self._parser.close()


async def _before(patience: Deadline, future: asyncio.Future[Result]) -> Result:
    """Return the result of a future; raises LateError at the deadline, whatever it still does."""
    try:
        return await asyncio.wait_for(future, max(patience.remaining(), 0.0))
    except TimeoutError:
        patience.cancel()
        raise deadline_exceeded() from None


@contextlib.contextmanager
def _watched(request: Request, patience: Deadline) -> Iterator[None]:
    """Give up, inside, when the client goes away."""
    watching = asyncio.create_task(_gone(request, patience))
    try:
        yield
    finally:
        watching.cancel()


async def _gone(request: Request, patience: Deadline) -> None:
    # The body is read: what comes next is the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    patience.cancel()


def to_json_response(value: Any) -> Response:
    """Return a value as JSON; arrays of numpy are lists of numbers."""
    return json_response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY))


def json_response(body: bytes) -> Response:
    """Return a response of JSON that is serialized already."""
    return Response(body, media_type="application/json")


def list_json(items: Iterable[bytes]) -> bytes:
    """Return a JSON list of items that are JSON already.

    Python's lock is free between two items, so that other threads go on; for one large value
    orjson would hold it for up to a second.
    """
    return b"[" + b",".join(items) + b"]"


def numbers_json(array: NDArray[Any]) -> bytes:
    """Return an array of numbers as JSON, serialized row by row."""
    if array.ndim > 1:
        return list_json(map(numbers_json, array))
    return orjson.dumps(np.ascontiguousarray(array), option=orjson.OPT_SERIALIZE_NUMPY)
