"""Little random models of every kind, and a server of them on a port of its own.

It never tests.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import uvicorn

from bertsmith.bundle import TaskKind
from bertsmith.model.config import ModelConfig
from bertsmith.serve.app import create_app
from bertsmith.serve.models import ServedModel
from bertsmith.serve.server import bind_socket, create_config, create_server
from bertsmith.serve.settings import ServeSettings
from bertsmith.text.wordpiece import Tokenizer

TEXT = [
    "The forge stood where the two roads met, and the smith worked there until dark.",
    "Every hammer on the wall had its own name, its own weight, and its own sound.",
    "When the iron was white he lifted it, turned it once, and struck.",
    "A boy from the village carried water to the smith and asked many questions.",
    "Some questions had answers; others were answered by the hammer alone.",
]
#: Each kind of head, with its labels.
HEADS: dict[str, tuple[TaskKind, tuple[str, ...]]] = {
    "mood": ("single", ("bad", "good")),
    "topics": ("multi", ("iron", "water", "words")),
    "grade": ("regression", ()),
    "names": ("entities", ("O", "B-PER", "I-PER", "B-LOC")),
    "speech": ("tags", ("NOUN", "VERB", "OTHER")),
    "answers": ("span", ()),
    "endings": ("choice", ()),
}


def model_config(words: Tokenizer) -> ModelConfig:
    """Two layers of an odd width."""
    return ModelConfig(
        vocab_size=words.vocab_size, layers=2, width=26, heads=2, feed_forward=37,
        max_positions=61, init_range=0.3,
    )  # fmt: skip


class RunningServer:
    """A server in a thread of the test, and where it listens."""

    def __init__(self, own: uvicorn.Server, url: str) -> None:
        self.server, self.url = own, url
        self.port = int(url.rpartition(":")[2])
        # Kept: to make one costs more than a request.
        self._client = httpx.Client(timeout=60, limits=httpx.Limits(max_connections=None))

    def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        """Ask an endpoint."""
        return self._client.post(self.url + path, json=body, **more)

    def close(self) -> None:
        """Close the connections that are kept."""
        self._client.close()


@contextmanager
def run_server(
    models: list[ServedModel], settings: ServeSettings | None = None, **more: Any
) -> Iterator[RunningServer]:
    """Serve models on a free port of the loopback, until the block ends."""
    settings = settings or ServeSettings()
    app = create_app(models, settings, **more)
    own, at = create_server(app, create_config(settings)), bind_socket("127.0.0.1", 0)
    thread = threading.Thread(target=own.run, args=([at],), daemon=True)
    thread.start()
    until = time.monotonic() + 30
    while not own.started and time.monotonic() < until:
        time.sleep(0.01)
    try:
        found = RunningServer(own, f"http://127.0.0.1:{at.getsockname()[1]}")
        yield found
        found.close()
    finally:
        own.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let the event loop run until a condition holds; TimeoutError after half a minute."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the code under test has no event for it
            await asyncio.sleep(0)
