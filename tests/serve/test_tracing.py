"""OpenTelemetry traces of requests."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from bertsmith.cli.serve import _has_tracing
from bertsmith.errors import SettingsError
from bertsmith.serve.models import ServedModel
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_pause import TIMEOUT, wait_until
from tests.serve.model_server import SENTENCES, run_server

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from bertsmith.serve.tracing import Tracing

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def test_request_queue_and_batches_are_spans_of_the_clients_trace(
    models: list[ServedModel],
) -> None:
    """A request of two batches has one queue span and two batch spans, in order of time."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    settings = ServeSettings(max_batch_tokens=16)

    def get_spans(name: str) -> list[ReadableSpan]:
        return [span for span in exporter.get_finished_spans() if span.name == name]

    with run_server(models[:1], settings, tracing=Tracing(provider)) as server:
        headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        body = {"inputs": [SENTENCES[0]] * 2}
        assert server.post("/embed", body, headers=headers).status_code == 200
        wait_until(lambda: len(get_spans("batch")) == 2 and get_spans("POST /embed"))
        (request,) = get_spans("POST /embed")
        assert request.kind == SpanKind.SERVER
        assert request.parent is not None
        assert f"{request.parent.span_id:016x}" == PARENT_ID
        assert dict(request.attributes or {}) == {
            "http.request.method": "POST",
            "url.path": "/embed",
            "http.route": "/embed",
            "http.response.status_code": 200,
        }
        (queue,) = get_spans("queue")
        batches = get_spans("batch")
        for span in (request, queue, *batches):
            assert span.context is not None
            assert f"{span.context.trace_id:032x}" == TRACE_ID
            assert span.start_time is not None
            assert span.end_time is not None
            assert span.start_time <= span.end_time
        for span in (queue, *batches):
            assert span.parent == request.context
        assert queue.end_time in [batch.start_time for batch in batches]
        for batch in batches:
            assert batch.attributes is not None
            assert batch.attributes["bertsmith.model"] == "plain"
            assert batch.attributes["bertsmith.batch.sequences"] == 1
        # A request without a trace starts one; a rejected request has a span too.
        exporter.clear()
        assert server.post("/embed", {"inputs": 1}).status_code == 422
        assert server.post("/nothing", {}).status_code == 404
        wait_until(lambda: len(exporter.get_finished_spans()) == 2)
        statuses = [
            (span.attributes or {})["http.response.status_code"]
            for span in exporter.get_finished_spans()
        ]
        assert statuses == [422, 404]
        assert all(span.parent is None for span in exporter.get_finished_spans())


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://localhost:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_standard_variables_turn_traces_on(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], *, expected: bool
) -> None:
    """Traces are off unless a variable of OpenTelemetry names an exporter or an endpoint."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _has_tracing() == expected


def test_unknown_exporter_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only OTLP is supported."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(SettingsError, match="'zipkin'; expected otlp or none"):
        _has_tracing()


def test_health_probes_have_no_spans(models: list[ServedModel]) -> None:
    """Load balancers probe every few seconds, which would hide the spans of requests."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with run_server(models[:1], tracing=Tracing(provider)) as server:
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/ready").status_code == 200
        assert httpx.get(f"{server.url}/info").status_code == 200
        wait_until(exporter.get_finished_spans)
    assert [span.name for span in exporter.get_finished_spans()] == ["GET /info"]


def test_close_does_not_wait_for_an_unreachable_collector() -> None:
    """The exporter is still busy when ``close`` returns."""
    resume = threading.Event()
    is_exporting = threading.Event()

    class UnreachableCollector(InMemorySpanExporter):
        def shutdown(self) -> None:
            is_exporting.set()
            resume.wait(TIMEOUT)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(UnreachableCollector()))
    Tracing(provider).close(0.01)
    assert is_exporting.wait(TIMEOUT)
    assert not resume.is_set()
    resume.set()


def test_invalid_variable_is_a_user_error(model_dirs: dict[str, Path]) -> None:
    """The command exits with 2 and names the variables."""
    completed = subprocess.run(
        [sys.executable, "-m", "bertsmith", "serve", str(model_dirs["plain"]), "--port", "0"],
        env={**os.environ, "OTEL_TRACES_EXPORTER": "otlp", "OTEL_BSP_SCHEDULE_DELAY": "-1"},
        capture_output=True, text=True, timeout=2 * TIMEOUT, check=False,
    )  # fmt: skip
    assert completed.returncode == 2
    assert "OTEL_* is not valid" in completed.stderr
    assert "Traceback" not in completed.stderr
