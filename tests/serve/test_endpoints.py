"""Each endpoint, asked by real clients, beside what the library says of the same texts.

These tests never overload the server.
"""

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bertsmith import answer, choose, embed, fill, pair, predict
from bertsmith.use.embed import Embedder
from bertsmith.use.tag import tag
from tests.serve.model_server import TEXT, RunningServer

openai = pytest.importorskip("openai")


def close(found: Any, wanted: Any) -> None:
    """Compare numbers to 1e-5: neighbours in a batch change the last bits."""
    np.testing.assert_allclose(np.array(found, np.float64), wanted, rtol=0, atol=1e-5)


def test_openai_client(running: RunningServer, folders: dict[str, Path]) -> None:
    """The real client gets the vectors of ``embed``: as bytes, its usual form, and as floats."""
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none")
    wanted = embed(folders["plain"], TEXT)
    found = client.embeddings.create(input=TEXT, model="plain")
    close([own.embedding for own in found.data], wanted)
    assert [own.index for own in found.data] == list(range(len(TEXT)))
    assert found.model == "plain"
    tokens = sum(map(len, Embedder.load(folders["plain"]).tokenize(TEXT).sequences))
    assert found.usage.prompt_tokens == tokens
    floats = client.embeddings.create(input=TEXT[0], model="plain", encoding_format="float")
    close(floats.data[0].embedding, wanted[0])
    assert "plain" in [own.id for own in client.models.list().data]


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"input": "a", "dimensions": 8}, 422, "dimensions: this model's vectors cannot"),
        ({"input": [1, 2, 3]}, 422, "ids of another tokenizer"),
        ({"input": []}, 422, "at least one"),
        ({"input": "a", "model": "nobody"}, 404, "there is no model 'nobody' here; expected one"),
        ({}, 422, "input: Field required"),
        ({"input": "a", "encoding_format": "hex"}, 422, "encoding_format"),
    ],
)
def test_openai_errors(running: RunningServer, body: Any, status: int, message: str) -> None:
    """A refusal is OpenAI's form of an error, and says what to do."""
    found = running.post("/v1/embeddings", body)
    assert found.status_code == status
    assert message in found.json()["error"]["message"]
    assert found.json()["error"]["code"] == status


def test_base64_is_little_endian_float32(running: RunningServer, folders: dict[str, Path]) -> None:
    """What a client without the package decodes."""
    found = running.post("/v1/embeddings", {"input": TEXT[0], "encoding_format": "base64"})
    raw = base64.b64decode(found.json()["data"][0]["embedding"])
    close(np.frombuffer(raw, "<f4"), embed(folders["plain"], TEXT[:1])[0])


def test_embed_by_curl(running: RunningServer, folders: dict[str, Path]) -> None:
    """The endpoint of text-embeddings-inference, from the shell; its own settings beside."""
    body = {"inputs": TEXT, "layer": -2, "pooling": "max", "normalize": False}
    done = subprocess.run(
        ["curl", "-sS", f"{running.url}/embed", "-H", "Content-Type: application/json", "-d",
         json.dumps(body)],
        capture_output=True, check=True,
    )  # fmt: skip
    close(json.loads(done.stdout), embed(folders["plain"], TEXT, layer=-2, pooling="max"))
    one = running.post("/embed", {"inputs": TEXT[0]}).json()
    close(one, embed(folders["plain"], TEXT[:1], normalize=True))


def test_embed_all(running: RunningServer, folders: dict[str, Path]) -> None:
    """A vector for each token, [CLS] and [SEP] with them or not."""
    own = Embedder.load(folders["plain"])
    for special in (True, False):
        found = running.post("/embed_all", {"inputs": TEXT[:2], "special": special}).json()
        for one, wanted in zip(found, own.encode_tokens(TEXT[:2], special=special), strict=True):
            close(one, wanted.vectors)


def test_too_long_is_cut_or_refused(running: RunningServer, folders: dict[str, Path]) -> None:
    """As the client wishes; usually it is cut."""
    long = "the smith " * 60
    cut = running.post("/embed", {"inputs": long})
    close(cut.json(), embed(folders["plain"], [long], normalize=True))
    for path in ("/embed", "/embed_all"):
        refused = running.post(path, {"inputs": long, "truncate": False})
        assert refused.status_code == 422
        assert "truncate: true" in refused.json()["error"]["message"]


def test_similarity(running: RunningServer, folders: dict[str, Path]) -> None:
    """The cosines of one sentence with each of the others."""
    vectors = embed(folders["plain"], TEXT, normalize=True)
    asked = {"source_sentence": TEXT[0], "sentences": TEXT[1:]}
    close(running.post("/similarity", {"inputs": asked}).json(), vectors[1:] @ vectors[0])


