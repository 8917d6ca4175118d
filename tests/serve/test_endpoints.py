"""Endpoints: results equal those of the Python API, and errors have a common format."""

import base64
import gzip
import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules

from bertsmith import answer, choose, embed, fill, pair, predict
from bertsmith.serve.models import ServedModel, load_served_model
from bertsmith.use.embed import Embedder
from bertsmith.use.tag import tag
from tests.serve.model_server import SENTENCES, RunningServer, run_server

openai = pytest.importorskip("openai")


def assert_close(actual: Any, expected: Any) -> None:
    """Compare numbers with a tolerance of 1e-5, because results depend slightly on the batch."""
    np.testing.assert_allclose(np.array(actual, np.float64), expected, rtol=0, atol=1e-5)


def test_openai_client_gets_the_vectors_of_embed(
    server: RunningServer, model_dirs: dict[str, Path]
) -> None:
    """OpenAI's client gets vectors of length 1 in base64 (its default) and as floats."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    expected = embed(model_dirs["plain"], SENTENCES, normalize=True)
    response = client.embeddings.create(input=SENTENCES, model="plain")
    assert_close([item.embedding for item in response.data], expected)
    assert [item.index for item in response.data] == list(range(len(SENTENCES)))
    assert response.model == "plain"
    sequences = Embedder.load(model_dirs["plain"]).tokenize(SENTENCES).sequences
    assert response.usage.prompt_tokens == sum(map(len, sequences))
    floats = client.embeddings.create(input=SENTENCES[0], model="plain", encoding_format="float")
    assert_close(floats.data[0].embedding, expected[0])
    assert "plain" in [model.id for model in client.models.list().data]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": []}, 422, "input: expected at least 1 item, found 0"),
        ({"input": "a", "model": "nobody"}, 404, "unknown model 'nobody'; expected one"),
        ({}, 422, "input: Field required"),
        ({"input": "a", "encoding_format": "hex"}, 422, "encoding_format"),
    ],
)
def test_openai_errors_say_what_is_wrong(
    server: RunningServer, body: Any, status: int, message: str
) -> None:
    """Errors have OpenAI's format and say what is wrong."""
    response = server.post("/v1/embeddings", body)
    assert response.status_code == status
    assert message in response.json()["error"]["message"]
    assert response.json()["error"]["code"] == status


def test_base64_vectors_are_little_endian_float32(
    server: RunningServer, model_dirs: dict[str, Path]
) -> None:
    """The base64 format of OpenAI's API decodes to float32."""
    body = {"input": SENTENCES[0], "encoding_format": "base64"}
    response = server.post("/v1/embeddings", body)
    raw = base64.b64decode(response.json()["data"][0]["embedding"])
    assert_close(
        np.frombuffer(raw, "<f4"), embed(model_dirs["plain"], SENTENCES[:1], normalize=True)[0]
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_openai_vectors_follow_the_sentence_transformers_config(
    model_dirs: dict[str, Path], tmp_path: Path, *, normalize: bool
) -> None:
    """/v1/embeddings normalizes a sentence-transformers model only if its modules do."""
    path = tmp_path / "model"
    shutil.copytree(model_dirs["plain"], path)
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    entries = [
        {"type": f"sentence_transformers.models.{name}", "path": folder}
        for name, folder in zip(modules, ("", "1_Pooling", "2_Normalize"), strict=False)
    ]
    (path / "modules.json").write_text(json.dumps(entries))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    with run_server([load_served_model("sentences", path)]) as server:
        response = server.post("/v1/embeddings", {"input": SENTENCES})
        vectors = [item["embedding"] for item in response.json()["data"]]
        assert_close(vectors, embed(model_dirs["plain"], SENTENCES, normalize=normalize))
        lengths = np.linalg.norm(server.post("/embed", {"inputs": SENTENCES}).json(), axis=-1)
        assert_close(lengths, np.ones(len(SENTENCES)))


def test_settings_that_do_not_fit_the_modules_are_invalid(
    model_dirs: dict[str, Path], tmp_path: Path
) -> None:
    """A Dense module expects the vectors of one layer; two layers give 422, not 404."""
    parts = [
        modules.Transformer(str(model_dirs["plain"])),
        modules.Pooling(26),
        modules.Dense(26, 8),
    ]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "dense"))
    with run_server([load_served_model("dense", tmp_path / "dense")]) as server:
        assert server.post("/embed", {"inputs": "a"}).status_code == 200
        response = server.post("/embed", {"inputs": "a", "layer": [1, 2]})
        assert response.status_code == 422
        assert "the Dense module expects" in response.json()["error"]["message"]


