"""Checks of the Host header, and security headers."""

from collections.abc import Iterator, Sequence

import httpx
import pytest

from bertsmith.errors import SettingsError
from bertsmith.serve.hosts import get_allowed_hosts
from bertsmith.serve.models import ServedModel
from bertsmith.serve.server import create_config
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_server import RunningServer, run_server


@pytest.fixture(scope="module")
def loopback_server(models: list[ServedModel]) -> Iterator[RunningServer]:
    """A server on 127.0.0.1 that also accepts a host name and all names of a domain."""
    names = get_allowed_hosts("127.0.0.1", "127.0.0.1", ["Bert.example.", "*.lab.example"])
    with run_server(models[:1], hosts=names) as server:
        yield server


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
def test_other_hosts_are_rejected(loopback_server: RunningServer, host: str, status: int) -> None:
    """Requests for a host name that is not allowed get 400 (DNS rebinding)."""
    response = httpx.get(f"{loopback_server.url}/models", headers={"Host": host})
    assert response.status_code == status
    if status == 400:
        assert "start the server with --allow-host NAME" in response.json()["error"]["message"]


def test_health_endpoints_accept_any_host(loopback_server: RunningServer) -> None:
    """Health probes of orchestrators send the IP address of a container as the host."""
    for path in ("/health", "/ready"):
        response = httpx.get(loopback_server.url + path, headers={"Host": "10.1.2.3"})
        assert response.status_code == 200


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
def test_allowed_hosts_by_address_and_option(
    host: str, address: str, names: Sequence[str], allowed: list[str] | None
) -> None:
    """By default, a loopback server accepts loopback names, and any other server accepts all."""
    hosts = get_allowed_hosts(host, address, names)
    if allowed is None:
        assert hosts is None
    else:
        assert hosts is not None
        assert set(hosts) == set(allowed)


@pytest.mark.parametrize("name", ["https://a.example", "a.example:8080", "", "a b", "a.*", "a/b"])
def test_invalid_host_name_is_an_error(name: str) -> None:
    """URLs, ports and wildcards within a name are rejected, and the error gives an example."""
    with pytest.raises(SettingsError, match=r"--allow-host is not a host name: .*without scheme"):
        get_allowed_hosts("127.0.0.1", "127.0.0.1", [name])


def test_forwarded_headers_are_ignored() -> None:
    """Clients cannot set their address or scheme with X-Forwarded headers."""
    assert not create_config(ServeSettings()).proxy_headers


def test_every_response_has_security_headers(server: RunningServer) -> None:
    """Responses, errors and pages forbid content sniffing, framing and loading of resources."""
    for path in ("/models", "/docs", "/metrics", "/nowhere", "/embed"):
        headers = httpx.get(server.url + path).headers
        assert headers["x-content-type-options"] == "nosniff", path
        assert headers["referrer-policy"] == "same-origin", path
        assert headers["x-frame-options"] == "DENY", path
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert "frame-ancestors 'none'" in headers["content-security-policy"], path
