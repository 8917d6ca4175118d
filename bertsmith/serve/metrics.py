"""Prometheus metrics of requests, batches and the queue."""

from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bertsmith.text.unknown import TokenCounter

#: Histogram buckets of request times in seconds.
_SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
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

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "bertsmith_requests_total", "Requests.", ["endpoint", "status"], registry=registry
        )
        self._request_seconds = Histogram(
            "bertsmith_request_seconds",
            "Duration of a request in seconds.",
            ["endpoint"],
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._sequences = Counter(
            "bertsmith_sequences_total", "Sequences computed.", registry=registry
        )
        self._tokens = Counter("bertsmith_tokens_total", "Tokens computed.", registry=registry)
        self._batch_tokens = Histogram(
            "bertsmith_batch_tokens",
            "Tokens per batch.",
            buckets=_TOKENS_BUCKETS,
            registry=registry,
        )
        self._model_seconds = Counter(
            "bertsmith_model_seconds_total",
            "Seconds of model computation, summed over concurrent batches.",
            registry=registry,
        )
        self._queued_tokens = Gauge(
            "bertsmith_waiting_tokens", "Tokens in the queue.", registry=registry
        )
        self._text_tokens = Counter(
            "bertsmith_text_tokens_total",
            "Tokens of request texts, without special tokens.",
            ["model"],
            registry=registry,
        )
        self._unknown_tokens = Counter(
            "bertsmith_unknown_tokens_total",
            "[UNK] tokens of request texts.",
            ["model"],
            registry=registry,
        )

    def set_queue_gauge(self, queued_tokens: Callable[[], float]) -> None:
        """Set the function that returns the current number of queued tokens."""
        self._queued_tokens.set_function(queued_tokens)

    def count_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a request. For an unknown path, ``endpoint`` is empty and counted as "other"."""
        self._requests.labels(endpoint or "other", str(status)).inc()
        self._request_seconds.labels(endpoint or "other").observe(seconds)

    def count_batch(self, num_sequences: int, num_tokens: int, seconds: float) -> None:
        """Count a computed batch."""
        self._sequences.inc(num_sequences)
        self._tokens.inc(num_tokens)
        self._batch_tokens.observe(num_tokens)
        self._model_seconds.inc(seconds)

    def get_token_counter(self, model: str) -> TokenCounter:
        """Return a counter for the tokens of the texts sent to a model."""
        return _ModelTokenCounter(
            self._text_tokens.labels(model), self._unknown_tokens.labels(model)
        )

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)
