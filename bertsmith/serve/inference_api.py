"""The endpoint POST /, in the format of Hugging Face's inference API and its InferenceClient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import Request
from pydantic import Field, TypeAdapter, ValidationError
from starlette.responses import Response

from bertsmith.errors import InputError
from bertsmith.serve.body_fields import NOT_BOOLEAN
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.embeddings import EmbeddingRoutes
from bertsmith.serve.execution import RequestExecutor, to_json_response
from bertsmith.serve.limits import MAX_TOP, check_limit
from bertsmith.serve.models import ServedModel
from bertsmith.serve.responses import InferenceResult
from bertsmith.serve.routes import as_list
from bertsmith.serve.schemas import (
    EmbedBody,
    InferenceBody,
    QuestionInput,
    SimilarityBody,
)
from bertsmith.serve.tei import format_labels
from bertsmith.serve.validation_errors import describe_errors
from bertsmith.text.mask import MASK_TOKEN
from bertsmith.text.tokenizer_spec import CONTINUATION_PREFIX
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.use.fill import Filling

#: Parameters of each task that have an effect. Others must be null.
_PARAMETERS: Final[dict[str, frozenset[str]]] = {
    "answer": frozenset(),
    "classify": frozenset({"top_k"}),
    "fill": frozenset({"top_k"}),
    "tag": frozenset({"aggregation_strategy"}),
}
_TEXT: Final = TypeAdapter(str)
_TEXTS: Final = TypeAdapter(Annotated[list[str], Field(min_length=1)])
_TOP: Final = TypeAdapter(Annotated[int, Field(ge=1, le=MAX_TOP), NOT_BOOLEAN])


class InferenceRoutes:
    """The endpoint POST /.

    Attributes:
        router: the router of the endpoint.
    """

    def __init__(self, executor: RequestExecutor, embeddings: EmbeddingRoutes) -> None:
        self._executor = executor
        self._service = executor.service
        self._embeddings = embeddings
        self.router = executor.create_router()
        self.router.post("/", response_model=InferenceResult)(self.infer)

    async def infer(self, request: Request, body: InferenceBody) -> Response:
        """Run the task that the model was trained for, in the format of HF's InferenceClient.

        A sentence with others gives similarities; a text gives labels, entities, predictions for
        a [MASK] or vectors, depending on the model.
        """
        model = self._service.find_model(body.model, "embed")
        task = choose_task(model, body.inputs, body.parameters)
        if task == "similarity":
            similarity_body = validate(SimilarityBody, model, body)
            return await self._embeddings.similarity(request, similarity_body)
        if task == "embed":
            return await self._embeddings.embed(request, validate(EmbedBody, model, body))
        parameters = {key: value for key, value in body.parameters.items() if value is not None}
        unused = sorted(parameters.keys() - _PARAMETERS[task])
        if unused:
            raise InputError(f"parameters: {unused[0]!r} has no effect; leave it out")
        compute: Callable[..., Any] = getattr(self, f"_{task}")

        def respond() -> Response:
            deadline: Deadline = request.state.deadline
            return to_json_response(compute(model, body.inputs, parameters, deadline))

        return await self._executor.run_in_thread(request, respond)

    def _answer(
        self, model: ServedModel, inputs: Any, _: Mapping[str, Any], deadline: Deadline
    ) -> dict[str, Any]:
        """Return the answer to a question."""
        question = parse("inputs", QuestionInput, inputs)
        pairs = [(question.question, question.context)]
        (answer,) = self._service.answer(model, pairs, deadline)
        best = answer.best
        return {
            "answer": best.text,
            "score": best.probability,
            "start": best.start or 0,
            "end": best.end or 0,
        }

    def _classify(
        self, model: ServedModel, inputs: Any, parameters: Mapping[str, Any], deadline: Deadline
    ) -> list[list[dict[str, Any]]]:
        """Return the labels of each text."""
        texts = self._parse_texts(inputs)
        top = parse("parameters.top_k", _TOP, parameters.get("top_k", MAX_TOP))
        predictions = self._service.classify(model, texts, deadline)
        return [format_labels(model, prediction)[:top] for prediction in predictions]

    def _fill(
        self, model: ServedModel, inputs: Any, parameters: Mapping[str, Any], deadline: Deadline
    ) -> list[Any]:
        """Return the predictions for the [MASK] of a text, or a list for each of several.

        For a list of texts, return a list with the result of each text.
        """
        texts = self._parse_texts(inputs)
        top = parse("parameters.top_k", _TOP, parameters.get("top_k", 5))
        filled = self._service.fill(model, texts, top, deadline)
        results = [
            _format_fillings(model.bundle.tokenizer, text, masks)
            for text, masks in zip(texts, filled, strict=True)
        ]
        return results if isinstance(inputs, list) else results[0]

    def _tag(
        self, model: ServedModel, inputs: Any, parameters: Mapping[str, Any], deadline: Deadline
    ) -> list[Any]:
        """Return the entities of a text, or the tags of its words; a list for each of several."""
        if parameters.get("aggregation_strategy") == "none":
            raise InputError(
                "parameters.aggregation_strategy: tokens are always aggregated; leave it out"
            )
        results = [
            [
                {
                    "entity_group": span.label,
                    "score": span.probability,
                    "word": span.text,
                    "start": span.start,
                    "end": span.end,
                }
                for span in tagged.spans
            ]
            for tagged in self._service.tag(model, self._parse_texts(inputs), deadline)
        ]
        return results if isinstance(inputs, list) else results[0]

    def _parse_texts(self, inputs: Any) -> list[str]:
        """Return the texts of a request, which has one text or a list of texts."""
        if not isinstance(inputs, list):
            return [parse("inputs", _TEXT, inputs)]
        check_limit("texts", len(inputs), self._service.settings.max_texts)
        texts: list[str] = parse("inputs", _TEXTS, inputs)
        return texts


def _format_fillings(tokenizer: Tokenizer, text: str, masks: Sequence[Filling]) -> list[Any]:
    """Return the predictions for the [MASK] of a text, or a list for each [MASK] of several."""
    results = []
    for mask in masks:
        before, after = text[: mask.start], text[mask.start + len(MASK_TOKEN) :]
        results.append(
            [
                {
                    "score": probability,
                    "token": tokenizer.token_to_id(token),
                    "token_str": token,
                    "sequence": _insert_token(before, token, after),
                }
                for token, probability in mask.predictions
            ]
        )
    return results[0] if len(results) == 1 else results


def _insert_token(before: str, token: str, after: str) -> str:
    """Return a text with a token in the place of a mask; ``##ing`` continues the previous word."""
    if token.startswith(CONTINUATION_PREFIX):
        return before.rstrip() + token.removeprefix(CONTINUATION_PREFIX) + after
    return before + token + after


