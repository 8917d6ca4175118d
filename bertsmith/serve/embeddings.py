"""The endpoints of vectors, as OpenAI's clients and text-embeddings-inference have them."""

import base64
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import Request
from starlette.responses import Response

from bertsmith.errors import InputError
from bertsmith.serve.deadline import Deadline, RequestTooLargeError
from bertsmith.serve.execution import RequestExecutor, list_json, numbers_json, to_json_response
from bertsmith.serve.routes import as_list
from bertsmith.serve.schemas import EmbedBody, OpenAiBody, SimilarityBody, VectorsBody
from bertsmith.serve.service import PendingEmbeddings
from bertsmith.use.embed import Floats
from bertsmith.use.vector_settings import VectorSettings

#: Characters of a request that are tokenized at once; what is longer would hold up others, and is
#: tokenized in a thread.
_SHORT = 10_000


class EmbeddingRoutes:
    """The endpoints, each a method; ``router`` has them all."""

    def __init__(self, asking: RequestExecutor) -> None:
        self._asking, self._service = asking, asking.service
        self._began = int(time.time())
        self.router = asking.create_router()
        self.router.post("/v1/embeddings")(self.openai)
        self.router.get("/v1/models")(self.models)
        for path in ("embed", "embed_all", "similarity"):
            self.router.post(f"/{path}")(getattr(self, path))

    async def _vectors(
        self, request: Request, model: str | None, texts: list[str], settings: VectorSettings,
        *, truncate: bool = True,
    ) -> tuple[PendingEmbeddings, list[Any]]:  # fmt: skip
        told: list[PendingEmbeddings] = []

        def submit(patience: Deadline) -> Any:
            told.append(
                self._service.embedding(model, texts, settings, patience, truncate=truncate)
            )
            return told[0].future

        found = await self._asking.await_future(
            request, submit, in_thread=sum(map(len, texts)) > _SHORT
        )
        return told[0], found

    async def openai(self, request: Request, body: OpenAiBody) -> Response:
        """Embed texts for OpenAI's clients: floats, or their bytes in base64."""
        if body.dimensions is not None:
            raise InputError(
                "dimensions: this model's vectors cannot be shortened; leave dimensions out"
            )
        texts = as_list(body.input)
        embedding, vectors = await self._vectors(request, body.model, texts, VectorSettings())

        def encode() -> bytes:
            items = (
                orjson.dumps({"object": "embedding", "index": number, "embedding": vector})
                for number, vector in enumerate(_encoded(vectors, body.encoding_format))
            )
            usage = {"prompt_tokens": embedding.num_tokens, "total_tokens": embedding.num_tokens}
            data = orjson.Fragment(list_json(items))
            return orjson.dumps(
                {"object": "list", "data": data, "model": embedding.model, "usage": usage}
            )

        return await self._asking.encode_response(encode, _size(vectors))

    async def models(self) -> Response:
        """Tell the models for OpenAI's clients."""
        told = [{"id": name, "object": "model", "created": self._began, "owned_by": "bertsmith"}
                for name in self._service.models]  # fmt: skip
        return to_json_response({"object": "list", "data": told})

    async def embed(self, request: Request, body: EmbedBody) -> Response:
        """Embed texts: a list of vectors."""
        settings = body.vector_settings(pooling=body.pooling, normalize=body.normalize)
        texts = as_list(body.inputs)
        _, vectors = await self._vectors(
            request, body.model, texts, settings, truncate=body.truncate
        )
        return await self._asking.encode_response(
            lambda: list_json(map(numbers_json, vectors)), _size(vectors)
        )

    async def embed_all(self, request: Request, body: VectorsBody) -> Response:
        """Embed texts: for each a list of its tokens' vectors."""
        texts, settings = as_list(body.inputs), body.vector_settings()
        found = await self._asking.run_in_thread(
            request, lambda until: self._service.tokens(body.model, texts, settings, until)
        )
        if not body.truncate and any(own.cut_off for own in found):
            raise RequestTooLargeError("a text is too long; shorten it, or send truncate: true")
        vectors = [item.vectors for item in found]
        return await self._asking.encode_response(
            lambda: list_json(map(numbers_json, vectors)), _size(vectors)
        )

    async def similarity(self, request: Request, body: SimilarityBody) -> Response:
        """Tell the cosine of one sentence and each of several others."""
        asked = body.inputs
        texts = [asked.source_sentence, *asked.sentences]
        _, found = await self._vectors(request, body.model, texts, VectorSettings(normalize=True))
        return to_json_response(np.stack(found[1:]) @ found[0])


def _size(vectors: Sequence[Floats]) -> int:
    """Return how many numbers some arrays have together."""
    return sum(vector.size for vector in vectors)


def _encoded(vectors: Sequence[Floats], encoding: str) -> Iterator[Any]:
    """Yield each vector as the client wants it: JSON numbers, or base64 of float32."""
    for vector in vectors:
        if encoding == "float":
            yield orjson.Fragment(numbers_json(vector))
        else:
            yield base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
