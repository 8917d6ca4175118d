"""Tokenize the texts of requests that arrive at the same time in one call.

A call of the tokenizer releases the GIL. Taking it back while a model thread uses it costs more
than tokenizing a short text.
"""

import asyncio
import itertools
from collections import deque
from typing import Final, NamedTuple

from bertsmith.use.embed import Embedder

#: Characters that are tokenized on the event loop without interruption.
MAX_CHARACTERS: Final = 10_000


class _Request(NamedTuple):
    """Texts to tokenize, and the future of their token ids."""

    embedder: Embedder
    texts: list[str]
    future: asyncio.Future[list[list[int]]]


class TextTokenizer:
    """Tokenizes the texts of requests on the event loop; not thread-safe."""

    def __init__(self) -> None:
        self._requests: deque[_Request] = deque()

    async def encode(self, embedder: Embedder, texts: list[str]) -> list[list[int]]:
        """Return the result of ``embedder.encode_texts``.

        Args:
            embedder: the embedder; requests with the same one are tokenized in one call.
            texts: texts with at most ``MAX_CHARACTERS`` characters.
        """
        loop = asyncio.get_running_loop()
        if not self._requests:
            # The requests of other connections run before the callback.
            loop.call_soon(self._encode_requests)
        request = _Request(embedder, texts, loop.create_future())
        self._requests.append(request)
        return await request.future

    def _encode_requests(self) -> None:
        """Tokenize the texts of waiting requests with the same embedder, up to the limit."""
        embedder = self._requests[0].embedder
        requests: list[_Request] = []
        num_characters = 0
        while self._requests and self._requests[0].embedder is embedder:
            num_characters += sum(map(len, self._requests[0].texts))
            if requests and num_characters > MAX_CHARACTERS:
                break
            requests.append(self._requests.popleft())
        if self._requests:
            asyncio.get_running_loop().call_soon(self._encode_requests)
        try:
            texts = [text for request in requests for text in request.texts]
            encoded = iter(embedder.encode_texts(texts))
        except Exception as error:  # noqa: BLE001 - forwarded to the requests
            for request in requests:
                if not request.future.done():
                    request.future.set_exception(error)
            return
        for request in requests:
            token_ids = list(itertools.islice(encoded, len(request.texts)))
            # The future of a cancelled request is done.
            if not request.future.done():
                request.future.set_result(token_ids)
