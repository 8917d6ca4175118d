"""Error responses in the format of OpenAI's API."""

import logging
import math
import traceback
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from bertsmith.errors import BertsmithError, ModelError
from bertsmith.serve.deadline import (
    BusyError,
    DeadlineExceededError,
    DisconnectedError,
    NotFiniteError,
    RequestTooLargeError,
    ShuttingDownError,
)

#: Status that nginx logs if the client closed the connection. It appears in logs and metrics only.
_CLIENT_CLOSED_REQUEST: Final = 499
_STATUS_BY_ERROR: Final[dict[type[BertsmithError], int]] = {
    BusyError: 429, DeadlineExceededError: 504, ShuttingDownError: 503, RequestTooLargeError: 422,
    DisconnectedError: _CLIENT_CLOSED_REQUEST, ModelError: 404, NotFiniteError: 500,
}  # fmt: skip
#: Maximum length of a message, which can quote names that the client chose.
_MAX_MESSAGE_CHARACTERS: Final = 2000
#: The field ``type`` of an error.
ERROR_TYPE_BY_STATUS: Final = {
    400: "bad_request", 401: "unauthorized", 403: "forbidden", 404: "not_found",
    405: "method_not_allowed", 408: "timeout", 413: "too_large", 422: "invalid_request",
    429: "busy", 431: "too_large",
    499: "client_gone", 500: "internal", 503: "stopping", 504: "timeout",
}  # fmt: skip


def create_error_response(
    status: int, message: str, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with the body {"error": {"message", "type", "code", "param"}}.

    ``code`` is the HTTP status, ``type`` is a name for the status, and ``param`` is always null.
    """
    if len(message) > _MAX_MESSAGE_CHARACTERS:
        message = message[: _MAX_MESSAGE_CHARACTERS - 1] + "…"
    error = {
        "message": message,
        "type": ERROR_TYPE_BY_STATUS.get(status, "error"),
        "code": status,
        "param": None,
    }
    return Response(orjson.dumps({"error": error}), status, headers, media_type="application/json")


def create_busy_response(error: BusyError) -> Response:
    """Return the 429 response of an overloaded server."""
    headers = {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    return create_error_response(429, str(error), headers)


def add_error_handlers(app: FastAPI) -> None:
    """Make an app send its errors with ``create_error_response``."""
    app.add_exception_handler(BertsmithError, _handle_exception)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(Exception, _handle_exception)


def create_exception_response(error: Exception) -> Response:
    """Return the response to a request that ended with an exception, and log a failure."""
    if not isinstance(error, BertsmithError):
        log_failure("an endpoint", error)
        return create_error_response(500, "internal server error; see the server's log")
    # Errors of other classes, such as InputError, are about the content of the request.
    status = 422
    for error_class, error_status in _STATUS_BY_ERROR.items():
        if isinstance(error, error_class):
            status = error_status
            break
    if status == 500:
        logging.getLogger("bertsmith.serve").error(str(error))
    if isinstance(error, BusyError):
        return create_busy_response(error)
    return create_error_response(status, str(error))


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message: Any = error.detail
    if error.status_code == 404:
        message = f"there is no endpoint {request.url.path}; see /docs"
    elif error.status_code == 405:
        message = f"{request.url.path} does not accept {request.method}; see /docs"
    return create_error_response(error.status_code, str(message), dict(error.headers or {}))


async def _handle_exception(_: Request, error: Exception) -> Response:
    return create_exception_response(error)


def log_failure(subject: str, error: BaseException) -> None:
    """Log an exception and its traceback, without its message, which may contain a user's text."""
    lines = [f"{subject} failed with {type(error).__name__}:"]
    cause: BaseException | None = error
    while cause is not None:
        lines += [line.rstrip() for line in traceback.format_tb(cause.__traceback__)]
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
        if cause is not None:
            lines.append(f"caused by {type(cause).__name__}:")
    logging.getLogger("bertsmith.serve").error("\n".join(lines))
