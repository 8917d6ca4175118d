"""Authentication with API keys, which have names and rate limits.

The file of the keys can change while the server runs.

Clients send a key as a bearer token, browsers also as the password of basic authentication.
"""

import base64
import binascii
import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import Field
from starlette.responses import Response

from bertsmith.errors import SettingsError
from bertsmith.serve.errors import create_error_response
from bertsmith.serve.rate_limits import TokenBucket
from bertsmith.serve.shared_table import CounterTable, Entry, LocalTable
from bertsmith.settings import Settings, read_toml

Rate = Annotated[float, Field(gt=0.0, strict=False)]


class KeySettings(Settings):
    """One table of a key file; the table's name is the name of the key in the log."""

    #: What clients send.
    key: str
    #: Limit of requests (429); None for no limit. A minute's requests may be sent at once.
    requests_per_minute: Rate | None = None
    #: Limit of computed tokens (429); None for no limit.
    tokens_per_minute: Rate | None = None


@dataclass(frozen=True)
class NamedKey:
    """An API key and what its client may use.

    Attributes:
        name: name for the log.
        settings: the key and its limits.
        secret: the key that clients send, without leading and trailing white space.
        requests: remaining requests; None without a limit.
        tokens: remaining tokens; None without a limit.
    """

    name: str
    settings: KeySettings
    secret: bytes
    requests: TokenBucket | None
    tokens: TokenBucket | None


class KeyRing:
    """The API keys of a server; a new set of keys can replace them while the server runs."""

    def __init__(
        self,
        keys: Mapping[str, KeySettings],
        *,
        has_page: bool = False,
        table: CounterTable | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Use a set of keys.

        Args:
            keys: the keys by name.
            has_page: whether the server has a web page. Browsers may then send a key as the
                password of basic authentication (RFC 7617), with any user name.
            table: table of the used limits, which several processes can share; None for a table of
                its own.
            clock: returns the time in seconds.

        Raises:
            SettingsError: there is no key, or a key is empty or not unique.
        """
        self._has_page = has_page
        self._table = table or LocalTable()
        self._clock = clock
        self._keys: dict[str, NamedKey] = {}
        self.replace(keys)

    def replace(self, keys: Mapping[str, KeySettings]) -> None:
        """Use other keys from now on. Keys that are unchanged keep the state of their limits.

        Raises:
            SettingsError: there is no key, or a key is empty or not unique.
        """
        if not keys:
            raise SettingsError("there is no API key; add a table with a key, such as [alice]")
        names: dict[str, str] = {}
        for name, settings in keys.items():
            other = names.setdefault(settings.key.strip(), name)
            if other != name:
                raise SettingsError(f"[{other}] and [{name}] have the same key; change one of them")
        if "" in names:
            raise SettingsError("the API key is empty; set a key, or leave the option out")
        self._keys = {name: self._create(name, settings) for name, settings in keys.items()}

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    def find(self, method: str, headers: Mapping[bytes, bytes]) -> NamedKey | None:
        """Return the key that a request contains; None for a missing or wrong key.

        All keys are compared, so that the time does not depend on the matching key.

        Args:
            method: HTTP method of the request.
            headers: headers of the request; the names must be in lower case.
        """
        matches = [key for key in self._keys.values() if self._matches(key, method, headers)]
        return matches[0] if matches else None

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

    def _matches(self, key: NamedKey, method: str, headers: Mapping[bytes, bytes]) -> bool:
        """Return whether a request contains a key, which is compared in constant time."""
        scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
        scheme = scheme.lower()
        credentials = credentials.strip()
        if scheme == b"basic" and self._has_page:
            password = _decode_base64(credentials).partition(b":")[2]
            return hmac.compare_digest(password, key.secret) and _is_same_origin(method, headers)
        return scheme == b"bearer" and hmac.compare_digest(credentials, key.secret)

    def _create(self, name: str, settings: KeySettings) -> NamedKey:
        """Return a key, with the buckets of the current key of this name if it is unchanged."""
        current = self._keys.get(name)
        if current is not None and current.settings == settings:
            return current
        return NamedKey(
            name,
            settings,
            settings.key.strip().encode(),
            self._create_bucket(f"requests of {name}", settings.requests_per_minute),
            self._create_bucket(f"tokens of {name}", settings.tokens_per_minute),
        )

    def _create_bucket(self, name: str, rate: float | None) -> TokenBucket | None:
        """Return the bucket of a limit; a changed limit has a bucket of its own."""
        if rate is None:
            return None
        return TokenBucket(rate, self._clock, self._table, f"{rate:g} {name}")


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
        try:
            return origin is None or urlsplit(origin).netloc == headers.get(b"host")
        except ValueError:
            # The origin is malformed, such as "http://[".
            return False
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


def read_key_file(path: Path) -> dict[str, KeySettings]:
    """Return the keys of a TOML file with a table for each key.

    Raises:
        SettingsError: the file cannot be read, or is not a valid key file.
    """
    tables = read_toml(path, "key file")
    if not tables:
        raise SettingsError(f"{path}: there is no API key; add a table with a key, such as [alice]")
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise SettingsError(
                f"{path}: {name} is not in a table; write a table for each key: [alice] and "
                'key = "..."'
            )
    return {name: KeySettings.parse(table, f"{path}: [{name}]") for name, table in tables.items()}


class FailedLogins:
    """Delays the answers to wrong keys, longer with each failure of an address."""

    #: Failures of an address without a delay.
    NUM_FREE = 3
    #: Delay of the first delayed answer; each later delay is twice as long.
    FIRST_DELAY_SECONDS = 0.25
    MAX_DELAY_SECONDS = 8.0
    #: Time without failures after which an address has no delay.
    FORGET_SECONDS = 600.0

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, table: CounterTable | None = None
    ) -> None:
        """Start without failures, or continue with those in a table.

        Args:
            clock: returns the time in seconds.
            table: table of the failures, which several processes can share; None for a table of its
                own.
        """
        self._clock = clock
        self._table = table or LocalTable()

    def record(self, address: str) -> float:
        """Record a failure; return the seconds by which to delay the answer."""
        now = self._clock()

        def count_failure(entry: Entry | None) -> Entry:
            num_failures, failed_at = entry or (0.0, now)
            return (1.0 if now - failed_at > self.FORGET_SECONDS else num_failures + 1, now)

        num_failures, _ = self._table.update(f"failures of {address}", count_failure)
        num_delays = int(num_failures) - 1 - self.NUM_FREE
        if num_delays < 0:
            return 0.0
        delay = self.FIRST_DELAY_SECONDS * 2.0 ** min(num_delays, 30)
        return min(delay, self.MAX_DELAY_SECONDS)