def test_embed_accepts_settings(server: RunningServer, model_dirs: dict[str, Path]) -> None:
    """/embed accepts requests of text-embeddings-inference, and Bertsmith's settings."""
    body = {"inputs": SENTENCES, "layer": -2, "pooling": "max", "normalize": False}
    process = subprocess.run(
        [
            "curl",
            "-sS",
            f"{server.url}/embed",
            "-H",
            "Content-Type: application/json",
            "-d",
            json.dumps(body),
        ],
        capture_output=True,
        check=True,
    )
    expected = embed(model_dirs["plain"], SENTENCES, layer=-2, pooling="max")
    assert_close(json.loads(process.stdout), expected)
    vectors = server.post("/embed", {"inputs": SENTENCES[0]}).json()
    assert_close(vectors, embed(model_dirs["plain"], SENTENCES[:1], normalize=True))


def test_embed_all_returns_a_vector_per_token(
    server: RunningServer, model_dirs: dict[str, Path]
) -> None:
    """/embed_all returns a vector per token, with or without special tokens."""
    embedder = Embedder.load(model_dirs["plain"])
    for include_special_tokens in (True, False):
        body = {"inputs": SENTENCES[:2], "include_special_tokens": include_special_tokens}
        actual = server.post("/embed_all", body).json()
        expected = embedder.encode_tokens(
            SENTENCES[:2], include_special_tokens=include_special_tokens
        )
        for vectors, expected_text in zip(actual, expected, strict=True):
            assert_close(vectors, expected_text.vectors)


def test_request_field_of_version_0_1_is_accepted(server: RunningServer) -> None:
    """``special`` is read as ``include_special_tokens``; both at once, or elsewhere, are errors."""
    body = {"inputs": SENTENCES[:2]}
    old = server.post("/embed_all", body | {"special": False}).json()
    assert old == server.post("/embed_all", body | {"include_special_tokens": False}).json()
    assert old != server.post("/embed_all", body).json()
    old_and_new = body | {"special": False, "include_special_tokens": False}
    assert server.post("/embed_all", old_and_new).status_code == 422
    assert server.post("/fill", body | {"special": False}).status_code == 422


def test_long_texts_are_truncated_or_rejected(
    server: RunningServer, model_dirs: dict[str, Path]
) -> None:
    """Texts that are too long are truncated by default, and rejected with ``truncate: false``."""
    long = "the smith " * 60
    response = server.post("/embed", {"inputs": long})
    assert_close(response.json(), embed(model_dirs["plain"], [long], normalize=True))
    for path in ("/embed", "/embed_all"):
        response = server.post(path, {"inputs": long, "truncate": False})
        assert response.status_code == 422
        assert "truncate: true" in response.json()["error"]["message"]


def test_similarity_is_the_cosine_of_the_vectors(
    server: RunningServer, model_dirs: dict[str, Path]
) -> None:
    """/similarity returns the cosine similarity to each of the sentences."""
    vectors = embed(model_dirs["plain"], SENTENCES, normalize=True)
    inputs = {"source_sentence": SENTENCES[0], "sentences": SENTENCES[1:]}
    response = server.post("/similarity", {"inputs": inputs})
    assert_close(response.json(), vectors[1:] @ vectors[0])


def test_tokenize_returns_ids_and_offsets(
    server: RunningServer, model_dirs: dict[str, Path]
) -> None:
    """/tokenize returns ids and character offsets; special tokens have no offsets."""
    text = SENTENCES[0]
    [tokens] = server.post("/tokenize", {"inputs": [text]}).json()
    tokenizer = Embedder.load(model_dirs["plain"]).tokenizer
    expected_ids = [tokenizer.cls_id, *tokenizer.encode(text), tokenizer.sep_id]
    assert [token["id"] for token in tokens] == expected_ids
    is_special = [token["special"] for token in tokens]
    assert is_special == [True, *[False] * (len(tokens) - 2), True]
    joined = "".join(text[token["start"] : token["stop"]] for token in tokens[1:-1])
    assert joined == text.replace(" ", "")
    plain = server.post("/tokenize", {"inputs": text, "add_special_tokens": False}).json()
    assert plain == [tokens[1:-1]]


def test_fill_equals_the_python_api(server: RunningServer, model_dirs: dict[str, Path]) -> None:
    """/fill returns the tokens and probabilities of ``fill``."""
    texts = ["the [MASK] of the [MASK]", "a [MASK] hammer"]
    results = server.post("/fill", {"inputs": texts, "top": 3}).json()
    for text, result in zip(texts, results, strict=True):
        expected_masks = fill(model_dirs["plain"], text, 3)
        for mask, expected in zip(result["masks"], expected_masks, strict=True):
            assert mask["start"] == expected.start
            assert [word for word, _ in mask["predictions"]] == [
                word for word, _ in expected.predictions
            ]
            assert_close(
                [probability for _, probability in mask["predictions"]],
                [probability for _, probability in expected.predictions],
            )
    assert server.post("/fill", {"inputs": texts[1]}).json()["masks"][0]["start"] == 2