def choose_task(model: ServedModel, inputs: Any, parameters: Mapping[str, Any]) -> str:
    """Return the task of a request, from its body and what the model was trained for."""
    if isinstance(inputs, dict) and "source_sentence" in inputs:
        return "similarity"
    for task in ("answer", "classify", "tag"):
        if task in model.tasks:
            return task
    # A text without [MASK] is an error if a parameter says that tokens are to be predicted.
    has_top = parameters.get("top_k") is not None
    texts = [text for text in as_list(inputs) if isinstance(text, str)]
    needs_fill = bool(texts) and (has_top or any(MASK_TOKEN in text for text in texts))
    return "fill" if needs_fill and "fill" in model.tasks else "embed"


def validate(schema: Any, model: ServedModel, body: InferenceBody) -> Any:
    """Return the body of another endpoint from a body of POST /.

    Raises:
        InputError: a field is invalid for that endpoint.
    """
    # Old clients of Hugging Face's API send options for its cache and the loading of models.
    extra = {name: value for name, value in (body.model_extra or {}).items() if name != "options"}
    fields = {**extra, "model": model.name, "inputs": body.inputs}
    if body.parameters:
        fields["parameters"] = body.parameters
    return parse("", schema, fields)


def parse(name: str, schema: Any, value: Any) -> Any:
    """Return a validated value of a field.

    Raises:
        InputError: the value is invalid.
    """
    try:
        if isinstance(schema, TypeAdapter):
            return schema.validate_python(value, strict=True)
        return schema.model_validate(value)
    except ValidationError as error:
        fields = () if isinstance(schema, TypeAdapter) else schema.model_fields
        raise InputError(describe_errors(error, fields, name)[0]) from None
