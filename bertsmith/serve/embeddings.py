"""Embedding endpoints, compatible with OpenAI's API and text-embeddings-inference."""

import base64
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import orjson
from fastapi import Request
from starlette.responses import Response

from bertsmith.errors import InputError
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.execution import (
    RequestExecutor,
    iter_json_pieces,
    serialize_array,
    to_json_response,
)
from bertsmith.serve.limits import check_limit
from bertsmith.serve.models import ServedModel
from bertsmith.serve.parsing import TRUNCATED_HEADER
from bertsmith.serve.response_memory import MIN_COUNTED_BYTES
from bertsmith.serve.responses import (
    EmbeddingList,
    Matrix,
    OpenAiModel,
    OpenAiModelList,
    Similarities,
    Vector,
)
from bertsmith.serve.schemas import EmbedBody, OpenAiBody, SimilarityBody, VectorsBody
from bertsmith.serve.text_tokenizer import MAX_CHARACTERS, TextTokenizer
from bertsmith.serve.token_ids import list_inputs
from bertsmith.serve.vectors import (
    BYTES_PER_ELEMENT,
    PendingEmbeddings,
    compute_token_matrices,
    resolve_vector_settings,
    submit_embeddings,
)
from bertsmith.use.token_vectors import Floats
from bertsmith.use.vector_settings import VectorSettings

_DEFAULT: Final = VectorSettings()
_NORMALIZED: Final = VectorSettings(normalize=True)
#: Largest response, in numbers, that is serialized before it is sent. A larger one is streamed.
_MAX_BUFFERED_NUMBERS: Final = 200_000
#: Largest difference of the length of a normalized vector from 1, by rounding.
_LENGTH_TOLERANCE = 1e-3
#: Maximum bytes of a float32 number in JSON, with a comma, such as -0.123456789.
_BYTES_PER_JSON_NUMBER: Final = 13


