"""The OpenAPI schema: real responses match it, and requests generated from it are handled."""

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from bertsmith.serve.app import create_app
from bertsmith.serve.models import ServedModel
from bertsmith.serve.parsing import TRUNCATED_HEADER, UNKNOWN_SHARE_HEADER
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_server import SENTENCES, RunningServer, find_fastapi_app, run_server

CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
#: Endpoints that need no API key.
PUBLIC_PATHS = ("/health", "/ready")
KEY = {"Authorization": "Bearer secret"}
QUESTION = {"question": "who worked?", "context": SENTENCES[0]}
PROMPT = {"prompt": SENTENCES[0], "endings": SENTENCES[1:3]}
PAIR = SENTENCES[:2]
#: Bodies of each endpoint that give responses of different forms, in addition to its example.
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/embeddings": [{"input": "the smith", "encoding_format": "base64"}],
    "/similarity": [{"inputs": SENTENCES[:3]}],
    "/attributions": [
        {"inputs": PAIR, "label": "bad"},
        {"inputs": "the smith", "model": "grade"},
    ],
    "/embed_sparse": [{"inputs": PAIR}],
    "/rerank": [{"query": "the smith", "texts": PAIR, "return_text": True}],
    "/v1/rerank": [{"query": "the smith", "documents": PAIR, "return_documents": True}],
    "/": [
        {"inputs": "the [MASK] was white"},
        {"inputs": "the [MASK] was [MASK]"},
        {"inputs": {"source_sentence": "the smith", "sentences": PAIR}},
        {"inputs": "the smith", "model": "mood"},
        {"inputs": "the smith", "model": "names"},
        {"inputs": QUESTION, "model": "answers"},
    ],
    "/predict": [{"inputs": [["the smith"], PAIR]}],
    "/tokenize": [{"inputs": PAIR, "add_special_tokens": False}],
    "/fill": [{"inputs": ["the [MASK]", "[MASK] was [MASK]"]}],
    "/pair": [{"inputs": [PAIR, PAIR]}],
    "/classify": [
        {"inputs": ["the smith", PAIR]},
        {"inputs": "the smith", "model": "topics"},
        {"inputs": ["the smith"], "model": "grade"},
    ],
    "/tag": [{"inputs": SENTENCES}, {"inputs": "the smith", "model": "speech"}],
    "/answer": [{"inputs": [QUESTION, QUESTION]}],
    "/choose": [{"inputs": [PROMPT, PROMPT]}],
    "/word_distances": [{"inputs": SENTENCES[:1], "word": "smith", "layer": -1}],
    "/attention": [{"inputs": PAIR, "max_cells": 3}],
}


