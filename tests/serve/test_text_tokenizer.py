"""Tokenizing of the texts of concurrent requests in one call."""

import asyncio
from pathlib import Path

import pytest

from bertsmith.errors import InputError
from bertsmith.serve.text_tokenizer import MAX_CHARACTERS, TextTokenizer
from bertsmith.use.embed import Embedder
from tests.serve.model_server import SENTENCES


class RecordingEmbedder(Embedder):
    """An embedder that records the texts of each call of the tokenizer."""

    calls: list[list[str]]

    def encode_texts(self, texts: object) -> list[list[int]]:
        """Record the texts and tokenize them."""
        assert isinstance(texts, list)
        self.calls.append(texts)
        return super().encode_texts(texts)


@pytest.fixture
def embedder(model_dirs: dict[str, Path]) -> RecordingEmbedder:
    """An embedder without recorded calls."""
    embedder = RecordingEmbedder.load(model_dirs["plain"])
    embedder.calls = []
    return embedder


def encode_concurrently(
    requests: list[tuple[Embedder, list[str]]],
) -> list[list[list[int]] | BaseException]:
    """Return the token ids, or the error, of requests that arrive at the same time."""

    async def run() -> list[list[list[int]] | BaseException]:
        tokenizer = TextTokenizer()
        tasks = (tokenizer.encode(embedder, texts) for embedder, texts in requests)
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(run())


def test_concurrent_requests_are_tokenized_in_one_call(embedder: RecordingEmbedder) -> None:
    """Each request gets the token ids of its texts."""
    requests = [SENTENCES[:1], SENTENCES[1:3], SENTENCES[3:]]
    results = encode_concurrently([(embedder, texts) for texts in requests])
    assert embedder.calls == [SENTENCES]
    assert results == [[embedder.encode_texts([text])[0] for text in texts] for texts in requests]


def test_calls_have_a_limited_size(embedder: RecordingEmbedder) -> None:
    """Other requests of the event loop run between two calls with the maximum of characters."""
    texts = ["a" * (MAX_CHARACTERS // 2)] * 5
    results = encode_concurrently([(embedder, [text]) for text in texts])
    assert [len(call) for call in embedder.calls] == [2, 2, 1]
    assert len(results) == 5


def test_an_error_reaches_the_requests_of_its_call(
    embedder: RecordingEmbedder, model_dirs: dict[str, Path]
) -> None:
    """Texts for another embedder are tokenized separately, and are not affected."""
    other = Embedder.load(model_dirs["plain"])
    failed, encoded = encode_concurrently([(embedder, ["\ud800"]), (other, ["the smith"])])
    assert isinstance(failed, InputError)
    assert encoded == [other.encode_texts(["the smith"])[0]]
