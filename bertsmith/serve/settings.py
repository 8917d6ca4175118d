"""Limits of the server."""

from typing import Annotated

from pydantic import Field

from bertsmith.settings import Settings

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0)]


class ServeSettings(Settings):
    """Limits of the server (``--set serve.…``); in brackets the HTTP status beyond the limit."""

    #: Bytes of a request's body (413).
    body_bytes: Count = 4 * 2**20
    #: Texts per request (422).
    texts: Count = 1024
    #: Tokens per request, summed over its texts (422).
    tokens: Count = 131_072
    #: [MASK]s per request; each costs a softmax over the vocabulary (422).
    masks: Count = 1024
    #: Numbers in the vectors of a response (422).
    numbers: Count = 4 * 2**20
    #: Bytes of a request's header (431).
    header_bytes: Count = 65_536
    #: Seconds to receive a request's header, then its body (408; a slow header just disconnects).
    body_seconds: Seconds = 10.0
    #: Bodies received concurrently; beyond it the oldest unfinished one is rejected (408).
    bodies: Count = 512
    #: Bytes of all bodies in memory (408 for the oldest unfinished body, else 429).
    bodies_bytes: Count = 256 * 2**20
    #: Seconds to answer a request (504).
    seconds: Seconds = 30.0
    #: Seconds in which a client must read 1 MiB of its response, or it is disconnected.
    send_seconds: Seconds = 30.0
    #: Bytes of unread responses; beyond it, stalled clients are disconnected.
    unsent_bytes: Count = 256 * 2**20
    #: Tokens in the queue, summed over all clients (429).
    queue_tokens: Count = 262_144
    #: Concurrent requests (429).
    requests: Count = 1024
    #: Concurrent event streams of open web pages, counted separately from requests (429).
    pages: Count = 256
    #: Tokens per batch, counting each sequence at the longest one's length. Smaller batches let
    #: short requests overtake long ones sooner. A CPU computes up to four batches at once.
    batch_tokens: Count = 1024
    #: Milliseconds that a lone request waits for others to share its batch.
    wait_ms: Annotated[float, Field(ge=0.0)] = 2.0
    #: Seconds to finish running requests after SIGTERM.
    stop_seconds: Seconds = 20.0
