"""Limits of the server."""

from typing import Annotated, ClassVar

from pydantic import Field

from bertsmith.settings import SettingsTable

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0)]


class ServeSettings(SettingsTable):
    """Limits of the server (``--set serve.…``), with the HTTP status of requests beyond a limit."""

    table: ClassVar[str] = "serve"

    #: Bytes of a request's body (413).
    max_body_bytes: Count = 4 * 2**20
    #: Texts per request (422).
    max_texts: Count = 1024
    #: Tokens per request, summed over its texts (422).
    max_tokens: Count = 131_072
    #: Characters per request, summed over its texts (422). Tokenizing needs up to 560 bytes per
    #: character.
    max_characters: Count = 2**20
    #: [MASK]s per request; each costs a softmax over the vocabulary (422).
    max_masks: Count = 1024
    #: Elements (float32 numbers) of all vectors in a response (422).
    max_vector_elements: Count = 4 * 2**20
    #: Bytes of a request's headers (431).
    max_header_bytes: Count = 65_536
    #: Seconds to receive a request's headers, and then its body (408). If the headers take longer,
    #: the connection is closed without a response.
    body_timeout_seconds: Seconds = 10.0
    #: Request bodies received concurrently. Beyond this number, the oldest unfinished body is
    #: rejected (408).
    max_pending_bodies: Count = 512
    #: Bytes of all request bodies in memory. Beyond this size, the oldest unfinished body is
    #: rejected (408), or the new one if all others are complete (429).
    max_total_body_bytes: Count = 256 * 2**20
    #: Seconds to answer a request (504).
    request_timeout_seconds: Seconds = 30.0
    #: Seconds in which a client must read 1 MiB of its response; a slower client is disconnected.
    send_timeout_seconds: Seconds = 30.0
    #: Bytes of large responses, from their computation until they are read. Beyond this size,
    #: requests wait, and clients that have stopped reading are disconnected.
    max_unsent_bytes: Count = 48 * 2**20
    #: Tokens in the queue, summed over all clients (429). Requests of several batches may use 90 %
    #: of them.
    max_queue_tokens: Count = 262_144
    #: Concurrent requests (429). One client can use at most four fifths of them.
    max_concurrent_requests: Count = 1024
    #: Tokens per batch. Smaller batches let short requests overtake long ones sooner. A CPU can
    #: compute up to four batches at once.
    max_batch_tokens: Count = 1024
    #: Milliseconds that the first request in an empty queue waits for others to share its batch.
    max_wait_ms: Annotated[float, Field(ge=0.0)] = 0.0
    #: Seconds after SIGTERM in which the server still accepts requests while /ready returns 503, so
    #: that load balancers notice. Ctrl-C and a second SIGTERM end this time.
    drain_seconds: Annotated[float, Field(ge=0.0)] = 1.0
    #: Seconds to finish running requests after that, or after Ctrl-C.
    shutdown_timeout_seconds: Seconds = 20.0
