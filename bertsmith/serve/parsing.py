"""Parse and validate request bodies; large ones in a thread, to keep the event loop responsive."""

import asyncio
import codecs
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from bertsmith.errors import InputError
from bertsmith.serve.clients import (
    CLIENT_KEY,
    RECORD_TOKENS_KEY,
    RESPONSE_KEY,
    TOKEN_BUCKET_KEY,
    TRACE_KEY,
)
from bertsmith.serve.deadline import Deadline, RequestTooLargeError, create_deadline_error
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.validation_errors import describe_errors

#: Largest body, in bytes, that is parsed on the event loop. A thread would be slower for it.
MAX_INLINE_BYTES: Final = 16_384
#: Response header with the share of [UNK] tokens. It is sent if the share exceeds
#: ``MAX_UNKNOWN_SHARE``.
UNKNOWN_SHARE_HEADER: Final = "X-Bertsmith-Unknown-Share"
#: Response header with the number of texts that were truncated, if any.
TRUNCATED_HEADER: Final = "X-Bertsmith-Truncated-Texts"
#: Maximum number of lists, objects, fields and strings in a body, per text that a request may have.
#: Parsed lists and objects need up to fifty times as much memory as their JSON.
_MAX_NODES_PER_TEXT: Final = 64
#: A string, or the start of a string that does not end. Without backtracking, so that the time is
#: proportional to the size of the body.
_JSON_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_EXAMPLE_ADVICE: Final = 'send an object such as {"inputs": ["a text"]}'


def parse_body(body: bytes, model: type[BaseModel], settings: ServeSettings) -> BaseModel:
    """Parse and validate a JSON body.

    Raises:
        InputError: the body is not JSON, or does not match the model.
        RequestTooLargeError: a list is longer than the settings allow, or there are too many lists
            or objects.
    """
    _check_num_nodes(body, settings.max_texts)
    try:
        value = from_json(body.removeprefix(codecs.BOM_UTF8), cache_strings="none")
    except ValueError as error:
        raise InputError(_describe_syntax_error(str(error))) from None
    try:
        return model.model_validate(value, context={"texts": settings.max_texts})
    except ValidationError as error:
        raise InputError("; ".join(describe_errors(error, model.model_fields))) from None


def _check_num_nodes(body: bytes, max_texts: int) -> None:
    """Raise RequestTooLargeError if a JSON body has too many lists, objects, fields or strings."""
    limit = _MAX_NODES_PER_TEXT * max_texts
    if _count_brackets(body) + body.count(b'"') <= limit:
        return
    # Some of them may be part of texts.
    num_nodes = end = 0
    for match in _JSON_STRING.finditer(body):
        num_nodes += _count_brackets(body[end : match.start()]) + 1
        end = match.end()
        if num_nodes > limit:
            break
    else:
        num_nodes += _count_brackets(body[end:])
    if num_nodes > limit:
        raise RequestTooLargeError(
            f"the limit is {limit:,} lists, objects, fields and strings per request, got more; "
            "split the request"
        )


def _count_brackets(content: bytes) -> int:
    """Return the number of opening brackets and colons."""
    return content.count(b"[") + content.count(b"{") + content.count(b":")


def _describe_syntax_error(reason: str) -> str:
    """Return a message about a body that the JSON parser rejected for ``reason``."""
    # JSON can escape a lone UTF-16 surrogate, which is not a character.
    if "surrogate" in reason or "hex escape" in reason:
        return f"a text has a lone surrogate (half of a character): {reason}; send valid Unicode"
    return f"the body is not valid JSON in UTF-8: {reason}; {_EXAMPLE_ADVICE}"


def _check_headers(request: Request) -> None:
    """Raise InputError if the headers say that the body is not JSON, or compressed."""
    content_type = request.headers.get("content-type", "")
    media_type = content_type.partition(";")[0].strip().lower()
    # Browsers send other types across sites without asking the server first.
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise InputError(f"the header Content-Type is {content_type!r}; expected application/json")
    encoding = request.headers.get("content-encoding", "").strip()
    if encoding.lower() not in ("", "identity"):
        raise InputError(
            f"the header Content-Encoding is {encoding!r}; send the body without compression"
        )


class BodyParser:
    """Parses the request bodies of an app."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        # One thread, because parsing holds the GIL: more threads would delay each other.
        self._executor = ThreadPoolExecutor(1, "body-parser")

    async def parse(self, request: Request, model: type[BaseModel]) -> BaseModel:
        """Return the parsed body of a request, and set ``request.state.deadline``.

        The time limit of a request starts when its body is complete.

        Raises:
            InputError: the body is not valid.
            RequestTooLargeError: a list is longer than the settings allow.
            DeadlineExceededError: the body was not parsed in time.
        """
        # ``RequestMiddleware`` passes the body in one message. Not request.body(), which would keep
        # the bytes until the response is sent.
        body = (await request.receive())["body"]
        request.state.deadline = Deadline(
            self._settings.request_timeout_seconds,
            request.scope.get(CLIENT_KEY, ""),
            request.scope.get(TOKEN_BUCKET_KEY),
            request.scope[RECORD_TOKENS_KEY],
            request.scope.get(TRACE_KEY),
            request.scope[RESPONSE_KEY].reserve,
            request.scope[RESPONSE_KEY].shrink,
        )
        _check_headers(request)
        if len(body) <= MAX_INLINE_BYTES:
            return parse_body(body, model, self._settings)
        loop = asyncio.get_running_loop()
        parsing = loop.run_in_executor(self._executor, parse_body, body, model, self._settings)
        try:
            return await asyncio.wait_for(parsing, self._settings.request_timeout_seconds)
        except TimeoutError:
            raise create_deadline_error() from None

    def close(self) -> None:
        """Shut down the thread and drop queued bodies."""
        self._executor.shutdown(wait=False, cancel_futures=True)
