"""Embedding endpoints, compatible with OpenAI's API and text-embeddings-inference."""

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
from bertsmith.serve.execution import (
    RequestExecutor,
    join_json_items,
    serialize_array,
    to_json_response,
)
from bertsmith.serve.limits import check_limit
from bertsmith.serve.routes import as_list
from bertsmith.serve.schemas import EmbedBody, OpenAiBody, SimilarityBody, VectorsBody
from bertsmith.serve.service import PendingEmbeddings
from bertsmith.use.embed import Floats
from bertsmith.use.vector_settings import VectorSettings

#: Largest request, in characters, that is tokenized on the event loop; larger ones are tokenized
#: in a thread, because they would delay other requests.
_MAX_INLINE_CHARACTERS = 10_000


class EmbeddingRoutes:
    """Embedding endpoints; each endpoint is a method.

    Attributes:
        router: the router of the endpoints.
    """

    def __init__(self, executor: RequestExecutor) -> None:
        self._executor = executor
        self._service = executor.service
        self._started_at = int(time.time())
        self.router = executor.create_router()
        self.router.post("/v1/embeddings")(self.create_openai_embeddings)
        self.router.get("/v1/models")(self.list_models)
        for path in ("embed", "embed_all", "similarity"):
            self.router.post(f"/{path}")(getattr(self, path))

    async def _compute_vectors(
        self,
        request: Request,
        model: str | None,
        texts: list[str],
        settings: VectorSettings,
        *,
        truncate: bool = True,
    ) -> tuple[PendingEmbeddings, list[Any]]:
        """Submit texts to the batcher; return the submission and, once computed, the vectors."""
        # ``submit`` must return only the future, so it stores the submission here.
        submitted: list[PendingEmbeddings] = []

        def submit(deadline: Deadline) -> Any:
            pending = self._service.submit_embeddings(
                model, texts, settings, deadline, truncate=truncate
            )
            submitted.append(pending)
            return pending.future

        is_large = sum(map(len, texts)) > _MAX_INLINE_CHARACTERS
        vectors = await self._executor.await_future(request, submit, in_thread=is_large)
        return submitted[0], vectors

    async def create_openai_embeddings(self, request: Request, body: OpenAiBody) -> Response:
        """Embed texts (OpenAI's API): vectors as lists of floats, or float32 bytes in base64.

        Vectors have length 1, unless the model is a sentence-transformers model that does not
        normalize.
        """
        if body.dimensions is not None:
            raise InputError(
                "dimensions: this model's vectors cannot be shortened; leave dimensions out"
            )
        texts = as_list(body.input)
        embedder = self._service.find_model(body.model, "embed").embedder
        # OpenAI's vectors have length 1, and its clients may use dot products as cosines. The
        # files of a sentence-transformers model say whether its vectors are normalized.
        settings = VectorSettings(normalize=True if embedder.pooling_config is None else None)
        pending, vectors = await self._compute_vectors(request, body.model, texts, settings)

        def encode() -> bytes:
            items = (
                orjson.dumps({"object": "embedding", "index": index, "embedding": vector})
                for index, vector in enumerate(_encode_vectors(vectors, body.encoding_format))
            )
            usage = {"prompt_tokens": pending.num_tokens, "total_tokens": pending.num_tokens}
            data = orjson.Fragment(join_json_items(items))
            return orjson.dumps(
                {"object": "list", "data": data, "model": pending.model_name, "usage": usage}
            )

        return await self._executor.encode_response(encode, _count_elements(vectors))

    async def list_models(self) -> Response:
        """List the models (OpenAI's API)."""
        models = [
            {"id": name, "object": "model", "created": self._started_at, "owned_by": "bertsmith"}
            for name in self._service.models
        ]
        return to_json_response({"object": "list", "data": models})

    async def embed(self, request: Request, body: EmbedBody) -> Response:
        """Embed texts: one vector per text."""
        settings = body.to_vector_settings(pooling=body.pooling, normalize=body.normalize)
        texts = as_list(body.inputs)
        _, vectors = await self._compute_vectors(
            request, body.model, texts, settings, truncate=body.truncate
        )
        return await self._create_vectors_response(vectors)

    async def embed_all(self, request: Request, body: VectorsBody) -> Response:
        """Embed tokens: one vector per token of each text."""
        texts = as_list(body.inputs)
        settings = body.to_vector_settings()
        results = await self._executor.run_in_thread(
            request,
            lambda deadline: self._service.embed_tokens(body.model, texts, settings, deadline),
        )
        if not body.truncate and any(result.is_truncated for result in results):
            raise RequestTooLargeError(
                "a text is longer than the model's maximum; shorten it, or send truncate: true"
            )
        return await self._create_vectors_response([result.vectors for result in results])

    async def similarity(self, request: Request, body: SimilarityBody) -> Response:
        """Compute cosine similarities: of one sentence to others, or of all pairs of texts."""
        if isinstance(body.inputs, list):
            texts = body.inputs
            limit = self._service.settings.max_vector_elements
            check_limit("similarities", len(texts) ** 2, limit)
        else:
            texts = [body.inputs.source_sentence, *body.inputs.sentences]
        _, vectors = await self._compute_vectors(
            request, body.model, texts, VectorSettings(normalize=True)
        )
        matrix = np.stack(vectors)
        if not isinstance(body.inputs, list):
            return to_json_response(matrix[1:] @ matrix[0])
        return await self._executor.encode_response(
            lambda: serialize_array(matrix @ matrix.T), len(texts) ** 2
        )

    async def _create_vectors_response(self, vectors: Sequence[Floats]) -> Response:
        """Return a JSON list of vectors, or of matrices."""
        return await self._executor.encode_response(
            lambda: join_json_items(map(serialize_array, vectors)), _count_elements(vectors)
        )


def _count_elements(vectors: Sequence[Floats]) -> int:
    """Return the number of elements of all arrays together."""
    return sum(vector.size for vector in vectors)


def _encode_vectors(vectors: Sequence[Floats], encoding_format: str) -> Iterator[Any]:
    """Yield each vector as JSON numbers ("float"), or as little-endian float32 in base64."""
    for vector in vectors:
        if encoding_format == "float":
            yield orjson.Fragment(serialize_array(vector))
        else:
            yield base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
