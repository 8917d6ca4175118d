"""Simulate the scheduler of a server on a model with a constant speed, without threads."""

import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from bertsmith.serve.deadline import BusyError
from bertsmith.serve.fair_queue import Call, QueuedSequence
from bertsmith.serve.scheduling import CallScheduler

#: Speed of the simulated model; that of BERT-base on a few CPU cores.
TOKENS_PER_SECOND = 4000.0
#: Time of a batch in addition to the time of its tokens.
SECONDS_PER_BATCH = 0.005
MAX_BATCH_TOKENS = 1024
TIMEOUT_SECONDS = 30.0


@dataclass(frozen=True)
class Traffic:
    """Requests of equal size that arrive at random times (a Poisson process).

    Attributes:
        client: prefix of the clients' names.
        lengths: tokens of each text of a request.
        tokens_per_second: mean tokens of the requests that arrive in a second.
        num_clients: number of clients that take turns.
        start: time of the first request, in seconds.
    """

    client: str
    lengths: tuple[int, ...]
    tokens_per_second: float
    num_clients: int = 1
    start: float = 0.0


@dataclass
class Outcome:
    """The answers to the requests of one prefix of clients.

    Attributes:
        seconds: waiting time of each answered request.
        num_tokens: tokens of all answered requests.
        num_requests: number of requests.
        num_late: requests that were accepted, but not answered in time.
        num_rejected: requests rejected on arrival or replaced by requests of lighter clients.
        tokens_by_client: tokens of the answered requests of each client.
    """

    seconds: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_requests: int = 0
    num_late: int = 0
    num_rejected: int = 0
    tokens_by_client: dict[str, int] = field(default_factory=dict)

    def get_p99_seconds(self) -> float:
        """Return the 99th percentile of the waiting times."""
        return sorted(self.seconds)[int(0.99 * (len(self.seconds) - 1))]


class Simulation:
    """A server with a number of model threads, which share the speed of the model.

    Attributes:
        outcomes: outcome of each prefix of clients.
        now: simulated time in seconds; after the simulation, the time at which the queue was empty.
    """

    def __init__(self, traffic: list[Traffic], seconds: float, num_threads: int = 1) -> None:
        """Run the simulation: requests arrive for ``seconds``, and then the queue is emptied."""
        self.now = 0.0
        self._scheduler = CallScheduler(
            max_batch_tokens=MAX_BATCH_TOKENS, max_queue_tokens=262_144, clock=lambda: self.now
        )
        self._num_threads = num_threads
        self.outcomes = {item.client: Outcome() for item in traffic}
        self._prefixes: dict[Call, str] = {}
        self._numbers = itertools.count()
        #: Heap of (time, number, call that arrives or batch that ends).
        self._events: list[tuple[float, int, Call | tuple[list[QueuedSequence], float, int]]] = []
        for item in traffic:
            for at, call in self._iter_calls(item, seconds):
                heapq.heappush(self._events, (at, next(self._numbers), call))
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            if isinstance(event, Call):
                self._submit(event)
            else:
                self._end_batch(*event)
            self._start_batches()

    def get_goodput(self) -> float:
        """Return the share of the model's time in which it computed requests answered in time."""
        num_tokens = sum(outcome.num_tokens for outcome in self.outcomes.values())
        batch_seconds = SECONDS_PER_BATCH + MAX_BATCH_TOKENS / TOKENS_PER_SECOND
        return num_tokens * batch_seconds / MAX_BATCH_TOKENS / self.now

    def _iter_calls(self, traffic: Traffic, seconds: float) -> Iterator[tuple[float, Call]]:
        """Yield the time and the call of each request."""
        generator = random.Random(traffic.client)
        num_tokens = sum(traffic.lengths)
        at = traffic.start
        for number in itertools.count():
            at += generator.expovariate(traffic.tokens_per_second / num_tokens)
            if at > seconds:
                return
            lengths = list(traffic.lengths)
            client = f"{traffic.client}{number % traffic.num_clients}"
            call = Call("key", client, list, at + TIMEOUT_SECONDS, lengths, lengths, at)
            self._prefixes[call] = traffic.client
            yield at, call

    def _submit(self, call: Call) -> None:
        """Queue a call, and remove it when it has ended."""
        outcome = self.outcomes[self._prefixes[call]]
        outcome.num_requests += 1
        try:
            self._scheduler.add(call)
        except BusyError:
            outcome.num_rejected += 1
            return

        def record(_: object) -> None:
            self._scheduler.remove(call)
            error = call.future.exception()
            outcome.num_rejected += isinstance(error, BusyError)
            outcome.num_late += error is not None and not isinstance(error, BusyError)

        call.future.add_done_callback(record)

    def _start_batches(self) -> None:
        """Start batches on all idle threads."""
        scheduler = self._scheduler
        while scheduler.has_calls() and scheduler.num_running_batches < self._num_threads:
            batch = scheduler.start_batch()
            if batch:
                num_tokens = sum(sequence.num_tokens for sequence in batch)
                seconds = SECONDS_PER_BATCH + num_tokens / TOKENS_PER_SECOND
                seconds *= scheduler.num_running_batches
                event = (batch, seconds, scheduler.num_running_batches)
                heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def _end_batch(self, batch: list[QueuedSequence], seconds: float, concurrency: int) -> None:
        """Answer the calls that are complete."""
        self._scheduler.measure_speed(batch, seconds, concurrency)
        self._scheduler.end_batch(batch)
        for sequence in batch:
            call = sequence.call
            call.num_sequences_left -= 1
            if call.num_sequences_left or call.future.done():
                continue
            outcome = self.outcomes[self._prefixes[call]]
            if self.now > call.expires_at:
                outcome.num_late += 1
                continue
            call.future.set_result([])
            outcome.seconds.append(self.now - call.queued_at)
            outcome.num_tokens += call.num_tokens
            tokens = outcome.tokens_by_client
            tokens[call.client] = tokens.get(call.client, 0) + call.num_tokens