def test_pair_equals_the_python_api(server: RunningServer, model_dirs: dict[str, Path]) -> None:
    """/pair accepts one pair, or a list of pairs."""
    expected = [pair(model_dirs["plain"], SENTENCES[0], second) for second in SENTENCES[1:]]
    single = server.post("/pair", {"inputs": [SENTENCES[0], SENTENCES[1]]}).json()
    assert_close(single["next_sentence_probability"], expected[0])
    pairs = [[SENTENCES[0], second] for second in SENTENCES[1:]]
    results = server.post("/pair", {"inputs": pairs}).json()
    assert_close([result["next_sentence_probability"] for result in results], expected)


@pytest.mark.parametrize("name", ["mood", "topics", "grade"])
def test_classify_equals_the_python_api(
    server: RunningServer, model_dirs: dict[str, Path], name: str
) -> None:
    """/classify works for single-label, multi-label and regression models, texts and pairs."""
    texts: list[str | tuple[str, str]] = [*SENTENCES, (SENTENCES[0], SENTENCES[1])]
    results = server.post("/classify", {"model": name, "inputs": texts}).json()
    for result, expected in zip(results, predict(model_dirs[name], texts), strict=True):
        if expected.score is not None:
            assert_close(result["score"], expected.score)
        else:
            labels = [item["label"] for item in result["labels"]]
            assert labels == [label for label, _ in expected.labels]
            assert_close(
                [item["score"] for item in result["labels"]],
                [probability for _, probability in expected.labels],
            )
    single = server.post("/classify", {"model": name, "inputs": SENTENCES[0]}).json()
    assert single.keys() == results[0].keys()


@pytest.mark.parametrize("name", ["names", "speech"])
def test_tag_equals_the_python_api(
    server: RunningServer, model_dirs: dict[str, Path], name: str
) -> None:
    """/tag returns the entities, or the tags, with character offsets."""
    results = server.post("/tag", {"model": name, "inputs": SENTENCES}).json()
    for spans, expected in zip(results, tag(model_dirs[name], SENTENCES), strict=True):
        actual = [(span["text"], span["start"], span["end"], span["label"]) for span in spans]
        assert actual == [(span.text, span.start, span.end, span.label) for span in expected.spans]
        assert_close(
            [span["probability"] for span in spans],
            [span.probability for span in expected.spans],
        )


def test_answer_equals_the_python_api(server: RunningServer, model_dirs: dict[str, Path]) -> None:
    """/answer returns the answer's text, offsets and probability, also for a long context."""
    context = " ".join(SENTENCES * 2)
    inputs = {"question": "who struck", "context": context}
    result = server.post("/answer", {"inputs": [inputs]}).json()[0]
    [expected] = answer(model_dirs["answers"], [("who struck", context)])
    assert result["text"] == expected.text
    assert (result["start"], result["end"]) == (expected.start, expected.end)
    assert_close(result["probability"], expected.probability)
    assert server.post("/answer", {"inputs": inputs}).json()["text"] == expected.text


def test_choose_equals_the_python_api(server: RunningServer, model_dirs: dict[str, Path]) -> None:
    """/choose returns the best ending and the probability of each ending."""
    inputs = {"prompt": SENTENCES[0], "endings": SENTENCES[1:4]}
    result = server.post("/choose", {"inputs": inputs}).json()
    [expected] = choose(model_dirs["endings"], [(SENTENCES[0], SENTENCES[1:4])])
    assert_close(result["probabilities"], expected.probabilities)
    assert result["best_index"] == expected.best_index


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/fill", {"inputs": "no mask"}, 422, "no [MASK] in"),
        ("/fill", {"inputs": ["[MASK] " * 40] * 30}, 422, "1,024 masks per request, got 1,200"),
        ("/pair", {"inputs": ["a", " "]}, 422, "text B is empty"),
        ("/pair", {"inputs": ["a", "b"], "model": "mood"}, 404, "'mood' cannot pair; expected"),
        ("/classify", {"inputs": [""]}, 422, "text 1 is empty"),
        ("/tag", {"inputs": "  "}, 422, "text 1 is empty"),
        ("/answer", {"inputs": {"question": "", "context": "b"}}, 422, "the question is empty"),
        ("/choose", {"inputs": {"prompt": "a", "endings": ["b"]}}, 422, "endings"),
        ("/embed", {"inputs": "a", "layer": 9}, 422, "there is no layer 9"),
        ("/embed", {"inputs": "a", "pooling": "middle"}, 422, "pooling"),
        ("/embed", {"inputs": "a", "pooling": "pooled", "model": "names"}, 422, "has no pooler"),
        ("/embed", {"inputs": "a", "pooling": "none"}, 422, "/embed_all"),
        ("/embed", {"inputs": "a", "polling": "mean"}, 422, "did you mean 'pooling'?"),
        ("/embed", {"inputs": []}, 422, "at least 1 item"),
        ("/embed", {"inputs": ["a"] * 2000}, 422, "1,024 texts per request, got 2,000"),
        ("/nothing", {}, 404, "there is no endpoint /nothing; see /docs"),
    ],
)
def test_errors_have_a_common_format(
    server: RunningServer, path: str, body: Any, status: int, message: str
) -> None:
    """Every error has its HTTP status as code, and a message that says what is wrong."""
    response = server.post(path, body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, status)
    assert message in error["message"]


