"""Several API keys, their limits, and the delay after wrong keys."""

import logging
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import httpx
import pytest

from bertsmith.errors import SettingsError
from bertsmith.serve.deadline import BusyError
from bertsmith.serve.errors import create_busy_response
from bertsmith.serve.keys import FailedLogins, KeyRing, KeySettings, read_key_file
from bertsmith.serve.launch import ServerProcess
from bertsmith.serve.models import ServedModel
from bertsmith.serve.options import ServerOptions
from bertsmith.serve.rate_limits import TokenBucket
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.shared_table import LocalTable, SharedTable
from tests.serve.model_pause import wait_until
from tests.serve.model_server import run_server

ALICE = {b"authorization": b"Bearer first"}


class FakeClock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self.now


def bearer(key: str) -> dict[str, str]:
    """Return the header of a request with a key."""
    return {"Authorization": f"Bearer {key}"}


def test_key_file_has_a_table_for_each_key(tmp_path: Path) -> None:
    """Each table has a key and optional limits; other content is an error."""
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkey = "first"\nrequests_per_minute = 60\n[bob]\nkey = "second"\n')
    assert read_key_file(path) == {
        "alice": KeySettings(key="first", requests_per_minute=60),
        "bob": KeySettings(key="second"),
    }
    for content, message in (
        ('alice = "first"', "alice is not in a table"),
        ('[alice]\nkey = "first"\nrequests = 5', "requests"),
        ('[alice]\nkey = "first"\ntokens_per_minute = 0', "tokens_per_minute"),
        ("[alice", "keys.toml"),
        ("", "keys.toml: there is no API key"),
    ):
        path.write_text(content)
        with pytest.raises(SettingsError, match=message):
            read_key_file(path)
    path.unlink()
    with pytest.raises(SettingsError, match=r"keys\.toml: no such key file"):
        read_key_file(path)


def test_keys_must_be_unique_and_not_empty() -> None:
    """A server without keys or with an empty one would accept everyone.

    Equal keys would share one name.
    """
    for keys, message in (
        ({}, "there is no API key"),
        ({"a": KeySettings(key="")}, "the API key is empty"),
        ({"a": KeySettings(key=" ")}, "the API key is empty"),
        ({"a": KeySettings(key="x"), "b": KeySettings(key="x ")}, r"\[a\] and \[b\]"),
    ):
        with pytest.raises(SettingsError, match=message):
            KeyRing(keys)


def test_keys_are_replaced_without_losing_the_limits_of_others() -> None:
    """A removed key is refused at once; an unchanged key keeps its used limit."""
    alice = KeySettings(key="first", requests_per_minute=1)
    ring = KeyRing({"alice": alice, "bob": KeySettings(key="second")}, clock=FakeClock())
    key = ring.find("POST", ALICE)
    assert key is not None
    assert key.name == "alice"
    assert key.requests is not None
    assert key.requests.take(1) == 0
    ring.replace({"alice": alice, "carol": KeySettings(key="third")})
    assert ring.find("POST", {b"authorization": b"Bearer second"}) is None
    assert ring.find("POST", {b"authorization": b"Bearer third"}) is not None
    unchanged = ring.find("POST", ALICE)
    assert unchanged is not None
    assert unchanged.requests is not None
    assert unchanged.requests.take(1) > 0
    # An error leaves the current keys in place.
    with pytest.raises(SettingsError):
        ring.replace({})
    assert ring.find("POST", ALICE) is unchanged


def test_token_bucket_allows_its_amount_per_minute() -> None:
    """A minute's amount may be used at once; a larger amount must be paid back first."""
    clock = FakeClock()
    bucket = TokenBucket(60.0, clock=clock)
    assert bucket.take(50) == 0
    assert bucket.take(100) == 0
    # The level is -90, and one is available again after 91 seconds.
    assert bucket.take(1) == pytest.approx(91)
    clock.now = 91.0
    assert bucket.take(1) == 0
    assert bucket.take(1) > 0
    # The level does not exceed the amount per minute.
    clock.now = 10_000.0
    assert bucket.take(60) == 0
    assert bucket.take(1) > 0


