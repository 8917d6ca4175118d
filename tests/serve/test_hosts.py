"""Host names that a server answers to, and security headers of every response."""

from collections.abc import Iterator, Sequence

import httpx
import pytest

from bertsmith.errors import SettingsError
from bertsmith.serve.hosts import allowed_hosts
from bertsmith.serve.models import ServedModel
from bertsmith.serve.server import create_config
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_server import RunningServer, run_server


@pytest.fixture(scope="module")
def loopback(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server on 127.0.0.1 that answers to one more name and a domain."""
    names = allowed_hosts("127.0.0.1", "127.0.0.1", ["Bert.example.", "*.lab.example"])
    with run_server(models[:1], hosts=names) as running:
        yield running


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8080", 200),
        ("LOCALHOST.", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8080", 200),
        ("[::1]", 200),
        ("bert.example", 200),
        ("BERT.example:443", 200),
        ("a.lab.example", 200),
        ("lab.example", 400),
        ("a.lab.example.evil.example", 400),
        ("evil.example", 400),
        ("localhost.evil.example:8080", 400),
        ("127.0.0.1.evil.example", 400),
        ("127.0.0.1@evil.example", 400),
        ("192.0.2.1", 400),
        ("", 400),
    ],
)
def test_only_allowed_hosts_are_answered(loopback: RunningServer, host: str, status: int) -> None:
    """A name that resolves to the machine but was not allowed gets no answer (DNS rebinding)."""
    response = httpx.get(f"{loopback.url}/models", headers={"Host": host})
    assert response.status_code == status
    if status == 400:
        assert "start the server with --allow-host NAME" in response.json()["error"]["message"]


def test_probes_need_no_host(loopback: RunningServer) -> None:
    """Orchestrators probe by an address of theirs."""
    for path in ("/health", "/ready"):
        assert httpx.get(loopback.url + path, headers={"Host": "10.1.2.3"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "address", "names", "allowed"),
    [
        ("127.0.0.1", "127.0.0.1", [], ["localhost", "127.0.0.1", "::1"]),
        ("::1", "::1", [], ["localhost", "127.0.0.1", "::1"]),
        ("my-machine", "127.0.1.1", [], ["localhost", "127.0.0.1", "::1", "my-machine",
                                         "127.0.1.1"]),
        ("127.0.0.1", "127.0.0.1", ["*"], None),
        ("0.0.0.0", "0.0.0.0", [], None),
        ("::", "::", [], None),
        ("192.0.2.1", "192.0.2.1", [], None),
        ("0.0.0.0", "0.0.0.0", ["a.example", "[2001:DB8::1]"],
         ["localhost", "127.0.0.1", "::1", "0.0.0.0", "a.example", "2001:db8::1"]),
    ],
)  # fmt: skip
def test_default_and_added_names(
    host: str, address: str, names: Sequence[str], allowed: list[str] | None
) -> None:
    """A loopback server answers to itself, a public one to all names; both to what is allowed."""
    result = allowed_hosts(host, address, names)
    assert (result if result is None else set(result)) == (allowed and set(allowed))


@pytest.mark.parametrize("name", ["https://a.example", "a.example:8080", "", "a b", "a.*", "a/b"])
def test_a_name_that_is_no_host_is_refused(name: str) -> None:
    """The error says what a name looks like."""
    with pytest.raises(SettingsError, match=r"--allow-host is not a host name: .*without scheme"):
        allowed_hosts("127.0.0.1", "127.0.0.1", [name])


def test_forwarded_headers_are_ignored() -> None:
    """No client can choose its address or scheme for the server."""
    assert not create_config(ServeSettings()).proxy_headers


def test_every_response_has_security_headers(running: RunningServer) -> None:
    """Errors, documents and answers alike: no sniffing, no frames, nothing loaded."""
    for path in ("/models", "/docs", "/metrics", "/nowhere", "/embed"):
        headers = httpx.get(running.url + path).headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["referrer-policy"] == "same-origin", path
        assert headers["x-frame-options"] == "DENY", path
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert "frame-ancestors 'none'" in headers["content-security-policy"], path
