"""Endpoints that look into a model: a word's vectors, attention, and attributions."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import orjson
from fastapi import Request
from starlette.responses import Response

from bertsmith.errors import InputError
from bertsmith.serve.deadline import Deadline, RequestTooLargeError
from bertsmith.serve.execution import (
    RequestExecutor,
    create_json_response,
    join_json_items,
    serialize_array,
    to_json_response,
)
from bertsmith.serve.limits import check_limit, check_no_surrogates
from bertsmith.serve.models import ServedModel
from bertsmith.serve.responses import AttentionResult, AttributionsResult, WordDistances
from bertsmith.serve.schemas import AttentionBody, AttributionsBody, WordDistancesBody
from bertsmith.serve.service import Service
from bertsmith.serve.vectors import compute_token_vectors
from bertsmith.use.attributions import attribute
from bertsmith.use.explain import AttentionMaps, encode_text_or_pair
from bertsmith.use.similar import cosine_distances
from bertsmith.use.token_vectors import Floats, WordVector, average_word_tokens
from bertsmith.use.vector_settings import build_vector_settings

#: Tokens of a text or pair whose attention is computed; longer ones are truncated.
MAX_ATTENTION_TOKENS: Final = 256
#: Tokens of a text or pair with attributions; the model computes a sequence for each token.
MAX_ATTRIBUTION_TOKENS: Final = 256
#: Occurrences of a word per request; every two occurrences are compared in every layer.
MAX_OCCURRENCES: Final = 100
#: Characters of all texts in which a word is searched. The search holds the GIL, for up to 90 ms.
_MAX_WORD_CHARACTERS: Final = 2**17
#: Elements of the vectors of all tokens in all layers: 256 MB, about 6,700 tokens of a base model.
_MAX_VECTOR_ELEMENTS: Final = 64 * 2**20


class InspectionRoutes:
    """Endpoints that look into a model; each endpoint is a method.

    Attributes:
        router: the router of the endpoints.
    """

    def __init__(self, executor: RequestExecutor) -> None:
        self._service = executor.service
        self.router = executor.create_router()
        post = self.router.post
        post("/word_distances", response_model=WordDistances)(self.word_distances)
        post("/attention", response_model=AttentionResult)(self.attention)
        post("/attributions", response_model=AttributionsResult)(self.attributions)

    def word_distances(self, request: Request, body: WordDistancesBody) -> Response:
        """Compare one word's vectors in several texts: cosine distances in each layer."""
        deadline: Deadline = request.state.deadline
        model = self._service.find_model(body.model, "inspect")
        layers = _select_layers(body.layer, model.bundle.config.layers)
        occurrences = compute_occurrences(
            self._service, model, body.inputs, body.word, layers, deadline
        )
        vectors = np.stack([occurrence.vector for occurrence in occurrences])
        # [number of occurrences, number of layers, D]
        by_layer = vectors.reshape(len(occurrences), len(layers), -1)
        items = (
            _join_fields(
                layer=orjson.dumps(layer),
                distances=serialize_array(cosine_distances(by_layer[:, index])),
            )
            for index, layer in enumerate(layers)
        )
        return create_json_response(
            _join_fields(
                word=orjson.dumps(body.word),
                occurrences=orjson.dumps(list(map(_format_occurrence, occurrences))),
                layers=join_json_items(items),
            )
        )

    def attention(self, request: Request, body: AttentionBody) -> Response:
        """Return attention probabilities: one row per query token, for each layer and head.

        Texts with more than 256 tokens are truncated.
        """
        text, pair = (body.inputs, None) if isinstance(body.inputs, str) else body.inputs
        deadline: Deadline = request.state.deadline
        texts = [text] if pair is None else [text, pair]
        model = self._service.check_request(body.model, "inspect", texts, deadline)
        config = model.bundle.config
        layers = _select_numbers("layer", body.layer, config.layers)
        heads = _select_numbers("head", body.head, config.heads)
        encoded = encode_text_or_pair(model.bundle, text, pair, MAX_ATTENTION_TOKENS)
        num_tokens = len(encoded.ids)
        size = min(num_tokens, body.max_cells or num_tokens)
        count = len(layers) * len(heads) * size * size
        limit = self._service.settings.max_vector_elements
        if count > limit:
            raise RequestTooLargeError(
                f"the limit is {limit:,} attention probabilities per request, got {count:,}; "
                "send a layer, a head, or max_cells"
            )
        maps = self._service.create_calls(model, deadline).compute_attention(encoded)
        return create_json_response(
            _join_fields(
                tokens=orjson.dumps(maps.tokens),
                segments=orjson.dumps(maps.segments),
                num_removed_tokens=orjson.dumps(maps.num_removed_tokens),
                maps=join_json_items(_iter_maps(maps, layers, heads, size)),
            )
        )

    def attributions(self, request: Request, body: AttributionsBody) -> Response:
        """Return how much each token changes the prediction of a classifier or regression model.

        Each token is replaced by [MASK] in turn. Texts can have at most 256 tokens.
        """
        deadline: Deadline = request.state.deadline
        bundle, compute = self._service.prepare_task(
            body.model, "classify", [body.inputs], deadline
        )
        result = attribute(
            bundle, body.inputs, body.label, max_tokens=MAX_ATTRIBUTION_TOKENS, compute=compute
        )
        return to_json_response(
            {
                "label": result.label,
                "score": result.score,
                "tokens": result.tokens,
                "segments": result.segments,
                "attributions": result.values,
                "truncated": result.is_truncated,
            }
        )


