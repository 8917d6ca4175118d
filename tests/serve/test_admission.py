"""Whom a server answers: clients with the key, and pages of other sites that were asked for."""

import socket
from typing import Any

import httpx
import pytest

from bertsmith.errors import SettingsError
from bertsmith.serve.auth import ApiKey
from bertsmith.serve.models import ServedModel
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_pause import TIMEOUT, paused_model
from tests.serve.model_server import RunningServer, run_server

ELSEWHERE = "http://page.example"
#: What a browser asks before it sends another site's question.
FIRST = {
    "Origin": ELSEWHERE, "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization",
}  # fmt: skip


def test_a_key(models: list[ServedModel]) -> None:
    """Without it 401, but for what tells that the server lives; nobody else's key will do."""
    with run_server(models[:1], key="open sesame") as own:
        assert own.post("/embed", {"inputs": "a"}).status_code == 401
        for header in ("Bearer open", "open sesame", "Bearer open sesame!", "Basic b3Blbg=="):
            found = own.post("/embed", {"inputs": "a"}, headers={"Authorization": header})
            assert found.status_code == 401
            assert "Authorization: Bearer KEY" in found.json()["error"]["message"]
        given = {"Authorization": "Bearer open sesame"}
        assert own.post("/embed", {"inputs": "a"}, headers=given).status_code == 200
        assert httpx.get(f"{own.url}/health").status_code == 200
        assert httpx.get(f"{own.url}/models").status_code == 401
        # A password is for the page, of which there is none here.
        assert httpx.get(f"{own.url}/models", auth=("me", "open sesame")).status_code == 401


def test_other_origins_are_kept_out_unless_asked_for(
    running: RunningServer, models: list[ServedModel]
) -> None:
    """No CORS header of its own accord; with --cors that origin's."""
    asked = {"Origin": "http://page.example"}
    found = running.post("/embed", {"inputs": "a"}, headers=asked)
    assert "access-control-allow-origin" not in found.headers
    with run_server(models[:1], origins=["http://page.example"]) as own:
        found = own.post("/embed", {"inputs": "a"}, headers=asked)
        assert found.headers["access-control-allow-origin"] == "http://page.example"


def test_a_page_elsewhere_asks_first_and_then_with_the_key(models: list[ServedModel]) -> None:
    """Browsers send no key where they ask whether they may; nothing else goes without it."""
    asked = {"Origin": "http://page.example"}
    first = asked | {"Access-Control-Request-Method": "POST",
                     "Access-Control-Request-Headers": "authorization"}  # fmt: skip
    with run_server(models[:1], key="open", origins=["http://page.example"]) as own:
        way = f"{own.url}/embed"
        found = httpx.options(way, headers=first)
        assert found.status_code == 200
        assert found.headers["access-control-allow-origin"] == "http://page.example"
        assert httpx.options(way, headers=asked).status_code == 401
        assert own.post("/embed", {"inputs": "a"}, headers=asked).status_code == 401
        given = asked | {"Authorization": "Bearer open"}
        assert own.post("/embed", {"inputs": "a"}, headers=given).status_code == 200
    with run_server(models[:1], key="open") as own:
        assert httpx.options(f"{own.url}/embed", headers=first).status_code == 401


@pytest.mark.parametrize(
    ("settings", "key", "headers", "content", "status"),
    [
        ({}, "open", {}, b"{}", 401),
        ({"body_bytes": 10}, None, {}, b"x" * 11, 413),
        ({"body_seconds": 0.1}, None, {"Content-Length": "50"}, b"{", 408),
        ({"requests": 1}, None, {}, b"{}", 429),
    ],
)
@pytest.mark.parametrize("origin", [ELSEWHERE, "*"])
def test_refusals_can_be_read_by_a_page_elsewhere(
    models: list[ServedModel], origin: str, settings: Any, key: str | None, headers: dict[str, str],
    content: bytes, status: int,
) -> None:  # fmt: skip
    """Without CORS headers a browser would hide from the page why it was refused."""
    sent = {"Origin": ELSEWHERE, "Host": "x", "Content-Length": str(len(content)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
    limits = ServeSettings(**settings)
    with (
        run_server(models[:1], limits, key=key, origins=[origin]) as server,
        paused_model() as hold,
    ):
        connect = ("127.0.0.1", server.port), TIMEOUT
        with socket.create_connection(*connect) as first, socket.create_connection(*connect) as own:
            if status == 429:
                body = b'{"inputs": "a"}'
                length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                first.sendall(f"POST /embed HTTP/1.1\r\n{length}".encode() + body)
                assert hold.begun.wait(TIMEOUT)
            own.sendall(f"POST /embed HTTP/1.1\r\n{head}\r\n".encode() + content)
            found = own.recv(65536).decode()
    assert found.startswith(f"HTTP/1.1 {status} ")
    assert f"access-control-allow-origin: {origin}\r\n" in found


def test_a_failure_inside_can_be_read_by_a_page_elsewhere(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """500 has CORS headers, too, and only one of each."""
    with run_server(models[:1], origins=[ELSEWHERE]) as server:
        for broken in (False, True):
            if broken:
                monkeypatch.setattr("bertsmith.serve.service.Service.embedding", None)
            found = server.post("/embed", {"inputs": "a"}, headers={"Origin": ELSEWHERE})
            assert found.status_code == (500 if broken else 200)
            assert found.headers.get_list("access-control-allow-origin") == [ELSEWHERE]
            assert "Origin" in found.headers["vary"]


@pytest.mark.parametrize("name", ["127.0.0.1", "bertsmith.example"])
def test_nor_may_other_sites_read_the_page(models: list[ServedModel], name: str) -> None:
    """Gradio by itself lets every origin in, and this one's cookies, where the host has a name."""
    pytest.importorskip("gradio", reason="gradio, of the extra serve, is not installed")
    from bertsmith.serve.page import mount

    asked = {"Host": name, "Origin": ELSEWHERE}
    ways = "/", "/config", "/gradio_api/info"
    with run_server(models[:1], page=mount) as own:
        for way in ways:
            for found in (httpx.get(own.url + way, headers=asked),
                          httpx.options(own.url + way, headers=FIRST | asked)):  # fmt: skip
                told = [one for one in found.headers if one.startswith("access-control-allow")]
                assert "access-control-allow-origin" not in told, (way, told)
                assert "access-control-allow-credentials" not in told, (way, told)
        assert httpx.get(own.url, headers={"Host": name}).status_code == 200
    with run_server(models[:1], page=mount, origins=[ELSEWHERE]) as own:
        for way in ways:
            found = httpx.get(own.url + way, headers=asked)
            assert found.headers["access-control-allow-origin"] == ELSEWHERE


def test_an_empty_key_is_none() -> None:
    """It would let in whoever sends nothing."""
    with pytest.raises(SettingsError, match="the key is empty"):
        ApiKey("")
