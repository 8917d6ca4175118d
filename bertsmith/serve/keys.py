"""The key that clients show, in a header of their own or as the password of a browser's visitor.

It never knows what is asked for.
"""

import base64
import binascii
import hmac
from collections.abc import Mapping

from starlette.responses import Response

from bertsmith.serve.faults import fault

#: Where a browser says that another site's page sent its visitor's request.
_OTHERS = (b"cross-site", b"same-site")


class Key:
    """A server's key, compared in constant time."""

    def __init__(self, key: str, *, page: bool = False) -> None:
        """``page``: whether browsers may show it as a password, whatever the name (RFC 7617)."""
        self._key, self._page = key.encode(), page

    def fits(self, headers: Mapping[bytes, bytes]) -> bool:
        """Tell whether headers, their names in lower case, show the key.

        What browsers send by themselves counts for pages of this server alone: another site's page
        could else ask with its visitor's key.
        """
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"basic" and self._page:
            password = _decoded(given).partition(b":")[2]
            own = headers.get(b"sec-fetch-site", b"none") not in _OTHERS
            return hmac.compare_digest(password, self._key) and own
        return scheme == b"Bearer" and hmac.compare_digest(given, self._key)

    def refusal(self, headers: Mapping[bytes, bytes]) -> Response:
        """Return what answers a request without it; a person's browser then asks for a password."""
        if self._page and b"text/html" in headers.get(b"accept", b""):
            way = 'Basic realm="Bertsmith: any name, the key as password", charset="UTF-8"'
        else:
            way = "Bearer"
        return fault(
            401, "send the header Authorization: Bearer KEY with this server's key",
            {"WWW-Authenticate": way},
        )  # fmt: skip


def _decoded(given: bytes) -> bytes:
    try:
        return base64.b64decode(given, validate=True)
    except binascii.Error:
        return b""
