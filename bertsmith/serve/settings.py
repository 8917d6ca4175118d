"""The limits of a server: what one request, one client and all of them together may ask.

It never knows how a limit is kept.
"""

from typing import Annotated

from pydantic import Field

from bertsmith.settings import Settings

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0)]


class ServeSettings(Settings):
    """``--set serve.…``: each limit, and in brackets the status that tells of it."""

    #: Of a request's body (413).
    body_bytes: Count = 4 * 2**20
    #: Of one request (422).
    texts: Count = 1024
    #: Of one request, all its texts together (422).
    tokens: Count = 131_072
    #: [MASK]s of one request: for each there is a probability for every word (422).
    masks: Count = 1024
    #: Numbers in the vectors of one answer (422).
    numbers: Count = 4 * 2**20
    #: Of a request's header (431).
    header_bytes: Count = 65_536
    #: Until a request's header and its body must be there (408; a slow header just ends).
    body_seconds: Seconds = 10.0
    #: Bodies that are being received at once; of more, the one that began first ends (408).
    bodies: Count = 512
    #: Memory for all bodies that are being received or answered (408 for the unfinished, or 429).
    bodies_bytes: Count = 256 * 2**20
    #: Until a request is answered (504).
    seconds: Seconds = 30.0
    #: For which a client may read less than 1 MiB of its answer; then its connection ends.
    send_seconds: Seconds = 30.0
    #: Memory for answers that clients have not read; beyond it connections that stand still end.
    unsent_bytes: Count = 256 * 2**20
    #: Waiting in the queue, of all clients together (429).
    queue_tokens: Count = 262_144
    #: Being answered at once (429).
    requests: Count = 1024
    #: Open pages that listen for answers, counted apart from requests (429).
    pages: Count = 256
    #: Of a batch, of which the CPU computes up to four at once; a long text holds up short ones no
    #: longer than one takes, and requests are read and answers sent while it is computed.
    batch_tokens: Count = 1024
    #: For how long a lone request waits for others to be computed with.
    wait_ms: Annotated[float, Field(ge=0.0)] = 2.0
    #: From SIGTERM on, for what is under way.
    stop_seconds: Seconds = 20.0
