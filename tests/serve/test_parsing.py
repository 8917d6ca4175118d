"""Parsing of request bodies: bounded errors, and no delay of other requests."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import orjson
import pytest
from pydantic import BaseModel, ValidationError

from bertsmith.errors import BertsmithError, InputError
from bertsmith.serve import embeddings, inference_api, parsing, schemas
from bertsmith.serve.deadline import RequestTooLargeError
from bertsmith.serve.models import ServedModel
from bertsmith.serve.parsing import parse_body
from bertsmith.serve.settings import ServeSettings
from tests.serve.model_server import RunningServer, run_server

BODY_MODELS = [
    schemas.EmbedBody,
    schemas.VectorsBody,
    schemas.SimilarityBody,
    schemas.TokenizeBody,
    schemas.FillBody,
    schemas.PairBody,
    schemas.ClassifyBody,
    schemas.TagBody,
    schemas.AnswerBody,
    schemas.ChooseBody,
    schemas.OpenAiBody,
]
NUM_ITEMS = 3000
#: Values with thousands of validation errors.
INVALID_VALUES: dict[str, Any] = {
    "numbers": [0] * NUM_ITEMS,
    "nulls": [None] * NUM_ITEMS,
    "lists": [[]] * NUM_ITEMS,
    "objects": [{}] * NUM_ITEMS,
    "pair of thousands": ["a"] * NUM_ITEMS,
    "pairs of thousands": [["a"] * NUM_ITEMS],
    "pairs of numbers": [[0, 0]] * NUM_ITEMS,
    "object": {str(number): 0 for number in range(NUM_ITEMS)},
    "objects of thousands": [{str(number): 0 for number in range(NUM_ITEMS)}],
    "sentences": {"source_sentence": "a", "sentences": [0] * NUM_ITEMS},
    "endings": {"prompt": "a", "endings": [0] * NUM_ITEMS},
    "endings of several": [{"prompt": "a", "endings": [0] * NUM_ITEMS}] * NUM_ITEMS,
}


@pytest.mark.parametrize("model", BODY_MODELS)
@pytest.mark.parametrize("name", INVALID_VALUES)
def test_number_of_validation_errors_is_bounded(model: type[BaseModel], name: str) -> None:
    """A body has at most three errors, even if the length of the list is not limited."""
    field = "input" if model is schemas.OpenAiBody else "inputs"
    for context in (None, {"texts": 10 * NUM_ITEMS}):
        assert _count_errors(model, {field: INVALID_VALUES[name]}, context) <= 3


@pytest.mark.parametrize("item", [b"[[1]]", b'{"a": "b"}', b'"["', b'"\\"{"'])
def test_many_small_values_are_rejected_before_parsing(
    monkeypatch: pytest.MonkeyPatch, item: bytes
) -> None:
    """A body of tiny lists, objects or strings is not parsed, which would need much memory."""
    settings = ServeSettings(max_texts=2)
    body = b'{"inputs": [' + b", ".join([item] * 200) + b"]}"
    with monkeypatch.context() as patch:
        patch.setattr(parsing, "from_json", lambda *_, **__: pytest.fail("parsed"))
        with pytest.raises(RequestTooLargeError, match="the limit is 128 lists, objects"):
            parse_body(body, schemas.EmbedBody, settings)


def test_brackets_in_texts_do_not_count_as_lists() -> None:
    """Texts may contain any number of brackets, quotes and colons."""
    text = '[MASK] { : \\" \\\\' * 300
    body = orjson.dumps({"inputs": [text, text + '"']})
    parsed = parse_body(body, schemas.EmbedBody, ServeSettings(max_texts=2))
    assert isinstance(parsed, schemas.EmbedBody)
    assert parsed.inputs == [text, text + '"']


def test_unfinished_string_is_scanned_once() -> None:
    """The time is proportional to the size, also if escaped quotes follow without an end."""
    assert len(parsing._JSON_STRING.findall(b'"' + b'\\"' * 1000)) == 1
    assert parsing._JSON_STRING.sub(b"", b'["a\\\\", "\\"[", "b') == b"[, , "


def _count_errors(model: type[BaseModel], body: Any, context: Any) -> int:
    """Return the number of validation errors of a body."""
    try:
        model.model_validate(body, context=context)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize(
    "model", [model for model in BODY_MODELS if model is not schemas.OpenAiBody]
)
def test_only_the_first_unknown_key_is_reported(model: type[BaseModel]) -> None:
    """A body of thousands of unknown keys has two errors: the missing field and one key."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate({str(number): 0 for number in range(NUM_ITEMS)})
    locations = [error["loc"] for error in caught.value.errors()]
    assert sorted(locations) == [("0",), ("inputs",)]