@pytest.fixture(scope="module")
def protected_server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server with an API key and small limits, for one host name."""
    limits = ServeSettings(max_texts=64, max_body_bytes=100_000)
    with run_server(models, limits, key="secret", hosts=("127.0.0.1",)) as server:
        yield server


@pytest.fixture(scope="module")
def schema(protected_server: RunningServer) -> Any:
    """The schema of the server with an API key."""
    return httpx.get(f"{protected_server.url}/openapi.json", headers=KEY).json()


def resolve(schema: Any, value: Any) -> Any:
    """Return a value, or the part of the schema that it refers to."""
    if "$ref" not in value:
        return value
    for name in value["$ref"].removeprefix("#/").split("/"):
        schema = schema[name]
    return schema


def validate(schema: Any, path: str, response: httpx.Response) -> None:
    """Check the status, the headers and the body of a response."""
    method = response.request.method.lower()
    documented = schema["paths"][path][method]["responses"]
    assert str(response.status_code) in documented
    expected = resolve(schema, documented[str(response.status_code)])
    media_type = response.headers["content-type"].partition(";")[0]
    content = expected["content"][media_type]
    if media_type == "application/json":
        # An empty schema would accept every response.
        assert content["schema"]
        root = {**content["schema"], "components": schema["components"]}
        jsonschema.Draft202012Validator(root).validate(response.json())
    if response.status_code == 401:
        assert set(expected["headers"]) <= {"WWW-Authenticate"}
        assert response.headers["www-authenticate"] == "Bearer"


def test_responses_match_the_schema(protected_server: RunningServer, schema: Any) -> None:
    """The example of every endpoint, and requests with responses of other forms, are valid."""
    num_requests = 0
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            url = protected_server.url + path.replace("{name}", "plain")
            if method == "get":
                validate(schema, path, httpx.get(url, headers=KEY))
                continue
            content = operation["requestBody"]["content"]["application/json"]
            for body in [content["example"], *BODIES.get(path, [])]:
                root = {**content["schema"], "components": schema["components"]}
                jsonschema.Draft202012Validator(root).validate(body)
                response = protected_server.post(path, body, headers=KEY)
                assert response.status_code == 200, response.text
                validate(schema, path, response)
                num_requests += 1
    assert num_requests == 21 + sum(map(len, BODIES.values()))


def test_undocumented_fields_are_found(schema: Any) -> None:
    """A response with a field more than the schema has is not valid."""
    request = httpx.Request("GET", "http://127.0.0.1/health")
    for body, is_valid in (({"status": "ok"}, True), ({"status": "ok", "more": 1}, False)):
        response = httpx.Response(200, json=body, request=request)
        try:
            validate(schema, "/health", response)
        except jsonschema.ValidationError:
            assert not is_valid
        else:
            assert is_valid


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"inputs": 1}, {}, 422),
        ({"inputs": ["a"] * 65}, {}, 422),
        ({"inputs": "a", "model": "nobody"}, {}, 404),
        ({"inputs": "a" * 200_000}, {}, 413),
        ({"inputs": "a"}, {"Authorization": "Bearer wrong"}, 401),
        ({"inputs": "a"}, {"Sec-Fetch-Site": "cross-site"}, 403),
        ({"inputs": "a"}, {"Host": "attacker.example"}, 400),
        ({"inputs": "a"}, {"X-Long": "a" * 70_000}, 431),
    ],
)
def test_errors_match_the_schema(
    protected_server: RunningServer, schema: Any, body: Any, headers: dict[str, str], status: int
) -> None:
    """Every error that a client can receive is documented with its real format."""
    response = protected_server.post("/embed", body, headers={**KEY, **headers})
    assert response.status_code == status
    validate(schema, "/embed", response)
    assert response.json()["error"]["code"] == status


def test_every_status_is_documented(schema: Any) -> None:
    """All errors have the same format; FastAPI's own format of invalid requests is not listed."""
    statuses = {"400", "404", "422", "429", "431", "500", "503"}
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            expected = statuses | ({"403", "408", "413", "504"} if method == "post" else set())
            expected |= set() if path in PUBLIC_PATHS else {"401"}
            assert set(operation["responses"]) == {"200", *expected}
    for response in schema["components"]["responses"].values():
        reference = response["content"]["application/json"]["schema"]["$ref"]
        assert reference == "#/components/schemas/ErrorResponse"
    assert "HTTPValidationError" not in schema["components"]["schemas"]
    headers = schema["paths"]["/embed"]["post"]["responses"]["200"]["headers"]
    assert set(headers) == {UNKNOWN_SHARE_HEADER, TRUNCATED_HEADER}


def test_key_is_a_bearer_token_of_all_but_health_endpoints(
    protected_server: RunningServer, schema: Any, server: RunningServer
) -> None:
    """The schema says which endpoints need the key, as the server does; without a key, none."""
    assert schema["components"]["securitySchemes"] == {
        "apiKey": {"type": "http", "scheme": "bearer"}
    }
    assert schema["security"] == [{"apiKey": []}]
    public = [
        path for path, item in schema["paths"].items() if item.get("get", {}).get("security") == []
    ]
    assert public == list(PUBLIC_PATHS)
    assert httpx.get(f"{protected_server.url}/models").status_code == 401
    open_schema = httpx.get(f"{server.url}/openapi.json").json()
    assert "security" not in open_schema
    assert "securitySchemes" not in open_schema["components"]


