"""The OpenAPI schema of a server: responses, errors, authentication, and examples that work."""

import copy
from collections.abc import Sequence
from typing import Any, Final

from fastapi import FastAPI
from pydantic import TypeAdapter

from bertsmith.serve.clients import HEALTH_PATHS
from bertsmith.serve.examples import build_example
from bertsmith.serve.models import ServedModel
from bertsmith.serve.parsing import TRUNCATED_HEADER, UNKNOWN_SHARE_HEADER
from bertsmith.serve.responses import ErrorResponse

_EMBEDDING_PATHS: Final = ("/embed", "/embed_sparse", "/v1/embeddings")
#: Errors of every endpoint.
_ERRORS: Final = {
    400: "The request is malformed, or its Host header is not allowed.",
    404: "There is no such model, or it does not support the endpoint.",
    422: "A field is invalid, or the request exceeds a limit.",
    429: "The server is busy.",
    431: "The header is too large.",
    500: "The server failed, or a model computed NaN.",
    503: "The server is shutting down.",
}
#: Further errors of endpoints that take a body.
_BODY_ERRORS: Final = {
    403: "The request comes from the page of another site.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    504: "The request was not answered in time.",
}
_UNAUTHORIZED: Final = "The API key is missing or wrong."
_ERROR_HEADERS: Final[dict[int, dict[str, Any]]] = {
    401: {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}},
    429: {
        "Retry-After": {
            "description": "Seconds until a retry is likely to succeed.",
            "schema": {"type": "integer", "minimum": 1},
        }
    },
}
_UNKNOWN_SHARE: Final = {
    "description": "Share of [UNK] tokens in the texts; sent if it is large.",
    "schema": {"type": "number", "minimum": 0, "maximum": 1},
}
_TRUNCATED_TEXTS: Final = {
    "description": "Number of truncated texts; sent if there are any.",
    "schema": {"type": "integer", "minimum": 1},
}
_REF_TEMPLATE: Final = "#/components/schemas/{model}"


def build_openapi(
    app: FastAPI, base_url: str, models: Sequence[ServedModel], *, needs_key: bool
) -> dict[str, Any]:
    """Return the OpenAPI schema of a server.

    Args:
        app: the app. Its own schema has the request bodies and the successful responses.
        base_url: URL of the server as the reader's request has it.
        models: the loaded models, which the examples name.
        needs_key: whether requests need the API key.
    """
    schema = copy.deepcopy(app.openapi())
    schema["servers"] = [{"url": base_url.removesuffix("/")}]
    components = schema["components"]
    for name in ("HTTPValidationError", "ValidationError"):
        # FastAPI's own format of errors, which the server does not use.
        components["schemas"].pop(name, None)
    error_schema = TypeAdapter(ErrorResponse).json_schema(ref_template=_REF_TEMPLATE)
    components["schemas"] |= error_schema.pop("$defs") | {"ErrorResponse": error_schema}
    components["responses"] = {
        f"Error{status}": _build_error(status, description)
        for status, description in {**_ERRORS, **_BODY_ERRORS, 401: _UNAUTHORIZED}.items()
    }
    if needs_key:
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"apiKey": []}]
    for item in components["schemas"].values():
        # Descriptions come from docstrings; each field has its own description.
        if "description" in item:
            item["description"] = item["description"].partition("\n\nAttributes:")[0]
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _complete_operation(path, operation, models, needs_key=needs_key)
    return schema


def _build_error(status: int, description: str) -> dict[str, Any]:
    """Return the response of an error."""
    content = {"schema": {"$ref": _REF_TEMPLATE.format(model="ErrorResponse")}}
    return {
        "description": description,
        "headers": _ERROR_HEADERS.get(status, {}),
        "content": {"application/json": content},
    }


def _complete_operation(
    path: str, operation: dict[str, Any], models: Sequence[ServedModel], *, needs_key: bool
) -> None:
    """Add the errors, headers and examples of an operation, and whether it needs the API key."""
    responses = operation["responses"]
    statuses = [*_ERRORS]
    if "requestBody" in operation:
        statuses += _BODY_ERRORS
        headers = {UNKNOWN_SHARE_HEADER: _UNKNOWN_SHARE}
        if path in _EMBEDDING_PATHS:
            headers[TRUNCATED_HEADER] = _TRUNCATED_TEXTS
        responses["200"]["headers"] = headers
        content = operation["requestBody"]["content"]["application/json"]
        content["example"] = build_example(path, models)
    if needs_key and path in HEALTH_PATHS:
        operation["security"] = []
    elif needs_key:
        statuses.append(401)
    for status in sorted(statuses):
        responses[str(status)] = {"$ref": f"#/components/responses/Error{status}"}
    for parameter in operation.get("parameters", ()):
        # The parameters of all endpoints are names of models.
        parameter["example"] = models[0].name
