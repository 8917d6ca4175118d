"""A response says how much of its texts is [UNK], and the metrics count it by model."""

import re
from typing import Any

import httpx
import pytest

from bertsmith.serve.models import ServedModel
from bertsmith.serve.parsing import UNKNOWN_SHARE_HEADER
from tests.serve.model_server import RunningServer, run_server

ENGLISH = "The smith struck the iron."
#: Korean: "The smith struck the iron."
KOREAN = "대장장이가 쇠를 쳤다."
#: For each endpoint a body with a text in it.
BODIES: dict[str, Any] = {
    "/v1/embeddings": lambda text: {"input": text},
    "/embed": lambda text: {"inputs": [text]},
    "/embed_all": lambda text: {"inputs": text},
    "/similarity": lambda text: {"inputs": {"source_sentence": text, "sentences": [text]}},
    "/tokenize": lambda text: {"inputs": text},
    "/fill": lambda text: {"inputs": f"{text} [MASK] [SEP]"},
    "/pair": lambda text: {"inputs": [text, text]},
    "/classify": lambda text: {"inputs": text},
    "/tag": lambda text: {"inputs": text},
    "/answer": lambda text: {"inputs": {"question": text, "context": text}},
    "/choose": lambda text: {"inputs": {"prompt": text, "endings": [text, text]}},
}


@pytest.mark.parametrize("path", BODIES)
def test_the_share_is_a_response_header(running: RunningServer, path: str) -> None:
    """Korean sent to an English model has the header; English has none; bodies are as before."""
    english, korean = (running.post(path, BODIES[path](text)) for text in (ENGLISH, KOREAN))
    assert (english.status_code, korean.status_code) == (200, 200)
    assert UNKNOWN_SHARE_HEADER not in english.headers
    assert korean.headers[UNKNOWN_SHARE_HEADER] == "0.75"
    assert type(english.json()) is type(korean.json())


def test_the_share_is_that_of_one_request(running: RunningServer) -> None:
    """Texts of other requests do not count; one word in many stays below the threshold."""
    long = " ".join([ENGLISH] * 20)
    assert UNKNOWN_SHARE_HEADER not in running.post("/embed", {"inputs": [f"{long} 쇠"]}).headers
    mixed = running.post("/embed", {"inputs": [ENGLISH.removesuffix("."), KOREAN]})
    ids = running.post("/tokenize", {"inputs": [ENGLISH.removesuffix("."), KOREAN]}).json()
    tokens = [token["text"] for text in ids for token in text if not token["special"]]
    expected = tokens.count("[UNK]") / len(tokens)
    assert float(mixed.headers[UNKNOWN_SHARE_HEADER]) == pytest.approx(expected, rel=1e-3)


def _metric(page: str, name: str, model: str) -> float:
    found = re.search(rf'^{name}{{model="{model}"}} (\S+)$', page, re.MULTILINE)
    return float(found[1]) if found else 0.0


def test_metrics_count_by_model(models: list[ServedModel]) -> None:
    """Tokens and unknown tokens of the texts that each model was sent."""
    with run_server(models) as server:
        server.post("/embed", {"inputs": [KOREAN, KOREAN], "model": "plain"})
        server.post("/classify", {"inputs": KOREAN, "model": "mood"})
        page = httpx.get(f"{server.url}/metrics").text
        assert _metric(page, "bertsmith_text_tokens_total", "plain") == 8
        assert _metric(page, "bertsmith_unknown_tokens_total", "plain") == 6
        assert _metric(page, "bertsmith_text_tokens_total", "mood") == 4
        assert _metric(page, "bertsmith_unknown_tokens_total", "mood") == 3
        assert _metric(page, "bertsmith_unknown_tokens_total", "names") == 0
        assert UNKNOWN_SHARE_HEADER in httpx.get(f"{server.url}/docs").text


def test_browsers_of_other_origins_may_read_the_header(models: list[ServedModel]) -> None:
    """CORS hides headers from pages unless they are listed."""
    with run_server(models[:1], origins=["https://a.example"]) as server:
        response = server.post(
            "/embed", {"inputs": KOREAN}, headers={"Origin": "https://a.example"}
        )
        assert UNKNOWN_SHARE_HEADER in response.headers["access-control-expose-headers"]