@pytest.mark.parametrize(("per_minute", "num_requests"), [(1.0, 1), (3.0, 3), (2.5, 2), (0.5, 1)])
def test_requests_of_a_burst_are_limited_by_the_amount_per_minute(
    per_minute: float, num_requests: int
) -> None:
    """The time that passes within the burst does not add a request; the returned wait does."""
    clock = FakeClock()
    bucket = TokenBucket(per_minute, clock=clock)
    waits = []
    for _ in range(num_requests + 2):
        waits.append(bucket.take(1))
        clock.now += 1e-3
    assert [seconds == 0 for seconds in waits] == [True] * num_requests + [False] * 2
    clock.now += waits[-1]
    assert bucket.take(1) == 0


@pytest.mark.parametrize(("seconds", "header"), [(0.1, "1"), (1.2, "2"), (2.0, "2")])
def test_retry_after_is_rounded_up(seconds: float, header: str) -> None:
    """A client that waits as long as Retry-After says is not rejected again."""
    response = create_busy_response(BusyError("busy", seconds))
    assert response.headers["retry-after"] == header


def test_refunded_tokens_are_available_again() -> None:
    """The level never exceeds the amount per minute."""
    clock = FakeClock()
    bucket = TokenBucket(60.0, clock=clock)
    assert bucket.take(60) == 0
    assert bucket.take(1) > 0
    bucket.refund(60)
    assert bucket.take(30) == 0
    bucket.refund(90)
    assert bucket.take(60) == 0
    assert bucket.take(1) > 0