@pytest.mark.parametrize("model", [schemas.EmbedBody, schemas.VectorsBody])
@pytest.mark.parametrize("field", ["layer", "weights"])
@pytest.mark.parametrize("items", [["a"] * NUM_ITEMS, [1] * NUM_ITEMS])
def test_lists_of_layers_and_weights_are_limited(
    model: type[BaseModel], field: str, items: Any
) -> None:
    """A list of thousands of layers or weights gives one error."""
    with pytest.raises(ValidationError) as caught:
        model.model_validate({"inputs": "a", field: items})
    assert caught.value.error_count() == 1


def test_list_length_is_checked_before_the_items() -> None:
    """A list that is too long gives RequestTooLargeError, even if its items are invalid."""
    body = b'{"inputs": [' + b"null," * 20 + b"null]}"
    with pytest.raises(RequestTooLargeError, match="the limit is 20 texts per request, got 21"):
        parse_body(body, schemas.EmbedBody, ServeSettings(max_texts=20))
    with pytest.raises(InputError, match=r"^inputs\.0: Input should be .* string, found null$"):
        parse_body(body, schemas.EmbedBody, ServeSettings(max_texts=21))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is not valid JSON in UTF-8: EOF while parsing a value at line 1"),
        (b'{"inputs": "\xff"}', "the body is not valid JSON in UTF-8: invalid unicode"),
        (b'{"a":' * 10_000, "recursion limit exceeded"),
        (b"[1" + b"1" * 10_000 + b"]", "number out of range"),
        (b'{"inputs": "\\ud800"}', "lone surrogate"),
        (b'{"inputs": "\\udc00 a"}', "lone surrogate"),
        (b"[]", "^the body: expected an object, found a list$"),
        (b'{"inputs": 5}', "^inputs: Input should be a valid string, found 5$"),
        (b'{"inputs": ["a", 5]}', "^inputs.1: Input should be a valid string, found 5$"),
        (b'{"inputs": "a", "' + b"n" * 1000 + b'": 0}', "^n{100}: unknown field"),
        (b'{"inputs": "a", "layer": "' + b"n" * 1000 + b'"}', 'found "n{48}…$'),
    ],
)
def test_errors_name_the_invalid_field(body: bytes, message: str) -> None:
    """The message says where the body is invalid, and is short."""
    with pytest.raises(BertsmithError, match=message) as caught:
        parse_body(body, schemas.EmbedBody, ServeSettings())
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (schemas.EmbedBody, "layer"),
        (schemas.EmbedBody, "dimensions"),
        (schemas.FillBody, "top"),
        (schemas.WordDistancesBody, "layer"),
        (schemas.AttentionBody, "layer"),
        (schemas.AttentionBody, "head"),
        (schemas.AttentionBody, "max_cells"),
        (schemas.CohereRerankBody, "top_n"),
        (schemas.OpenAiBody, "dimensions"),
    ],
)
def test_booleans_are_no_integers(body: type[BaseModel], field: str) -> None:
    """As in the OpenAPI schema, true is not 1 and false is not 0; 2.0 and "2" are still 2."""
    for value in (True, False):
        with pytest.raises(ValidationError) as caught:
            body.model_validate({field: value})
        types = {error["loc"][0]: error["type"] for error in caught.value.errors()}
        assert types[field] == "int_type"
    for number in (2.0, "2"):
        with pytest.raises(ValidationError) as caught:
            body.model_validate({field: number})
        assert field not in {error["loc"][0] for error in caught.value.errors()}


