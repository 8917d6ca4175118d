"""Compute the vectors of texts and tokens for requests."""

import mmap
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from bertsmith.errors import ModelError, SettingsError
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.limits import check_limit, check_num_truncated
from bertsmith.serve.models import ServedModel
from bertsmith.serve.service import Service
from bertsmith.serve.token_ids import tokenize_inputs
from bertsmith.use.embed import Embedder, VectorBatches
from bertsmith.use.token_vectors import Floats, TokenVectors
from bertsmith.use.vector_settings import TruncationSide, VectorSettings
from bertsmith.use.vectors import VectorSpec

#: Bytes of a float32 number.
BYTES_PER_ELEMENT: Final = 4


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


def resolve_vector_settings(embedder: Embedder, settings: VectorSettings) -> VectorSpec:
    """Resolve the settings of a request for a model.

    Raises:
        SettingsError: the settings are invalid for the model; for example, several layers are
            concatenated although a Dense module follows.
    """
    try:
        spec = embedder.resolve_settings(settings)
    except ModelError as error:
        # In requests, a ModelError says that there is no such model (404).
        raise SettingsError(str(error)) from None
    if spec.pooling == "pooled" and not embedder.has_pooler:
        raise SettingsError(
            'pooling: this model has no pooler for "pooled"; use another pooling, such as "first"'
        )
    return spec


def submit_embeddings(
    service: Service,
    model: str | ServedModel | None,
    texts: Sequence[str] | Sequence[list[int]],
    settings: VectorSettings,
    deadline: Deadline,
    *,
    truncate: bool = True,
    truncation_side: TruncationSide = "right",
    prompt_name: str | None = None,
    encoded: Sequence[list[int]] | None = None,
    num_response_bytes: int = 0,
) -> PendingEmbeddings:
    """Submit texts to the batcher without waiting for their vectors.

    Args:
        service: the service.
        model: the model or its name; None for the first one that supports the task.
        texts: the texts, or the token ids of each text from [CLS] to [SEP].
        settings: layers, pooling and normalization.
        deadline: the request's deadline.
        truncate: truncate texts that are too long, instead of rejecting them.
        truncation_side: side on which texts are truncated.
        prompt_name: name of the prompt to add to texts; see ``Embedder.with_prompt``.
        encoded: results of ``Embedder.encode_texts`` for the texts; None to tokenize them.
        num_response_bytes: bytes of the response, if it can be larger than the vectors.

    Raises:
        InputError: token ids or the prompt are not those of the model.
        SettingsError: the settings have no pooling, which gives a vector for each token.
        RequestTooLargeError: the texts exceed a limit of the server; or, without ``truncate``, a
            text is longer than the model's maximum.
    """
    strings = [text for text in texts if isinstance(text, str)]
    served_model = service.check_request(model, "embed", strings)
    spec = resolve_vector_settings(served_model.embedder, settings)
    if spec.pooling == "none":
        raise SettingsError(
            'pooling "none" returns one vector per token; send the request to /embed_all'
        )
    if encoded is None:
        embedder = served_model.embedder.with_token_counter(deadline.token_counts)
        tokenized = tokenize_inputs(embedder, texts, truncation_side, prompt_name)
    else:
        unk_id = served_model.embedder.tokenizer.unk_id
        num_unknown = sum(ids.count(unk_id) for ids in encoded)
        deadline.token_counts.add(sum(map(len, encoded)), num_unknown)
        tokenized = served_model.embedder.build_sequences(encoded, truncation_side)
    if not truncate:
        check_num_truncated(tokenized.num_truncated, served_model.embedder.max_seqlen)
    check_limit("vector elements", len(texts) * spec.width, service.settings.max_vector_elements)
    # Only large requests wait here, which run in threads.
    num_vector_bytes = BYTES_PER_ELEMENT * len(texts) * spec.width
    deadline.reserve_response(max(num_vector_bytes, num_response_bytes))
    payloads = [(len(ids), ids) for ids in tokenized.sequences]
    future = service.create_calls(served_model, deadline).submit(
        ("embed", settings), partial(served_model.embedder.encode_batch, spec=spec), payloads
    )
    num_tokens = sum(length for length, _ in payloads)
    return PendingEmbeddings(served_model.name, future, num_tokens, tokenized.num_truncated)