def test_schema_has_the_address_and_the_models(models: list[ServedModel]) -> None:
    """The server's address is that of the request, and the examples name the loaded models."""
    with run_server(models[:2]) as server:
        headers = {"Host": "bert.example.com:81"}
        schema = httpx.get(f"{server.url}/openapi.json", headers=headers).json()
    assert schema["servers"] == [{"url": "http://bert.example.com:81"}]
    examples = {
        path: item["post"]["requestBody"]["content"]["application/json"]["example"]
        for path, item in schema["paths"].items()
        if "post" in item
    }
    assert examples["/fill"] == {"model": "plain", "inputs": "my dog is [MASK]", "top": 3}
    assert examples["/classify"]["model"] == "mood"
    # No loaded model can answer questions.
    assert "model" not in examples["/answer"]
    assert schema["paths"]["/v1/models/{name}"]["get"]["parameters"][0]["example"] == "plain"


def test_optional_fields_may_be_null(schema: Any) -> None:
    """The schema allows null and empty parameters where the server does."""
    body = schema["components"]["schemas"]["EmbedBody"]
    root = {**body, "components": schema["components"]}
    validator = jsonschema.Draft202012Validator(root)
    fields = dict.fromkeys(body["properties"].keys() - {"inputs"})
    validator.validate({"inputs": "a", **fields})
    validator.validate({"inputs": "a", "parameters": {}})
    assert not validator.is_valid({"inputs": None})
    assert not validator.is_valid({"inputs": "a", "parameters": {"top_k": 1}})


@pytest.mark.parametrize("needs_key", [False, True])
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_generated_requests_get_documented_responses(
    models: list[ServedModel], mode: GenerationMode, needs_key: bool
) -> None:
    """Valid and invalid requests, with and without the key, get responses of the schema."""
    key = "secret" if needs_key else None
    with run_server(models, ServeSettings(max_texts=64), key=key) as server:
        openapi = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=KEY)
        num_operations = 0
        for operation in openapi.get_all_operations():
            assert isinstance(operation, Ok)
            if mode is GenerationMode.POSITIVE or operation.ok().body:
                assert _send_generated_requests(operation.ok(), mode, needs_key=needs_key)
                num_operations += 1
    assert num_operations == (29 if mode is GenerationMode.POSITIVE else 21)


def _send_generated_requests(operation: Any, mode: GenerationMode, *, needs_key: bool) -> set[int]:
    """Send generated requests to an endpoint, and return the statuses of the responses."""
    statuses: set[int] = set()

    @settings(
        max_examples=3 if needs_key else 10,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        # Generated requests can have a wrong key.
        case.headers = dict(KEY)
        response = case.call_and_validate(checks=CHECKS)
        statuses.add(response.status_code)
        assert response.status_code < 500
        assert response.status_code != 401
        if response.status_code >= 400:
            assert response.json()["error"]["code"] == response.status_code
        if needs_key and operation.path not in PUBLIC_PATHS:
            case.headers = {}
            response = case.call_and_validate(checks=CHECKS)
            assert response.status_code == 401

    send()
    return statuses


def test_openapi_schema_lists_every_endpoint(models: list[ServedModel]) -> None:
    """The schema has exactly the public endpoints."""
    app = find_fastapi_app(create_app(models[:1]))
    paths = set(app.openapi()["paths"])
    assert paths == {
        "/v1/embeddings", "/v1/models", "/embed", "/embed_all", "/similarity", "/tokenize",
        "/fill", "/pair", "/classify", "/tag", "/answer", "/choose", "/models", "/health",
        "/ready", "/metrics", "/docs", "/word_distances", "/attention",
        "/", "/v1/models/{name}", "/info", "/predict", "/decode", "/rerank", "/v1/rerank",
        "/v2/rerank", "/embed_sparse", "/attributions",
    }  # fmt: skip