def test_malformed_requests_get_errors(server: RunningServer) -> None:
    """A wrong content type, invalid JSON, invalid UTF-8 and a wrong method are errors."""
    url = f"{server.url}/embed"
    response = httpx.post(url, content=b"\xff\x00{", timeout=60)
    assert response.status_code == 422
    assert "error" in response.json()
    assert "the header Content-Type is ''; expected application/json" in response.text
    headers = {"Content-Type": "application/json"}
    response = httpx.post(url, content=b"{", headers=headers, timeout=60)
    assert response.status_code == 422
    assert "the body is not valid JSON in UTF-8: EOF while parsing an object" in response.text
    assert "at line 1 column 1; send an object such as" in response.text
    response = httpx.post(url, content=b'{"inputs": "\xff"}', headers=headers, timeout=60)
    assert "the body is not valid JSON in UTF-8: invalid unicode" in response.text
    response = httpx.get(url, timeout=60)
    assert response.status_code == 405
    assert response.json()["error"]["type"] == "method_not_allowed"


def test_compressed_bodies_are_rejected(server: RunningServer) -> None:
    """The error names the compression, instead of saying that the body is not valid JSON."""
    content = gzip.compress(b'{"inputs": "a"}')
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    response = httpx.post(server.url + "/embed", content=content, headers=headers)
    assert response.status_code == 422
    assert "the header Content-Encoding is 'gzip'; send the body without" in response.text


def test_information_endpoints_respond(server: RunningServer) -> None:
    """/models, /health, /ready and /metrics respond; /docs lists all endpoints."""
    models = {model["name"]: model for model in httpx.get(f"{server.url}/models").json()}
    assert models["plain"]["tasks"] == ["embed", "embed_sparse", "fill", "inspect", "pair"]
    assert models["names"]["labels"] == ["O", "B-PER", "I-PER", "B-LOC"]
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{server.url}/ready").json() == {"status": "ready"}
    server.post("/embed", {"inputs": SENTENCES})
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'bertsmith_requests_total{endpoint="/embed",status="200"}' in metrics
    assert "bertsmith_waiting_tokens 0.0" in metrics
    page = httpx.get(f"{server.url}/docs").text
    for path in httpx.get(f"{server.url}/openapi.json").json()["paths"]:
        assert path in page
    # The page links to no other host.
    assert "http://" not in page.replace(server.url, "")
    assert "https://" not in page


def test_examples_of_the_docs_page_work(server: RunningServer) -> None:
    """The curl commands of /docs run as they are: they name this server and loaded models."""
    page = httpx.get(f"{server.url}/docs").text
    commands = [html.unescape(match) for match in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL)]
    assert len(commands) == 21
    for command in commands:
        shell_command = ["bash", "-c", f"{command} --fail"]
        process = subprocess.run(shell_command, capture_output=True, check=False)
        assert process.returncode == 0, command
        assert '"model"' in command


def test_docs_page_uses_the_host_of_the_request(models: list[ServedModel]) -> None:
    """The examples have the request's Host header, the key, and a note about missing models."""
    with run_server(models[:1], key="secret") as server:
        headers = {"Host": "bert.example.com:81", "Authorization": "Bearer secret"}
        page = httpx.get(f"{server.url}/docs", headers=headers).text
    assert "http://bert.example.com:81/fill" in page
    assert "Authorization: Bearer $BERTSMITH_API_KEY" in page
    assert "secret" not in page
    assert page.count("No loaded model can ") == 9


def test_responses_have_a_request_id(server: RunningServer) -> None:
    """The client's id is returned if it is valid, else a new one is created."""
    response = server.post("/embed", {"inputs": "a"}, headers={"X-Request-Id": "mine-7"})
    assert response.headers["x-request-id"] == "mine-7"
    response = server.post("/embed", {"inputs": "a"}, headers={"X-Request-Id": "x" * 300})
    assert len(response.headers["x-request-id"]) == 32


def test_server_does_not_import_training_code() -> None:
    """Importing the server and its page loads no module of bertsmith.train."""
    program = (
        "import sys, bertsmith.serve.app, bertsmith.serve.server, bertsmith.serve.page\n"
        "print([name for name in sys.modules if name.startswith('bertsmith.train.')])"
    )
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert process.stdout.strip() == "[]"
