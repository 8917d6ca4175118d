"""The endpoints of what this package's models can do, one a task."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import orjson
from fastapi import Request
from starlette.responses import Response

from bertsmith.bundle import FineTunedBundle
from bertsmith.serve.deadline import Deadline
from bertsmith.serve.execution import RequestExecutor, json_response, list_json, to_json_response
from bertsmith.serve.models import ServedModel
from bertsmith.serve.schemas import (
    AnswerBody,
    ChooseBody,
    ClassifyBody,
    FillBody,
    PairBody,
    TagBody,
    TokenizeBody,
)
from bertsmith.use.predict import Prediction

One = TypeVar("One")


class TaskRoutes:
    """The endpoints, each a method; ``router`` has them all."""

    def __init__(self, asking: RequestExecutor) -> None:
        self._asking, self._service = asking, asking.service
        self.router = asking.create_router()
        self.router.get("/models")(self.models)
        for path in ("tokenize", "fill", "pair", "classify", "tag", "answer", "choose"):
            self.router.post(f"/{path}")(getattr(self, path))

    async def models(self) -> Response:
        """Tell the models, and what each can do."""
        return to_json_response([_told(own) for own in self._service.models.values()])

    async def tokenize(self, request: Request, body: TokenizeBody) -> Response:
        """Cut texts into tokens: ids, words and characters [start, stop)."""
        texts, special = as_list(body.inputs), body.add_special_tokens

        def answer(until: Deadline) -> Response:
            own, found = self._service.tokenize(body.model, texts, until)
            return json_response(list_json(_tokens(own, found, special=special, until=until)))

        return await self._asking.run_in_thread(request, answer)

    async def fill(self, request: Request, body: FillBody) -> Response:
        """Fill in the masks of a text: the likeliest words with their probabilities."""
        texts = as_list(body.inputs)

        def answer(until: Deadline) -> Response:
            found = self._service.fill(body.model, texts, body.top, until)
            items = ({"masks": [{"place": mask.place, "words": mask.words} for mask in masks]}
                     for masks in found)  # fmt: skip
            return as_asked(body.inputs, items)

        return await self._asking.run_in_thread(request, answer)

    async def pair(self, request: Request, body: PairBody) -> Response:
        """Tell how probable it is that B follows A."""
        pairs = as_list(body.inputs)

        def answer(until: Deadline) -> Response:
            found = self._service.pair(body.model, pairs, until)
            return as_asked(body.inputs, map(asdict, found))

        return await self._asking.run_in_thread(request, answer)

    async def classify(self, request: Request, body: ClassifyBody) -> Response:
        """Tell the labels of a text or a pair with their probabilities, or its number."""
        texts: list[str | tuple[str, str]] = as_list(body.inputs)

        def answer(until: Deadline) -> Response:
            found = self._service.classify(body.model, texts, until)
            return as_asked(body.inputs, map(_prediction, found))

        return await self._asking.run_in_thread(request, answer)

    async def tag(self, request: Request, body: TagBody) -> Response:
        """Find the entities of a text, or the tag of each of its words, with their characters."""
        texts = as_list(body.inputs)

        def answer(until: Deadline) -> Response:
            found = self._service.tag(body.model, texts, until)
            return as_asked(body.inputs, (list(map(asdict, tagged.spans)) for tagged in found))

        return await self._asking.run_in_thread(request, answer)

    async def answer(self, request: Request, body: AnswerBody) -> Response:
        """Answer a question from its context, with the characters of the answer."""
        questions = [(item.question, item.context) for item in as_list(body.inputs)]

        def answer(until: Deadline) -> Response:
            found = self._service.answer(body.model, questions, until)
            items = ({**asdict(own.best), "null_score": own.null_score, "cut_off": own.cut_off,
                      "candidates": [asdict(one) for one in own.candidates[:5]]}
                     for own in found)  # fmt: skip
            return as_asked(body.inputs, items)

        return await self._asking.run_in_thread(request, answer)

    async def choose(self, request: Request, body: ChooseBody) -> Response:
        """Tell which ending fits a prompt, with the probability of each."""
        questions = [(item.prompt, item.endings) for item in as_list(body.inputs)]

        def answer(until: Deadline) -> Response:
            found = self._service.choose(body.model, questions, until)
            return as_asked(body.inputs, map(asdict, found))

        return await self._asking.run_in_thread(request, answer)


def as_list(inputs: One | list[One]) -> list[One]:
    """Return a list of one thing that was asked, or the list itself."""
    return inputs if isinstance(inputs, list) else [inputs]


def as_asked(inputs: object, items: Iterable[Any]) -> Response:
    """Return the answers to a list that was asked, or the one answer to one thing."""
    if isinstance(inputs, list):
        return json_response(list_json(map(orjson.dumps, items)))
    return to_json_response(next(iter(items)))


def _told(own: ServedModel) -> dict[str, Any]:
    config = own.bundle.config
    told = {"name": own.name, "abilities": sorted(own.abilities), "layers": config.layers,
            "width": config.width, "words": own.bundle.tokenizer.vocab_size,
            "longest": own.embedder.max_seqlen}  # fmt: skip
    if isinstance(own.bundle, FineTunedBundle):
        told |= {"kind": own.bundle.head.kind, "labels": list(own.bundle.head.labels)}
    return told


def _tokens(
    own: ServedModel,
    encoded: Sequence[tuple[list[int], list[tuple[int, int]]]],
    *,
    special: bool,
    until: Deadline,
) -> Iterator[bytes]:
    """Yield the tokens of each text as JSON. Raises LateError or GoneError."""
    tokenizer = own.bundle.tokenizer
    first, last = ({"id": number, "text": tokenizer.ids_to_tokens([number])[0], "special": True,
                    "start": None, "stop": None}
                   for number in (tokenizer.cls_id, tokenizer.sep_id))  # fmt: skip
    for ids, places in encoded:
        until.check()
        rows = zip(ids, tokenizer.ids_to_tokens(ids), places, strict=True)
        tokens = [{"id": number, "text": word, "special": False, "start": start, "stop": stop}
                  for number, word, (start, stop) in rows]  # fmt: skip
        yield orjson.dumps([first, *tokens, last] if special else tokens)


def _prediction(own: Prediction) -> dict[str, Any]:
    if own.score is not None:
        return {"score": own.score, "cut_off": own.cut_off}
    return {"labels": [{"label": label, "score": share} for label, share in own.labels],
            "cut_off": own.cut_off}  # fmt: skip
