"""Endpoints of the tasks: tokenize, fill, pair, classify, tag, answer, choose."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import orjson
from fastapi import Request
from starlette.responses import Response

from bertsmith.bundle import FineTunedBundle
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.execution import (
    RequestExecutor,
    create_json_response,
    join_json_items,
    to_json_response,
)
from bertsmith.serve.models import ServedModel
from bertsmith.serve.responses import (
    AnswerResults,
    ChooseResults,
    ClassifyResult,
    FillResult,
    ModelDescription,
    PairResult,
    TagResult,
    Token,
)
from bertsmith.serve.schemas import (
    AnswerBody,
    ChooseBody,
    ClassifyBody,
    FillBody,
    PairBody,
    TagBody,
    TokenizeBody,
)
from bertsmith.tasks.label_names import get_label_names, get_training_file
from bertsmith.use.answer import Answer
from bertsmith.use.choose import Choice
from bertsmith.use.predict import Prediction

Item = TypeVar("Item")


class TaskRoutes:
    """Endpoints of the tasks; each endpoint is a method.

    Attributes:
        router: the router of the endpoints.
    """

    def __init__(self, executor: RequestExecutor) -> None:
        self._service = executor.service
        self.router = executor.create_router()
        self.router.get("/models", response_model=list[ModelDescription])(self.list_models)
        post = self.router.post
        post("/tokenize", response_model=list[list[Token]])(self.tokenize)
        post("/fill", response_model=FillResult)(self.fill)
        post("/pair", response_model=PairResult)(self.pair)
        post("/classify", response_model=ClassifyResult)(self.classify)
        post("/tag", response_model=TagResult)(self.tag)
        post("/answer", response_model=AnswerResults)(self.answer)
        post("/choose", response_model=ChooseResults)(self.choose)

    async def list_models(self) -> Response:
        """List the models and their tasks."""
        return to_json_response([_describe_model(model) for model in self._service.models.values()])

    def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """Split texts into tokens: ids, token texts and character offsets [start, stop)."""
        texts = as_list(body.inputs)
        deadline: Deadline = request.state.deadline
        model, encoded = self._service.tokenize(
            body.model, texts, deadline, prompt_name=body.prompt_name
        )
        token_lists = _iter_token_lists(
            model, encoded, add_special_tokens=body.add_special_tokens, deadline=deadline
        )
        return create_json_response(join_json_items(token_lists))

    def fill(self, request: Request, body: FillBody) -> Response:
        """Predict the most probable tokens for each [MASK] of a text."""
        texts = as_list(body.inputs)
        deadline: Deadline = request.state.deadline
        filled = self._service.fill(body.model, texts, body.top, deadline)
        # Unlike asdict, vars does not copy the predictions.
        items = ({"masks": list(map(vars, masks))} for masks in filled)
        return _create_response(body.inputs, items)

    def pair(self, request: Request, body: PairBody) -> Response:
        """Predict the probability that text B follows text A (next-sentence prediction)."""
        pairs = as_list(body.inputs)
        deadline: Deadline = request.state.deadline
        results = self._service.pair(body.model, pairs, deadline)
        return _create_response(body.inputs, map(asdict, results))

    def classify(self, request: Request, body: ClassifyBody) -> Response:
        """Classify texts or pairs: labels with probabilities, or the score of a regression."""
        texts: list[str | tuple[str, str]] = as_list(body.inputs)
        deadline: Deadline = request.state.deadline
        predictions = self._service.classify(body.model, texts, deadline)
        return _create_response(body.inputs, map(_format_prediction, predictions))

    def tag(self, request: Request, body: TagBody) -> Response:
        """Find the entities of a text, or tag each word, with character offsets."""
        texts = as_list(body.inputs)
        deadline: Deadline = request.state.deadline
        results = self._service.tag(body.model, texts, deadline)
        items = (list(map(asdict, tagged.spans)) for tagged in results)
        return _create_response(body.inputs, items)

    def answer(self, request: Request, body: AnswerBody) -> Response:
        """Extract the answer to a question from a context, with character offsets."""
        questions = [(item.question, item.context) for item in as_list(body.inputs)]
        deadline: Deadline = request.state.deadline
        answers = self._service.answer(body.model, questions, deadline)
        return _create_response(body.inputs, map(_format_answer, answers))

    def choose(self, request: Request, body: ChooseBody) -> Response:
        """Choose the best ending of a prompt, with the probability of each ending."""
        prompts = [(item.prompt, item.endings) for item in as_list(body.inputs)]
        deadline: Deadline = request.state.deadline
        choices = self._service.choose(body.model, prompts, deadline)
        return _create_response(body.inputs, map(_format_choice, choices))


def as_list(inputs: Item | list[Item]) -> list[Item]:
    """Return a list unchanged, and a single item as a list."""
    return inputs if isinstance(inputs, list) else [inputs]


def _create_response(inputs: object, items: Iterable[Any]) -> Response:
    """Return a response with all items, or with the only item if the inputs are not a list.

    Args:
        inputs: the inputs of the request: a list, or a single input.
        items: the result of each input.
    """
    if isinstance(inputs, list):
        return create_json_response(join_json_items(map(orjson.dumps, items)))
    return to_json_response(next(iter(items)))


def _describe_model(model: ServedModel) -> dict[str, Any]:
    """Return the entry of a model in /models."""
    config = model.bundle.config
    fields = {
        "name": model.name,
        "tasks": sorted(model.tasks),
        "num_layers": config.layers,
        "num_heads": config.heads,
        "hidden_size": config.width,
        "vocab_size": model.bundle.tokenizer.vocab_size,
        "max_seqlen": model.embedder.max_seqlen,
    }
    if isinstance(model.bundle, FineTunedBundle):
        head = model.bundle.head
        training_file = get_training_file(model.bundle.info)
        label_names = get_label_names(head.kind, head.labels, training_file)
        fields |= {"kind": head.kind, "labels": list(head.labels), "label_names": label_names}
    return fields


def _iter_token_lists(
    model: ServedModel,
    encoded: Sequence[tuple[list[int], list[tuple[int, int]]]],
    *,
    add_special_tokens: bool,
    deadline: Deadline,
) -> Iterator[bytes]:
    """Yield the tokens of each text as a JSON list.

    Args:
        model: the model whose tokenizer encoded the texts.
        encoded: token ids and character offsets of each text.
        add_special_tokens: whether to add [CLS] and [SEP].
        deadline: checked before each text.
    """
    tokenizer = model.bundle.tokenizer
    cls_id, sep_id = tokenizer.cls_id, tokenizer.sep_id
    cls_text, sep_text = tokenizer.ids_to_tokens([cls_id, sep_id])
    cls = {"id": cls_id, "text": cls_text, "special": True, "start": None, "stop": None}
    sep = {"id": sep_id, "text": sep_text, "special": True, "start": None, "stop": None}
    for ids, offsets in encoded:
        deadline.check()
        rows = zip(ids, tokenizer.ids_to_tokens(ids), offsets, strict=True)
        tokens = [
            {"id": token_id, "text": text, "special": False, "start": start, "stop": stop}
            for token_id, text, (start, stop) in rows
        ]
        yield orjson.dumps([cls, *tokens, sep] if add_special_tokens else tokens)


def _format_answer(answer: Answer) -> dict[str, Any]:
    """Return the fields of an answer in /answer, with the five best spans as candidates."""
    return {
        **asdict(answer.best),
        "null_score_diff": answer.null_score_diff,
        "truncated": answer.is_truncated,
        "candidates": [asdict(span) for span in answer.candidates[:5]],
    }


def _format_choice(choice: Choice) -> dict[str, Any]:
    """Return the fields of a choice in /choose."""
    return {
        "probabilities": choice.probabilities,
        "best_index": choice.best_index,
        "truncated": choice.is_truncated,
    }


def _format_prediction(prediction: Prediction) -> dict[str, Any]:
    """Return the fields of a prediction in /classify."""
    if prediction.score is not None:
        return {"score": prediction.score, "truncated": prediction.is_truncated}
    return {
        "labels": [{"label": label, "score": score} for label, score in prediction.labels],
        "truncated": prediction.is_truncated,
    }
