"""Further endpoints of text-embeddings-inference: /info, /predict and /decode."""

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from bertsmith.bundle import FineTunedBundle
from bertsmith.errors import InputError
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.execution import RequestExecutor, to_json_response
from bertsmith.serve.limits import check_limit, check_not_truncated
from bertsmith.serve.models import ServedModel
from bertsmith.serve.responses import ModelInfo, PredictResult
from bertsmith.serve.schemas import DecodeBody, PredictBody
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.token_ids import check_vocabulary
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.model_setup import get_dtype_name
from bertsmith.use.predict import Prediction
from bertsmith.use.rerank import sigmoid
from bertsmith.version import __version__


class TeiRoutes:
    """Endpoints of text-embeddings-inference; each endpoint is a method.

    Attributes:
        router: the router of the endpoints.
    """

    def __init__(self, executor: RequestExecutor) -> None:
        self._service = executor.service
        self.router = executor.create_router()
        self.router.get("/info", response_model=ModelInfo)(self.info)
        self.router.post("/predict", response_model=PredictResult)(self.predict)
        self.router.post("/decode", response_model=list[str])(self.decode)

    async def info(self, model: str | None = None) -> Response:
        """Describe a model (by default the first one) and the limits of the server."""
        served_model = self._service.find_model(model, "embed")
        return to_json_response(describe_model(served_model, self._service.settings))

    def predict(self, request: Request, body: PredictBody) -> Response:
        """Classify a text, a pair [A, B], or a batch [[A], [A, B], ...]."""
        inputs = body.inputs
        is_batch = isinstance(inputs, list) and isinstance(inputs[0], list)
        sequences: list[Any] = inputs if is_batch else [inputs]  # type: ignore[assignment]
        texts = [to_text_or_pair(sequence) for sequence in sequences]
        deadline: Deadline = request.state.deadline
        model = self._service.find_model(body.model, "classify")
        predictions = self._service.classify(model, texts, deadline)
        if not body.truncate:
            check_not_truncated(predictions)
        results = [
            format_labels(model, prediction, raw=body.raw_scores) for prediction in predictions
        ]
        return to_json_response(results if is_batch else results[0])

    def decode(self, request: Request, body: DecodeBody) -> Response:
        """Convert token ids to texts."""
        ids = body.ids
        sequences: list[Any] = ids if isinstance(ids[0], list) else [ids]
        deadline: Deadline = request.state.deadline
        model = self._service.find_model(body.model, "embed")
        num_tokens = sum(map(len, sequences))
        check_limit("tokens", num_tokens, self._service.settings.max_tokens)
        tokenizer = model.bundle.tokenizer
        texts = []
        for number, sequence in enumerate(sequences, 1):
            deadline.check()
            check_vocabulary(tokenizer, sequence, number)
            if body.skip_special_tokens:
                texts.append(tokenizer.decode(sequence))
            else:
                texts.append(" ".join(iter_decoded_parts(tokenizer, sequence)))
        return to_json_response(texts)


def describe_model(model: ServedModel, settings: ServeSettings) -> dict[str, Any]:
    """Return the response of /info for a model."""
    model_type: dict[str, Any] = {"embedding": {"pooling": _describe_pooling(model)}}
    if "rerank" in model.tasks or "classify" in model.tasks:
        assert isinstance(model.bundle, FineTunedBundle)
        labels = model.bundle.head.labels or ("score",)
        ids = {
            "id2label": {str(index): label for index, label in enumerate(labels)},
            "label2id": {label: index for index, label in enumerate(labels)},
        }
        model_type = {"reranker" if "rerank" in model.tasks else "classifier": ids}
    return {
        "model_id": model.name,
        "model_sha": None,
        "model_dtype": get_dtype_name(model.embedder.encoder),
        "model_type": model_type,
        "max_concurrent_requests": settings.max_concurrent_requests,
        "max_input_length": model.embedder.max_seqlen,
        "max_batch_tokens": settings.max_batch_tokens,
        "max_batch_requests": None,
        "max_client_batch_size": settings.max_texts,
        "auto_truncate": True,
        "tokenization_workers": settings.max_concurrent_requests,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


def _describe_pooling(model: ServedModel) -> str:
    """Return the pooling of a model, by its name in text-embeddings-inference."""
    config = model.embedder.pooling_config
    modes = config.modes if config is not None else ("mean",)
    return "+".join(modes)


def to_text_or_pair(sequence: str | Sequence[str]) -> str | tuple[str, str]:
    """Return a text for "A" and ["A"], and a pair for ["A", "B"]."""
    if isinstance(sequence, str):
        return sequence
    return sequence[0] if len(sequence) == 1 else (sequence[0], sequence[1])


def format_labels(
    model: ServedModel, prediction: Prediction, *, raw: bool = False
) -> list[dict[str, Any]]:
    """Return the labels of a prediction with their scores, highest score first.

    Args:
        model: the model.
        prediction: its prediction for one text.
        raw: return the output of a model with one output; otherwise its sigmoid.

    Raises:
        InputError: ``raw`` for a model with several labels.
    """
    if prediction.score is not None:
        assert isinstance(model.bundle, FineTunedBundle)
        label = (*model.bundle.head.labels, "score")[0]
        score = prediction.score if raw else sigmoid(prediction.score)
        return [{"score": score, "label": label}]
    if raw:
        raise InputError(
            "raw_scores: a model with several labels returns probabilities only; leave it out"
        )
    return [{"score": score, "label": label} for label, score in prediction.labels]


def iter_decoded_parts(tokenizer: Tokenizer, ids: Sequence[int]) -> Iterator[str]:
    """Yield the texts between [PAD], [CLS] and [SEP], and these tokens."""
    special_ids = (tokenizer.pad_id, tokenizer.cls_id, tokenizer.sep_id)
    text_ids: list[int] = []
    for token_id in ids:
        if token_id not in special_ids:
            text_ids.append(token_id)
            continue
        if text_ids:
            yield tokenizer.decode(text_ids)
        text_ids = []
        yield tokenizer.ids_to_tokens([token_id])[0]
    if text_ids:
        yield tokenizer.decode(text_ids)
