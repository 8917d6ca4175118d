"""Authentication by API key, and CORS."""

import socket
from typing import Any

import httpx
import pytest

from bertsmith.serve.models import ServedModel
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_pause import TIMEOUT, paused_model
from tests.serve.model_server import RunningServer, run_server

ORIGIN = "http://page.example"
#: Headers of a CORS preflight request.
PREFLIGHT = {
    "Origin": ORIGIN, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}  # fmt: skip


def test_requests_without_the_api_key_get_401(models: list[ServedModel]) -> None:
    """A missing or wrong key is rejected, except for /health."""
    with run_server(models[:1], key="open sesame") as server:
        assert server.post("/embed", {"inputs": "a"}).status_code == 401
        for value in ("Bearer open", "open sesame", "Bearer open sesame!", "Basic b3Blbg=="):
            response = server.post("/embed", {"inputs": "a"}, headers={"Authorization": value})
            assert response.status_code == 401
            assert "Authorization: Bearer KEY" in response.json()["error"]["message"]
        headers = {"Authorization": "Bearer open sesame"}
        assert server.post("/embed", {"inputs": "a"}, headers=headers).status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert httpx.get(f"{server.url}/models").status_code == 401
        # Basic authentication is only accepted with the web page.
        assert httpx.get(f"{server.url}/models", auth=("me", "open sesame")).status_code == 401


def test_cors_headers_are_sent_to_allowed_origins_only(
    server: RunningServer, models: list[ServedModel]
) -> None:
    """Other sites get CORS headers only if their origin is allowed."""
    headers = {"Origin": ORIGIN}
    response = server.post("/embed", {"inputs": "a"}, headers=headers)
    assert "access-control-allow-origin" not in response.headers
    with run_server(models[:1], origins=[ORIGIN]) as cors_server:
        response = cors_server.post("/embed", {"inputs": "a"}, headers=headers)
        assert response.headers["access-control-allow-origin"] == ORIGIN


def test_cors_preflight_needs_no_api_key(models: list[ServedModel]) -> None:
    """Browsers send preflight requests without the key; all other requests need it."""
    origin = {"Origin": ORIGIN}
    with run_server(models[:1], key="open", origins=[ORIGIN]) as server:
        url = f"{server.url}/embed"
        response = httpx.options(url, headers=PREFLIGHT)
        assert response.status_code == 200
        assert response.headers["access-control-allow-origin"] == ORIGIN
        assert httpx.options(url, headers=origin).status_code == 401
        assert server.post("/embed", {"inputs": "a"}, headers=origin).status_code == 401
        headers = origin | {"Authorization": "Bearer open"}
        assert server.post("/embed", {"inputs": "a"}, headers=headers).status_code == 200
    with run_server(models[:1], key="open") as server:
        assert httpx.options(f"{server.url}/embed", headers=PREFLIGHT).status_code == 401


@pytest.mark.parametrize(
    ("settings", "key", "headers", "content", "status"),
    [
        ({}, "open", {}, b"{}", 401),
        ({"max_body_bytes": 10}, None, {}, b"x" * 11, 413),
        ({"body_timeout_seconds": 0.1}, None, {"Content-Length": "50"}, b"{", 408),
        ({"max_concurrent_requests": 1}, None, {}, b"{}", 429),
    ],
)
@pytest.mark.parametrize("origin", [ORIGIN, "*"])
def test_rejections_have_cors_headers(
    models: list[ServedModel],
    origin: str,
    settings: Any,
    key: str | None,
    headers: dict[str, str],
    content: bytes,
    status: int,
) -> None:
    """Without CORS headers a browser would hide the error from the script."""
    fields = {"Origin": ORIGIN, "Host": "x", "Content-Length": str(len(content)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    limits = ServeSettings(**settings)
    with (
        run_server(models[:1], limits, key=key, origins=[origin]) as server,
        paused_model() as pause,
        socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as first,
        socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as second,
    ):
        if status == 429:
            # The first request is computed while the second one arrives.
            body = b'{"inputs": "a"}'
            length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            first.sendall(f"POST /embed HTTP/1.1\r\n{length}".encode() + body)
            assert pause.started.wait(TIMEOUT)
        second.sendall(f"POST /embed HTTP/1.1\r\n{head}\r\n".encode() + content)
        response = second.recv(65536).decode()
    assert response.startswith(f"HTTP/1.1 {status} ")
    assert f"access-control-allow-origin: {origin}\r\n" in response


def test_internal_errors_have_cors_headers(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 500 response has each CORS header once, like a 200 response."""
    with run_server(models[:1], origins=[ORIGIN]) as server:
        for is_broken in (False, True):
            if is_broken:
                monkeypatch.setattr("bertsmith.serve.embeddings.submit_embeddings", None)
            response = server.post("/embed", {"inputs": "a"}, headers={"Origin": ORIGIN})
            assert response.status_code == (500 if is_broken else 200)
            assert response.headers.get_list("access-control-allow-origin") == [ORIGIN]
            assert "Origin" in response.headers["vary"]


@pytest.mark.parametrize("host", ["127.0.0.1", "bertsmith.example"])
def test_web_page_has_the_same_cors_rules(models: list[ServedModel], host: str) -> None:
    """Other origins can read neither the page nor an endpoint, unless they are allowed."""
    headers = {"Host": host, "Origin": ORIGIN}
    paths = ("/", "/models", "/openapi.json")
    with run_server(models[:1], has_page=True) as server:
        for path in paths:
            for response in (
                httpx.get(server.url + path, headers=headers),
                httpx.options(server.url + path, headers=PREFLIGHT | headers),
            ):
                cors_headers = [
                    name for name in response.headers if name.startswith("access-control-allow")
                ]
                assert cors_headers == [], path
        assert httpx.get(server.url, headers={"Host": host}).status_code == 200
    with run_server(models[:1], has_page=True, origins=[ORIGIN]) as server:
        for path in paths:
            response = httpx.get(server.url + path, headers=headers)
            assert response.headers["access-control-allow-origin"] == ORIGIN
