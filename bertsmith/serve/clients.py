"""Identify the clients of a server, and limit how many requests each of them runs."""

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final

#: Health endpoints bypass authentication, the check of the Host header and the concurrency limit.
HEALTH_PATHS: Final = ("/health", "/ready")
#: Key of the client's identity in an ASGI scope: its address or the name of its API key.
CLIENT_KEY: Final = "bertsmith.client"
#: Key of the client's ``TokenBucket`` in an ASGI scope.
TOKEN_BUCKET_KEY: Final = "bertsmith.token_bucket"
#: Key, in an ASGI scope, of the function that ``EarlyAdmission.admit`` yields for the request.
RECORD_TOKENS_KEY: Final = "bertsmith.record_tokens"
#: Key of the request's ``ResponseReservation`` in an ASGI scope.
RESPONSE_KEY: Final = "bertsmith.response"
#: Key of the context of the request's spans in an ASGI scope.
TRACE_KEY: Final = "bertsmith.trace"
#: A client may run at most this many requests per free slot of the server. A single client can
#: therefore use 4/5 of the limit, and there is always room for other clients.
_MAX_REQUESTS_PER_FREE_SLOT: Final = 4


def get_client_address(scope: Mapping[str, Any]) -> str:
    """Return the IP address of a request's client; "unix" for a unix socket."""
    client = scope.get("client")
    return str(client[0]) if client and client[0] else "unix"


@lru_cache(maxsize=4096)
def get_address_group(address: str) -> str:
    """Return the addresses that one client can use: an IPv4 address, or an IPv6 network (/64)."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 6 and parsed.ipv4_mapped is None:
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(getattr(parsed, "ipv4_mapped", None) or parsed)


def get_path(scope: Mapping[str, Any]) -> str:
    """Return the path of a request, without the path under which a proxy publishes the server."""
    return str(scope["path"]).removeprefix(scope.get("root_path", ""))


class ConcurrencyLimit:
    """Counts running requests; not thread-safe.

    Attributes:
        num_active: number of running requests.
    """

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._counts: Counter[str] = Counter()
        self.num_active = 0

    def has_room(self, client: str) -> bool:
        """Return whether a client may run another request."""
        num_free = self._max_requests - self.num_active
        return self._counts[client] < _MAX_REQUESTS_PER_FREE_SLOT * num_free

    @contextmanager
    def count(self, client: str) -> Iterator[None]:
        """Count a request of a client as running within the block."""
        self.num_active += 1
        self._counts[client] += 1
        try:
            yield
        finally:
            self.num_active -= 1
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]
