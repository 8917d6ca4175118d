"""From an endpoint to the service and back: off the event loop, and given up when nobody waits.

It never knows what is asked.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import orjson
from fastapi import Request
from starlette.responses import Response

from bertsmith.serve.patience import GoneError, Patience, late
from bertsmith.serve.service import Service

Result = TypeVar("Result")


class Asking:
    """Asks a service for the endpoints of an app."""

    def __init__(self, service: Service) -> None:
        self.service = service
        # A thread waits for each request that is no plain embedding; it tokenizes beside the model.
        self._threads = ThreadPoolExecutor(service.settings.requests, "request")

    async def thread(self, request: Request, ask: Callable[[Patience], Result]) -> Result:
        """Return what ``ask`` does in a thread. Raises what it raises, or GoneError."""
        patience = Patience(self.service.settings.seconds)
        with _watched(request, patience):
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._threads, ask, patience)

    async def future(
        self,
        request: Request,
        submit: Callable[[Patience], Future[Result]],
        *,
        beside: bool = False,
    ) -> Result:
        """Return what a future of the batcher brings. Raises LateError or GoneError.

        beside: whether ``submit`` itself takes long, and is called in a thread.
        """
        patience = Patience(self.service.settings.seconds)
        with _watched(request, patience):
            if beside:
                loop = asyncio.get_running_loop()
                submitted = await loop.run_in_executor(self._threads, submit, patience)
            else:
                submitted = submit(patience)
            waiting = asyncio.wrap_future(submitted)
            try:
                return await asyncio.wait_for(waiting, self.service.settings.seconds)
            except TimeoutError:
                raise late() from None
            except (asyncio.CancelledError, CancelledError):
                if patience.gone:
                    raise GoneError("the client went away") from None
                raise

    def close(self) -> None:
        """Wait for nobody any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def _watched(request: Request, patience: Patience) -> Iterator[None]:
    """Give up, inside, when the client goes away."""
    watching = asyncio.create_task(_gone(request, patience))
    try:
        yield
    finally:
        watching.cancel()


async def _gone(request: Request, patience: Patience) -> None:
    # The body is read: what comes next is the end of the connection.
    while (await request.receive())["type"] != "http.disconnect":
        pass
    patience.cancel()


def said(value: Any) -> Response:
    """Return a value as JSON; arrays of numpy are lists of numbers."""
    options = orjson.OPT_SERIALIZE_NUMPY
    return Response(orjson.dumps(value, option=options), media_type="application/json")
