"""What Prometheus reads at /metrics: requests, batches, and what waits.

It never knows a text, nor who asked.
"""

from collections.abc import Callable
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from bertsmith.text.unknown import TokenCounter

#: Seconds of a request: from a cached look to a batch of long texts.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
#: Tokens of a batch.
_TOKENS = (16, 64, 256, 512, 1024, 2048, 4096, 8192)


class _ModelTokens(NamedTuple):
    """Counts the tokens of one model; safe for several threads."""

    tokens: Counter
    unknown: Counter

    def add(self, num_tokens: int, num_unknown: int) -> None:
        """See ``TokenCounter``."""
        self.tokens.inc(num_tokens)
        self.unknown.inc(num_unknown)


class Metrics:
    """Counters of one server."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        own = self._registry
        self._requests = Counter(
            "bertsmith_requests_total", "Requests.", ["endpoint", "status"], registry=own
        )
        self._seconds = Histogram(
            "bertsmith_request_seconds", "Seconds of a request.", ["endpoint"],
            buckets=_SECONDS, registry=own,
        )  # fmt: skip
        self._units = Counter("bertsmith_sequences_total", "Sequences computed.", registry=own)
        self._tokens = Counter("bertsmith_tokens_total", "Tokens computed.", registry=own)
        self._batch = Histogram(
            "bertsmith_batch_tokens", "Tokens of a batch.", buckets=_TOKENS, registry=own
        )
        self._busy = Counter(
            "bertsmith_model_seconds_total", "Seconds of computing, of each batch at once.",
            registry=own,
        )  # fmt: skip
        self._waiting = Gauge("bertsmith_waiting_tokens", "Tokens that wait.", registry=own)

        self._text_tokens = Counter(
            "bertsmith_text_tokens_total", "Tokens of request texts, special tokens left out.",
            ["model"], registry=own,
        )  # fmt: skip
        self._unknown_tokens = Counter(
            "bertsmith_unknown_tokens_total", "Tokens of request texts that are [UNK].",
            ["model"], registry=own,
        )  # fmt: skip

    def watch_queue(self, waiting: Callable[[], float]) -> None:
        """Tell what waits whenever it is asked."""
        self._waiting.set_function(waiting)

    def count_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a request; what is no endpoint is counted under one name."""
        self._requests.labels(endpoint or "other", str(status)).inc()
        self._seconds.labels(endpoint or "other").observe(seconds)

    def count_batch(self, units: int, tokens: int, seconds: float) -> None:
        """Count a batch."""
        self._units.inc(units)
        self._tokens.inc(tokens)
        self._batch.observe(tokens)
        self._busy.inc(seconds)

    def token_counter(self, model: str) -> TokenCounter:
        """Return what counts the tokens of the texts that a model is sent."""
        return _ModelTokens(self._text_tokens.labels(model), self._unknown_tokens.labels(model))

    def render(self) -> bytes:
        """Return the text that Prometheus reads."""
        return generate_latest(self._registry)
