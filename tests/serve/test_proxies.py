"""X-Forwarded-For of trusted proxies."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from bertsmith.serve.models import ServedModel
from bertsmith.serve.proxies import add_mapped_addresses, keep_last_forwarded_address
from tests.serve.model_pause import wait_until
from tests.serve.model_server import run_server


def read_client(addresses: list[str], peer: str, forwarded_for: bytes) -> str:
    """Return the client's address that uvicorn finds for a request."""
    clients: list[str] = []

    async def app(scope: Any, *_: Any) -> None:
        clients.append(scope["client"][0])

    scope: Any = {
        "type": "http",
        "scheme": "http",
        "client": (peer, 1234),
        "headers": [(b"x-forwarded-for", forwarded_for)],
    }
    middleware = ProxyHeadersMiddleware(app, add_mapped_addresses(addresses))
    asyncio.run(middleware(scope, None, None))  # type: ignore[arg-type]
    return clients[0]


@pytest.mark.parametrize(
    ("trusted", "peer", "is_trusted"),
    [
        ("10.0.0.5", "::ffff:10.0.0.5", True),
        ("10.0.0.5", "10.0.0.5", True),
        ("10.0.0.5", "::ffff:10.0.0.6", False),
        ("10.0.0.0/8", "::ffff:10.9.9.9", True),
        ("10.0.0.0/8", "::ffff:11.0.0.1", False),
        ("fd00::/8", "fd00::1", True),
        ("fd00::1", "::1", False),
    ],
)
def test_ipv4_proxies_are_trusted_on_an_ipv6_socket(
    trusted: str, peer: str, is_trusted: bool
) -> None:
    """With --host ::, the address of an IPv4 proxy is reported as ::ffff:ADDRESS."""
    assert read_client([trusted], peer, b"192.0.2.7") == ("192.0.2.7" if is_trusted else peer)


def test_last_address_is_the_one_of_the_proxy() -> None:
    """The last address of the last field remains; requests without the field do not change."""
    headers = [
        (b"x-forwarded-for", b"1.1.1.1, 2.2.2.2"),
        (b"host", b"x"),
        (b"x-forwarded-for", b"3.3.3.3 , 4.4.4.4"),
    ]
    keep_last_forwarded_address(headers)
    assert headers == [(b"host", b"x"), (b"x-forwarded-for", b"4.4.4.4")]
    keep_last_forwarded_address(headers)
    assert headers[1:] == [(b"x-forwarded-for", b"4.4.4.4")]
    headers = [(b"host", b"x")]
    keep_last_forwarded_address(headers)
    assert headers == [(b"host", b"x")]


def test_clients_cannot_choose_their_address(
    models: list[ServedModel], caplog: pytest.LogCaptureFixture
) -> None:
    """With '*', the client is the last address, which the proxy has appended."""
    options = {"proxy_headers": True, "forwarded_allow_ips": add_mapped_addresses(["*"])}
    with (
        caplog.at_level(logging.INFO, "bertsmith.serve"),
        run_server(models[:1], uvicorn_options=options) as server,
    ):
        headers = {"X-Forwarded-For": "203.0.113.1, 192.0.2.7", "X-Forwarded-Proto": "https"}
        assert httpx.get(f"{server.url}/models", headers=headers).status_code == 200
        wait_until(lambda: "/models" in caplog.text)
    lines = [json.loads(record.message) for record in caplog.records if "/models" in record.message]
    assert [line["client"] for line in lines] == ["192.0.2.7"]
