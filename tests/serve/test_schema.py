"""The OpenAPI schema, and requests generated from it by schemathesis."""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.core.result import Ok

from bertsmith.serve.app import create_app
from bertsmith.serve.models import ServedModel
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_server import run_server


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_generated_requests_cause_no_server_error(
    models: list[ServedModel], mode: GenerationMode
) -> None:
    """Valid and invalid bodies get a status below 500, and errors have the common format."""
    with run_server(models, ServeSettings(max_texts=64)) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
        for operation in schema.get_all_operations():
            assert isinstance(operation, Ok)
            statuses = _send_generated_requests(operation.ok(), mode)
            assert statuses
            assert max(statuses) < 500


def _send_generated_requests(operation: Any, mode: GenerationMode) -> set[int]:
    """Send generated requests to an endpoint, and return the statuses of the responses."""
    statuses: set[int] = set()

    @settings(max_examples=20, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call()
        statuses.add(response.status_code)
        assert response.status_code < 500
        if response.status_code >= 400:
            assert response.json()["error"]["code"] == response.status_code

    if mode is GenerationMode.POSITIVE or operation.body:
        send()
    return statuses or {200}


def test_openapi_schema_lists_every_endpoint(models: list[ServedModel]) -> None:
    """The schema has exactly the public endpoints."""
    app = create_app(models[:1])._app
    paths = set(app.openapi()["paths"])  # type: ignore[attr-defined]
    assert paths == {
        "/v1/embeddings", "/v1/models", "/embed", "/embed_all", "/similarity", "/tokenize",
        "/fill", "/pair", "/classify", "/tag", "/answer", "/choose", "/models", "/health",
        "/ready", "/metrics", "/docs", "/word_distances", "/attention",
        "/", "/v1/models/{name}", "/info", "/predict", "/decode", "/rerank", "/v1/rerank",
        "/v2/rerank",
    }  # fmt: skip
