"""Clients of OpenAI, LangChain, Hugging Face, Cohere and text-embeddings-inference."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from huggingface_hub import InferenceClient

from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.serve.parsing import TRUNCATED_HEADER
from bertsmith.serve.service import Service
from bertsmith.serve.settings import ServeSettings
from bertsmith.serve.tei import describe_model
from bertsmith.use import quantization
from bertsmith.use.embed import Embedder
from tests.serve.model_server import SENTENCES, RunningServer, run_server

openai = pytest.importorskip("openai")
LONG_TEXT = " ".join(SENTENCES)


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Hugging Face's client connect to the server, although tests are offline."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


def assert_close(actual: Any, expected: Any) -> None:
    """Compare numbers with a tolerance of 1e-5, because results depend slightly on the batch."""
    np.testing.assert_allclose(np.array(actual, np.float64), expected, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def service(models: list[ServedModel]) -> Iterator[Service]:
    """A service of the same models, which computes the expected results."""
    service = Service(models)
    yield service
    service.close()


@pytest.fixture(scope="module")
def embedder(model_dirs: dict[str, Path]) -> Embedder:
    """The embedder of the model "plain"."""
    return Embedder.load(model_dirs["plain"])


@pytest.fixture(scope="module")
def openai_client(server: RunningServer) -> Any:
    """OpenAI's client of the server."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")


def test_openai_client_shortens_vectors(openai_client: Any, embedder: Embedder) -> None:
    """``dimensions`` returns the first elements with length 1; the native size changes nothing."""
    full = embedder.encode(SENTENCES, normalize=True)
    for dimensions in (7, 26):
        response = openai_client.embeddings.create(
            input=SENTENCES, model="plain", dimensions=dimensions
        )
        expected = full[:, :dimensions]
        expected = expected / np.linalg.norm(expected, axis=-1, keepdims=True)
        assert_close([item.embedding for item in response.data], expected)


def test_openai_client_sends_token_ids(openai_client: Any, embedder: Embedder) -> None:
    """Token ids of the model's own tokenizer give the vectors of the texts."""
    sequences = embedder.tokenize(SENTENCES).sequences
    response = openai_client.embeddings.create(input=sequences, model="plain")
    expected = embedder.encode(SENTENCES, normalize=True)
    assert_close([item.embedding for item in response.data], expected)
    response = openai_client.embeddings.create(input=sequences[0], model="plain")
    assert_close(response.data[0].embedding, expected[0])
    assert response.usage.prompt_tokens == len(sequences[0])


def test_token_ids_give_the_vectors_of_their_texts(
    server: RunningServer, embedder: Embedder
) -> None:
    """As in text-embeddings-inference, all endpoints of vectors accept the ids of /tokenize."""
    texts = [SENTENCES[0], LONG_TEXT]
    ids = [embedder.tokenizer.encode(text) for text in texts]
    sequences = [[embedder.tokenizer.cls_id, *row, embedder.tokenizer.sep_id] for row in ids]
    for path, options in (
        ("/embed", {"truncation_direction": "left"}),
        ("/embed_all", {"truncation_direction": "left", "include_special_tokens": False}),
        ("/embed_sparse", {}),
    ):
        expected = server.post(path, {"inputs": texts, **options})
        actual = server.post(path, {"inputs": sequences, **options})
        assert actual.json() == expected.json()
        assert actual.headers.get(TRUNCATED_HEADER) == expected.headers.get(TRUNCATED_HEADER)
        one = server.post(path, {"inputs": sequences[0], **options})
        assert len(one.json()) == 1
        response = server.post(path, {"inputs": sequences, "truncate": False})
        assert response.status_code == 422
        assert "1 of the texts are longer" in response.json()["error"]["message"]


def test_openai_client_gets_one_model(openai_client: Any) -> None:
    """/v1/models/{id} describes a model, and an unknown one is 404."""
    assert openai_client.models.retrieve("mood").id == "mood"
    with pytest.raises(openai.NotFoundError, match="unknown model 'nobody'; expected one of"):
        openai_client.models.retrieve("nobody")


