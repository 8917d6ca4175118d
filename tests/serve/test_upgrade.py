"""Requests with the header Upgrade: h2c, which Java's HttpClient and ``curl --http2`` send."""

import json
import socket
import time

import pytest

from tests.serve.model_pause import TIMEOUT
from tests.serve.model_server import RunningServer

UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAQAAP\r\n"
BODY = json.dumps({"inputs": "a hammer"}).encode()
HEADER = (
    b"POST /embed HTTP/1.1\r\nHost: x\r\n%sContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n"
)


def read_response(connection: socket.socket) -> tuple[int, bytes]:
    """Return the status and the body of a response with Content-Length."""
    content = b""
    while b"\r\n\r\n" not in content:
        content += connection.recv(65536)
    head, _, body = content.partition(b"\r\n\r\n")
    fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
    while len(body) < int(fields[b"content-length"]):
        body += connection.recv(65536)
    return int(head.split()[1]), body


@pytest.mark.parametrize("size", [1000, len(HEADER % (UPGRADE, 99)), 7])
def test_upgrade_is_ignored(server: RunningServer, size: int) -> None:
    """The body arrives with the header or later, and the connection can be used again.

    The request is sent in segments of ``size`` bytes.
    """
    request = HEADER % (UPGRADE, len(BODY)) + BODY
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        results = []
        for _ in range(2):
            for start in range(0, len(request), size):
                connection.sendall(request[start : start + size])
                time.sleep(0.01)
            results.append(read_response(connection))
        connection.sendall(HEADER % (b"", len(BODY)) + BODY)
        results.append(read_response(connection))
    assert [status for status, _ in results] == [200, 200, 200]
    assert len({body for _, body in results}) == 1


def test_pipelined_upgrades_are_ignored(server: RunningServer) -> None:
    """Several requests in one segment, with and without a body, are all answered."""
    get = b"GET /health HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"\r\n"
    chunked = (
        b"POST /embed HTTP/1.1\r\nHost: x\r\n" + UPGRADE + b"Content-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
    )
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as connection:
        for request in (get, chunked, get):
            connection.sendall(request)
            assert read_response(connection)[0] == 200
        connection.sendall(get + chunked + b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n")
        content = b""
        while chunk := connection.recv(65536):
            content += chunk
    assert content.count(b"HTTP/1.1 200 OK") == 3
    assert content.endswith(b'{"status":"ok"}')


def test_connect_gets_400(server: RunningServer) -> None:
    """CONNECT asks for a tunnel, which the server does not provide."""
    with socket.create_connection(("127.0.0.1", server.port), TIMEOUT) as connection:
        connection.sendall(b"CONNECT a:80 HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
