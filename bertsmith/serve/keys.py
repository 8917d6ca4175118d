"""API keys with names and rate limits, read from a file that can change while the server runs."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from bertsmith.errors import SettingsError
from bertsmith.serve.auth import ApiKey
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
        api_key: checks whether a request contains the key.
        requests: remaining requests; None without a limit.
        tokens: remaining tokens; None without a limit.
    """

    name: str
    settings: KeySettings
    api_key: ApiKey
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
            has_page: whether the server has a web page, see ``ApiKey``.
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
        self._keys = {name: self._create(name, settings) for name, settings in keys.items()}

    def __len__(self) -> int:
        """Return the number of keys."""
        return len(self._keys)

    def find(self, method: str, headers: Mapping[bytes, bytes]) -> NamedKey | None:
        """Return the key that a request contains; None for a missing or wrong key.

        All keys are compared, so that the time does not depend on the matching key.
        """
        matches = [key for key in self._keys.values() if key.api_key.matches(method, headers)]
        return matches[0] if matches else None

    def get_any(self) -> ApiKey:
        """Return one of the keys, which creates the response to a request without a key."""
        return next(iter(self._keys.values())).api_key

    def _create(self, name: str, settings: KeySettings) -> NamedKey:
        """Return a key, with the buckets of the current key of this name if it is unchanged."""
        current = self._keys.get(name)
        if current is not None and current.settings == settings:
            return current
        return NamedKey(
            name,
            settings,
            ApiKey(settings.key, has_page=self._has_page),
            self._create_bucket(f"requests of {name}", settings.requests_per_minute),
            self._create_bucket(f"tokens of {name}", settings.tokens_per_minute),
        )

    def _create_bucket(self, name: str, rate: float | None) -> TokenBucket | None:
        """Return the bucket of a limit; a changed limit has a bucket of its own."""
        if rate is None:
            return None
        return TokenBucket(rate, self._clock, self._table, f"{rate:g} {name}")


def read_key_file(path: Path) -> dict[str, KeySettings]:
    """Return the keys of a TOML file with a table for each key.

    Raises:
        SettingsError: the file cannot be read, or is not a valid key file.
    """
    tables = read_toml(path)
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