class EmbeddingRoutes:
    """Embedding endpoints; each endpoint is a method.

    Attributes:
        router: the router of the endpoints.
    """

    def __init__(self, executor: RequestExecutor) -> None:
        self._executor = executor
        self._service = executor.service
        self._text_tokenizer = TextTokenizer()
        self._started_at = int(time.time())
        self.router = executor.create_router()
        post, get = self.router.post, self.router.get
        post("/v1/embeddings", response_model=EmbeddingList)(self.create_openai_embeddings)
        get("/v1/models", response_model=OpenAiModelList)(self.list_models)
        get("/v1/models/{name}", response_model=OpenAiModel)(self.get_model)
        post("/embed", response_model=list[Vector])(self.embed)
        post("/embed_all", response_model=list[Matrix])(self.embed_all)
        post("/similarity", response_model=Similarities)(self.similarity)

    async def _compute_vectors(
        self,
        request: Request,
        model: str | ServedModel | None,
        texts: Any,
        settings: VectorSettings,
        dimensions: int | None = None,
        **options: Any,
    ) -> tuple[PendingEmbeddings, list[Floats]]:
        """Submit texts to the batcher; return the submission and, once computed, the vectors.

        ``texts`` are texts or token ids, the vectors are shortened to ``dimensions`` elements, and
        ``options`` are those of ``submit_embeddings``.
        """
        # The model may be replaced before the texts are submitted.
        served_model = self._service.find_model(model, "embed")
        embedder = served_model.embedder
        spec = resolve_vector_settings(embedder, settings)
        if dimensions is not None and dimensions > spec.width:
            raise InputError(f"dimensions is {dimensions:,}; expected 1 to {spec.width:,}")
        num_vector_bytes = BYTES_PER_ELEMENT * len(texts) * spec.width
        num_bytes = max(num_vector_bytes, options.get("num_response_bytes", 0))
        # A large request tokenizes, and waits for memory, in a thread.
        is_large = sum(map(len, texts)) > MAX_CHARACTERS or num_bytes >= MIN_COUNTED_BYTES
        if not is_large and isinstance(texts[0], str):
            self._service.check_request(served_model, "embed", texts)
            embedder = embedder.with_prompt(options.get("prompt_name"))
            options["encoded"] = await self._text_tokenizer.encode(embedder, texts)
        # ``submit`` must return only the future, so it stores the submission here.
        submitted: list[PendingEmbeddings] = []

        def submit(deadline: Deadline) -> Any:
            pending = submit_embeddings(
                self._service, served_model, texts, settings, deadline, **options
            )
            submitted.append(pending)
            return pending.future

        vectors = await self._executor.await_future(request, submit, in_thread=is_large)
        return submitted[0], shorten_vectors(vectors, dimensions)

    async def create_openai_embeddings(self, request: Request, body: OpenAiBody) -> Response:
        """Embed texts (OpenAI's API): vectors as lists of floats, or float32 bytes in base64.

        Vectors have length 1, unless the model is a sentence-transformers model that does not
        normalize.
        """
        texts = list_inputs(body.input)
        model = self._service.find_model(body.model, "embed")
        # OpenAI's vectors have length 1, and its clients may use dot products as cosines. The
        # files of a sentence-transformers model say whether its vectors are normalized.
        settings = _NORMALIZED if model.embedder.pooling_config is None else _DEFAULT
        pending, vectors = await self._compute_vectors(
            request, model, texts, settings, body.dimensions, prompt_name=body.prompt_name
        )
        pieces = _iter_openai_pieces(pending, vectors, body.encoding_format)
        response = await self._create_response(pieces, _count_elements(vectors))
        return _add_truncated_header(response, pending)

    async def list_models(self) -> Response:
        """List the models (OpenAI's API)."""
        models = list(map(self._describe_model, self._service.models))
        return to_json_response({"object": "list", "data": models})

    async def get_model(self, name: str) -> Response:
        """Return one model (OpenAI's API)."""
        return to_json_response(self._describe_model(self._service.find_model(name, "embed").name))

    def _describe_model(self, name: str) -> dict[str, Any]:
        """Return the entry of a model in OpenAI's API."""
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "bertsmith",
        }

    async def embed(self, request: Request, body: EmbedBody) -> Response:
        """Embed texts: one vector per text."""
        settings = body.to_vector_settings(pooling=body.pooling, normalize=body.normalize)
        pending, vectors = await self._compute_vectors(
            request,
            body.model,
            list_inputs(body.inputs),
            settings,
            body.dimensions,
            truncate=body.truncate,
            truncation_side=body.truncation_direction,
            prompt_name=body.prompt_name,
        )
        return _add_truncated_header(await self._create_vectors_response(vectors), pending)

    async def embed_all(self, request: Request, body: VectorsBody) -> Response:
        """Embed tokens: one vector per token of each text."""
        inputs = list_inputs(body.inputs)
        settings = body.to_vector_settings()
        compute = partial(
            compute_token_matrices,
            self._service,
            body.model,
            inputs,
            settings,
            request.state.deadline,
            truncate=body.truncate,
            truncation_side=body.truncation_direction,
            prompt_name=body.prompt_name,
        )
        vectors = await self._executor.run_in_thread(request, compute)
        return await self._create_vectors_response(vectors)

    async def similarity(self, request: Request, body: SimilarityBody) -> Response:
        """Compute cosine similarities: of one sentence to others, or of all pairs of texts."""
        num_similarities = 0
        if isinstance(body.inputs, list):
            texts = body.inputs
            num_similarities = len(texts) ** 2
            limit = self._service.settings.max_vector_elements
            check_limit("similarities", num_similarities, limit)
        else:
            texts = [body.inputs.source_sentence, *body.inputs.sentences]
        _, vectors = await self._compute_vectors(
            request,
            body.model,
            texts,
            _NORMALIZED,
            truncate=body.parameters.truncate,
            truncation_side=body.parameters.truncation_direction,
            prompt_name=body.parameters.prompt_name,
            num_response_bytes=_BYTES_PER_JSON_NUMBER * num_similarities,
        )
        matrix = np.stack(vectors)
        if not isinstance(body.inputs, list):
            return to_json_response(_compute_cosine_similarities(matrix[1:], matrix[0]))
        return await self._executor.encode_response(
            lambda: serialize_array(_compute_cosine_similarities(matrix, matrix.T)),
            num_similarities,
        )

    async def _create_vectors_response(self, vectors: Sequence[Floats]) -> Response:
        """Return a JSON list of vectors, or of matrices."""
        num_elements = _count_elements(vectors)
        return await self._create_response(iter_json_pieces(list(vectors)), num_elements)

    async def _create_response(self, pieces: Iterator[bytes], num_elements: int) -> Response:
        """Return a response with pieces of JSON; a large one is streamed."""
        if num_elements > _MAX_BUFFERED_NUMBERS:
            return self._executor.stream_response(pieces)
        return await self._executor.encode_response(lambda: b"".join(pieces), num_elements)