def test_tokenize(running: RunningServer, folders: dict[str, Path]) -> None:
    """Ids, words and characters; special tokens stand for no character."""
    [found] = running.post("/tokenize", {"inputs": TEXT[:1]}).json()
    own = Embedder.load(folders["plain"]).tokenizer
    assert [one["id"] for one in found] == [own.cls_id, *own.encode(TEXT[0]), own.sep_id]
    assert [one["special"] for one in found] == [True, *[False] * (len(found) - 2), True]
    assert "".join(TEXT[0][one["start"] : one["stop"]] for one in found[1:-1]) == TEXT[0].replace(
        " ", ""
    )
    plain = running.post("/tokenize", {"inputs": TEXT[0], "add_special_tokens": False}).json()
    assert plain == [found[1:-1]]


def test_fill(running: RunningServer, folders: dict[str, Path]) -> None:
    """The same words and probabilities as ``fill``."""
    texts = ["the [MASK] of the [MASK]", "a [MASK] hammer"]
    found = running.post("/fill", {"inputs": texts, "top": 3}).json()
    for text, own in zip(texts, found, strict=True):
        for mask, wanted in zip(own["masks"], fill(folders["plain"], text, 3), strict=True):
            assert mask["place"] == wanted.place
            assert [word for word, _ in mask["words"]] == [word for word, _ in wanted.words]
            close([share for _, share in mask["words"]], [share for _, share in wanted.words])
    assert running.post("/fill", {"inputs": texts[1]}).json()["masks"][0]["place"] == 2


def test_pair(running: RunningServer, folders: dict[str, Path]) -> None:
    """One pair, or several."""
    wanted = [pair(folders["plain"], TEXT[0], own) for own in TEXT[1:]]
    one = running.post("/pair", {"inputs": [TEXT[0], TEXT[1]]}).json()
    close(one["follows"], wanted[0])
    many = running.post("/pair", {"inputs": [[TEXT[0], own] for own in TEXT[1:]]}).json()
    close([own["follows"] for own in many], wanted)


@pytest.mark.parametrize("name", ["mood", "topics", "grade"])
def test_classify(running: RunningServer, folders: dict[str, Path], name: str) -> None:
    """One label, many labels, a number; of a text or a pair."""
    texts: list[str | tuple[str, str]] = [*TEXT, (TEXT[0], TEXT[1])]
    found = running.post("/classify", {"model": name, "inputs": texts}).json()
    for own, wanted in zip(found, predict(folders[name], texts), strict=True):
        if wanted.score is not None:
            close(own["score"], wanted.score)
        else:
            assert [one["label"] for one in own["labels"]] == [one for one, _ in wanted.labels]
            close([one["score"] for one in own["labels"]], [share for _, share in wanted.labels])
    alone = running.post("/classify", {"model": name, "inputs": TEXT[0]}).json()
    assert alone.keys() == found[0].keys()


@pytest.mark.parametrize("name", ["names", "speech"])
def test_tag(running: RunningServer, folders: dict[str, Path], name: str) -> None:
    """Entities, and plain tags, with their characters."""
    found = running.post("/tag", {"model": name, "inputs": TEXT}).json()
    for own, wanted in zip(found, tag(folders[name], TEXT), strict=True):
        spans = [(one.text, one.start, one.end, one.label) for one in wanted.spans]
        assert [(one["text"], one["start"], one["end"], one["label"]) for one in own] == spans
        close([one["probability"] for one in own], [one.probability for one in wanted.spans])


def test_answer(running: RunningServer, folders: dict[str, Path]) -> None:
    """The span, its characters and its probability; a long context comes in windows."""
    context = " ".join(TEXT * 2)
    asked = {"question": "who struck", "context": context}
    found = running.post("/answer", {"inputs": [asked]}).json()[0]
    [wanted] = answer(folders["answers"], [("who struck", context)])
    assert (found["text"], found["start"], found["end"]) == (
        wanted.text, wanted.start, wanted.end,
    )  # fmt: skip
    close(found["probability"], wanted.probability)
    assert running.post("/answer", {"inputs": asked}).json()["text"] == wanted.text


