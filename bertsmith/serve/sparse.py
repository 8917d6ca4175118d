"""The endpoint /embed_sparse, compatible with text-embeddings-inference."""

from collections.abc import Iterator
from functools import partial
from typing import Final

import orjson
from fastapi import Request
from starlette.responses import Response

from bertsmith.bundle import PretrainedBundle
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.execution import RequestExecutor, create_json_response
from bertsmith.serve.limits import check_limit, check_num_truncated
from bertsmith.serve.parsing import TRUNCATED_HEADER
from bertsmith.serve.responses import SparseEntry
from bertsmith.serve.schemas import EmbedSparseBody
from bertsmith.serve.token_ids import list_inputs, tokenize_inputs
from bertsmith.use.sparse import SparseVector, compute_sparse_vectors

#: Vocabulary entries of all texts, before those without a weight are removed: 384 MiB.
_MAX_ENTRIES: Final = 32 * 2**20
#: Bytes of a token id and its weight.
_BYTES_PER_ENTRY: Final = 12
#: Largest response, in entries, that is serialized before it is sent. A larger one is streamed.
_MAX_BUFFERED_ENTRIES: Final = 100_000


class SparseRoutes:
    """The endpoint /embed_sparse.

    Attributes:
        router: the router of the endpoint.
    """

    def __init__(self, executor: RequestExecutor) -> None:
        self._executor = executor
        self._service = executor.service
        self.router = executor.create_router()
        response_model = list[list[SparseEntry]]
        self.router.post("/embed_sparse", response_model=response_model)(self.embed_sparse)

    def embed_sparse(self, request: Request, body: EmbedSparseBody) -> Response:
        """Compute a sparse vector per text from the masked-LM head (SPLADE): weights of tokens."""
        inputs = list_inputs(body.inputs)
        deadline: Deadline = request.state.deadline
        texts = [text for text in inputs if isinstance(text, str)]
        model = self._service.check_request(body.model, "embed_sparse", texts, deadline)
        assert isinstance(model.bundle, PretrainedBundle)
        embedder = model.embedder
        vocab_size = embedder.tokenizer.vocab_size
        check_limit("vocabulary entries", len(inputs) * vocab_size, _MAX_ENTRIES)
        tokenized = tokenize_inputs(embedder, inputs, body.truncation_direction, body.prompt_name)
        if not body.truncate:
            check_num_truncated(tokenized.num_truncated, embedder.max_seqlen)
        compute = partial(compute_sparse_vectors, model.bundle, config=embedder.splade_config)
        payloads = [(len(ids), ids) for ids in tokenized.sequences]
        calls = self._service.create_calls(model, deadline)
        vectors = calls.compute("embed_sparse", compute, payloads)
        num_entries = sum(len(vector.token_ids) for vector in vectors)
        # Each entry has two numbers.
        limit = self._service.settings.max_vector_elements
        check_limit("vector elements", 2 * num_entries, limit)
        deadline.reserve_response(_BYTES_PER_ENTRY * num_entries)
        pieces = _iter_pieces(vectors)
        if num_entries > _MAX_BUFFERED_ENTRIES:
            response = self._executor.stream_response(pieces)
        else:
            response = create_json_response(b"".join(pieces))
        if tokenized.num_truncated:
            response.headers[TRUNCATED_HEADER] = str(tokenized.num_truncated)
        return response


def _iter_pieces(vectors: list[SparseVector]) -> Iterator[bytes]:
    """Yield the response as pieces of JSON; each vector is freed when it was serialized."""
    vectors.reverse()
    separator = b"["
    while vectors:
        yield separator
        yield _serialize_entries(vectors.pop())
        separator = b","
    yield b"]"


def _serialize_entries(vector: SparseVector) -> bytes:
    """Return the entries of a vector as a JSON list."""
    entries = [
        {"index": token_id, "value": weight}
        # NumPy's float32 numbers have fewer digits in JSON than Python's float.
        for token_id, weight in zip(vector.token_ids.tolist(), vector.weights, strict=True)
    ]
    return orjson.dumps(entries, option=orjson.OPT_SERIALIZE_NUMPY)
