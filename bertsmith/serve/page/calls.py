"""Routes that call the page's functions, with the protocol of Gradio's clients ("sse_v3").

They replace Gradio's own routes, which store the inputs of each session, load files and URLs named
in inputs, log inputs, and have no limit of concurrent calls.
"""

import asyncio
import math
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from inspect import Parameter, signature
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Send

from bertsmith.serve.deadline import BusyError
from bertsmith.serve.page.jobs import Job, JobQueue
from bertsmith.serve.page.library import gr

API = "/gradio_api"
#: Seconds in which a client must receive one message.
_SEND_SECONDS = 30.0
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EMPTY = Parameter.empty
#: Fields of the event that selects a head.
_EVENT_FIELDS = {"layer", "head"}


class CallRoutes:
    """Routes that call the functions of a ``gradio.Blocks`` through a queue."""

    def __init__(self, blocks: Any, jobs: JobQueue) -> None:
        self._jobs = jobs
        self._by_index = {
            index: function for index, function in blocks.fns.items() if function.fn is not None
        }
        self._by_name = {
            function.api_name: function
            for function in self._by_index.values()
            if function.api_visibility == "public"
        }

    def routes(self) -> list[Route]:
        """Return all routes."""
        return [
            _route("/queue/join", self.join, "POST"),
            _route("/queue/data", self.data, "GET"),
            _route("/run/{name}", self.run, "POST"),
            _route("/call/{name}", self.call, "POST"),
            _route("/call/v2/{name}", self.call_by_keywords, "POST"),
            _route("/call/{name}/{session}", self.call_result, "GET"),
        ]

    async def join(self, request: Request) -> Response:
        """Queue a call from the page; /queue/data streams its result."""
        body = await _body(request)
        session, index = body.get("session_hash"), body.get("fn_index")
        if not isinstance(session, str) or not _SESSION.fullmatch(session):
            raise _invalid("session_hash", "1 to 64 letters and digits")
        function = self._by_index.get(index) if type(index) is int else None
        if function is None:
            raise HTTPException(404, "the page has no such function; reload it")
        job = self._submit(function, body, session)
        return _json({"event_id": job.job_id})

    async def data(self, request: Request) -> Response:
        """Stream the results of a session until no call is pending."""
        session = request.query_params.get("session_hash", "")
        return _Stream(self._messages(session), media_type="text/event-stream")

    async def run(self, request: Request) -> Response:
        """Call a function by name and wait for its result."""
        job = self._submit(self._named(request), await _body(request), None)
        await job.finished.wait()
        if job.error is not None:
            return _json({"error": job.error}, 422)
        return _json({"data": job.value})

    async def call(self, request: Request) -> Response:
        """Queue a call by name; /call/NAME/EVENT_ID streams its result."""
        return self._queue(self._named(request), await _body(request))

    async def call_by_keywords(self, request: Request) -> Response:
        """Queue a call by name with keyword arguments."""
        function, body = self._named(request), await _body(request)
        parameters = signature(function.fn).parameters
        if body.keys() - parameters.keys():
            raise _invalid("the body", f"an object with {', '.join(parameters)}")
        data = [body.get(name, parameter.default) for name, parameter in parameters.items()]
        missing = [name for name, value in zip(parameters, data, strict=True) if value is _EMPTY]
        if missing:
            raise HTTPException(422, f"the body has no {missing[0]}")
        return self._queue(function, {"data": data})

    async def call_result(self, request: Request) -> Response:
        """Stream the result of a call by name."""
        session = request.path_params["session"]
        return _Stream(self._named_messages(session), media_type="text/event-stream")

    def _named(self, request: Request) -> Any:
        function = self._by_name.get(request.path_params["name"])
        if function is None:
            names = ", ".join(sorted(self._by_name))
            raise HTTPException(404, f"the page has no such function; expected one of: {names}")
        return function

    def _queue(self, function: Any, body: dict[str, Any]) -> Response:
        # Each call gets a session of its own, whose id is the event id.
        session = uuid.uuid4().hex
        self._submit(function, body, session)
        return _json({"event_id": session})

    def _submit(self, function: Any, body: dict[str, Any], session: str | None) -> Job:
        call = partial(_call_function, function, _check_arguments(function, body))
        try:
            return self._jobs.submit(call, session)
        except BusyError as error:
            # Gradio's clients handle this status.
            raise HTTPException(503, str(error), {"Retry-After": "1"}) from None

    async def _messages(self, session: str) -> AsyncIterator[bytes]:
        async for job in self._jobs.results(session):
            if job is None:
                yield _event({"msg": "heartbeat"})
            elif job.error is None:
                output = {"data": job.value, "is_generating": False}
                yield _event(_completed(job, output, success=True))
            else:
                output = {"error": job.error, "visible": True, "duration": 10, "title": "Error"}
                yield _event(_completed(job, output, success=False))
        yield _event({"msg": "close_stream", "event_id": None})

    async def _named_messages(self, session: str) -> AsyncIterator[bytes]:
        async for job in self._jobs.results(session):
            if job is None:
                yield b"event: heartbeat\ndata: null\n\n"
            elif job.error is None:
                yield b"event: complete\ndata: " + _dumps(job.value) + b"\n\n"
            else:
                yield b"event: error\ndata: " + _dumps({"error": job.error}) + b"\n\n"