def compute_token_vectors(
    service: Service,
    model: str | ServedModel | None,
    texts: Sequence[str],
    settings: VectorSettings,
    deadline: Deadline | None = None,
    *,
    max_vector_elements: int | None = None,
) -> list[TokenVectors]:
    """Return the tokens of each text with their vectors; the pooling of ``settings`` is ignored.

    Args:
        service: the service.
        model: the model or its name; None for the first one that supports the task.
        texts: the texts.
        settings: layers, weights and special tokens.
        deadline: the request's deadline; None for the default time limit.
        max_vector_elements: maximum number of elements of all vectors; None for the default.
    """
    served_model = service.check_request(model, "embed", texts, deadline)
    deadline = deadline or Deadline(service.settings.request_timeout_seconds)
    embedder = served_model.embedder
    max_tokens = _count_max_tokens(embedder, texts)
    spec, compute = _reserve_token_vectors(
        service, served_model, max_tokens, settings, deadline, max_vector_elements
    )

    def compute_batches(sequences: Sequence[list[int]], *_: Any) -> VectorBatches:
        yield list(range(len(sequences))), compute(sequences)

    return embedder.encode_tokens_with_spec(texts, spec, None, compute_batches)


def compute_token_matrices(
    service: Service,
    model: str | ServedModel | None,
    inputs: Sequence[str] | Sequence[list[int]],
    settings: VectorSettings,
    deadline: Deadline,
    *,
    truncate: bool = True,
    truncation_side: TruncationSide = "right",
    prompt_name: str | None = None,
) -> list[Floats]:
    """Return the vectors of the tokens of each text, float32 [S, W].

    The arguments are those of ``submit_embeddings``; the pooling of ``settings`` is ignored.
    """
    strings = [text for text in inputs if isinstance(text, str)]
    served_model = service.check_request(model, "embed", strings, deadline)
    embedder = served_model.embedder
    max_tokens = _count_max_tokens(embedder.with_prompt(prompt_name), inputs)
    _, compute = _reserve_token_vectors(service, served_model, max_tokens, settings, deadline)
    tokenized = tokenize_inputs(embedder, inputs, truncation_side, prompt_name)
    if not truncate:
        check_num_truncated(tokenized.num_truncated, embedder.max_seqlen)
    return compute(tokenized.sequences)


def _count_max_tokens(embedder: Embedder, inputs: Sequence[str] | Sequence[list[int]]) -> int:
    """Return the number of tokens of texts or token ids if each character is a token."""
    num_other_tokens = len(embedder.text_config.prompt) + 2
    return sum(min(len(item) + num_other_tokens, embedder.max_seqlen) for item in inputs)


def _reserve_token_vectors(
    service: Service,
    model: ServedModel,
    max_tokens: int,
    settings: VectorSettings,
    deadline: Deadline,
    max_vector_elements: int | None = None,
) -> tuple[VectorSpec, Callable[[Sequence[list[int]]], list[Floats]]]:
    """Wait until there is memory for the vectors of ``max_tokens`` tokens.

    Tokenizing needs memory too, so only as many texts are tokenized as there is room for responses.

    Returns:
        The resolved settings, and a function that computes the vectors of each token of sequences,
        float32 [S, W] each.
    """
    limit = max_vector_elements or service.settings.max_vector_elements
    settings = settings.model_copy(update={"pooling": "none"})
    spec = resolve_vector_settings(model.embedder, settings)
    deadline.reserve_response(BYTES_PER_ELEMENT * min(max_tokens * spec.width, limit))

    def compute(sequences: Sequence[list[int]]) -> list[Floats]:
        num_elements = sum(map(len, sequences)) * spec.width
        check_limit("vector elements", num_elements, limit)
        deadline.shrink_response(BYTES_PER_ELEMENT * num_elements)
        compute_batch = partial(_compute_into_outputs, model.embedder, spec)
        outputs = _allocate_outputs([len(ids) for ids in sequences], spec.width)
        payloads = [
            (len(ids), (ids, output)) for ids, output in zip(sequences, outputs, strict=True)
        ]
        calls = service.create_calls(model, deadline)
        return calls.compute(("embed tokens", settings), compute_batch, payloads)

    return spec, compute


def _allocate_outputs(lengths: Sequence[int], width: int) -> list[Floats]:
    """Return an array [S, W] for each length, in memory of their own.

    Small arrays that remain between the freed activations of each batch would fragment the heap: it
    would grow by ten times their size, and the system would never get the memory back.
    """
    memory = mmap.mmap(-1, max(BYTES_PER_ELEMENT * sum(lengths) * width, 1))
    flat = np.frombuffer(memory, np.float32, sum(lengths) * width).reshape(-1, width)
    return np.split(flat, np.cumsum(lengths)[:-1])


def _compute_into_outputs(
    embedder: Embedder, spec: VectorSpec, payloads: Sequence[tuple[list[int], Floats]]
) -> list[Floats]:
    """Compute the token vectors of a batch of (token ids, output array); return the outputs."""
    batch = embedder.encode_batch([ids for ids, _ in payloads], spec)
    results = []
    for vectors, (_, output) in zip(batch, payloads, strict=True):
        # Without the vectors of special tokens, the result is shorter than the sequence.
        result = output[: len(vectors)]
        result[:] = vectors
        results.append(result)
    return results