def test_booleans_are_no_integers_in_parameters_and_lists() -> None:
    """The same holds for top_k of POST /, and for each layer of a list."""
    with pytest.raises(ValidationError, match="valid integer"):
        inference_api._TOP.validate_python(True)
    assert inference_api._TOP.validate_python(2.0) == 2
    with pytest.raises(ValidationError, match="valid integer"):
        schemas.EmbedBody.model_validate({"inputs": "a", "layer": [True, 2]})


def test_byte_order_mark_is_skipped() -> None:
    """Some editors save JSON files with a byte order mark."""
    parsed = parse_body('\ufeff{"inputs": "a"}'.encode(), schemas.EmbedBody, ServeSettings())
    assert parsed == schemas.EmbedBody(inputs="a")


def test_invalid_token_ids_give_one_error() -> None:
    """Many token ids that are not numbers give one error."""
    for value in ([1, *["a"] * NUM_ITEMS], [[1, "a"]] * NUM_ITEMS, [[1], *[2] * NUM_ITEMS]):
        with pytest.raises(ValidationError, match=r"valid (integer|list)") as caught:
            schemas.OpenAiBody.model_validate({"input": value})
        assert caught.value.error_count() == 1


def _pause_if_large(
    function: Callable[..., Any], is_large: Callable[..., bool]
) -> tuple[Any, threading.Event, threading.Event]:
    """Return a function that pauses for large arguments, and its events ``started``, ``resume``."""
    started = threading.Event()
    resume = threading.Event()

    def paused(*arguments: Any) -> Any:
        if is_large(arguments[0]):
            started.set()
            assert resume.wait(60)
        return function(*arguments)

    return paused, started, resume


def _assert_small_requests_are_answered(
    server: RunningServer, path: str, body: Any, started: threading.Event, resume: threading.Event
) -> None:
    """Check that small requests are answered while a large one is paused.

    Args:
        server: the server.
        path: path of the large request.
        body: body of the large request.
        started: set when the large request is paused.
        resume: set to continue the large request.
    """
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(server.post, path, body)
        assert started.wait(60)
        for _ in range(3):
            assert server.post("/embed", {"inputs": "a hammer"}).status_code == 200
            assert httpx.get(f"{server.url}/health", timeout=60).status_code == 200
        assert not large.done()
        resume.set()
        assert large.result(60).status_code == 200


def test_requests_are_answered_while_a_large_body_is_parsed(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large body is parsed in a thread, which does not block the event loop."""
    paused, started, resume = _pause_if_large(parse_body, lambda body: len(body) > 100_000)
    monkeypatch.setattr(parsing, "parse_body", paused)
    with run_server(models[:1]) as server:
        body = {"inputs": ["a " * 1000] * 100}
        _assert_small_requests_are_answered(server, "/embed", body, started, resume)


@pytest.mark.parametrize("max_buffered_numbers", [10**6, 1000])
@pytest.mark.parametrize("path", ["/embed", "/embed_all", "/v1/embeddings"])
def test_requests_are_answered_while_a_large_response_is_serialized(
    models: list[ServedModel], monkeypatch: pytest.MonkeyPatch, path: str, max_buffered_numbers: int
) -> None:
    """A large response is serialized in a thread, buffered or streamed, and blocks no other."""
    started, resume = threading.Event(), threading.Event()

    def pause(function: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
        def iter_paused(*arguments: Any) -> Iterator[bytes]:
            if any(isinstance(argument, list) and len(argument) > 10 for argument in arguments):
                started.set()
                assert resume.wait(60)
            yield from function(*arguments)

        return iter_paused

    for name in ("iter_json_pieces", "_iter_openai_pieces"):
        monkeypatch.setattr(embeddings, name, pause(getattr(embeddings, name)))
    monkeypatch.setattr(embeddings, "_MAX_BUFFERED_NUMBERS", max_buffered_numbers)
    field = "input" if path.startswith("/v1") else "inputs"
    with run_server(models[:1]) as server:
        _assert_small_requests_are_answered(server, path, {field: ["a"] * 1000}, started, resume)