class _Stream(StreamingResponse):
    """Event stream that ends if its client does not read."""

    async def stream_response(self, send: Send) -> None:
        """Send all messages, each within ``_SEND_SECONDS``."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(_SEND_SECONDS):
                await send(message)

        with suppress(TimeoutError):
            await super().stream_response(send_in_time)


def _route(path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str) -> Route:
    async def respond(request: Request) -> Response:
        try:
            return await endpoint(request)
        except HTTPException as error:
            # Gradio's clients expect this error format.
            return _json({"detail": error.detail}, error.status_code, error.headers)

    return Route(API + path, respond, methods=[method], include_in_schema=False)


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request."""
    # Scripts of other sites can send some other content types without a CORS preflight.
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise HTTPException(415, "the header Content-Type must be application/json")
    try:
        body = orjson.loads(await request.body())
    except orjson.JSONDecodeError:
        raise HTTPException(422, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise HTTPException(422, "the body is not a JSON object")
    return body


def _check_arguments(function: Any, body: dict[str, Any]) -> list[Any]:
    """Return the arguments of a call, checked against the inputs of its function.

    Raises:
        HTTPException: 422 for a wrong number of values, or an invalid value.
    """
    data = body.get("data")
    if not isinstance(data, list) or len(data) != len(function.inputs):
        raise _invalid("data", f"a list of {len(function.inputs)} values")
    for number, (component, value) in enumerate(zip(function.inputs, data, strict=True)):
        expected = _describe_expected(component, value)
        if expected:
            raise _invalid(f"data[{number}]", expected)
    if not function.collects_event_data:
        return data
    event = body.get("event_data")
    if not isinstance(event, dict) or event.keys() != _EVENT_FIELDS:
        raise _invalid("event_data", "an object with layer and head")
    if not all(type(value) is int for value in event.values()):
        raise _invalid("event_data", "two integers")
    return [*data, gr.EventData(None, event)]


def _describe_expected(component: Any, value: Any) -> str:
    """Return a description of a component's valid values; empty if the value is valid."""
    if isinstance(component, gr.Textbox):
        return "" if isinstance(value, str) else "a text"
    if isinstance(component, gr.Dropdown):
        return "" if value is None or isinstance(value, str) else "a text or null"
    if isinstance(component, gr.Slider):
        is_number = type(value) is int or (type(value) is float and math.isfinite(value))
        # The maximum depends on the model; the functions check it.
        is_valid = is_number and value >= component.minimum
        return "" if is_valid else f"a number of at least {component.minimum}"
    # Named functions check types themselves. Objects are rejected: Gradio reads files they name.
    values = value if isinstance(value, list) else [value]
    is_plain = all(item is None or isinstance(item, str | int | float | bool) for item in values)
    return "" if is_plain else "a text, a number, true, false, null or a list of these"


def _call_function(function: Any, arguments: list[Any]) -> list[Any]:
    """Return the list of outputs of a function."""
    value = function.fn(*arguments)
    return [value] if len(function.outputs) == 1 else list(value)


def _invalid(name: str, expected: str) -> HTTPException:
    # Without the value, which may be the visitor's input.
    return HTTPException(422, f"{name} is invalid; expected {expected}")


def _completed(job: Job, output: dict[str, Any], *, success: bool) -> dict[str, Any]:
    return {
        "msg": "process_completed",
        "event_id": job.job_id,
        "output": output,
        "success": success,
    }


def _dumps(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_dumps(value), status, headers, media_type="application/json")


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + _dumps(message) + b"\n\n"