def compute_occurrences(
    service: Service,
    model: str | ServedModel | None,
    texts: Sequence[str],
    word: str,
    layers: Sequence[int],
    deadline: Deadline | None = None,
) -> list[WordVector]:
    """Return the occurrences of a word, with the vectors of the layers concatenated.

    Raises:
        InputError: a text does not contain the word.
        RequestTooLargeError: there are too many texts, characters or occurrences.
    """
    check_no_surrogates([word])
    served_model = service.find_model(model, "inspect")
    model = service.check_request(served_model, "inspect", texts, deadline)
    check_limit("characters", sum(map(len, texts)), _MAX_WORD_CHARACTERS)
    spans_by_text = model.embedder.find_word(texts, word)
    num_occurrences = sum(map(len, spans_by_text.values()))
    check_limit("occurrences of the word", num_occurrences, MAX_OCCURRENCES)
    settings = build_vector_settings(layers, pooling="none")
    vectors = compute_token_vectors(
        service, served_model, texts, settings, deadline, max_vector_elements=_MAX_VECTOR_ELEMENTS
    )
    return average_word_tokens(word, spans_by_text, vectors, model.embedder.max_seqlen)


def max_pool(probabilities: Floats, size: int) -> Floats:
    """Max-pool a square matrix to ``size`` rows and columns, at most as many as it has."""
    starts = np.arange(size) * len(probabilities) // size
    rows: Floats = np.maximum.reduceat(probabilities, starts, axis=0)
    pooled: Floats = np.maximum.reduceat(rows, starts, axis=1)
    return pooled


def _iter_maps(
    maps: AttentionMaps, layers: Sequence[int], heads: Sequence[int], size: int
) -> Iterator[bytes]:
    """Yield the attention of each layer and head as a JSON object."""
    for layer in layers:
        for head in heads:
            probabilities = max_pool(maps.probabilities[layer - 1, head - 1], size)
            yield _join_fields(
                layer=orjson.dumps(layer),
                head=orjson.dumps(head),
                probabilities=serialize_array(probabilities),
            )


def _select_layers(layer: int | None, num_layers: int) -> list[int]:
    """Return the layer, counted from 0 (the embeddings), or all layers for None.

    Args:
        layer: the layer; negative numbers count from the end.
        num_layers: layers of the model, without the embeddings.

    Raises:
        InputError: there is no such layer.
    """
    if layer is None:
        return list(range(num_layers + 1))
    index = layer if layer >= 0 else num_layers + 1 + layer
    if not 0 <= index <= num_layers:
        raise InputError(
            f"layer is {layer}; expected 0 (the embeddings) to {num_layers}, or -1 (the last layer)"
        )
    return [index]


def _select_numbers(name: str, number: int | None, count: int) -> list[int]:
    """Return the number, or all numbers from 1 to ``count`` for None.

    Raises:
        InputError: the number is greater than ``count``.
    """
    if number is None:
        return list(range(1, count + 1))
    if number > count:
        raise InputError(f"{name} is {number}; expected 1 to {count}")
    return [number]


def _format_occurrence(occurrence: WordVector) -> dict[str, Any]:
    """Return the fields of an occurrence in /word_distances."""
    return {
        "text_index": occurrence.text_index,
        "start": occurrence.start,
        "end": occurrence.end,
    }


def _join_fields(**fields: bytes) -> bytes:
    """Return a JSON object of serialized fields."""
    return b"{" + b",".join(b'"%s":%s' % (name.encode(), fields[name]) for name in fields) + b"}"