def _compute_cosine_similarities(rows: Floats, columns: Floats) -> Floats:
    """Return cosine similarities: the products of vectors of length 1, without rounding beyond 1.

    Clients may compute angles, which do not exist for larger numbers.
    """
    similarities: Floats = (rows @ columns).clip(-1, 1)
    return similarities


def shorten_vectors(vectors: Sequence[Floats], dimensions: int | None) -> list[Floats]:
    """Return the first elements of vectors, as models with Matryoshka embeddings are trained for.

    Vectors of length 1 keep this length.

    Args:
        vectors: the vectors, float32 [W] each.
        dimensions: number of elements; None or W for the same vectors.
    """
    if dimensions is None or not vectors or dimensions == len(vectors[0]):
        return list(vectors)
    return [_shorten_vector(vector, dimensions) for vector in vectors]


def _shorten_vector(vector: Floats, dimensions: int) -> Floats:
    shortened = vector[:dimensions]
    if abs(float(np.linalg.norm(vector)) - 1) > _LENGTH_TOLERANCE:
        return shortened
    return shortened / np.float32(max(float(np.linalg.norm(shortened)), 1e-12))


def _add_truncated_header(response: Response, pending: PendingEmbeddings) -> Response:
    """Add the number of truncated texts to a response, if there are any."""
    if pending.num_truncated:
        response.headers[TRUNCATED_HEADER] = str(pending.num_truncated)
    return response


def _count_elements(vectors: Sequence[Floats]) -> int:
    """Return the number of elements of all arrays together."""
    return sum(vector.size for vector in vectors)


def _iter_openai_pieces(
    pending: PendingEmbeddings, vectors: list[Floats], encoding_format: str | None
) -> Iterator[bytes]:
    """Yield the response of OpenAI's API as pieces of JSON."""
    separator = b'{"object":"list","data":['
    for index, vector in enumerate(_encode_vectors(vectors, encoding_format)):
        yield separator
        yield orjson.dumps({"object": "embedding", "index": index, "embedding": vector})
        separator = b","
    usage = {"prompt_tokens": pending.num_tokens, "total_tokens": pending.num_tokens}
    # The fields after the list; without their opening brace they continue the object.
    yield b"]," + orjson.dumps({"model": pending.model_name, "usage": usage})[1:]


def _encode_vectors(vectors: Sequence[Floats], encoding_format: str | None) -> Iterator[Any]:
    """Yield each vector as little-endian float32 in base64, or as JSON numbers ("float", None)."""
    for vector in vectors:
        if encoding_format == "base64":
            yield base64.b64encode(np.ascontiguousarray(vector, "<f4").tobytes()).decode()
        else:
            yield orjson.Fragment(serialize_array(vector))
