"""The endpoint /embed_sparse, compatible with text-embeddings-inference."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

import orjson
from fastapi import Request
from starlette.responses import Response

from bertsmith.bundle import PretrainedBundle
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.execution import RequestExecutor, create_json_response, join_json_items
from bertsmith.serve.limits import check_limit, check_num_truncated
from bertsmith.serve.parsing import TRUNCATED_HEADER
from bertsmith.serve.responses import SparseEntry
from bertsmith.serve.routes import as_list
from bertsmith.serve.schemas import EmbedSparseBody
from bertsmith.use.sparse import SparseVector, compute_sparse_vectors

#: Vocabulary entries of all texts, before those without a weight are removed: 384 MiB.
_MAX_ENTRIES: Final = 32 * 2**20


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

    async def embed_sparse(self, request: Request, body: EmbedSparseBody) -> Response:
        """Compute a sparse vector per text from the masked-LM head (SPLADE): weights of tokens."""
        texts = as_list(body.inputs)

        def respond(deadline: Deadline) -> Response:
            model = self._service.check_request(body.model, "embed_sparse", texts, deadline)
            assert isinstance(model.bundle, PretrainedBundle)
            embedder = model.embedder.with_prompt(body.prompt_name)
            vocab_size = embedder.tokenizer.vocab_size
            check_limit("vocabulary entries", len(texts) * vocab_size, _MAX_ENTRIES)
            tokenized = embedder.tokenize(texts, body.truncation_direction)
            if not body.truncate:
                check_num_truncated(tokenized.num_truncated, embedder.max_seqlen)
            compute = partial(compute_sparse_vectors, model.bundle, config=embedder.splade_config)
            payloads = [(len(ids), ids) for ids in tokenized.sequences]
            calls = self._service.create_calls(model, deadline)
            vectors = calls.compute("embed_sparse", compute, payloads)
            # Each entry has two numbers.
            num_elements = 2 * sum(len(vector.token_ids) for vector in vectors)
            limit = self._service.settings.max_vector_elements
            check_limit("vector elements", num_elements, limit)
            response = create_json_response(join_json_items(_iter_entries(vectors)))
            if tokenized.num_truncated:
                response.headers[TRUNCATED_HEADER] = str(tokenized.num_truncated)
            return response

        return await self._executor.run_in_thread(request, respond)


def _iter_entries(vectors: Sequence[SparseVector]) -> Iterator[bytes]:
    """Yield the entries of each vector as a JSON list."""
    for vector in vectors:
        entries = [
            {"index": token_id, "value": weight}
            # NumPy's float32 numbers have fewer digits in JSON than Python's float.
            for token_id, weight in zip(vector.token_ids.tolist(), vector.weights, strict=True)
        ]
        yield orjson.dumps(entries, option=orjson.OPT_SERIALIZE_NUMPY)
