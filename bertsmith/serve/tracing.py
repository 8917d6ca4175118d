"""OpenTelemetry traces: a span per request, with its time in the queue and its batches."""

import threading
import time
from collections.abc import Callable, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from bertsmith.errors import SettingsError
from bertsmith.serve.batching import ComputedBatch
from bertsmith.serve.model_calls import BatchKey
from bertsmith.version import __version__


class Tracing:
    """Creates the spans of a server."""

    def __init__(
        self, provider: TracerProvider, get_nanoseconds: Callable[[], int] = time.time_ns
    ) -> None:
        """Create spans.

        Args:
            provider: exports the spans.
            get_nanoseconds: returns the time in nanoseconds since 1970.
        """
        self._provider = provider
        self._tracer = provider.get_tracer("bertsmith", __version__)
        self._get_nanoseconds = get_nanoseconds
        self._propagator = TraceContextTextMapPropagator()

    def start_request(self, method: str, path: str, headers: Mapping[bytes, bytes]) -> Span:
        """Start the span of a request, as a part of the client's trace if it sends one."""
        carrier = {
            name: headers[name.encode()].decode("latin-1")
            for name in ("traceparent", "tracestate")
            if name.encode() in headers
        }
        return self._tracer.start_span(
            method,
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.path": path},
        )

    def create_context(self, span: Span) -> Context:
        """Return the context in which spans are children of a span."""
        return set_span_in_context(span, Context())

    def end_request(self, span: Span, method: str, route: str, status: int) -> None:
        """End the span of a request.

        Args:
            span: the span.
            method: HTTP method.
            route: path of the endpoint; empty if the request was rejected or the path is unknown.
            status: HTTP status of the response; 0 if there was none.
        """
        if route:
            span.update_name(f"{method} {route}")
            span.set_attribute("http.route", route)
        span.set_attribute("http.response.status_code", status)
        if status == 0 or status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end()

    def record_batch(self, batch: ComputedBatch) -> None:
        """Create the spans of a batch that has just been computed, for each of its requests."""
        if not batch.traced_calls:
            return
        assert isinstance(batch.key, BatchKey)
        ended_at = self._get_nanoseconds()
        started_at = ended_at - round(batch.seconds * 1e9)
        attributes: dict[str, str | int] = {
            "bertsmith.model": batch.key.model,
            "bertsmith.batch.sequences": batch.num_sequences,
            "bertsmith.batch.tokens": batch.num_tokens,
        }
        for call in batch.traced_calls:
            if call.wait_seconds is not None:
                queued_at = started_at - round(call.wait_seconds * 1e9)
                queue = self._tracer.start_span("queue", call.trace_context, start_time=queued_at)
                queue.end(started_at)
            self._tracer.start_span(
                "batch", call.trace_context, attributes=attributes, start_time=started_at
            ).end(ended_at)

    def close(self, timeout_seconds: float = 2.0) -> None:
        """Export the remaining spans; those that the collector does not accept in time are lost."""
        # The exporter repeats requests to an unreachable collector for up to 30 seconds.
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(timeout_seconds)


def create_tracing() -> Tracing:
    """Return a ``Tracing`` that sends spans as the environment variables OTEL_* say.

    Raises:
        SettingsError: a variable is not valid.
    """
    default = Resource({SERVICE_NAME: "bertsmith"})
    # ``create`` adds OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES; later values win.
    environment = Resource.create()
    name = str(environment.attributes.get(SERVICE_NAME, ""))
    resource = environment.merge(default) if name.startswith("unknown_service") else environment
    try:
        # ``Tracing.close`` shuts the provider down; at the exit it would have no time limit.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except (ValueError, OSError) as error:
        raise SettingsError(
            f"an environment variable OTEL_* is not valid: {error}; correct it"
        ) from None
    return Tracing(provider)