def test_choose(running: RunningServer, folders: dict[str, Path]) -> None:
    """The probability of each ending."""
    asked = {"prompt": TEXT[0], "endings": TEXT[1:4]}
    found = running.post("/choose", {"inputs": asked}).json()
    [wanted] = choose(folders["endings"], [(TEXT[0], TEXT[1:4])])
    close(found["probabilities"], wanted.probabilities)
    assert found["best"] == wanted.best


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/fill", {"inputs": "no mask"}, 422, "no [MASK] in"),
        ("/fill", {"inputs": ["[MASK] " * 40] * 30}, 422, "1,200 masks; this server takes 1,024"),
        ("/pair", {"inputs": ["a", " "]}, 422, "text B is empty"),
        ("/pair", {"inputs": ["a", "b"], "model": "mood"}, 404, "'mood' cannot pair; expected"),
        ("/classify", {"inputs": [""]}, 422, "text 1 is empty"),
        ("/tag", {"inputs": "  "}, 422, "text 1 is empty"),
        ("/answer", {"inputs": {"question": "", "context": "b"}}, 422, "the question is empty"),
        ("/choose", {"inputs": {"prompt": "a", "endings": ["b"]}}, 422, "endings"),
        ("/embed", {"inputs": "a", "layer": 9}, 422, "there is no layer 9"),
        ("/embed", {"inputs": "a", "pooling": "middle"}, 422, "pooling"),
        ("/embed", {"inputs": "a", "pooling": "none"}, 422, "/embed_all"),
        ("/embed", {"inputs": "a", "polling": "mean"}, 422, "polling: Extra inputs"),
        ("/embed", {"inputs": []}, 422, "at least 1 item"),
        ("/embed", {"inputs": ["a"] * 2000}, 422, "2,000 texts; this server takes 1,024"),
        ("/nothing", {}, 404, "there is no /nothing here; /docs"),
    ],
)
def test_errors(running: RunningServer, path: str, body: Any, status: int, message: str) -> None:
    """One form for all, with a message that says what to do."""
    found = running.post(path, body)
    told = found.json()["error"]
    assert (found.status_code, told["code"]) == (status, status)
    assert message in told["message"]


def test_garbage(running: RunningServer) -> None:
    """What is no JSON is told as such; a wrong method, too."""
    found = httpx.post(f"{running.url}/embed", content=b"\xff\x00{", timeout=60)
    assert found.status_code == 422
    assert "error" in found.json()
    assert "the header Content-Type is ''; expected application/json" in found.text
    sent = {"Content-Type": "application/json"}
    found = httpx.post(f"{running.url}/embed", content=b"{", headers=sent, timeout=60)
    assert found.status_code == 422
    assert "the body is not valid JSON in UTF-8: EOF while parsing an object" in found.text
    assert "at line 1 column 1; send an object such as" in found.text
    found = httpx.post(
        f"{running.url}/embed", content=b'{"inputs": "\xff"}', headers=sent, timeout=60
    )
    assert "the body is not valid JSON in UTF-8: invalid unicode" in found.text
    found = httpx.get(f"{running.url}/embed", timeout=60)
    assert (found.status_code, found.json()["error"]["type"]) == (405, "method_not_allowed")


def test_what_tells_of_the_server(running: RunningServer) -> None:
    """Models with what they can do, health, readiness, metrics, and the page of endpoints."""
    told = {own["name"]: own for own in httpx.get(f"{running.url}/models").json()}
    assert told["plain"]["abilities"] == ["embed", "fill", "pair"]
    assert told["names"]["labels"] == ["O", "B-PER", "I-PER", "B-LOC"]
    assert httpx.get(f"{running.url}/health").json() == {"status": "ok"}
    assert httpx.get(f"{running.url}/ready").json() == {"status": "ready"}
    running.post("/embed", {"inputs": TEXT})
    metrics = httpx.get(f"{running.url}/metrics").text
    assert 'bertsmith_requests_total{endpoint="/embed",status="200"}' in metrics
    assert "bertsmith_waiting_tokens 0.0" in metrics
    page = httpx.get(f"{running.url}/docs").text
    for path in httpx.get(f"{running.url}/openapi.json").json()["paths"]:
        assert path in page
    assert "http://" not in page.replace("http://localhost", "")
    assert "https://" not in page


def test_every_example_of_the_docs_works(running: RunningServer) -> None:
    """The bodies that /docs shows are answered."""
    from bertsmith.serve.docs_page import EXAMPLES

    for path, body in EXAMPLES.items():
        named = {**body, "model": "plain"} if "model" in body else body
        assert running.post(path, named).status_code == 200, path


def test_a_request_has_an_id(running: RunningServer) -> None:
    """The client's own if it is plain, else a new one."""
    given = running.post("/embed", {"inputs": "a"}, headers={"X-Request-Id": "mine-7"})
    assert given.headers["x-request-id"] == "mine-7"
    made = running.post("/embed", {"inputs": "a"}, headers={"X-Request-Id": "x" * 300})
    assert len(made.headers["x-request-id"]) == 32


def test_a_server_loads_no_optimizer() -> None:
    """Nothing of training is in its process but what asks the machine what it can."""
    program = (
        "import sys, bertsmith.serve.app, bertsmith.serve.server, bertsmith.serve.page\n"
        "print([one for one in sys.modules if one.startswith('bertsmith.train.')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['bertsmith.runtime.device']"