def test_reload_fails_without_an_effect(
    model_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any error, also one of PyTorch, the keys are unchanged, and the next reload works."""
    key_file = tmp_path / "keys.toml"
    key_file.write_text('[alice]\nkey = "first"\n')
    messages: list[str] = []
    options = ServerOptions(
        models=(("plain", model_dirs["plain"]),), settings=ServeSettings(), device="cpu",
        key_file=key_file, shared_directory=tmp_path,
    )  # fmt: skip
    process = ServerProcess(options, nullcontext, log=messages.append)
    assert process._keys is not None
    key_file.write_text('[bob]\nkey = "second"\n')
    with monkeypatch.context() as context:
        context.setattr(process, "_load_models", _run_out_of_memory)
        process.reload()
    assert messages[-1] == "reload failed, nothing changed: out of memory"
    assert process._keys.find("POST", ALICE) is not None
    process.reload()
    assert messages[-1] == "reloaded the models and keys"
    assert process._keys.find("POST", ALICE) is None


def _run_out_of_memory() -> list[ServedModel]:
    raise RuntimeError("out of memory")


def test_processes_share_the_limits(tmp_path: Path) -> None:
    """Two processes together allow the requests and failed logins of one; a new limit is unused."""
    clock = FakeClock()
    tables = [SharedTable(tmp_path / "table") for _ in range(2)]
    settings = KeySettings(key="first", requests_per_minute=3)
    rings = [KeyRing({"alice": settings}, table=table, clock=clock) for table in tables]
    logins = [FailedLogins(clock, table) for table in tables]

    def take(ring: KeyRing) -> bool:
        key = ring.find("POST", ALICE)
        assert key is not None
        assert key.requests is not None
        return key.requests.take(1) == 0

    assert [take(rings[number % 2]) for number in range(5)] == [True, True, True, False, False]
    clock.now = 20.0
    assert [take(ring) for ring in rings] == [True, False]
    assert [logins[number % 2].record("a") for number in range(5)] == [0, 0, 0, 0.25, 0.5]
    rings[0].replace({"alice": KeySettings(key="first", requests_per_minute=5)})
    assert take(rings[0])


def _replace_entry(new: tuple[float, float], _: object) -> tuple[float, float]:
    """Return the new entry, whatever the old one is."""
    return new


def test_full_shared_table_forgets_the_oldest_entries(tmp_path: Path) -> None:
    """The table has a fixed size; the entries that changed last remain."""
    table = SharedTable(tmp_path / "table", num_slots=8)
    for number in range(9):
        entry = (1.0, float(number))
        # The table returns what the function returns.
        assert table.update(f"name {number}", partial(_replace_entry, entry)) == entry
    size = (tmp_path / "table").stat().st_size
    assert table.update("name 8", lambda entry: entry or (0.0, 9.0)) == (1.0, 8)
    assert table.update("name 0", lambda entry: entry or (0.0, 9.0)) == (0.0, 9)
    assert table.update("name 1", lambda entry: entry or (0.0, 9.0)) == (0.0, 9)
    assert table.update("name 3", lambda entry: entry or (0.0, 9.0)) == (1.0, 3)
    assert (tmp_path / "table").stat().st_size == size


def test_failed_logins_do_not_reset_the_limits_of_keys(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """Failures of many addresses fill their table, but a client does not lose its own entry."""
    key_file = tmp_path / "keys.toml"
    key_file.write_text('[alice]\nkey = "first"\nrequests_per_minute = 0.001\n')
    options = ServerOptions(
        models=(("plain", model_dirs["plain"]),),
        settings=ServeSettings(),
        device="cpu",
        key_file=key_file,
        shared_directory=tmp_path,
    )
    process = ServerProcess(options, nullcontext, log=lambda _: None)
    assert process._keys is not None
    assert process._login_table is not None
    key = process._keys.find("POST", ALICE)
    assert key is not None
    assert key.requests is not None
    assert key.requests.take(1) == 0
    # Later than the entry of the key, which would otherwise be the newest one.
    logins = FailedLogins(lambda: time.monotonic() + 60, process._login_table)
    for number in range(60_000):
        logins.record(f"10.0.{number // 256}.{number % 256}")
    assert key.requests.take(1) > 0


def test_limits_of_a_key_give_429(
    models: list[ServedModel], caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond its requests or tokens, a key gets 429 and Retry-After; other keys are not affected.

    The log names the key.
    """
    keys = {
        "alice": KeySettings(key="first", requests_per_minute=0.001),
        "bob": KeySettings(key="second", tokens_per_minute=0.001),
        "carol": KeySettings(key="third"),
    }
    with (
        caplog.at_level(logging.INFO, "bertsmith.serve"),
        run_server(models[:1], keys=KeyRing(keys)) as server,
    ):
        body = {"inputs": "a hammer"}
        for key, limit in (("first", "requests per minute"), ("second", "tokens per minute")):
            assert server.post("/embed", body, headers=bearer(key)).status_code == 200
            response = server.post("/embed", body, headers=bearer(key))
            assert response.status_code == 429
            assert int(response.headers["retry-after"]) > 60
            assert limit in response.json()["error"]["message"]
            # Health probes do not count.
            assert httpx.get(f"{server.url}/health", headers=bearer(key)).status_code == 200
        assert server.post("/embed", body, headers=bearer("third")).status_code == 200
        wait_until(lambda: '"key":"carol"' in caplog.text)
    assert '"key":"alice"' in caplog.text
    assert "first" not in caplog.text


def test_failures_of_an_address_delay_its_answers() -> None:
    """The fourth failure is delayed, each later one twice as long, until failures stop."""
    clock = FakeClock()
    logins = FailedLogins(clock)
    delays = [logins.record("a") for _ in range(12)]
    assert delays == [0, 0, 0, 0.25, 0.5, 1, 2, 4, 8, 8, 8, 8]
    assert logins.record("b") == 0
    clock.now = FailedLogins.FORGET_SECONDS + 1
    assert logins.record("a") == 0


def test_failed_logins_use_bounded_memory() -> None:
    """Only the addresses that failed last are remembered."""
    logins = FailedLogins(FakeClock(), LocalTable(max_entries=2))
    for address in "aaabbbc":
        logins.record(address)
    assert logins.record("b") > 0
    assert logins.record("a") == 0


def test_wrong_keys_are_delayed_but_not_the_right_one(models: list[ServedModel]) -> None:
    """The answer to a wrong key waits; requests without a key and with the right key do not."""
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    keys = KeyRing({"alice": KeySettings(key="first")})
    with run_server(models[:1], keys=keys, sleep=sleep) as server:
        for _ in range(5):
            response = server.post("/embed", {"inputs": "a"}, headers=bearer("wrong"))
            assert response.status_code == 401
        assert delays == [0, 0, 0, 0.25, 0.5]
        assert server.post("/embed", {"inputs": "a"}).status_code == 401
        assert server.post("/embed", {"inputs": "a"}, headers=bearer("first")).status_code == 200
        assert len(delays) == 5
