"""Compute the vectors of texts and tokens for requests."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from bertsmith.errors import SettingsError
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.limits import check_limit, check_num_truncated
from bertsmith.serve.service import Service
from bertsmith.serve.token_ids import tokenize_inputs
from bertsmith.use.embed import VectorBatches
from bertsmith.use.token_vectors import TokenVectors
from bertsmith.use.vector_settings import TruncationSide, VectorSettings
from bertsmith.use.vectors import VectorSpec


@dataclass(frozen=True)
class PendingEmbeddings:
    """Texts whose vectors are being computed.

    Attributes:
        model_name: name of the model.
        future: resolves to the vector of each text, float32 [W].
        num_tokens: tokens of all texts.
        num_truncated: texts that were truncated.
    """

    model_name: str
    future: Future[list[Any]]
    num_tokens: int
    num_truncated: int


def submit_embeddings(
    service: Service,
    model_name: str | None,
    texts: Sequence[str] | Sequence[list[int]],
    settings: VectorSettings,
    deadline: Deadline,
    *,
    truncate: bool = True,
    truncation_side: TruncationSide = "right",
    prompt_name: str | None = None,
) -> PendingEmbeddings:
    """Submit texts to the batcher without waiting for their vectors.

    Args:
        service: the service.
        model_name: name of the model; None for the first one that supports the task.
        texts: the texts, or the token ids of each text from [CLS] to [SEP].
        settings: layers, pooling and normalization.
        deadline: the request's deadline.
        truncate: truncate texts that are too long, instead of rejecting them.
        truncation_side: side on which texts are truncated.
        prompt_name: name of the prompt to add to texts; see ``Embedder.with_prompt``.

    Raises:
        InputError: token ids or the prompt are not those of the model.
        SettingsError: the settings have no pooling, which gives a vector for each token.
        RequestTooLargeError: the texts exceed a limit of the server; or, without ``truncate``, a
            text is longer than the model's maximum.
    """
    strings = [text for text in texts if isinstance(text, str)]
    model = service.check_request(model_name, "embed", strings, deadline)
    spec = model.embedder.resolve_settings(settings)
    if spec.pooling == "none":
        raise SettingsError(
            'pooling "none" returns one vector per token; send the request to /embed_all'
        )
    tokenized = tokenize_inputs(model.embedder, texts, truncation_side, prompt_name)
    if not truncate:
        check_num_truncated(tokenized.num_truncated, model.embedder.max_seqlen)
    check_limit("vector elements", len(texts) * spec.width, service.settings.max_vector_elements)
    payloads = [(len(ids), ids) for ids in tokenized.sequences]
    future = service.create_calls(model, deadline).submit(
        ("embed", settings), partial(model.embedder.encode_batch, spec=spec), payloads
    )
    num_tokens = sum(length for length, _ in payloads)
    return PendingEmbeddings(model.name, future, num_tokens, tokenized.num_truncated)


def compute_token_vectors(
    service: Service,
    model_name: str | None,
    texts: Sequence[str],
    settings: VectorSettings,
    deadline: Deadline | None = None,
    *,
    max_vector_elements: int | None = None,
    truncation_side: TruncationSide = "right",
    prompt_name: str | None = None,
) -> list[TokenVectors]:
    """Return the vectors of the tokens of each text; the pooling of ``settings`` is ignored.

    Args:
        service: the service.
        model_name: name of the model; None for the first one that supports the task.
        texts: the texts.
        settings: layers, weights and special tokens.
        deadline: the request's deadline.
        max_vector_elements: maximum number of elements of all vectors; None for the default.
        truncation_side: side on which texts are truncated.
        prompt_name: name of the prompt to add to texts; see ``Embedder.with_prompt``.
    """
    model = service.check_request(model_name, "embed", texts, deadline)
    calls = service.create_calls(model, deadline)
    settings = settings.model_copy(update={"pooling": "none"})

    def compute(sequences: Sequence[list[int]], spec: VectorSpec, _: int | None) -> VectorBatches:
        payloads = [(len(ids), ids) for ids in sequences]
        num_elements = sum(length for length, _ in payloads) * spec.width
        limit = max_vector_elements or service.settings.max_vector_elements
        check_limit("vector elements", num_elements, limit)
        compute_batch = partial(model.embedder.encode_batch, spec=spec)
        vectors = calls.compute(("embed", settings), compute_batch, payloads)
        yield list(range(len(payloads))), vectors

    spec = model.embedder.resolve_settings(settings)
    embedder = model.embedder.with_prompt(prompt_name)
    return embedder.encode_tokens_with_spec(texts, spec, None, compute, truncation_side)
