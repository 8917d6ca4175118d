"""Every error of the server in one form, with a status and a message that says what to do.

It never knows which endpoint failed.
"""

import logging
from typing import Any, Final

import orjson
from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
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

#: What nobody reads any more: the client closed its end (nginx's own status for it).
_GONE: Final = 499
_STATUS: Final[dict[type[BertsmithError], int]] = {
    BusyError: 429, DeadlineExceededError: 504, ShuttingDownError: 503, RequestTooLargeError: 422, DisconnectedError: _GONE,
    ModelError: 404, NotFiniteError: 500,
}  # fmt: skip
#: Characters of a message, which may repeat a name that the client chose.
_MAX_MESSAGE: Final = 2000
_TYPES: Final = {
    400: "bad_request", 401: "unauthorized", 404: "not_found", 405: "method_not_allowed",
    408: "timeout", 413: "too_large", 422: "invalid_request", 429: "busy", 431: "too_large",
    499: "client_gone", 500: "internal", 503: "stopping", 504: "timeout",
}  # fmt: skip


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error as OpenAI's clients read it: {"error": {"message", "type", "code", "param"}}.

    ``type`` says in a word what the status says; ``code`` is the status.
    """
    if len(message) > _MAX_MESSAGE:
        message = message[: _MAX_MESSAGE - 1] + "…"
    told = {"message": message, "type": _TYPES.get(status, "error"), "code": status, "param": None}
    body = orjson.dumps({"error": told})
    return Response(body, status, headers, media_type="application/json")


def add_error_handlers(app: FastAPI) -> None:
    """Have an app tell every error in this form."""
    app.add_exception_handler(BertsmithError, _ours)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, _unknown)


def add_page_error_handlers(app: FastAPI) -> None:
    """Have the page's app tell in this form that there is nothing at a path."""
    app.add_exception_handler(HTTPException, _of_page)


async def _ours(_: Request, error: Exception) -> Response:
    status = next((own for kind, own in _STATUS.items() if isinstance(error, kind)), 422)
    headers = None
    if status == 500:
        logging.getLogger("bertsmith.serve").error(str(error))
    if isinstance(error, BusyError):
        headers = {"Retry-After": str(max(1, round(error.retry_after)))}
    return error_response(status, str(error), headers)


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message: Any = error.detail
    if error.status_code == 404:
        message = f"there is no {request.url.path} here; /docs lists what there is"
    elif error.status_code == 405:
        message = f"{request.method} is not what {request.url.path} takes; /docs tells"
    return error_response(error.status_code, str(message), dict(error.headers or {}))


async def _of_page(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.url.path.startswith("/gradio_api"):
        # The page's own scripts read its own form.
        return await http_exception_handler(request, error)
    return await _http(request, error)


async def _unknown(_: Request, error: Exception) -> Response:
    logging.getLogger("bertsmith.serve").error("an endpoint failed", exc_info=error)
    return error_response(500, "the server failed at this; its log says how")
