"""Whatever a client sends by the server's own description, or against it: never a 5xx.

These tests never know an endpoint by name.
"""

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
def test_no_server_error(models: list[ServedModel], mode: GenerationMode) -> None:
    """Bodies that fit the description, and bodies that do not: a status below 500, in one form."""
    with run_server(models, ServeSettings(texts=64)) as own:
        schema = schemathesis.openapi.from_url(f"{own.url}/openapi.json")
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            statuses = _tried(found.ok(), mode)
            assert statuses
            assert max(statuses) < 500


def _tried(operation: Any, mode: GenerationMode) -> set[int]:
    """Send bodies to an endpoint; return the statuses."""
    statuses: set[int] = set()

    @settings(max_examples=20, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        found = case.call()
        statuses.add(found.status_code)
        assert found.status_code < 500
        if found.status_code >= 400:
            assert found.json()["error"]["code"] == found.status_code

    if mode is GenerationMode.POSITIVE or operation.body:
        send()
    return statuses or {200}


def test_the_description_names_every_endpoint(models: list[ServedModel]) -> None:
    """Those of the issue, and nothing that is not answered."""
    app = create_app(models[:1])._app
    paths = set(app.openapi()["paths"])  # type: ignore[attr-defined]
    assert paths == {
        "/v1/embeddings", "/v1/models", "/embed", "/embed_all", "/similarity", "/tokenize",
        "/fill", "/pair", "/classify", "/tag", "/answer", "/choose", "/models", "/health",
        "/ready", "/metrics", "/docs",
    }  # fmt: skip