def test_null_fields_have_their_defaults(server: RunningServer, embedder: Embedder) -> None:
    """Null, and "parameters" without content, are the same as leaving a field out."""
    expected = embedder.encode(SENTENCES[:1], normalize=True)
    body: dict[str, Any] = {"input": SENTENCES[0], "encoding_format": None, "dimensions": None}
    response = server.post("/v1/embeddings", body).json()
    assert_close(response["data"][0]["embedding"], expected[0])
    body = {
        "inputs": SENTENCES[0],
        "truncate": None,
        "prompt_name": None,
        "truncation_direction": None,
        "layer": None,
        "combine": None,
        "include_special_tokens": None,
        "parameters": {},
    }
    assert_close(server.post("/embed", body).json(), expected)
    empty: tuple[dict[str, Any] | None, ...] = (None, {})
    for parameters in empty:
        body = {"inputs": "a [MASK]", "top": None, "parameters": parameters}
        assert len(server.post("/fill", body).json()["masks"][0]["predictions"]) == 5


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/embeddings", {"input": "a", "dimensions": 27}, "dimensions is 27; expected 1 to 26"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "greater than or equal to 1"),
        ("/v1/embeddings", {"input": [9906, 1917]}, "token ids must be those of the model's own"),
        ("/v1/embeddings", {"input": [[2, 5, 3], [7]]}, "input 2: token ids must be"),
        ("/v1/embeddings", {"input": [2, 9906, 3]}, "not in the vocabulary; expected 0 to 226"),
        ("/v1/embeddings", {"input": [2, -1, 3]}, "not in the vocabulary"),
        ("/v1/embeddings", {"input": [2, True, 3]}, "valid integer"),
        ("/v1/embeddings", {"input": [[]]}, "at least 1 item"),
        ("/embed", {"inputs": "a", "prompt_name": "query"}, "unknown prompt 'query'"),
        ("/embed", {"inputs": [5, 6]}, "token ids must be those of the model's own"),
        ("/embed_all", {"inputs": [[2, 9906, 3]]}, "not in the vocabulary; expected 0 to 226"),
        ("/embed_sparse", {"inputs": [[2, 5, 3], "a"]}, "inputs.1: Input should be a valid list"),
        ("/embed", {"inputs": "a", "parameters": {"a": 1}}, "parameters: unknown field (valid"),
        ("/similarity", {"inputs": ["a"], "parameters": {"b": 1}}, "parameters.b: unknown field"),
        ("/embed", {"inputs": "a", "truncation_direction": "up"}, "truncation_direction"),
        ("/fill", {"inputs": None}, "inputs: Input should be a valid string"),
        ("/rerank", {"query": "", "texts": ["a"]}, "the query is empty"),
        ("/rerank", {"query": "a", "texts": ["b", " "]}, "document 2 is empty"),
        ("/rerank", {"query": "a", "texts": []}, "texts: expected at least 1 item, found 0"),
        ("/rerank", {"query": "a", "texts": ["b"], "model": "mood"}, "cannot rerank, which"),
        ("/rerank", {"query": LONG_TEXT, "texts": ["b"], "truncate": False}, "is longer than"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}, "text: Field required"),
        ("/v1/rerank", {"query": "a", "documents": [5]}, "documents.0: Input should be a valid s"),
        ("/predict", {"inputs": ["a", "b", "c"]}, "expected at most 2 items, found 3"),
        ("/predict", {"inputs": [1, 2]}, "inputs.0: Input should be a valid string"),
        ("/predict", {"inputs": "a", "raw_scores": True}, "returns probabilities only"),
        ("/predict", {"inputs": LONG_TEXT, "truncate": False}, "longer than the model's maximum"),
        ("/decode", {"ids": [999]}, "input 1: a token id is not in the vocabulary"),
        ("/", {"inputs": "a [MASK]", "parameters": {"targets": ["b"]}}, "'targets' has no effect"),
        ("/", {"inputs": "a [MASK]", "parameters": {"top_k": "5"}}, "parameters.top_k: Input"),
        ("/", {"inputs": "a", "model": "mood", "parameters": {"top_k": -1}}, "parameters.top_k: "),
        ("/", {"inputs": "a [MASK]", "parameters": {"top_k": 0}}, "parameters.top_k: "),
        ("/", {"inputs": {"a": 1}}, "inputs: Input should be a valid string"),
        ("/", {"inputs": "a", "model": "names", "parameters": {"aggregation_strategy": "none"}},
         "always aggregated"),
        ("/", {"inputs": "a", "parameters": {"top_k": 5}}, "text 1: no [MASK] in 'a'"),
        ("/", {"inputs": 5}, "inputs: Input should be a valid string, found 5"),
        ("/", {"inputs": "a", "dimensions": "b"}, "dimensions: Input should be a valid integer"),
    ],
)  # fmt: skip
def test_invalid_requests_say_what_is_wrong(
    server: RunningServer, path: str, body: dict[str, Any], message: str
) -> None:
    """The error names the field, or what the server expects."""
    response = server.post(path, body)
    error = response.json()["error"]
    assert error["code"] == response.status_code
    assert response.status_code in (404, 422)
    assert re.search(re.escape(message), error["message"])


