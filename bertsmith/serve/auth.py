"""API key authentication: bearer tokens, and basic authentication for browsers."""

import base64
import binascii
import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.responses import Response

from bertsmith.errors import SettingsError
from bertsmith.serve.errors import create_error_response


class ApiKey:
    """The server's API key, compared in constant time."""

    def __init__(self, key: str, *, has_page: bool = False) -> None:
        """Store the key without leading and trailing white space.

        Args:
            key: the key that clients must send.
            has_page: whether the server has a web page. Browsers may then send the key as the
                password of basic authentication (RFC 7617), with any user name.

        Raises:
            SettingsError: the key is empty.
        """
        if not key.strip():
            raise SettingsError("the API key is empty; set a key, or leave the option out")
        self._key = key.strip().encode()
        self._has_page = has_page

    def matches(self, method: str, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request contains the key; header names must be in lower case."""
        scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
        scheme = scheme.lower()
        credentials = credentials.strip()
        if scheme == b"basic" and self._has_page:
            password = _decode_base64(credentials).partition(b":")[2]
            return hmac.compare_digest(password, self._key) and _is_same_origin(method, headers)
        return scheme == b"bearer" and hmac.compare_digest(credentials, self._key)

    def create_unauthorized_response(self, headers: Mapping[bytes, bytes]) -> Response:
        """Return the 401 response; a browser that requested HTML then asks for a password."""
        if self._has_page and b"text/html" in headers.get(b"accept", b""):
            challenge = 'Basic realm="Bertsmith: any name, the key as password", charset="UTF-8"'
        else:
            challenge = "Bearer"
        return create_error_response(
            401,
            "the API key is missing or wrong; send the header Authorization: Bearer KEY",
            {"WWW-Authenticate": challenge},
        )


def _is_same_origin(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request was sent by this server's page, or by a user opening the page.

    Browsers add a saved password to the requests of every site, which other sites could exploit
    (CSRF). The header Sec-Fetch-Site says whether the request comes from the same site. Browsers
    send it over HTTPS and to localhost only, so otherwise the header Origin is checked. A request
    without both headers only reads, and other sites cannot see its response.
    """
    fetch_site = headers.get(b"sec-fetch-site")
    if fetch_site is None:
        origin = headers.get(b"origin")
        return origin is None or urlsplit(origin).netloc == headers.get(b"host")
    # Following a link from another site is safe: that site cannot read the opened page.
    is_navigation = method == "GET" and headers.get(b"sec-fetch-mode") == b"navigate"
    return fetch_site in (b"same-origin", b"none") or (
        is_navigation and headers.get(b"sec-fetch-dest") == b"document"
    )


def _decode_base64(encoded: bytes) -> bytes:
    """Return the decoded bytes; empty if ``encoded`` is not valid base64."""
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        return b""
