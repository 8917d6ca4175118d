"""Run a server with small random models in a thread of the test."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from bertsmith.bundle import TaskKind
from bertsmith.model.config import ModelConfig
from bertsmith.serve.app import create_app
from bertsmith.serve.keys import KeyRing, KeySettings
from bertsmith.serve.models import ServedModel
from bertsmith.serve.server import create_config, create_server
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.sockets import bind_socket
from bertsmith.text.wordpiece import Tokenizer

SENTENCES = [
    "The forge stood where the two roads met, and the smith worked there until dark.",
    "Every hammer on the wall had its own name, its own weight, and its own sound.",
    "When the iron was white he lifted it, turned it once, and struck.",
    "A boy from the village carried water to the smith and asked many questions.",
    "Some questions had answers; others were answered by the hammer alone.",
]
#: Kind and labels of the head of each fine-tuned model, by the model's name.
HEADS: dict[str, tuple[TaskKind, tuple[str, ...]]] = {
    "mood": ("single", ("bad", "good")),
    "topics": ("multi", ("iron", "water", "words")),
    "grade": ("regression", ()),
    "names": ("entities", ("O", "B-PER", "I-PER", "B-LOC")),
    "speech": ("tags", ("NOUN", "VERB", "OTHER")),
    "answers": ("span", ()),
    "endings": ("choice", ()),
}


def model_config(tokenizer: Tokenizer) -> ModelConfig:
    """Return the configuration of a small model with two layers."""
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        layers=2,
        width=26,
        heads=2,
        feed_forward=37,
        max_positions=61,
        init_range=0.3,
    )


class RunningServer:
    """A server in a thread, and an HTTP client for it.

    Attributes:
        server: the server.
        url: URL of the server, without a slash at its end.
        port: port that the server listens on.
    """

    def __init__(self, server: uvicorn.Server, url: str) -> None:
        self.server = server
        self.url = url
        self.port = int(url.rpartition(":")[2])
        # Shared by all requests, because creating a client takes longer than a request.
        self._client = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send a POST request with a JSON body."""
        return self._client.post(self.url + path, json=body, **options)

    def close(self) -> None:
        """Close the client's connections."""
        self._client.close()


def find_fastapi_app(app: Any) -> FastAPI:
    """Return the FastAPI app inside the middleware of a server."""
    while not isinstance(app, FastAPI):
        app = app._app
    return app


def get_middleware(server: RunningServer) -> Any:
    """Return the RequestMiddleware of a server."""
    return server.server.config.app


@contextmanager
def run_server(
    models: list[ServedModel],
    settings: ServeSettings | None = None,
    *,
    key: str | None = None,
    uvicorn_options: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[RunningServer]:
    """Serve models on a free loopback port.

    Args:
        models: the models.
        settings: the limits of the server.
        key: the only API key; None for no authentication.
        uvicorn_options: arguments of ``uvicorn.Config``.
        options: arguments of ``create_app``.
    """
    settings = settings or ServeSettings()
    if key is not None:
        has_page = options.get("has_page", False)
        options["keys"] = KeyRing({"default": KeySettings(key=key)}, has_page=has_page)
    app = create_app(models, settings, **options)
    server = create_server(app, create_config(settings, **(uvicorn_options or {})))
    sock = bind_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
    try:
        running = RunningServer(server, f"http://127.0.0.1:{sock.getsockname()[1]}")
        yield running
        running.close()
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


def send_request_without_reading(server: RunningServer) -> socket.socket:
    """Request a response larger than the socket buffers; return the connection."""
    body = {"inputs": ["the smith worked " * 30] * 250, "layer": [0, 1, 2]}
    content = json.dumps(body).encode()
    connection = socket.socket()
    connection.settimeout(60)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    head = (
        "POST /embed_all HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    assert connection.recv(12) == b"HTTP/1.1 200"
    return connection


async def wait_until(condition: Callable[[], bool]) -> None:
    """Run the event loop until a condition is true; TimeoutError after 30 seconds."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0)
