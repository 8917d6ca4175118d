"""Prometheus metrics of requests, batches, the queue and the process."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

from bertsmith.serve.batching import ComputedBatch
from bertsmith.serve.model_calls import BatchKey
from bertsmith.text.unknown import TokenCounter

#: Histogram buckets of request times in seconds.
_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: Histogram buckets of sequences per batch.
_SEQUENCES_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Histogram buckets of tokens per batch.
_TOKENS_BUCKETS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)


class _ModelTokenCounter(NamedTuple):
    """Thread-safe token counters of one model."""

    tokens: Counter
    unknown: Counter

    def add(self, num_tokens: int, num_unknown: int) -> None:
        """Count the tokens and the [UNK] tokens of a text."""
        self.tokens.inc(num_tokens)
        self.unknown.inc(num_unknown)


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, directory: Path | None = None) -> None:
        """Create the metrics.

        Args:
            directory: folder in which several processes share their metrics. Each of them then
                returns the sums of all, without the figures of the process. The environment
                variable PROMETHEUS_MULTIPROC_DIR must have the same value since the start of the
                process. None for a single process.
        """
        self._directory = directory
        #: Metrics of each endpoint and status, because finding them takes longer than an update.
        self._endpoint_metrics: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._get_gauges: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"bertsmith_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"bertsmith_{name}", text, registry=registry, multiprocess_mode="livesum")

        def histogram(name: str, text: str, label: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"bertsmith_{name}", text, [label], buckets=buckets, registry=registry)

        self._requests = counter("requests_total", "Requests.", "endpoint", "status")
        self._request_seconds = histogram(
            "request_seconds", "Duration of a request in seconds.", "endpoint", _SECONDS_BUCKETS
        )
        self._running_requests = gauge("running_requests", "Requests being answered.")
        self._queued_tokens = gauge("waiting_tokens", "Tokens in the queue.")
        self._queue_seconds = histogram(
            "queue_seconds",
            "Time in the queue, until the first sequence of a request is computed.",
            "model",
            _SECONDS_BUCKETS,
        )
        self._sequences = counter("sequences_total", "Sequences computed.", "model")
        self._batch_sequences = histogram(
            "batch_sequences", "Sequences per batch.", "model", _SEQUENCES_BUCKETS
        )
        self._tokens = counter("tokens_total", "Tokens computed.", "model")
        self._batch_tokens = histogram(
            "batch_tokens", "Tokens per batch.", "model", _TOKENS_BUCKETS
        )
        self._model_seconds = counter(
            "model_seconds_total",
            "Seconds of model computation, summed over concurrent batches.",
            "model",
        )
        self._text_tokens = counter(
            "text_tokens_total", "Tokens of request texts, without special tokens.", "model"
        )
        self._unknown_tokens = counter(
            "unknown_tokens_total", "[UNK] tokens of request texts.", "model"
        )
        if directory is None:
            # Memory, CPU time and open files of the process: process_resident_memory_bytes, ...
            ProcessCollector(registry=registry)

    def set_gauges(
        self, queued_tokens: Callable[[], float], running_requests: Callable[[], float]
    ) -> None:
        """Set the functions that return the numbers of queued tokens and running requests."""
        self._get_gauges = lambda: (queued_tokens(), running_requests())

    def count_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a request. For an unknown path, ``endpoint`` is empty and counted as "other"."""
        metrics = self._endpoint_metrics.get((endpoint, status))
        if metrics is None:
            name = endpoint or "other"
            metrics = self._requests.labels(name, str(status)), self._request_seconds.labels(name)
            self._endpoint_metrics[endpoint, status] = metrics
        num_requests, durations = metrics
        num_requests.inc()
        durations.observe(seconds)
        self._share_gauges()

    def count_batch(self, batch: ComputedBatch) -> None:
        """Count a computed batch."""
        assert isinstance(batch.key, BatchKey)
        model = batch.key.model
        self._sequences.labels(model).inc(batch.num_sequences)
        self._tokens.labels(model).inc(batch.num_tokens)
        self._batch_tokens.labels(model).observe(batch.num_tokens)
        self._batch_sequences.labels(model).observe(batch.num_sequences)
        self._model_seconds.labels(model).inc(batch.seconds)
        for seconds in batch.wait_seconds:
            self._queue_seconds.labels(model).observe(seconds)
        self._share_gauges()

    def get_token_counter(self, model: str) -> TokenCounter:
        """Return a counter for the tokens of the texts sent to a model."""
        return _ModelTokenCounter(
            self._text_tokens.labels(model), self._unknown_tokens.labels(model)
        )

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self._update_gauges()
        registry = self._registry
        if self._directory is not None:
            registry = CollectorRegistry()
            # prometheus_client does not annotate this constructor.
            MultiProcessCollector(registry, str(self._directory))  # type: ignore[no-untyped-call]
        return generate_latest(registry)

    def _share_gauges(self) -> None:
        """Set the gauges if other processes read them from a file."""
        if self._directory is not None:
            self._update_gauges()

    def _update_gauges(self) -> None:
        """Set the gauges."""
        queued_tokens, running_requests = self._get_gauges()
        self._queued_tokens.set(queued_tokens)
        self._running_requests.set(running_requests)
