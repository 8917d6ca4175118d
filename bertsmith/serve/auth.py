"""The key that clients show, in a header of their own or as the password of a page's visitor.

It never knows what is asked for.
"""

import base64
import binascii
import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.responses import Response

from bertsmith.errors import SettingsError
from bertsmith.serve.errors import error_response


class ApiKey:
    """A server's key, compared in constant time."""

    def __init__(self, key: str, *, page: bool = False) -> None:
        """``page``: whether browsers may show it as a password, whatever the name (RFC 7617).

        Raises SettingsError for an empty key; white space around it is none of it.
        """
        if not key.strip():
            raise SettingsError("the key is empty; give one, or none at all")
        self._key, self._page = key.strip().encode(), page

    def matches(self, method: str, headers: Mapping[bytes, bytes]) -> bool:
        """Tell whether a request's headers, their names in lower case, show the key."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        scheme, given = scheme.lower(), given.strip()
        if scheme == b"basic" and self._page:
            password = _decoded(given).partition(b":")[2]
            return hmac.compare_digest(password, self._key) and _of_our_page(method, headers)
        return scheme == b"bearer" and hmac.compare_digest(given, self._key)

    def unauthorized_response(self, headers: Mapping[bytes, bytes]) -> Response:
        """Return what answers a request without it; a person's browser then asks for a password."""
        if self._page and b"text/html" in headers.get(b"accept", b""):
            way = 'Basic realm="Bertsmith: any name, the key as password", charset="UTF-8"'
        else:
            way = "Bearer"
        return error_response(
            401, "send the header Authorization: Bearer KEY with this server's key",
            {"WWW-Authenticate": way},
        )  # fmt: skip


def _of_our_page(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Tell whether a request comes of this server's page, or opens it.

    Browsers send a password by themselves, whoever's page asks. They say whose it was in
    Sec-Fetch-Site, if the address is one of https or this machine's own; else Origin says it,
    without which it is a plain read whose answer other pages do not see.
    """
    site = headers.get(b"sec-fetch-site")
    if site is None:
        origin = headers.get(b"origin")
        return origin is None or urlsplit(origin).netloc == headers.get(b"host")
    # Whoever follows a link sees our page, and the page with the link does not.
    opens = method == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"
    return site in (b"same-origin", b"none") or (
        opens and headers.get(b"sec-fetch-dest") == b"document"
    )


def _decoded(given: bytes) -> bytes:
    try:
        return base64.b64decode(given, validate=True)
    except binascii.Error:
        return b""