def test_truncated_texts_are_counted_in_a_header(server: RunningServer) -> None:
    """The header has the number of truncated texts; it is missing if there are none."""
    name = "x-bertsmith-truncated-texts"
    texts = [LONG_TEXT, "short", LONG_TEXT]
    assert server.post("/embed", {"inputs": texts}).headers[name] == "2"
    assert server.post("/v1/embeddings", {"input": texts}).headers[name] == "2"
    assert name not in server.post("/embed", {"inputs": "short"}).headers


def test_texts_are_truncated_on_either_side(server: RunningServer, embedder: Embedder) -> None:
    """truncation_direction "Left" keeps the end of a text."""
    ids = embedder.tokenizer.encode(LONG_TEXT)
    num_kept = embedder.max_seqlen - 2
    assert len(ids) > num_kept
    vectors = {
        side: server.post("/embed", {"inputs": LONG_TEXT, "truncation_direction": side}).json()
        for side in ("Right", "left")
    }
    cls_id, sep_id = embedder.tokenizer.cls_id, embedder.tokenizer.sep_id
    for side, part in (("Right", ids[:num_kept]), ("left", ids[-num_kept:])):
        response = server.post("/v1/embeddings", {"input": [cls_id, *part, sep_id]})
        assert_close(vectors[side][0], response.json()["data"][0]["embedding"])


def test_rerank_orders_texts(server: RunningServer, service: Service) -> None:
    """Scores are the sigmoid of the outputs for (query, text), in descending order."""
    scores = [
        prediction.score or 0.0
        for prediction in service.classify("grade", [("the smith", text) for text in SENTENCES])
    ]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    assert order != sorted(order)
    body = {"query": "the smith", "texts": SENTENCES}
    response = server.post("/rerank", body).json()
    assert [row["index"] for row in response] == order
    expected = [1 / (1 + math.exp(-scores[index])) for index in order]
    assert_close([row["score"] for row in response], expected)
    response = server.post("/rerank", {**body, "raw_scores": True, "return_text": True}).json()
    assert_close([row["score"] for row in response], [scores[index] for index in order])
    assert [row["text"] for row in response] == [SENTENCES[index] for index in order]


