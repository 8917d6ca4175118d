"""Endpoints that order texts by their relevance to a query.

/rerank is compatible with text-embeddings-inference, /v1/rerank and /v2/rerank with the clients of
Cohere and Jina.
"""

import uuid
from typing import Any

from fastapi import Request
from starlette.responses import Response

from bertsmith.serve.deadline import Deadline
from bertsmith.serve.execution import RequestExecutor, to_json_response
from bertsmith.serve.limits import check_not_truncated
from bertsmith.serve.responses import RankedText, Ranking
from bertsmith.serve.schemas import CohereRerankBody, RerankBody
from bertsmith.use.rerank import order_scores


class RerankRoutes:
    """Endpoints that rerank texts; each endpoint is a method.

    Attributes:
        router: the router of the endpoints.
    """

    def __init__(self, executor: RequestExecutor) -> None:
        self._service = executor.service
        self.router = executor.create_router()
        post = self.router.post
        post("/rerank", response_model=list[RankedText])(self.rerank)
        # Cohere's clients use either version.
        for path in ("/v1/rerank", "/v2/rerank"):
            name = f"rerank{path[:3]}"
            post(path, name=name, response_model=Ranking)(self.rerank_documents)

    def rerank(self, request: Request, body: RerankBody) -> Response:
        """Order texts by their relevance to a query, most relevant first.

        The model needs one output for a pair of texts. Scores are from 0 to 1.
        """
        deadline: Deadline = request.state.deadline
        predictions = self._service.rerank(body.model, body.query, body.texts, deadline)
        if not body.truncate:
            check_not_truncated(predictions, "a query with its text")
        rows: list[dict[str, Any]] = [
            {"index": index, "score": score}
            for index, score in order_scores(predictions, raw=body.raw_scores)
        ]
        if body.return_text:
            rows = [{**row, "text": body.texts[row["index"]]} for row in rows]
        return to_json_response(rows)

    def rerank_documents(self, request: Request, body: CohereRerankBody) -> Response:
        """Order documents by their relevance to a query (Cohere's and Jina's API)."""
        texts = [item if isinstance(item, str) else item.text for item in body.documents]
        deadline: Deadline = request.state.deadline
        model = self._service.find_model(body.model, "rerank")
        predictions = self._service.rerank(model, body.query, texts, deadline)
        results: list[dict[str, Any]] = [
            {"index": index, "relevance_score": score}
            for index, score in order_scores(predictions)[: body.top_n]
        ]
        if body.return_documents:
            results = [{**row, "document": {"text": texts[row["index"]]}} for row in results]
        return to_json_response(
            {
                "id": uuid.uuid4().hex,
                "model": model.name,
                "results": results,
                "usage": {"total_tokens": deadline.token_counts.num_tokens},
            }
        )