def test_rerank_needs_a_model_with_one_output(models: list[ServedModel]) -> None:
    """Without such a model the error says so, and /models lists no such task."""
    with run_server(models[:1]) as server:
        response = server.post("/rerank", {"query": "a", "texts": ["b"]})
        assert response.status_code == 404
        assert "no loaded model can rerank" in response.json()["error"]["message"]
        assert "rerank" not in httpx.get(f"{server.url}/models").json()[0]["tasks"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_rerank_of_documents(server: RunningServer, path: str) -> None:
    """Cohere's and Jina's format: documents may be objects, and top_n limits the results."""
    documents = [SENTENCES[0], {"text": SENTENCES[1], "title": "ignored"}, SENTENCES[2]]
    texts = SENTENCES[:3]
    expected = server.post("/rerank", {"query": "iron", "texts": texts}).json()
    body = {"query": "iron", "documents": documents, "model": "grade", "max_tokens_per_doc": 9}
    response = server.post(path, {**body, "top_n": 2, "return_documents": True}).json()
    assert response["model"] == "grade"
    assert response["usage"]["total_tokens"] > 30
    for row, other in zip(response["results"], expected[:2], strict=True):
        assert row["index"] == other["index"]
        assert_close(row["relevance_score"], other["score"])
        assert row["document"] == {"text": texts[row["index"]]}
    assert "document" not in server.post(path, body).json()["results"][0]


@pytest.mark.parametrize("version", [1, 2])
def test_cohere_client_reranks(server: RunningServer, version: int) -> None:
    """Both versions of Cohere's client work with the server's URL."""
    cohere = pytest.importorskip("cohere")
    client_class = cohere.Client if version == 1 else cohere.ClientV2
    client = client_class("none", base_url=server.url)
    response = client.rerank(model="grade", query="iron", documents=SENTENCES, top_n=3)
    expected = server.post("/rerank", {"query": "iron", "texts": SENTENCES}).json()[:3]
    assert [row.index for row in response.results] == [row["index"] for row in expected]
    assert_close(
        [row.relevance_score for row in response.results], [row["score"] for row in expected]
    )


def test_langchain_embeds(server: RunningServer, embedder: Embedder) -> None:
    """LangChain works if it sends texts; the ids of OpenAI's tokenizer are refused with advice."""
    langchain_openai = pytest.importorskip("langchain_openai")
    embeddings = langchain_openai.OpenAIEmbeddings(
        base_url=f"{server.url}/v1", api_key="none", model="plain",
        check_embedding_ctx_length=False,
    )  # fmt: skip
    expected = embedder.encode(SENTENCES, normalize=True)
    assert_close(embeddings.embed_documents(SENTENCES), expected)
    assert_close(embeddings.embed_query(SENTENCES[0]), expected[0])


def test_inference_client_works_with_the_base_url(
    server: RunningServer, service: Service, embedder: Embedder
) -> None:
    """Hugging Face's client gets vectors, similarities and predictions for masks from "/"."""
    client = InferenceClient(server.url, token="none")
    expected = embedder.encode(SENTENCES, normalize=True)
    assert_close(client.feature_extraction(SENTENCES[0]), expected[:1])
    options: dict[str, Any] = {"truncate": True, "truncation_direction": "right"}
    assert_close(client.feature_extraction(SENTENCES[0], normalize=True, **options), expected[:1])
    similarities = client.sentence_similarity(SENTENCES[0], other_sentences=SENTENCES[1:])
    assert_close(similarities, expected[1:] @ expected[0])
    text = "the [MASK] was white"
    (masks,) = service.fill("plain", [text], 20)
    filled = client.fill_mask(text, top_k=20)
    # A continuation has no space, as in a sequence of transformers.
    assert [(row.token_str, row.sequence) for row in filled] == [
        (token, f"the {token} was white".replace(" ##", "")) for token, _ in masks[0].predictions
    ]
    assert any(row.token_str.startswith("##") for row in filled)
    assert_close([row.score for row in filled], [value for _, value in masks[0].predictions])
    tokenizer = embedder.tokenizer
    assert [row.token for row in filled] == [tokenizer.token_to_id(row.token_str) for row in filled]


def test_options_of_old_inference_clients_are_ignored(server: RunningServer) -> None:
    """LangChain's HuggingFaceInferenceAPIEmbeddings sends options, which have no effect here."""
    all_inputs: list[Any] = [
        SENTENCES,
        "the [MASK]",
        {"source_sentence": SENTENCES[0], "sentences": SENTENCES[1:]},
    ]
    for inputs in all_inputs:
        body = {"inputs": inputs, "options": {"wait_for_model": True}}
        response = server.post("/", body)
        assert response.status_code == 200, response.text
        assert response.json() == server.post("/", {"inputs": inputs}).json()


@pytest.mark.parametrize("name", ["mood", "topics"])
def test_inference_client_classifies(
    models: list[ServedModel], service: Service, name: str
) -> None:
    """The first model of the server decides about the task."""
    first = [model for model in models if model.name == name]
    with run_server(first) as server:
        rows = InferenceClient(server.url, token="none").text_classification(SENTENCES[0])
        (prediction,) = service.classify(name, [SENTENCES[0]])
        assert [row.label for row in rows] == [label for label, _ in prediction.labels]
        assert_close([row.score for row in rows], [score for _, score in prediction.labels])
        client = InferenceClient(server.url, token="none")
        assert len(client.text_classification(SENTENCES[0], top_k=1)) == 1


def test_inference_client_tags_and_answers(
    models: list[ServedModel], service: Service, server: RunningServer
) -> None:
    """Entities and answers have the offsets of the service."""
    by_name = {model.name: model for model in models}
    with run_server([by_name["names"]]) as tagger:
        rows = InferenceClient(tagger.url, token="none").token_classification(SENTENCES[0])
        (tagged,) = service.tag("names", [SENTENCES[0]])
        assert [(row.entity_group, row.word, row.start, row.end) for row in rows] == [
            (span.label, span.text, span.start, span.end) for span in tagged.spans
        ]
    with run_server([by_name["answers"]]) as answerer:
        client = InferenceClient(answerer.url, token="none")
        row: Any = client.question_answering(question="who?", context=SENTENCES[0])
        (answer,) = service.answer("answers", [("who?", SENTENCES[0])])
        best = answer.best
        assert (row.answer, row.start, row.end) == (best.text, best.start, best.end)
        assert_close(row.score, best.probability)


def test_inference_api_accepts_lists(models: list[ServedModel]) -> None:
    """A list of texts gives a list with the result of each; its length is limited."""
    masked = ["the [MASK] was white", "a [MASK] and a [MASK]"]
    texts = {"mood": SENTENCES[:2], "names": SENTENCES[:2], "plain": masked}
    for model in models:
        if model.name not in texts:
            continue
        with run_server([model], ServeSettings(max_texts=2)) as server:
            inputs = texts[model.name]
            results = server.post("/", {"inputs": inputs}).json()
            expected = [server.post("/", {"inputs": text}).json() for text in inputs]
            if model.name == "mood":
                expected = [result for (result,) in expected]
            assert_same_results(results, expected)
            excess = server.post("/", {"inputs": inputs + inputs})
            assert excess.status_code == 422
            assert "the limit is 2 texts per request, got 4" in excess.text
            empty = server.post("/", {"inputs": []})
            assert empty.status_code == 422
            assert "expected at least 1 item, found 0" in empty.text


def test_all_texts_of_a_list_need_a_mask(server: RunningServer) -> None:
    """A list with [MASK] in only some texts gives an error that names the text without it."""
    response = server.post("/", {"inputs": ["the [MASK] was white", "a bridge"]})
    assert response.status_code == 422
    assert "text 2: no [MASK] in 'a bridge'" in response.text


def assert_same_results(results: Any, expected: Any) -> None:
    """Compare nested JSON values; scores may differ by rounding."""
    if isinstance(expected, list):
        assert len(results) == len(expected)
        for result, value in zip(results, expected, strict=True):
            assert_same_results(result, value)
    elif isinstance(expected, dict):
        assert results == {**expected, "score": pytest.approx(expected["score"], rel=1e-4)}
    else:
        assert results == expected


def test_predict_has_the_format_of_tei(server: RunningServer, service: Service) -> None:
    """A text or pair gives a list of labels; a batch gives a list for each."""
    pair = (SENTENCES[0], SENTENCES[1])
    expected = [
        [{"label": label, "score": score} for label, score in prediction.labels]
        for prediction in service.classify("mood", [SENTENCES[0], pair])
    ]

    def check(actual: Any, rows: Any) -> None:
        assert [row["label"] for row in actual] == [row["label"] for row in rows]
        assert_close([row["score"] for row in actual], [row["score"] for row in rows])

    check(server.post("/predict", {"inputs": SENTENCES[0]}).json(), expected[0])
    check(server.post("/predict", {"inputs": list(pair)}).json(), expected[1])
    batch = server.post("/predict", {"inputs": [[SENTENCES[0]], list(pair)]}).json()
    for actual, rows in zip(batch, expected, strict=True):
        check(actual, rows)
    (score,) = service.classify("grade", [SENTENCES[0]])
    body = {"inputs": SENTENCES[0], "model": "grade", "raw_scores": True}
    assert_close(server.post("/predict", body).json()[0]["score"], score.score)


def test_decode_inverts_tokenize(server: RunningServer) -> None:
    """The ids of a lower-case text decode to the text, with special tokens on request."""
    text = SENTENCES[2].lower()
    tokens = server.post("/tokenize", {"inputs": text}).json()[0]
    ids = [token["id"] for token in tokens]
    decoded = server.post("/decode", {"ids": ids}).json()
    assert decoded == [text.replace(",", " ,").replace(".", " .")] or decoded == [text]
    texts = server.post("/decode", {"ids": [ids, ids[1:3]], "skip_special_tokens": False}).json()
    assert texts[0] == f"[CLS] {decoded[0]} [SEP]"
    assert "[CLS]" not in texts[1]


@pytest.mark.parametrize(("dtype", "expected"), [(torch.bfloat16, "bfloat16"), (None, "int8")])
def test_info_has_the_number_format(
    model_dirs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype | None,
    expected: str,
) -> None:
    """It is float32 by default; in the fast mode, it depends on the processor."""
    monkeypatch.setattr(quantization, "choose_16_bit_dtype", lambda _: dtype)
    for fast, name in ((False, "float32"), (True, expected)):
        model = load_served_model("m", model_dirs["plain"], fast=fast)
        assert describe_model(model, ServeSettings())["model_dtype"] == name


def test_info_describes_a_model(
    server: RunningServer, model_dirs: dict[str, Path], models: list[ServedModel]
) -> None:
    """/info has the fields that clients of text-embeddings-inference read."""
    info = httpx.get(f"{server.url}/info").json()
    assert (info["model_id"], info["max_input_length"]) == ("plain", models[0].embedder.max_seqlen)
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert info["max_client_batch_size"] == 1024
    info = httpx.get(f"{server.url}/info", params={"model": "grade"}).json()
    assert "reranker" in info["model_type"]
    info = httpx.get(f"{server.url}/info", params={"model": "mood"}).json()
    assert info["model_type"]["classifier"]["id2label"] == {"0": "bad", "1": "good"}
    assert httpx.get(f"{server.url}/info", params={"model": "x"}).status_code == 404
    with run_server([load_served_model("m", model_dirs["mood"])]) as other:
        assert "classifier" in httpx.get(f"{other.url}/info").json()["model_type"]


def test_similarities_are_cosines_in_spite_of_rounding(server: RunningServer) -> None:
    """No similarity of equal texts is above 1, where arccos is undefined."""
    texts = [f"the smith lifted {'iron ' * count}once" for count in range(1, 41)]
    assert np.max(server.post("/similarity", {"inputs": texts}).json()) <= 1
    for text in texts:
        inputs = {"source_sentence": text, "sentences": [text]}
        assert server.post("/similarity", {"inputs": inputs}).json()[0] <= 1
